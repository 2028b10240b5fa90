// One job: where it runs or why it does not, what was decided on it, and the run that it trains.
import { usePoll } from "./api";
import { gpusOf, JobState, NoService } from "./cluster";
import { count, duration, when } from "./format";
import { Card, Command, Fact, Problem } from "./parts";
import { runUrl } from "./router";
import { DecisionList, Lanes } from "./timeline";
import type { ClusterJob, JobDocument } from "./types";
import { Why } from "./why";

const EVERY_MS = 2000;
const OVER = ["finished", "failed", "cancelled", "impossible"];

export function JobPage({ name }: { name: string }) {
  const { data, error } = usePoll<JobDocument>("/api/cluster/job", { job: name }, EVERY_MS);
  if (error && !data) return <main><Problem error={error} /></main>;
  if (!data) return <main><div class="placeholder tall" /></main>;
  if (data.problem) return <main><NoService problem={data.problem} hint={data.hint} /><p><a href="/cluster">Cluster</a></p></main>;
  const job = data.job;
  const over = OVER.includes(job.state);
  return (
    <main class="cluster">
      <nav class="subnav" aria-label="cluster"><a href="/cluster">Now</a><a href="/cluster/timeline">Timeline</a></nav>
      <header class="title">
        <div class="line">
          <h1>{job.name}</h1>
          <JobState job={job} />
          <span class="muted">job {job.id} of {job.tenant}</span>
          {data.run && <a href={runUrl(data.run)}>run {data.run}</a>}
        </div>
        {job.reason && <p class="reason">{job.reason}</p>}
        <dl class="facts">
          <Fact label="GPUs">{gpusOf(job)}</Fact>
          <Fact label="CPUs per machine">{count(job.cpus)}</Fact>
          <Fact label="priority">{job.priority}</Fact>
          <Fact label="preemptible">{job.preemptible ? "yes" : "no"}</Fact>
          <Fact label="starts">{count(job.starts)}</Fact>
          <Fact label="submitted">{when(job.submitted)}</Fact>
          <Fact label="started">{when(job.started)}</Fact>
          {job.ended !== null && <Fact label="ended">{when(job.ended)}</Fact>}
          {job.started !== null && <Fact label="took">{duration((job.ended ?? Date.now() / 1000) - job.started)}</Fact>}
          {job.exit_status !== null && <Fact label="exit status">{job.exit_status}</Fact>}
        </dl>
        <p class="commands">
          <Command text={`headway logs ${job.id}${over ? "" : " --follow"}`} />
          {!over && <Command text={`headway cancel ${job.id}`} />}
        </p>
      </header>
      <div class="two">
        {job.state === "waiting" && !job.held && <Card title="Why it waits"><Why job={job.id} /></Card>}
        {job.state !== "waiting" && <Places job={job} />}
        <Card title="History">
          {data.spans.length ? <Lanes now={data.now_s} rows={[{ job: job.id, name: job.name, tenant: job.tenant, gpus: job.gpus, spans: data.spans }]} tenants={[job.tenant]} range={null} alone /> : <p class="muted">The scheduler does not know it yet.</p>}
          <DecisionList events={data.events} plain />
        </Card>
      </div>
    </main>
  );
}

function Places({ job }: { job: ClusterJob }) {
  return (
    <Card title={job.ended === null ? "Runs on" : "Ran on"}>
      {job.placement.length ? (
        <table class="plain">
          <thead><tr><th scope="col">node</th><th scope="col">GPUs</th></tr></thead>
          <tbody>{job.placement.map((place) => <tr key={place.node}><th scope="row">{place.node}</th><td>{place.gpus.join(", ") || "–"}</td></tr>)}</tbody>
        </table>
      ) : (
        <p class="muted">Nowhere: it never started.</p>
      )}
    </Card>
  );
}
