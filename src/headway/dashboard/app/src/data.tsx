// Datasets: versions, who trained on them, and samples with what the loss counts marked.
import { useEffect, useState } from "preact/hooks";
import { useAsk } from "./api";
import { Clips } from "./clips";
import { bytes, count, setting, short } from "./format";
import { lineageUrl } from "./lineage";
import { Card, Empty, Problem } from "./parts";
import { runUrl } from "./router";
import type { Dataset, DatasetSample } from "./types";

export function DataPage({ id }: { id: string | null }) {
  const { data, error } = useAsk<{ datasets: Dataset[]; folder: string }>("/api/datasets");
  useEffect(() => {
    document.title = "Data – Headway";
  }, []);
  const chosen = data?.datasets.find((dataset) => dataset.id === id) ?? null;
  return (
    <main>
      <h1>Data</h1>
      {error && <Problem error={error} />}
      {data && !data.datasets.length && <Empty title={`No datasets in ${data.folder}, and no run names one. Build one:`} command={`headway data build ${data.folder}/mine 'texts/*.txt'`} />}
      {data && data.datasets.length > 0 && (
        <div class="scroll">
          <table class="runs">
            <thead>
              <tr><th scope="col">dataset</th><th scope="col">version</th><th scope="col">kind</th><th scope="col" class="num">samples</th><th scope="col" class="num">tokens</th><th scope="col" class="num narrow">vocabulary</th><th scope="col" class="num narrow">size</th><th scope="col" class="narrow">runs</th></tr>
            </thead>
            <tbody>
              {data.datasets.map((dataset) => (
                <tr key={dataset.id} class={dataset.id === id ? "at" : undefined}>
                  <th scope="row" class="name"><a href={`/data/${dataset.id}`}>{dataset.path}</a></th>
                  {dataset.problem ? <td class="wrong wrap" colSpan={7}>{dataset.problem}</td> : (
                    <>
                      <td class="mono">{dataset.version}</td><td>{dataset.kind}</td><td class="num">{count(dataset.documents)}</td><td class="num">{short(dataset.tokens)}</td>
                      <td class="num narrow">{count(dataset.vocab_size)}</td><td class="num narrow">{bytes(dataset.bytes)}</td>
                      <td class="narrow wrap">{dataset.runs.slice(0, 4).map((run, index) => <span key={run}>{index > 0 && ", "}<a href={runUrl(run)}>{run}</a></span>)}{dataset.runs.length > 4 && ` and ${dataset.runs.length - 4} more`}</td>
                    </>
                  )}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {chosen && !chosen.problem && (chosen.media ? <Clips key={chosen.id} dataset={chosen} /> : <SamplesOf key={chosen.id} dataset={chosen} />)}
      {chosen?.version && <p><a href={lineageUrl(chosen.version)}>Lineage of version {chosen.version}</a></p>}
      {data && data.datasets.length > 0 && !chosen && <p class="muted">Choose a dataset to see its samples, with the tokens that the loss counts marked, or a contact sheet.</p>}
    </main>
  );
}

function SamplesOf({ dataset }: { dataset: Dataset }) {
  const [first, setFirst] = useState(0);
  const { data, error } = useAsk<{ count: number; first: number; samples: DatasetSample[] }>("/api/dataset", { id: dataset.id, first });
  const masked = data?.samples.some((sample) => sample.pieces.some((piece) => !piece.trained)) ?? false;
  return (
    <Card title={`Samples of ${dataset.path}`} aside={masked ? <span class="muted"><span class="trained key">trained on</span> <span class="context key">context</span></span> : <span class="muted">the loss counts every token</span>}>
      {error && <Problem error={error} />}
      <div class="documents">
        {data?.samples.map((sample) => (
          <article key={sample.document}>
            <h3>Document {count(sample.document)} <span class="muted">{count(sample.tokens)} tokens</span></h3>
            <div class="pieces" tabIndex={0} role="group" aria-label={`document ${sample.document}`}>
              {sample.pieces.map((piece, index) => (
                <span key={index} class={masked ? (piece.trained ? "trained" : "context") : undefined}>
                  {piece.role && <span class="role">{piece.role}</span>}
                  {piece.text}
                </span>
              ))}
              {sample.cut && <span class="muted"> … {count(sample.tokens - 512)} more tokens</span>}
            </div>
            {sample.fields && <dl class="fields">{Object.entries(sample.fields).map(([key, value]) => <div key={key}><dt>{key}</dt><dd>{setting(value)}</dd></div>)}</dl>}
          </article>
        ))}
      </div>
      {data && (
        <div class="toolbar">
          <button disabled={first === 0} onClick={() => setFirst(Math.max(0, first - 6))}>Previous</button>
          <span class="muted">{count(first)} to {count(Math.min(first + 6, data.count) - 1)} of {count(data.count)} documents</span>
          <button disabled={first + 6 >= data.count} onClick={() => setFirst(first + 6)}>Next</button>
        </div>
      )}
    </Card>
  );
}
