// All runs: filter, sort, choose columns, select some to compare. The list follows the runs while they go on.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { useAsk, useLive } from "./api";
import { duration, fixed, loss, number, percent, short, when } from "./format";
import { Empty, Problem, State } from "./parts";
import { askPlots } from "./plots";
import { go, runUrl, setQuery, useKeys, usePlace } from "./router";
import type { RunRow } from "./types";

interface Listing {
  runs: RunRow[];
  root: string;
  version: string;
  problem?: string | null;
  hidden: number;
}

interface Column {
  key: string;
  title: string;
  num: boolean;
  value: (row: RunRow) => number | string | null | undefined;
  show: (row: RunRow) => string;
  /** Widths of page below which it is left out. */
  narrow?: boolean;
}

const COLUMNS: Column[] = [
  { key: "step", title: "step", num: true, value: (r) => r.step, show: (r) => r.step.toLocaleString("en-US") },
  { key: "loss", title: "loss", num: true, value: (r) => r.loss, show: (r) => loss(r.loss) },
  { key: "reward", title: "reward", num: true, value: (r) => r.reward, show: (r) => fixed(r.reward, 3) },
  { key: "tokens_per_s", title: "tokens/s", num: true, value: (r) => r.tokens_per_s, show: (r) => short(r.tokens_per_s), narrow: true },
  { key: "mfu", title: "MFU", num: true, value: (r) => r.mfu, show: (r) => percent(r.mfu), narrow: true },
  { key: "step_s", title: "step time", num: true, value: (r) => r.step_s, show: (r) => (r.step_s == null ? "–" : `${number(r.step_s)} s`), narrow: true },
  { key: "lr", title: "lr", num: true, value: (r) => r.lr, show: (r) => number(r.lr), narrow: true },
  { key: "grad_norm", title: "grad norm", num: true, value: (r) => r.grad_norm, show: (r) => number(r.grad_norm), narrow: true },
  { key: "objective", title: "objective", num: false, value: (r) => r.objective, show: (r) => r.objective ?? "–", narrow: true },
  { key: "recipe", title: "recipe", num: false, value: (r) => r.recipe, show: (r) => r.recipe ?? "–", narrow: true },
  { key: "device", title: "on", num: true, value: (r) => r.workers, show: (r) => (r.workers == null ? "–" : `${r.workers} × ${r.device}`), narrow: true },
  { key: "attempts", title: "attempts", num: true, value: (r) => r.attempts, show: (r) => String(r.attempts ?? "–"), narrow: true },
  { key: "started", title: "started", num: true, value: (r) => r.started, show: (r) => when(r.started), narrow: true },
  { key: "seconds", title: "took", num: true, value: (r) => r.seconds, show: (r) => duration(r.seconds), narrow: true },
];
const DEFAULT = ["step", "loss", "tokens_per_s", "mfu", "device", "started", "seconds"];
const SPARKS = 60;

