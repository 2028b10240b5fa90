// Several runs over each other, and what differs between them.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { useAsk, useLive } from "./api";
import { Chart, SERIES_COLORS } from "./chart";
import { count, loss, percent, setting, short } from "./format";
import { Card, Empty, Problem, State } from "./parts";
import { usePlots } from "./plots";
import { Choice, Escape, Metrics, rangeOf } from "./run";
import { go, runUrl, setQuery, usePlace } from "./router";
import type { RunRow } from "./types";

interface Comparison {
  runs: RunRow[];
  differs: { key: string; values: Record<string, unknown> }[];
  metrics: string[];
  verdict: string;
}

const FIRST = ["loss", "reward", "eval_loss", "grad_norm", "tokens_per_s"];
const WIDE = 16;
const BUCKETS = 1000;

export function ComparePage() {
  const { query } = usePlace();
  const names = query.getAll("run");
  useEffect(() => {
    document.title = "Compare – Headway";
  }, []);
  if (names.length < 2) return <Choose names={names} />;
  return <Overlay names={names} />;
}

function Choose({ names }: { names: string[] }) {
  const { data, error } = useAsk<{ runs: RunRow[] }>("/api/runs");
  const [picked, setPicked] = useState<Set<string>>(new Set(names));
  const toggle = (name: string) => {
    const next = new Set(picked);
    if (!next.delete(name)) next.add(name);
    setPicked(next);
  };
  const show = (chosen: string[]) => go(`/compare?${chosen.map((name) => `run=${encodeURIComponent(name)}`).join("&")}`);
  const rows = (data?.runs ?? []).filter((row) => row.step > 0);
  return (
    <main>
      <h1>Compare runs</h1>
      {error && <Problem error={error} />}
      {data && rows.length < 2 ? (
        <Empty title="There are fewer than two runs with steps. Try another setting:" command="headway train recipes/demo.toml --set train.lr=1e-3" />
      ) : (
        <>
          <div class="toolbar">
            <button class="primary" disabled={picked.size < 2} onClick={() => show([...picked])}>Compare {picked.size || ""}</button>
            <button onClick={() => show(rows.slice(0, 100).map((row) => row.name))}>The newest {Math.min(rows.length, 100)}</button>
          </div>
          <ul class="chooser">
            {rows.map((row) => (
              <li key={row.name}>
                <label><input type="checkbox" checked={picked.has(row.name)} onChange={() => toggle(row.name)} /> {row.name}</label>
                <State state={row.state} />
                <span class="muted num">step {count(row.step)}, loss {loss(row.loss)}</span>
              </li>
            ))}
          </ul>
        </>
      )}
    </main>
  );
}

function Overlay({ names }: { names: string[] }) {
  const { query } = usePlace();
  const key = names.join("\n");
  const { data, error, again } = useAsk<Comparison>("/api/compare", { run: names });
  const [round, setRound] = useState(0);
  useLive(null, (changed) => {
    if (!changed.length || changed.some((name) => names.includes(name))) {
      again();
      setRound((n) => n + 1);
    }
  });
  const [hidden, setHidden] = useState<Set<string>>(new Set());
  const colors = useMemo(() => Object.fromEntries(names.map((name, index) => [name, index])), [key]);
  const all = data?.metrics ?? [];
  const wanted = query.getAll("key");
  const shown = wanted.length ? wanted : data ? FIRST.filter((name) => all.includes(name)).slice(0, 2) : ["loss"];
  const smoothing = Number(query.get("smooth") ?? "0");
  const range = rangeOf(query.get("zoom"));
  const { plots, pending, error: unread } = usePlots(names, shown, range, round, BUCKETS);
  const late = useRef(false);
  useEffect(() => {
    if (late.current && !pending.length) again(); // names of metrics, too, are known once their runs are read
    late.current = pending.length > 0;
  }, [pending.length === 0]);
  const visible = useMemo(() => names.filter((name) => !hidden.has(name)), [key, hidden]);
  const zoom = (next: [number, number] | null) => setQuery({ zoom: next && `${next[0]}-${next[1]}` });
  const toggle = (name: string) => {
    const next = new Set(hidden);
    if (!next.delete(name)) next.add(name);
    setHidden(next);
  };
  return (
    <main class="compare">
      <h1>Compare {names.length} runs</h1>
      {error && <Problem error={error} />}
      <div class="toolbar">
        <Metrics all={all} shown={shown} choose={(next) => setQuery({ key: next.length ? next : null })} />
        <label class="slider">
          smoothing
          <input type="range" min="0" max="0.99" step="0.01" value={smoothing} onInput={(event) => setQuery({ smooth: Number(event.currentTarget.value) ? event.currentTarget.value : null })} />
          <output>{smoothing.toFixed(2)}</output>
        </label>
        <Choice label="x axis" value={query.get("x") ?? "step"} options={[["step", "step"], ["log", "log step"]]} pick={(next) => setQuery({ x: next === "log" ? "log" : null })} />
        <Choice label="y axis" value={query.get("y") ?? "linear"} options={[["linear", "linear"], ["log", "log"]]} pick={(next) => setQuery({ y: next === "log" ? "log" : null })} />
        {range && <button onClick={() => zoom(null)}>Steps {count(range[0])} to {count(range[1])} ×</button>}
      </div>
      <Escape active={range !== null} act={() => zoom(null)} />
      {unread && <Problem error={unread} />}
      {pending.length > 0 && <p class="pending muted" role="status">Compacting new records: {count(names.length - pending.length)} of {count(names.length)} runs are drawn.</p>}
      <div class={shown.length === 2 ? "grid overlay two-charts" : "grid overlay"}>
        {shown.map((name, index) => (
          <Chart
            key={name}
            title={name}
            plot={plots[name]}
            runs={visible}
            colors={colors}
            smoothing={smoothing}
            logX={query.get("x") === "log"}
            logY={query.get("y") === "log"}
            range={range}
            onZoom={zoom}
            height={index === 0 || shown.length === 2 ? 380 : 240}
          />
        ))}
      </div>
      <Runs data={data} names={names} hidden={hidden} toggle={toggle} />
      {data && <Differences data={data} names={names} />}
    </main>
  );
}

