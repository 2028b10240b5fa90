// One run: how it goes, where its time went, what happened to it, and what it was told to do.
import { useEffect, useMemo, useState } from "preact/hooks";
import { useAsk, useLive } from "./api";
import { Chart, type Mark } from "./chart";
import { jobUrl } from "./cluster_map";
import { Documents } from "./documents";
import { clock, count, duration, fixed, loss, number, percent, seconds, short, when } from "./format";
import { Insights } from "./insights";
import { Labels } from "./labels";
import { Attempts, LedgerCard, PlanCard } from "./ledger";
import { lineageUrl } from "./lineage";
import { Logs, Stacks } from "./logs";
import { Card, Command, Empty, Fact, Problem, State, Tabs } from "./parts";
import { usePlots } from "./plots";
import { RecipeView } from "./recipe";
import { Rollouts } from "./rollouts";
import { runUrl, setQuery, useKeys, usePlace } from "./router";
import { Samples } from "./samples";
import type { Ledger, Overview } from "./types";

const FIRST = ["reward", "loss", "grad_norm", "lr", "tokens_per_s", "mfu", "eval_loss"];
/** Of a policy: whether it learns, and what its answers become. */
const FIRST_OF_POLICY = ["reward", "pass@", "length", "sampled_entropy", ...FIRST];
const AT_FIRST = 4;
const BUCKETS = 1000;

export function RunPage({ name }: { name: string }) {
  const { query } = usePlace();
  const overview = useAsk<Overview>("/api/run", { run: name });
  const ledger = useAsk<Ledger>("/api/ledger", { run: name });
  const [round, setRound] = useState(0);
  const live = useLive(name, () => {
    overview.again();
    ledger.again();
    setRound((n) => n + 1);
  });
  useEffect(() => {
    document.title = `${name} – Headway`;
  }, [name]);
  const run = overview.data;
  if (!run) return <main>{overview.error ? <Gone error={overview.error} /> : <div class="placeholder tall" />}</main>;
  const tab = query.get("tab") ?? (run.policy ? "rollouts" : "incidents");
  const tabs: [string, string][] = [
    ["incidents", `Incidents${ledger.data?.incidents.length ? ` ${ledger.data.incidents.length}` : ""}`],
    ...(run.policy ? ([["rollouts", "Rollouts"]] as [string, string][]) : []),
    ["samples", "Samples"],
    ...(run.policy ? [] : ([["documents", "Documents"]] as [string, string][])),
    ["logs", "Logs"],
    ["stacks", "Stacks"],
    ["recipe", "Recipe"],
    ["system", "System"],
  ];
  return (
    <main class="run">
      <Title run={run} ledger={ledger.data} live={live} gone={overview.error !== null} again={overview.again} />
      {ledger.data?.warnings.map((text) => <p class="warning" key={text} role="status">{text}</p>)}
      <div class="columns">
        <Charts run={run} ledger={ledger.data} round={round} />
        <div class="side">
          {ledger.data !== null && ledger.data.insights.length > 0 && <Insights run={run} insights={ledger.data.insights} />}
          {ledger.error ? <Card title="Ledger"><Problem error={ledger.error} /></Card> : <LedgerCard ledger={ledger.data} />}
          {ledger.data?.plan && <PlanCard plan={ledger.data.plan} />}
          {run.evaluations.length > 0 && <Evaluations run={run} />}
        </div>
      </div>
      <Tabs names={tabs} active={tab} onPick={(next) => setQuery({ tab: next })} label="about this run" />
      <div id="panel" role="tabpanel" aria-labelledby={`tab-${tab}`} tabIndex={0}>
        {tab === "incidents" && <Incidents ledger={ledger.data} run={run} />}
        {tab === "rollouts" && <Rollouts run={run} round={round} />}
        {tab === "samples" && <Samples run={run} round={round} />}
        {tab === "documents" && <Documents run={run} />}
        {tab === "logs" && <Logs run={run} />}
        {tab === "stacks" && <Stacks run={run} round={round} />}
        {tab === "recipe" && <RecipeView run={run} />}
        {tab === "system" && <System run={run} ledger={ledger.data} />}
      </div>
    </main>
  );
}