export function RunsPage() {
  const { query } = usePlace();
  const where = query.get("where") ?? "";
  const sort = query.get("sort") ?? "";
  const { data, error, again } = useAsk<Listing>("/api/runs", { where, archived: query.get("archived") });
  const live = useLive(null, again);
  const shown = useMemo(() => columnsOf(query.get("columns"), data?.runs ?? []), [query.get("columns"), data]);
  const rows = useMemo(() => sorted(data?.runs ?? [], sort), [data, sort]);
  const [picked, setPicked] = useState<Set<string>>(new Set());
  const [cursor, setCursor] = useState(-1);
  const sparks = useSparks(rows);
  const body = useRef<HTMLTableSectionElement>(null);

  const toggle = (name: string) => {
    const next = new Set(picked);
    if (!next.delete(name)) next.add(name);
    setPicked(next);
  };
  const compare = () => {
    if (picked.size > 1) go(`/compare?${[...picked].map((name) => `run=${encodeURIComponent(name)}`).join("&")}`);
  };
  useKeys((event) => {
    if ((event.target as Element).matches?.("button, summary")) return;
    const row = rows[cursor];
    if (event.key === "j" || event.key === "ArrowDown") setCursor(Math.min(cursor + 1, rows.length - 1));
    else if (event.key === "k" || event.key === "ArrowUp") setCursor(Math.max(cursor - 1, 0));
    else if (event.key === "x" && row) toggle(row.name);
    else if (event.key === "Enter" && row && !(event.target as Element).closest("a")) go(runUrl(row.name));
    else if (event.key === "c") compare();
    else return;
    event.preventDefault();
  });
  useEffect(() => body.current?.children[cursor]?.scrollIntoView({ block: "nearest" }), [cursor]);

  return (
    <main>
      <h1 class="hidden">Runs</h1>
      <div class="toolbar">
        <Filter key="filter" value={where} problem={data?.problem ?? null} />
        <ColumnChoice shown={shown} />
        <button class="primary" disabled={picked.size < 2} onClick={compare} title="c">
          Compare{picked.size > 1 ? ` ${picked.size}` : ""}
        </button>
        {!live && <span class="muted" role="status">not connected: what is shown may be old</span>}
      </div>
      {error && <Problem error={error} />}
      {data && !rows.length && !error && (where ? (
        <Empty title="No run matches.">
          <button onClick={() => setQuery({ where: null })}>Show all runs</button>
        </Empty>
      ) : (
        <Empty title={`No runs in ${data.root} yet. Train one:`} command="headway train recipes/demo.toml" />
      ))}
      {rows.length > 0 && (
        <div class="scroll">
          <table class="runs">
            <thead>
              <tr>
                <th scope="col" class="pick"><span class="hidden">selected</span></th>
                <Heading name="name" title="run" sort={sort} />
                <Heading name="state" title="state" sort={sort} />
                <th scope="col" class="narrow"><span class="hidden">loss over steps</span></th>
                {shown.map((column) => <Heading key={column.key} name={column.key} title={column.title} sort={sort} num={column.num} narrow={column.narrow} />)}
              </tr>
            </thead>
            <tbody ref={body}>
              {rows.map((row, index) => (
                <tr key={row.name} class={index === cursor ? "at" : undefined}>
                  <td class="pick">
                    <input type="checkbox" aria-label={`select ${row.name}`} checked={picked.has(row.name)} onChange={() => toggle(row.name)} />
                  </td>
                  <th scope="row" class="name">
                    <a href={runUrl(row.name)} title={row.note || undefined}>{row.name}</a>
                    {row.tags?.map((tag) => <span class="tag" key={tag}>{tag}</span>)}
                  </th>
                  <td><State state={row.state} />{row.state === "running" && row.eta_s != null && <span class="eta"> ETA {duration(row.eta_s)}</span>}</td>
                  <td class="spark narrow">{sparks[row.name] && <Spark values={sparks[row.name]} />}</td>
                  {row.problem ? (
                    <td class="muted wrap" colSpan={shown.length}>{row.problem}</td>
                  ) : (
                    shown.map((column) =>
                      column.key === "step" ? <StepCell key="step" row={row} /> : (
                        <td key={column.key} class={`${column.num ? "num" : ""} ${column.narrow ? "narrow" : ""}`}>{column.show(row)}</td>
                      ),
                    )
                  )}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {rows.length > 0 && (
        <p class="keys muted">
          <span>{rows.length.toLocaleString("en-US")} run{rows.length === 1 ? "" : "s"} in {data?.root}{data?.hidden ? <>, <a href="/?archived=true">{data.hidden} archived</a></> : null}</span>
          <span><kbd>j</kbd> <kbd>k</kbd> move</span>
          <span><kbd>Enter</kbd> open</span>
          <span><kbd>x</kbd> select</span>
          <span><kbd>c</kbd> compare</span>
          <span><kbd>/</kbd> filter</span>
        </p>
      )}
    </main>
  );
}

function columnsOf(chosen: string | null, rows: RunRow[]): Column[] {
  const keys = chosen?.split(",") ?? (rows.some((row) => row.reward != null) ? ["step", "loss", "reward", ...DEFAULT.slice(2)] : DEFAULT);
  return COLUMNS.filter((column) => keys.includes(column.key));
}

function sorted(rows: RunRow[], sort: string): RunRow[] {
  if (!sort) return rows;
  const down = sort.startsWith("-");
  const key = sort.replace("-", "");
  const column = COLUMNS.find((each) => each.key === key);
  const value = (row: RunRow) => (key === "name" ? row.name : key === "state" ? row.state : column?.value(row));
  return [...rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x == null || y == null) return x == null ? (y == null ? 0 : 1) : -1; // what is not known comes last
    const order = typeof x === "string" ? x.localeCompare(String(y), "en", { numeric: true }) : x - (y as number);
    return down ? -order : order;
  });
}

function Heading({ name, title, sort, num, narrow }: { name: string; title: string; sort: string; num?: boolean; narrow?: boolean }) {
  const direction = sort === name ? "ascending" : sort === `-${name}` ? "descending" : undefined;
  const next = sort === name ? `-${name}` : sort === `-${name}` ? null : name;
  return (
    <th scope="col" class={`${num ? "num" : ""} ${narrow ? "narrow" : ""}`} aria-sort={direction}>
      <button class="heading" onClick={() => setQuery({ sort: next })}>
        {title}
        <span aria-hidden="true">{direction ? (direction === "ascending" ? " ↑" : " ↓") : ""}</span>
      </button>
    </th>
  );
}

function StepCell({ row }: { row: RunRow }) {
  const total = row.total_steps;
  return (
    <td class="num step">
      {row.step.toLocaleString("en-US")}
      {total != null && <span class="muted"> / {total.toLocaleString("en-US")}</span>}
    </td>
  );
}

function Filter({ value, problem }: { value: string; problem: string | null }) {
  const [text, setText] = useState(value);
  const timer = useRef(0);
  useEffect(() => setText(value), [value]);
  const change = (next: string) => {
    setText(next);
    clearTimeout(timer.current);
    timer.current = window.setTimeout(() => setQuery({ where: next.trim() || null }), 250);
  };
  return (
    <div class="filter">
      <input
        id="filter"
        type="search"
        spellcheck={false}
        autocomplete="off"
        placeholder="filter: demo-*   or   loss < 3 and train.lr > 1e-3"
        aria-label="filter runs"
        aria-invalid={problem !== null}
        aria-describedby={problem ? "filter-problem" : undefined}
        value={text}
        onInput={(event) => change(event.currentTarget.value)}
      />
      {problem && <pre id="filter-problem" class="wrong">{problem}</pre>}
    </div>
  );
}

function ColumnChoice({ shown }: { shown: Column[] }) {
  const keys = shown.map((column) => column.key);
  const toggle = (key: string) => {
    const next = keys.includes(key) ? keys.filter((each) => each !== key) : [...keys, key];
    setQuery({ columns: next.join(",") || "step" });
  };
  return (
    <details class="menu">
      <summary>Columns</summary>
      <fieldset>
        <legend class="hidden">Columns</legend>
        {COLUMNS.map((column) => (
          <label key={column.key}>
            <input type="checkbox" checked={keys.includes(column.key)} onChange={() => toggle(column.key)} /> {column.title}
          </label>
        ))}
      </fieldset>
    </details>
  );
}

/** The course of the loss, small, for the runs at the top of the list. */
function useSparks(rows: RunRow[]): Record<string, (number | null)[]> {
  const [sparks, setSparks] = useState<Record<string, (number | null)[]>>({});
  const asked = useRef<Record<string, number>>({});
  useEffect(() => {
    const wanted = rows.slice(0, SPARKS).filter((row) => row.step > 0 && asked.current[row.name] !== row.step);
    if (!wanted.length) return;
    wanted.forEach((row) => (asked.current[row.name] = row.step));
    let current = true;
    const load = async () => {
      for (let at = 0; at < wanted.length && current; at += 12) {
        const part = wanted.slice(at, at + 12);
        const answers = await Promise.all(part.map((row) => askPlots({
          run: [row.name], key: row.objective && row.reward != null ? ["reward"] : ["loss"], buckets: 40,
        }).catch(() => null)));
        if (!current) return;
        setSparks((before) => {
          const next = { ...before };
          part.forEach((row, index) => {
            const plot = answers[index] && Object.values(answers[index]!.plots)[0];
            if (plot) next[row.name] = plot.means?.[row.name] ?? plot.lines[row.name] ?? [];
          });
          return next;
        });
      }
    };
    void load();
    return () => {
      current = false;
    };
  }, [rows]);
  return sparks;
}

function Spark({ values }: { values: (number | null)[] }) {
  const known = values.map((value, index) => [index, value] as const).filter((point): point is readonly [number, number] => point[1] !== null);
  if (known.length < 2) return null;
  const low = Math.min(...known.map(([, value]) => value));
  const high = Math.max(...known.map(([, value]) => value));
  const x = (index: number) => (96 * index) / Math.max(values.length - 1, 1) + 2;
  const y = (value: number) => 20 - (16 * (value - low)) / (high - low || 1);
  return (
    <svg viewBox="0 0 100 24" width="100" height="24" aria-hidden="true">
      <polyline points={known.map(([index, value]) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`).join(" ")} />
    </svg>
  );
}
