// Models: the checkpoints of runs, how they scored, and the commands that use them.
import { useEffect } from "preact/hooks";
import { useAsk } from "./api";
import { bytes, count, number, percent, when } from "./format";
import { Card, Command, Empty, Problem } from "./parts";
import { runUrl } from "./router";
import type { Model } from "./types";

export function ModelsPage() {
  const { data, error } = useAsk<{ models: Model[] }>("/api/models");
  useEffect(() => {
    document.title = "Models – Headway";
  }, []);
  return (
    <main>
      <h1>Models</h1>
      {error && <Problem error={error} />}
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
                      <td class="num">{count(checkpoint.step)}</td>
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
