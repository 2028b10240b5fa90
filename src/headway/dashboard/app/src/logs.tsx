// What the processes printed, and what workers were doing when one hung. Text is shown as text.
import { useEffect, useRef, useState } from "preact/hooks";
import { ask, useAsk } from "./api";
import { bytes, when } from "./format";
import { Empty, Problem } from "./parts";
import { setQuery, usePlace } from "./router";
import type { FileEntry, Overview } from "./types";

interface Part {
  text: string;
  from: number;
  end: number;
  bytes: number;
}

const EVERY_MS = 2000;
const MOST_CHARACTERS = 1_000_000;

/** Without the codes that colour a terminal; a line that was drawn over counts as drawn last. */
export function plain(text: string): string {
  return text
    .replace(/\x1b\[[0-9;?]*[ -/]*[@-~]/g, "")
    .replace(/[^\n]*\r(?!\n)/g, "")
    .replace(/\r\n/g, "\n");
}

export function Logs({ run }: { run: Overview }) {
  const { query } = usePlace();
  const { data, error } = useAsk<{ files: FileEntry[] }>("/api/logs", { run: run.name });
  if (error) return <Problem error={error} />;
  if (!data) return <div class="placeholder" />;
  if (!data.files.length) return <Empty title="No log: a run that was started in a terminal printed there." command={run.commands.logs} />;
  const file = data.files.find((entry) => entry.name === query.get("file"))?.name ?? data.files[0].name;
  return (
    <div class="files">
      <FileList files={data.files} active={file} />
      <Follow key={file} run={run} file={file} />
    </div>
  );
}

function FileList({ files, active }: { files: FileEntry[]; active: string }) {
  return (
    <ul class="filelist">
      {files.map((entry) => (
        <li key={entry.name}>
          <button aria-pressed={entry.name === active} onClick={() => setQuery({ file: entry.name })}>
            {entry.name}
            <span class="muted">{bytes(entry.bytes)}, {when(entry.modified)}</span>
          </button>
        </li>
      ))}
    </ul>
  );
}

function Follow({ run, file }: { run: Overview; file: string }) {
  const [text, setText] = useState<string | null>(null);
  const [cut, setCut] = useState(false);
  const [find, setFind] = useState("");
  const box = useRef<HTMLPreElement>(null);
  const end = useRef<number | null>(null);
  const running = run.state === "running";
  useEffect(() => {
    let timer = 0;
    let current = true;
    const poll = async () => {
      try {
        const part = await ask<Part>("/api/logs", { run: run.name, file, offset: end.current });
        if (!current) return;
        if (end.current === null || part.from !== end.current) {
          setText(part.text);
          setCut(part.from > 0);
        } else if (part.text) setText((before) => ((before ?? "") + part.text).slice(-MOST_CHARACTERS));
        end.current = part.end;
      } catch {
        // the next try may do better
      }
      if (current && running) timer = window.setTimeout(poll, document.hidden ? 5 * EVERY_MS : EVERY_MS);
    };
    void poll();
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [run.name, file, running]);
  const shown = plain(text ?? "").split("\n").filter((line) => !find || line.toLowerCase().includes(find.toLowerCase())).join("\n");
  const atEnd = useRef(true);
  useEffect(() => {
    if (box.current && atEnd.current) box.current.scrollTop = box.current.scrollHeight;
  }, [shown]);
  return (
    <div class="log">
      <div class="toolbar">
        <input type="search" placeholder="find in this log" aria-label="find in this log" value={find} onInput={(event) => setFind(event.currentTarget.value)} />
        {cut && <span class="muted">the end of a longer log</span>}
        {running && <span class="muted">following</span>}
      </div>
      <pre
        ref={box}
        role="region"
        tabIndex={0}
        aria-label={file}
        onScroll={(event) => {
          const target = event.currentTarget;
          atEnd.current = target.scrollHeight - target.scrollTop - target.clientHeight < 24;
        }}
      >
        {text === null ? "" : shown || (find ? "no line has this" : "empty")}
      </pre>
    </div>
  );
}

export function Stacks({ run, round }: { run: Overview; round: number }) {
  const { query } = usePlace();
  const { data, error, again } = useAsk<{ files: FileEntry[]; running: boolean }>("/api/stacks", { run: run.name });
  useEffect(again, [round]);
  const file = data?.files.find((entry) => entry.name === query.get("file"))?.name ?? data?.files[0]?.name ?? null;
  const content = useAsk<Part>(file ? "/api/stacks" : null, { run: run.name, file });
  if (error) return <Problem error={error} />;
  if (!data) return <div class="placeholder" />;
  if (!file)
    return data.running ? (
      <Empty title="No stacks yet. See what each worker is doing right now:" command={run.commands.stacks} />
    ) : (
      <Empty title="No stacks were recorded: no worker hung." />
    );
  return (
    <div class="files">
      <FileList files={data.files} active={file} />
      <div class="log">{content.error ? <Problem error={content.error} /> : <pre role="region" tabIndex={0} aria-label={file}>{plain(content.data?.text ?? "")}</pre>}</div>
    </div>
  );
}
