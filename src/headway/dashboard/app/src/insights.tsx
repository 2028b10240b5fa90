// What stands out in a run, each with the place that shows it.
import { Card } from "./parts";
import { runUrl, setQuery } from "./router";
import type { Insight, Overview } from "./types";

/** Steps on either side of the one that a link zooms to. */
const AROUND = 25;

export function Insights({ run, insights }: { run: Overview; insights: Insight[] }) {
  return (
    <Card title="Insights">
      <ul class="insights">
        {insights.map((insight, index) => (
          <li key={index}>
            <strong>{insight.kind}</strong> {insight.text.replace(`${insight.kind} `, "")}
            <span class="links"><Links run={run} insight={insight} /></span>
          </li>
        ))}
      </ul>
    </Card>
  );
}

function Links({ run, insight }: { run: Overview; insight: Insight }) {
  const { step, evidence } = insight;
  const zoom = (at: number) => setQuery({ zoom: `${Math.max(0, at - AROUND)}-${at + AROUND}` });
  const open = (event: Event, at: number) => {
    event.preventDefault();
    setQuery({ tab: "documents", step: String(at) });
    document.getElementById("panel")?.scrollIntoView({ block: "start" });
  };
  const other = typeof evidence.run === "string" ? evidence.run : null;
  return (
    <>
      {step !== null && <button class="ghost small" onClick={() => zoom(step)}>zoom to step {step.toLocaleString("en-US")}</button>}
      {insight.kind === "loss spike" && step !== null && <a href={runUrl(run.name, `?tab=documents&step=${step}`)} onClick={(event) => open(event, step)}>its documents</a>}
      {other && <a href={`/compare?run=${encodeURIComponent(run.name)}&run=${encodeURIComponent(other)}&key=tokens_per_s&key=loss`}>compare with {other}</a>}
      {insight.kind === "straggler" && <a href={runUrl(run.name, "?tab=system")}>attempts</a>}
    </>
  );
}
