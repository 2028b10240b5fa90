// One metric over steps: a thin line for what was measured, a strong one for its smoothed course.
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { duration, number, percent } from "./format";
import { onTheme } from "./theme";
import type { Plot } from "./types";

export interface Mark {
  step: number;
  text: string;
}

export interface ChartProps {
  title: string;
  plot: Plot | undefined;
  runs: string[];
  colors: Record<string, number>;
  smoothing: number;
  logX?: boolean;
  logY?: boolean;
  /** Seconds since the start of the run at a step, for an axis of time. */
  elapsed?: ((step: number) => number) | null;
  range: [number, number] | null;
  onZoom: (range: [number, number] | null) => void;
  marks?: Mark[];
  height?: number;
  onRemove?: () => void;
}

type Column = (number | null)[];

export const SERIES_COLORS = 8;
/** Distances of ticks on an axis of steps: there is no step 1.5. */
const WHOLE = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

function css(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Exponential moving average without the bias of its beginning; gaps stay gaps. */
export function smooth(values: Column, factor: number): Column {
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = factor * sum + (1 - factor) * value;
    weight = factor * weight + (1 - factor);
    return sum / weight;
  });
}

export function formatMetric(name: string, value: number | null | undefined): string {
  if (value == null) return "–";
  if (name === "mfu") return percent(value);
  return number(value);
}

function columns(props: ChartProps): { data: uPlot.AlignedData; shown: string[] } {
  const plot = props.plot!;
  const shown = props.runs.filter((run) => run in plot.lines);
  const x = props.elapsed ? plot.steps.map(props.elapsed) : plot.steps;
  const positive = (column: Column) => (props.logY ? column.map((v) => (v !== null && v > 0 ? v : null)) : column);
  const raw = shown.map((run) => positive(plot.lines[run]));
  if (!props.smoothing) return { data: [x, ...raw] as uPlot.AlignedData, shown };
  const smoothed = shown.map((run) => {
    const means = plot.means?.[run];
    if (!means) return positive(smooth(plot.lines[run], props.smoothing));
    const course = smooth(means, props.smoothing);
    return positive(plot.steps.map((_, index) => (index % 2 ? course[(index - 1) / 2] : null)));
  });
  return { data: [x, ...raw, ...smoothed] as uPlot.AlignedData, shown };
}

export function lastValue(plot: Plot | undefined, run: string): number | null {
  const line = plot?.lines[run];
  if (!line) return null;
  for (let index = line.length - 1; index >= 0; index--) if (line[index] !== null) return line[index];
  return null;
}

export function Chart(props: ChartProps) {
  const box = useRef<HTMLDivElement>(null);
  const readout = useRef<HTMLOutputElement>(null);
  const instance = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const ready = props.plot !== undefined && props.plot.steps.length > 0;
  const shownKey = ready ? props.runs.filter((run) => run in props.plot!.lines).join("\n") : "";
  const colorKey = props.runs.map((run) => props.colors[run]).join();
  const single = props.runs.length === 1;

  const rest = () => {
    const now = latest.current;
    if (readout.current)
      readout.current.textContent = single ? formatMetric(now.title, lastValue(now.plot, now.runs[0])) : "";
  };

  useLayoutEffect(() => {
    if (!ready || !box.current) return;
    const build = () => {
      instance.current?.destroy();
      const now = latest.current;
      const { data, shown } = columns(now);
      const chart = new uPlot(options(now, shown, box.current!.clientWidth, () => latest.current, readout, rest), data, box.current!);
      instance.current = chart;
      applyRange(chart, now);
      rest();
    };
    build();
    const sized = new ResizeObserver(() => {
      const width = box.current?.clientWidth;
      if (width && instance.current && instance.current.width !== width)
        instance.current.setSize({ width, height: props.height ?? 220 });
    });
    sized.observe(box.current);
    const stop = onTheme(build);
    return () => {
      sized.disconnect();
      stop();
      instance.current?.destroy();
      instance.current = null;
    };
  }, [ready, shownKey, colorKey, props.logX, props.logY, props.smoothing > 0, !!props.elapsed, props.height]);

  useEffect(() => {
    if (!instance.current || !ready) return;
    instance.current.setData(columns(props).data, false);
    applyRange(instance.current, props);
    rest();
  }, [props.plot, props.smoothing, props.range?.[0], props.range?.[1], props.marks, props.elapsed]);

  const last = single ? formatMetric(props.title, lastValue(props.plot, props.runs[0])) : `${props.runs.length} runs`;
  return (
    <figure class="chart">
      <figcaption>
        <h3>{props.title}</h3>
        <output ref={readout} class="readout" aria-live="off" />
        {props.onRemove && (
          <button class="ghost small" title={`Hide ${props.title}`} aria-label={`Hide ${props.title}`} onClick={props.onRemove}>
            ×
          </button>
        )}
      </figcaption>
      {ready ? (
        <div ref={box} class="plot" role="img" aria-label={`${props.title} over ${props.elapsed ? "time" : "steps"}, last ${last}`} />
      ) : (
        <div class="plot empty">{props.plot ? "no values in this range" : ""}</div>
      )}
    </figure>
  );
}

function applyRange(chart: uPlot, props: ChartProps): void {
  const x = chart.data[0] as number[];
  if (!x.length) return;
  let [low, high] = props.range ?? [x[0], x[x.length - 1]];
  if (props.range && props.elapsed) [low, high] = [props.elapsed(low), props.elapsed(high)];
  if (low === high) [low, high] = [low - 1, high + 1];
  chart.batch(() => chart.setScale("x", { min: low, max: high }));
  chart.redraw(true, true); // by itself it would keep the range before
}

