// What a run made: pictures, sound, video and texts in its folder, and the answers of its evaluations.
import { useEffect, useState } from "preact/hooks";
import { address, useAsk } from "./api";
import { when } from "./format";
import { Empty, Problem } from "./parts";
import type { Overview, SampleFile } from "./types";

export function Samples({ run, round }: { run: Overview; round: number }) {
  const { data, error, again } = useAsk<{ files: SampleFile[] }>("/api/samples", { run: run.name });
  useEffect(again, [round]);
  if (error) return <Problem error={error} />;
  if (!data) return <div class="placeholder" />;
  if (!data.files.length && !run.evaluations.length)
    return <Empty title="No samples in this run. Let its model write some text:" command={run.commands.sample} />;
  return (
    <div>
      {folders(data.files).map(([folder, files]) => (
        <section key={folder} aria-label={folder}>
          <h3 class="folder">{folder}</h3>
          <div class="samples">
            {files.map((file) => <Sample key={file.path} run={run.name} file={file} />)}
          </div>
        </section>
      ))}
      {run.evaluations.map((evaluation) => (
        <Answers key={`${evaluation.task}[${evaluation.variant}]@${evaluation.step}`} run={run.name} task={evaluation.variant ? `${evaluation.task}[${evaluation.variant}]` : evaluation.task} step={evaluation.step} />
      ))}
    </div>
  );
}

const ORDER = ["text", "image", "video", "audio"];

/** Samples by folder, the newest folder first: mostly one per step. */
function folders(files: SampleFile[]): [string, SampleFile[]][] {
  const groups = new Map<string, SampleFile[]>();
  for (const file of files) {
    const folder = file.path.slice(0, file.path.lastIndexOf("/"));
    groups.set(folder, [...(groups.get(folder) ?? []), file]);
  }
  const inOrder = (a: SampleFile, b: SampleFile) => ORDER.indexOf(a.kind) - ORDER.indexOf(b.kind) || a.path.localeCompare(b.path, "en", { numeric: true });
  return [...groups].map(([folder, group]): [string, SampleFile[]] => [folder, group.sort(inOrder)]).sort(([a], [b]) => b.localeCompare(a, "en", { numeric: true }));
}

function Sample({ run, file }: { run: string; file: SampleFile }) {
  const url = address("/files", { run, path: file.path });
  const name = file.path.slice(file.path.lastIndexOf("/") + 1);
  return (
    <figure class={`sample ${file.kind}`}>
      {file.kind === "image" && <a href={url} target="_blank" rel="noreferrer"><img src={url} alt={name} loading="lazy" /></a>}
      {file.kind === "audio" && <audio controls preload="none" src={url} aria-label={name} />}
      {file.kind === "video" && <video controls preload="metadata" src={url} aria-label={name} />}
      {file.kind === "text" && <TextSample run={run} file={file} />}
      <figcaption title={file.path}>{name}<span class="muted">{when(file.modified)}</span></figcaption>
    </figure>
  );
}

function TextSample({ run, file }: { run: string; file: SampleFile }) {
  const { data, error } = useAsk<{ text: string; cut: boolean }>("/api/sample-text", { run, path: file.path });
  if (error) return <Problem error={error} />;
  return <pre role="region" tabIndex={0} aria-label={file.path}>{data?.text ?? ""}{data?.cut && "\n…"}</pre>;
}

function Answers({ run, task, step }: { run: string; task: string; step: number | null }) {
  const [open, setOpen] = useState(false);
  const { data, error } = useAsk<{ rows: Record<string, unknown>[] }>(open ? "/api/evaluation" : null, { run, key: task, step });
  return (
    <details class="answers" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{task} at step {step ?? "–"}: questions and answers</summary>
      {error && <Problem error={error} />}
      {data?.rows.map((row, index) => (
        <dl key={index} class="row">
          {Object.entries(row).filter(([, value]) => value !== null && value !== "").map(([key, value]) => (
            <div key={key}><dt>{key}</dt><dd>{typeof value === "string" ? value : JSON.stringify(value)}</dd></div>
          ))}
        </dl>
      ))}
    </details>
  );
}