function Gone({ error }: { error: import("./api").Refused }) {
  return (
    <div class="nothing">
      <Problem error={error} />
      <p><a href="/">All runs</a></p>
    </div>
  );
}

function Title({ run, ledger, live, gone, again }: { run: Overview; ledger: Ledger | null; live: boolean; gone: boolean; again: () => void }) {
  const share = run.total_steps ? Math.min(1, run.step / run.total_steps) : null;
  const running = run.state === "running";
  return (
    <header class="title">
      <div class="line">
        <h1>{run.name}</h1>
        <State state={run.state} />
        {run.parent && (
          <span class="muted">
            from{" "}
            {run.parent.here ? <a href={runUrl(run.parent.run)}>{run.parent.run}</a> : run.parent.run}
            {run.parent.step !== null && `@${run.parent.step}`}
          </span>
        )}
        {!gone && !run.name.startsWith(".") && <Labels run={run} saved={again} />}
        <a class="muted" href={lineageUrl(run.name)}>lineage</a>
        {run.job && <a class="muted" href={jobUrl(run.job)}>job {run.job}</a>}
        {gone && <span class="wrong" role="status">the folder of this run is gone: this is what was read before</span>}
        {!live && !gone && <span class="muted" role="status">not connected: what is shown may be old</span>}
      </div>
      {run.note && <p class="note">{run.note}</p>}
      {run.state !== "running" && run.reason && run.state !== "finished" && <p class="reason">{run.reason}</p>}
      {share !== null && share < 1 && (
        <div class="progress" role="progressbar" aria-label="steps done" aria-valuemin={0} aria-valuemax={run.total_steps!} aria-valuenow={run.step}>
          <svg width="100%" height="4" viewBox="0 0 100 4" preserveAspectRatio="none"><rect x="0" y="0" width={100 * share} height="4" /></svg>
        </div>
      )}
      <dl class="facts">
        <Fact label="step">{count(run.step)}{run.total_steps != null && <span class="muted"> / {count(run.total_steps)}</span>}</Fact>
        {run.reward != null && <Fact label="reward">{fixed(run.reward, 3)}</Fact>}
        <Fact label="loss">{loss(run.loss)}</Fact>
        {running ? <Fact label="ETA">{duration(run.eta_s)}</Fact> : <Fact label="took">{duration(run.seconds)}</Fact>}
        <Fact label="tokens/s">{short(run.tokens_per_s)}</Fact>
        <Fact label="MFU">{percent(ledger?.mfu ?? run.mfu)}</Fact>
        <Fact label="step time">{seconds(run.step_s)}</Fact>
        <Fact label="on">{run.workers == null ? "–" : `${run.workers} × ${run.device}`}</Fact>
        <Fact label="started">{when(run.started)}</Fact>
        {(run.attempts ?? 0) > 1 && <Fact label="attempts">{count(run.attempts)}</Fact>}
      </dl>
    </header>
  );
}

