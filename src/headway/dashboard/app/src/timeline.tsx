// What the scheduler decided when: a lane per job, GPUs held by tenant above, and the decisions in words.
import { useMemo } from "preact/hooks";
import { usePoll } from "./api";
import { NoService } from "./cluster";
import { jobUrl } from "./cluster_map";
import { count, duration } from "./format";
import { Card, Problem } from "./parts";
import { Choice } from "./run";
import { setQuery, usePlace } from "./router";
import type { ClusterEvent, Lane, Timeline } from "./types";

const EVERY_MS = 3000;
const WINDOWS: [string, string][] = [["", "all"], ["86400", "day"], ["3600", "hour"], ["600", "10 min"]];
const HOLDING = ["starting", "running", "ending"];
const TICKS = 4;

export function TimelinePage() {
  const { query } = usePlace();
  const { data, error } = usePoll<Timeline>("/api/cluster/timeline", {}, EVERY_MS);
  const window = query.get("window") ?? "";
  const kind = query.get("kind") ?? "";
  if (error && !data) return <Problem error={error} />;
  if (!data) return <div class="placeholder tall" />;
  if (data.problem) return <NoService problem={data.problem} hint={data.hint} />;
  const range: [number, number] | null = window ? [Math.max(0, data.now_s - Number(window)), data.now_s] : null;
  const from = range?.[0] ?? -Infinity;
  const rows = data.jobs.filter((row) => row.spans.some((span) => (span.end_s ?? data.now_s) >= from));
  const kinds = [...new Set(data.events.map((entry) => entry.kind))].sort();
  const events = data.events.filter((entry) => entry.at_s >= from && (!kind || entry.kind === kind));
  return (
    <>
      {error && <Problem error={error} />}
      <h1>Timeline</h1>
      <div class="toolbar">
        <Choice label="window" value={window} options={WINDOWS} pick={(next) => setQuery({ window: next || null })} />
        <span class="lane-legend muted"><i class="waiting" /> waiting <i class="held" /> held <i class="starting" /> starting <i class="running" /> running <i class="ending" /> ending</span>
      </div>
      <Card title="Jobs" aside={<span class="muted">the scheduler's clock, up to its newest entry{data.hidden > 0 && `; ${count(data.hidden)} older jobs are not shown`}</span>}>
        {rows.length ? (
          <>
            <Held rows={rows} now={data.now_s} tenants={data.tenants} range={range} />
            <Lanes rows={rows} now={data.now_s} tenants={data.tenants} range={range} />
          </>
        ) : (
          <p class="calm muted">{data.refusal ? `Only events are shown: ${data.refusal}.` : "No job in this window."}</p>
        )}
      </Card>
      <Card title="Decisions" aside={
        <label class="muted">kind <select value={kind} onChange={(event) => setQuery({ kind: event.currentTarget.value || null })}><option value="">all</option>{kinds.map((each) => <option key={each}>{each}</option>)}</select></label>
      }>
        <DecisionList events={events} />
      </Card>
    </>
  );
}

function bounds(rows: Lane[], now: number, range: [number, number] | null): [number, number] {
  const [low, high] = range ?? [Math.min(...rows.map((row) => row.spans[0].begin_s)), now];
  return [low, high > low ? high : low + 1];
}

/** A lane per job: what state it was in when. */
export function Lanes({ rows, now, tenants, range, alone }: { rows: Lane[]; now: number; tenants: string[]; range: [number, number] | null; alone?: boolean }) {
  const [low, high] = bounds(rows, now, range);
  const at = (time: number) => (100 * (Math.min(Math.max(time, low), high) - low)) / (high - low);
  return (
    <div class={alone ? "lanes alone" : "lanes"}>
      <Axis low={low} high={high} />
      <ul>
        {rows.map((row) => {
          const tenant = Math.max(0, tenants.indexOf(row.tenant ?? "")) % 8;
          return (
            <li key={row.job}>
              {!alone && <a class="lane-name" href={jobUrl(row.job)} title={`${row.name ?? `job ${row.job}`} of ${row.tenant}, ${row.gpus} GPUs`}>{row.name ?? row.job}</a>}
              <svg width="100%" height="18" role="img" aria-label={`${row.name ?? row.job} of ${row.tenant}: ${row.spans.map((span) => `${span.state} from ${duration(span.begin_s)}`).join(", ")}`}>
                {row.spans.map((span, index) => {
                  const [begin, end] = [at(span.begin_s), at(span.end_s ?? now)];
                  if ((span.end_s ?? now) < low) return null;
                  const holds = HOLDING.includes(span.state);
                  return (
                    <rect key={index} class={`span ${span.state} t${tenant}`} x={`${begin}%`} width={`${Math.max(0.15, end - begin)}%`} y={holds ? 2 : 8} height={holds ? 14 : 2}>
                      <title>{`${span.state} ${duration(span.begin_s)} to ${span.end_s === null ? "now" : duration(span.end_s)}${span.nodes.length ? ` on ${span.nodes.join(", ")}` : ""}`}</title>
                    </rect>
                  );
                })}
              </svg>
            </li>
          );
        })}
      </ul>
    </div>
  );
}

function Axis({ low, high }: { low: number; high: number }) {
  const ticks = Array.from({ length: TICKS + 1 }, (_, index) => low + ((high - low) * index) / TICKS);
  return (
    <div class="lane-axis" aria-hidden="true">
      <svg width="100%" height="16">
        {ticks.map((time, index) => <text key={index} x={`${(100 * index) / TICKS}%`} y="11" text-anchor={index === 0 ? "start" : index === TICKS ? "end" : "middle"}>{duration(time)}</text>)}
      </svg>
    </div>
  );
}

/** How many GPUs each tenant's jobs held, over each other. */
function Held({ rows, now, tenants, range }: { rows: Lane[]; now: number; tenants: string[]; range: [number, number] | null }) {
  const [low, high] = bounds(rows, now, range);
  const { times, sums, most } = useMemo(() => heldOver(rows, now, tenants), [rows, now, tenants]);
  const x = (time: number) => (1000 * (Math.min(Math.max(time, low), high) - low)) / (high - low);
  const y = (gpus: number) => 60 - (58 * gpus) / Math.max(most, 1);
  return (
    <div class="held-gpus">
      <span class="lane-name muted">{count(most)} GPUs</span>
      <svg width="100%" height="60" viewBox="0 0 1000 60" preserveAspectRatio="none" role="img" aria-label={`GPUs held by ${tenants.join(", ")}; at most ${most}`}>
        {tenants.map((tenant, index) => {
          const upper = times.map((time, place) => [time, sums[place].slice(0, index + 1).reduce((a, b) => a + b, 0)]);
          const lower = times.map((time, place) => [time, sums[place].slice(0, index).reduce((a, b) => a + b, 0)]);
          return <polygon key={tenant} class={`t${index % 8}`} points={[...stairs(upper, now), ...stairs(lower, now).reverse()].map(([time, gpus]) => `${x(time).toFixed(2)},${y(gpus).toFixed(2)}`).join(" ")} />;
        })}
      </svg>
    </div>
  );
}

/** The sum per tenant after each change. */
function heldOver(rows: Lane[], now: number, tenants: string[]): { times: number[]; sums: number[][]; most: number } {
  const changes = rows.flatMap((row) => {
    const tenant = Math.max(0, tenants.indexOf(row.tenant ?? ""));
    // A start may wait for the exit of the job that it displaces: until it runs, its GPUs are still the other's.
    return row.spans.filter((span) => (span.state === "running" || span.state === "ending") && span.gpus).flatMap((span): [number, number, number][] => [[span.begin_s, tenant, span.gpus], [span.end_s ?? now, tenant, -span.gpus]]);
  });
  changes.sort((a, b) => a[0] - b[0] || a[2] - b[2]);
  const times: number[] = [];
  const sums: number[][] = [];
  const current = tenants.map(() => 0);
  for (const [time, tenant, gpus] of changes) {
    current[tenant] += gpus;
    if (times[times.length - 1] === time) sums[sums.length - 1] = [...current];
    else {
      times.push(time);
      sums.push([...current]);
    }
  }
  return { times, sums, most: Math.max(0, ...sums.map((each) => each.reduce((a, b) => a + b, 0))) };
}

function stairs(points: number[][], now: number): number[][] {
  return points.flatMap(([time, value], index) => [[time, value], [points[index + 1]?.[0] ?? now, value]]);
}

export function DecisionList({ events, plain }: { events: ClusterEvent[]; plain?: boolean }) {
  if (!events.length) return <p class="calm muted">Nothing has happened yet.</p>;
  return (
    <ol class="decisions">
      {events.map((event, index) => (
        <li key={`${event.seq}-${index}`} class={event.kind}>
          <time class="num muted">{duration(event.at_s)}</time>
          <span class="wrap">{event.job && !plain && <a href={jobUrl(event.job)}>{event.name ?? `job ${event.job}`}</a>} {event.sentence}</span>
        </li>
      ))}
    </ol>
  );
}