function options(
  props: ChartProps,
  shown: string[],
  width: number,
  current: () => ChartProps,
  readout: { current: HTMLOutputElement | null },
  rest: () => void,
): uPlot.Options {
  const many = shown.length > 12;
  const stroke = (run: string) => css(`--s${props.colors[run] % SERIES_COLORS}`);
  const dash = (run: string) => {
    const turn = Math.floor(props.colors[run] / SERIES_COLORS) % 4;
    return turn ? [[6, 3], [2, 3], [8, 3, 2, 3]][turn - 1] : undefined;
  };
  const strong = (run: string): uPlot.Series => ({
    label: run,
    stroke: stroke(run),
    width: many ? 1 : shown.length > 1 ? 1.5 : 2,
    dash: many ? undefined : dash(run),
    alpha: many ? 0.65 : 1,
    spanGaps: props.smoothing > 0 || shown.length > 1,
    points: many ? { show: false } : { size: 4 },
  });
  const faint = (run: string): uPlot.Series => ({
    ...strong(run),
    width: 1,
    alpha: shown.length > 1 ? 0.12 : 0.3,
    dash: undefined,
    points: { show: false },
  });
  const lines = props.smoothing ? [...shown.map(faint), ...shown.map(strong)] : shown.map(strong);
  const axis = { stroke: css("--muted"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return {
    width,
    height: props.height ?? 220,
    padding: [10, 12, 0, 0],
    legend: { show: false },
    cursor: {
      sync: { key: "headway", setSeries: false, scales: ["x", null] },
      drag: { x: true, y: false, setScale: false },
      focus: { prox: 24 },
      points: { size: 6, show: !many },
      y: false,
    },
    focus: { alpha: shown.length > 1 ? 0.15 : 1 },
    scales: {
      x: { time: false, auto: false, distr: props.logX ? 3 : 1, log: 10 },
      y: { distr: props.logY ? 3 : 1, log: 10 },
    },
    axes: [
      {
        ...axis,
        grid: { show: false },
        size: 28,
        gap: 6,
        values: (_, ticks) => ticks.map((v) => (v == null ? "" : props.elapsed ? duration(v) : v.toLocaleString("en-US"))),
        space: props.elapsed ? 70 : 60,
        ...(props.elapsed || props.logX ? {} : { incrs: WHOLE }),
      },
      { ...axis, size: 56, gap: 6, values: (_, ticks) => ticks.map((v) => (v == null ? "" : formatMetric(props.title, v))) },
    ],
    series: [{}, ...lines],
    hooks: {
      setSelect: [
        (chart) => {
          if (chart.select.width < 4) return;
          let low = chart.posToVal(chart.select.left, "x");
          let high = chart.posToVal(chart.select.left + chart.select.width, "x");
          chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          const steps = current().plot!.steps;
          if (current().elapsed) {
            const x = chart.data[0] as number[];
            [low, high] = [low, high].map((value) => steps[Math.min(chart.valToIdx(value), x.length - 1)]);
          }
          if (Math.ceil(high) > Math.floor(low)) current().onZoom([Math.floor(low), Math.ceil(high)]);
        },
      ],
      setCursor: [(chart) => showReadout(chart, props, shown, current(), readout.current, rest)],
      draw: [(chart) => drawMarks(chart, current())],
      ready: [
        (chart) => {
          chart.over.addEventListener("dblclick", () => current().onZoom(null));
        },
      ],
    },
  };
}

/** Say where the cursor is: the step and the value; of several runs, those of the nearest line. */
function showReadout(
  chart: uPlot,
  props: ChartProps,
  shown: string[],
  now: ChartProps,
  target: HTMLOutputElement | null,
  rest: () => void,
): void {
  const index = chart.cursor.idx;
  if (!target) return;
  if (index == null || chart.cursor.left! < 0 || !now.plot) return rest();
  const first = props.smoothing ? shown.length : 0;
  let best = -1;
  let nearest = Infinity;
  let value: number | null = null;
  for (let place = 0; place < shown.length; place++) {
    const column = chart.data[1 + first + place] as Column;
    const at = valueNear(column, index);
    if (at === null) continue;
    const away = shown.length === 1 ? 0 : Math.abs(chart.valToPos(at, "y") - (chart.cursor.top ?? 0));
    if (away < nearest) [best, nearest, value] = [place, away, at];
  }
  const step = now.plot.steps[index];
  if (best < 0 || step === undefined) return rest();
  const who = shown.length > 1 ? `${shown[best]}  ` : "";
  target.textContent = `${who}step ${step.toLocaleString("en-US")}  ${formatMetric(props.title, value)}`;
}

function valueNear(column: Column, index: number): number | null {
  for (let away = 0; away < 40; away++) {
    const value = column[index - away] ?? column[index + away];
    if (value != null) return value;
  }
  return null;
}

/** Incidents on the axis of the plot: a dashed line, and a small flag at its top. */
function drawMarks(chart: uPlot, props: ChartProps): void {
  if (!props.marks?.length) return;
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top - 10 * devicePixelRatio, bbox.width, bbox.height + 10 * devicePixelRatio);
  ctx.clip();
  ctx.strokeStyle = ctx.fillStyle = css("--bad");
  ctx.lineWidth = devicePixelRatio;
  for (const mark of props.marks) {
    const x = Math.round(chart.valToPos(props.elapsed ? props.elapsed(mark.step) : mark.step, "x", true)) + 0.5;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.globalAlpha = 0.6;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.globalAlpha = 1;
    ctx.setLineDash([]);
    const size = 4 * devicePixelRatio;
    ctx.beginPath();
    ctx.moveTo(x - size, bbox.top - 2 * size);
    ctx.lineTo(x + size, bbox.top - 2 * size);
    ctx.lineTo(x, bbox.top);
    ctx.fill();
  }
  ctx.restore();
}