function Charts({ run, ledger, round }: { run: Overview; ledger: Ledger | null; round: number }) {
  const { query } = usePlace();
  const wanted = run.policy ? FIRST_OF_POLICY : FIRST;
  const named = wanted.map((key) => (key.endsWith("@") ? run.metrics.find((metric) => metric.startsWith(key)) : run.metrics.find((metric) => metric === key)));
  const usual = [...new Set(named.filter((key) => key !== undefined))].slice(0, AT_FIRST);
  const keys = query.getAll("key").filter((key) => run.metrics.includes(key));
  const shown = keys.length ? keys : usual;
  const smoothing = Number(query.get("smooth") ?? "0");
  const logY = query.get("y") === "log";
  const axis = query.get("x") ?? "step";
  const range = rangeOf(query.get("zoom"));
  const { plots } = usePlots([run.name], shown, range, round, BUCKETS); // the title says when the run is gone
  const elapsed = useMemo(() => (axis === "time" && ledger?.clock.steps.length ? elapsedOf(ledger) : null), [axis, ledger]);
  const marks: Mark[] = useMemo(
    () => (ledger?.incidents ?? []).filter((incident) => incident.step !== null).map((incident) => ({ step: incident.step!, text: incident.text })),
    [ledger],
  );
  if (!run.metrics.length)
    return (
      <div class="charts">
        <Empty title={run.state === "running" ? "The first step has not ended yet." : "This run recorded no step."} command={run.commands.logs} />
      </div>
    );
  const zoom = (next: [number, number] | null) => setQuery({ zoom: next && `${next[0]}-${next[1]}` });
  const choose = (next: string[]) => setQuery({ key: next.length ? next : null });
  return (
    <div class="charts">
      <div class="toolbar">
        <Metrics all={run.metrics} shown={shown} choose={choose} />
        <label class="slider">
          smoothing
          <input type="range" min="0" max="0.99" step="0.01" value={smoothing} onInput={(event) => setQuery({ smooth: Number(event.currentTarget.value) ? event.currentTarget.value : null })} />
          <output>{smoothing.toFixed(2)}</output>
        </label>
        <Choice label="x axis" value={axis} options={[["step", "step"], ["log", "log step"], ["time", "time"]]} pick={(next) => setQuery({ x: next === "step" ? null : next })} />
        <Choice label="y axis" value={logY ? "log" : "linear"} options={[["linear", "linear"], ["log", "log"]]} pick={(next) => setQuery({ y: next === "log" ? "log" : null })} />
        {range && <button onClick={() => zoom(null)} title="Escape">Steps {count(range[0])} to {count(range[1])} ×</button>}
      </div>
      <Escape active={range !== null} act={() => zoom(null)} />
      <div class={shown.length === 1 ? "grid single" : "grid"}>
        {shown.map((key, index) => (
          <Chart
            key={key}
            title={key}
            plot={plots[key]}
            runs={[run.name]}
            colors={{ [run.name]: 0 }}
            smoothing={smoothing}
            logX={axis === "log"}
            logY={logY}
            elapsed={elapsed}
            range={range}
            onZoom={zoom}
            marks={marks}
            height={index === 0 ? 280 : 180}
            onRemove={shown.length > 1 ? () => choose(shown.filter((each) => each !== key)) : undefined}
          />
        ))}
      </div>
      <p class="muted hint">Drag over a plot to zoom all of them; double-click or Escape shows everything.</p>
    </div>
  );
}

export function rangeOf(text: string | null): [number, number] | null {
  const match = /^(\d+)-(\d+)$/.exec(text ?? "");
  return match && Number(match[2]) > Number(match[1]) ? [Number(match[1]), Number(match[2])] : null;
}

function elapsedOf(ledger: Ledger): (step: number) => number {
  const { steps, walls } = ledger.clock;
  const start = ledger.attempts[0]?.started ?? walls[0];
  return (step) => {
    let low = 0;
    let high = steps.length - 1;
    if (step <= steps[0]) return walls[0] - start;
    if (step >= steps[high]) return walls[high] - start;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle;
      else high = middle;
    }
    const share = (step - steps[low]) / (steps[high] - steps[low]);
    return walls[low] + share * (walls[high] - walls[low]) - start;
  };
}

