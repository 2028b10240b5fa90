// Models: the checkpoints of runs, how they scored, and the commands that use them.
import { useEffect } from "preact/hooks";
import { useAsk } from "./api";
import { bytes, count, number, percent, when } from "./format";
import { Card, Command, Empty, Problem } from "./parts";
import { Lineage, lineageUrl } from "./lineage";
import { runUrl, usePlace } from "./router";
import type { Model, ModelName } from "./types";

export function ModelsPage() {
  const of = usePlace().query.get("of");
  const { data, error } = useAsk<{ models: Model[]; names: ModelName[]; problem: string | null }>("/api/models");
  useEffect(() => {
    document.title = "Models – Headway";
  }, []);
  return (
    <main>
      <h1>Models</h1>
      {error && <Problem error={error} />}
      {data?.problem && <p class="problem" role="alert">{data.problem}</p>}
      {of && <Lineage key={of} of={of} />}
      {data && data.models.length > 0 && <Names names={data.names} example={data.models[0]} />}
      {data && !data.models.length && <Empty title="No run has saved a checkpoint yet." command="headway train recipes/demo.toml" />}
      <div class="models">
        {data?.models.map((model) => (
          <Card
            key={model.run}
            title={model.run}
            aside={
              <span class="muted">
                {model.objective ?? "?"}{model.adapters && ", adapters"}
                {model.parent && <>, from {model.parent.here ? <a href={runUrl(model.parent.run)}>{model.parent.run}</a> : model.parent.run}{model.parent.step !== null && `@${model.parent.step}`}</>}
              </span>
            }
          >
            <div class="scroll" tabIndex={0} role="region" aria-label={`checkpoints of ${model.run}`}>
              <table class="plain">
                <thead><tr><th scope="col" class="num">step</th><th scope="col">saved</th><th scope="col" class="num">size</th><th scope="col">digest</th><th scope="col">scores</th></tr></thead>
                <tbody>
                  {model.checkpoints.map((checkpoint) => (
                    <tr key={checkpoint.step}>
                      <td class="num"><a href={lineageUrl(`${model.run}@${checkpoint.step}`)} title="lineage">{count(checkpoint.step)}</a>{data.names.filter((name) => name.run === model.run && name.step === checkpoint.step).map((name) => <span class="tag" key={name.name}>{name.name}</span>)}</td>
                      <td>{when(checkpoint.saved)}</td>
                      <td class="num">{bytes(checkpoint.bytes)}</td>
                      <td class="mono">{checkpoint.digest?.slice(0, 12) ?? <span class="wrong">manifest cannot be read</span>}</td>
                      <td>{checkpoint.scores.map((score) => `${score.task} ${score.share ? percent(score.value) : number(score.value)}`).join(", ") || "–"}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
            <p class="commands"><Command text={model.commands.serve} /> <Command text={`${model.commands["checkpoint export"]} out/`} /> <a href={runUrl(model.run)}>run</a></p>
          </Card>
        ))}
      </div>
    </main>
  );
}

/** The registry: what each name stands for now, and what it stood for before. */
function Names({ names, example }: { names: ModelName[]; example: Model }) {
  if (!names.length)
    return <p class="commands muted">No model has a name yet: <Command text={`headway model tag ${example.run}@${example.checkpoints[0].step} prod`} /></p>;
  return (
    <Card title="Names">
      <div class="scroll" tabIndex={0} role="region" aria-label="names of models">
        <table class="plain">
          <thead><tr><th scope="col">name</th><th scope="col">model</th><th scope="col">digest</th><th scope="col">since</th><th scope="col">before</th><th scope="col">notes</th></tr></thead>
          <tbody>
            {names.map((entry) => (
              <tr key={entry.name}>
                <th scope="row"><a href={lineageUrl(entry.name)}>{entry.name}</a></th>
                <td>{entry.here ? <a href={lineageUrl(`${entry.run}@${entry.step}`)}>{entry.run}@{entry.step}</a> : <>{entry.run}@{entry.step} <span class="wrong">gone</span></>}</td>
                <td class="mono">{entry.digest.slice(0, 12)}</td>
                <td>{when(entry.at)}</td>
                <td>{entry.before.map((old) => `${old.run}@${old.step}`).slice(0, 3).join(", ") || "–"}</td>
                <td class="wrap">{entry.notes.map((note) => note.text).join("; ") || "–"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Card>
  );
}
