// Clips of a dataset of images or video: a contact sheet, and what the index says of each.
import { useState } from "preact/hooks";
import { address, useAsk } from "./api";
import { count, duration } from "./format";
import { Card, Problem } from "./parts";
import type { Clip, Dataset } from "./types";

const SHOWN = 15;

export function Clips({ dataset }: { dataset: Dataset }) {
  const [first, setFirst] = useState(0);
  const [failed, setFailed] = useState<number | null>(null);
  const { data, error } = useAsk<{ count: number; first: number; clips: Clip[] }>("/api/dataset", { id: dataset.id, first });
  const what = dataset.kind === "video" ? "clips" : "images";
  return (
    <Card title={`Samples of ${dataset.path}`}>
      {error && <Problem error={error} />}
      <div class="clips">
        <figure>
          {failed === first ? <p class="muted">These {what} could not be drawn.</p> : (
            <div class="sheet" tabIndex={0} role="region" aria-label="contact sheet">
              <img src={address("/sheet", { id: dataset.id, first: String(first) })} alt={`frames of ${what} ${first} to ${first + SHOWN - 1}; the table below names them`} onError={() => setFailed(first)} />
            </div>
          )}
        </figure>
        <div class="scroll" tabIndex={0} role="region" aria-label={what}>
          <table class="plain">
            <thead><tr><th scope="col" class="num">number</th><th scope="col">file</th><th scope="col" class="num">size</th>{dataset.kind === "video" && <th scope="col" class="num">length</th>}<th scope="col">label</th><th scope="col">captions</th></tr></thead>
            <tbody>
              {data?.clips.map((clip) => (
                <tr key={clip.clip}>
                  <td class="num">{count(clip.clip)}</td>
                  <th scope="row" class="wrap">{clip.name}</th>
                  <td class="num">{clip.width} × {clip.height}</td>
                  {dataset.kind === "video" && <td class="num">{duration(clip.seconds)}, {count(clip.frames)} frames</td>}
                  <td>{clip.label ?? "–"}</td>
                  <td class="wrap">{clip.captions.join("; ") || "–"}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
        {data && (
          <div class="toolbar">
            <button disabled={first === 0} onClick={() => setFirst(Math.max(0, first - SHOWN))}>Previous</button>
            <span class="muted">{count(first)} to {count(Math.min(first + SHOWN, data.count) - 1)} of {count(data.count)} {what}</span>
            <button disabled={first + SHOWN >= data.count} onClick={() => setFirst(first + SHOWN)}>Next</button>
          </div>
        )}
      </div>
    </Card>
  );
}