export function Metrics({ all, shown, choose }: { all: string[]; shown: string[]; choose: (keys: string[]) => void }) {
  const [text, setText] = useState("");
  const matching = all.filter((key) => key.includes(text.trim()));
  const toggle = (key: string) => choose(shown.includes(key) ? shown.filter((each) => each !== key) : [...shown, key]);
  return (
    <details class="menu">
      <summary>Metrics {shown.length} of {all.length}</summary>
      <fieldset>
        <legend class="hidden">Metrics</legend>
        {all.length > 12 && <input type="search" aria-label="find a metric" placeholder="find" value={text} onInput={(event) => setText(event.currentTarget.value)} />}
        {matching.map((key) => (
          <label key={key}>
            <input type="checkbox" checked={shown.includes(key)} onChange={() => toggle(key)} /> {key}
          </label>
        ))}
      </fieldset>
    </details>
  );
}

export function Choice({ label, value, options, pick }: { label: string; value: string; options: [string, string][]; pick: (value: string) => void }) {
  return (
    <span class="choice" role="group" aria-label={label}>
      <span class="muted">{label.split(" ")[0]}</span>
      {options.map(([key, text]) => (
        <button key={key} aria-pressed={key === value} onClick={() => pick(key)}>{text}</button>
      ))}
    </span>
  );
}

export function Escape({ active, act }: { active: boolean; act: () => void }) {
  useKeys((event) => {
    if (active && event.key === "Escape") act();
  });
  return null;
}

function Incidents({ ledger, run }: { ledger: Ledger | null; run: Overview }) {
  if (!ledger) return <div class="placeholder" />;
  return (
    <div class="incidents">
      {ledger.incidents.length ? (
        <ol>
          {ledger.incidents.map((incident, index) => (
            <li key={index}>
              <time dateTime={new Date(incident.wall * 1000).toISOString()}>{clock(incident.wall)}</time>
              <span class="num muted">{incident.step === null ? "before step 1" : `step ${count(incident.step)}`}</span>
              <span class="text">{incident.text}</span>
            </li>
          ))}
        </ol>
      ) : (
        <p class="muted calm">Nothing went wrong{run.state === "running" ? " so far" : ""}.</p>
      )}
      {ledger.attempts.length > 1 && <Attempts ledger={ledger} />}
      {["stopped", "failed", "interrupted"].includes(run.state) && <p>Continue it: <Command text={run.commands.resume} /></p>}
    </div>
  );
}

function Evaluations({ run }: { run: Overview }) {
  return (
    <Card title="Evaluations">
      <table class="plain">
        <thead>
          <tr><th scope="col">task</th><th scope="col" class="num">step</th><th scope="col" class="num">score</th><th scope="col" class="num">95 %</th></tr>
        </thead>
        <tbody>
          {run.evaluations.map((evaluation, index) => {
            const metric = evaluation.metrics[0];
            const shown = (value: number | null) => (value == null ? "–" : metric.share ? percent(value) : number(value));
            return (
              <tr key={index}>
                <th scope="row">{evaluation.task}{evaluation.variant && `[${evaluation.variant}]`}{metric && <span class="muted"> {metric.name}</span>}</th>
                <td class="num">{count(evaluation.step)}</td>
                <td class="num">{metric ? shown(metric.value) : "–"}</td>
                <td class="num muted">{metric && metric.low != null ? `${shown(metric.low)} to ${shown(metric.high)}` : "–"}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </Card>
  );
}

function System({ run, ledger }: { run: Overview; ledger: Ledger | null }) {
  const rows = Object.entries(run.environment).flatMap(([key, value]): [string, string][] =>
    value && typeof value === "object"
      ? Object.entries(value).map(([inner, deep]): [string, string] => [`${key}.${inner}`, String(deep)])
      : [[key, String(value)]],
  );
  return (
    <div class="two">
      <Card title="Environment">
        {rows.length ? (
          <table class="plain"><tbody>{rows.map(([key, value]) => <tr key={key}><th scope="row">{key}</th><td class="wrap">{value}</td></tr>)}</tbody></table>
        ) : (
          <Empty title="No environment is recorded yet." />
        )}
      </Card>
      <Card title="Attempts">{ledger ? <Attempts ledger={ledger} /> : <div class="placeholder" />}</Card>
    </div>
  );
}
