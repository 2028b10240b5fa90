// Why a job waits: who holds the GPUs, when it may start, and what would start it now.
import { useAsk } from "./api";
import { count, duration } from "./format";
import { Problem } from "./parts";
import type { WhyAnswer } from "./types";

export function Why({ job }: { job: string }) {
  const { data, error } = useAsk<WhyAnswer>("/api/cluster/why", { job });
  if (error) return <Problem error={error} />;
  if (!data) return <p class="muted">asking the scheduler</p>;
  if (data.problem) return <p class="wrong">{data.problem}</p>;
  const why = data.why;
  if (!why) return <p class="muted">It is {data.state}{data.reason && `: ${data.reason}`}.</p>;
  const start = why.start;
  return (
    <div class="why">
      <p><strong>{why.state}</strong>: {why.sentence}</p>
      {start && (
        <p>
          {start.p50_s === null ? "Start time unknown: it never started in half of the simulated futures." : (
            <>Start within <strong>{duration(start.p50_s)}</strong> (50 %), {start.p90_s === null ? "never" : `within ${duration(start.p90_s)}`} (90 %)</>
          )}
        </p>
      )}
      {why.instead.map((change) => <p key={change.sentence}>It would start now by {change.sentence}.</p>)}
      {why.holders.length > 0 && (
        <p class="muted">GPUs are held by {why.holders.map((holder) => holder.jobs === null ? `${holder.tenant} (${count(holder.gpus)})` : `${holder.tenant} (${count(holder.gpus)} in ${count(holder.jobs)} ${holder.jobs === 1 ? "job" : "jobs"}, ${count(holder.guarantee)} guaranteed)`).join(", ")}.</p>
      )}
    </div>
  );
}