function Runs({ data, names, hidden, toggle }: { data: Comparison | null; names: string[]; hidden: Set<string>; toggle: (name: string) => void }) {
  const rows = new Map(data?.runs.map((row) => [row.name, row]));
  return (
    <Card title="Runs">
      <div class="scroll legend">
        <table class="plain">
          <thead>
            <tr>
              <th scope="col"><span class="hidden">shown</span></th><th scope="col">run</th><th scope="col">state</th><th scope="col" class="num">step</th>
              <th scope="col" class="num">loss</th><th scope="col" class="num">tokens/s</th><th scope="col" class="num">MFU</th><th scope="col"><span class="hidden">remove</span></th>
            </tr>
          </thead>
          <tbody>
            {names.map((name, index) => {
              const row = rows.get(name);
              return (
                <tr key={name}>
                  <td class="pick"><input type="checkbox" aria-label={`show ${name}`} checked={!hidden.has(name)} onChange={() => toggle(name)} /></td>
                  <th scope="row"><span class={`swatch c${index % SERIES_COLORS} d${Math.floor(index / SERIES_COLORS) % 4}`} aria-hidden="true" /><a href={runUrl(name)}>{name}</a></th>
                  <td>{row && <State state={row.state} />}</td>
                  <td class="num">{count(row?.step)}</td>
                  <td class="num">{loss(row?.loss)}</td>
                  <td class="num">{short(row?.tokens_per_s)}</td>
                  <td class="num">{percent(row?.mfu)}</td>
                  <td class="pick"><button class="ghost small" aria-label={`Remove ${name}`} onClick={() => setQuery({ run: names.filter((each) => each !== name) })}>×</button></td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
    </Card>
  );
}

/** One key per row for few runs, one run per row for many. */
function Differences({ data, names }: { data: Comparison; names: string[] }) {
  const keys = data.differs.map((row) => row.key);
  const across = names.length <= WIDE && names.length <= Math.max(6, keys.length);
  return (
    <Card title="Differences" aside={<span class="muted">{data.verdict}</span>}>
      {keys.length > 0 && (
        <div class="scroll legend" tabIndex={0} role="region" aria-label="differences">
          {across ? (
            <table class="plain">
              <thead><tr><th scope="col">key</th>{names.map((name) => <th scope="col" key={name}>{name}</th>)}</tr></thead>
              <tbody>
                {data.differs.map((row) => (
                  <tr key={row.key}><th scope="row">{row.key}</th>{names.map((name) => <td key={name} class="wrap">{setting(row.values[name])}</td>)}</tr>
                ))}
              </tbody>
            </table>
          ) : (
            <table class="plain">
              <thead><tr><th scope="col">run</th>{keys.map((key) => <th scope="col" key={key}>{key}</th>)}</tr></thead>
              <tbody>
                {names.map((name) => <tr key={name}><th scope="row">{name}</th>{data.differs.map((row) => <td key={row.key}>{setting(row.values[name])}</td>)}</tr>)}
              </tbody>
            </table>
          )}
        </div>
      )}
    </Card>
  );
}
