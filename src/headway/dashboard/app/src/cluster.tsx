// The cluster: what each GPU does, who waits for which reason, what tenants use, and what was decided when.
import { useEffect } from "preact/hooks";
import { usePoll } from "./api";
import { ClusterMap, jobUrl } from "./cluster_map";
import { JobPage } from "./cluster_job";
import { count, duration, number, percent } from "./format";
import { Card, Command, Empty, Fact, Problem, State } from "./parts";
import { setQuery, usePlace } from "./router";
import { DecisionList, TimelinePage } from "./timeline";
import type { Cluster, ClusterJob, Tenant } from "./types";
import { Why } from "./why";

const EVERY_MS = 2000;

export function ClusterPage({ part, job }: { part: string | null; job: string | null }) {
  useEffect(() => {
    document.title = `${job ?? (part === "timeline" ? "Timeline" : "Cluster")} – Headway`;
  }, [part, job]);
  if (part === "job" && job) return <JobPage key={job} name={job} />;
  return (
    <main class="cluster">
      <nav class="subnav" aria-label="cluster">
        <a href="/cluster" aria-current={part ? undefined : "page"}>Now</a>
        <a href="/cluster/timeline" aria-current={part === "timeline" ? "page" : undefined}>Timeline</a>
      </nav>
      {part === "timeline" ? <TimelinePage /> : <Now />}
    </main>
  );
}

/** Why there is nothing to show: mostly that no service runs. */
export function NoService({ problem, hint }: { problem: string; hint?: string | null }) {
  return (
    <Empty title={problem} command="headway up --demo">
      {hint && <p>{hint}</p>}
    </Empty>
  );
}

function Now() {
  const { data, error } = usePoll<Cluster>("/api/cluster", {}, EVERY_MS);
  if (error && !data) return <Problem error={error} />;
  if (!data) return <div class="placeholder tall" />;
  if (data.problem) return <NoService problem={data.problem} hint={data.hint} />;
  const gpus = data.nodes.reduce((sum, node) => sum + node.gpus.length, 0);
  const free = data.nodes.filter((node) => node.state === "healthy").reduce((sum, node) => sum + node.gpus_free, 0);
  const held = data.nodes.reduce((sum, node) => sum + node.gpus.length - node.gpus_free, 0);
  const healthy = data.nodes.filter((node) => node.state === "healthy").length;
  const by = (state: string) => data.jobs.filter((job) => job.state === state).length;
  return (
    <>
      {error && <Problem error={error} />}
      <header class="title">
        <h1>Cluster</h1>
        <dl class="facts">
          <Fact label="nodes">{count(healthy)}<span class="muted"> of {count(data.nodes.length)} healthy</span></Fact>
          <Fact label="GPUs in use">{count(held)}<span class="muted"> of {count(gpus)}, {percent(gpus ? held / gpus : null, 0)}</span></Fact>
          <Fact label="free">{count(free)}</Fact>
          <Fact label="running">{count(by("running"))}</Fact>
          <Fact label="waiting">{count(by("waiting"))}</Fact>
        </dl>
      </header>
      <ClusterMap cluster={data} />
      <div class="columns">
        <Queue jobs={data.jobs} over={data.over} />
        <div class="side">
          <Tenants tenants={data.tenants} gpus={gpus} />
          <Card title="Newest decisions" aside={<a href="/cluster/timeline">timeline</a>}>
            <DecisionList events={data.newest} />
          </Card>
        </div>
      </div>
    </>
  );
}

function Queue({ jobs, over }: { jobs: ClusterJob[]; over: ClusterJob[] }) {
  const { query } = usePlace();
  const showOver = query.get("over") === "true";
  const open = query.get("why");
  const rows = showOver ? over : jobs;
  return (
    <Card
      title={showOver ? "Jobs that are over" : "Queue"}
      aside={<button class="ghost small" onClick={() => setQuery({ over: showOver ? null : "true", why: null })}>{showOver ? "queue" : `${count(over.length)} that are over`}</button>}
    >
      {!rows.length && <p class="calm muted">{showOver ? "No job is over yet." : <>No job waits or runs. <Command text="headway submit --gpus 1 -- python train.py" /></>}</p>}
      {rows.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="jobs">
          <table class="plain queue">
            <thead>
              <tr>
                <th scope="col">job</th><th scope="col">state</th><th scope="col" class="narrow">tenant</th><th scope="col" class="num">GPUs</th>
                <th scope="col" class="num narrow">priority</th><th scope="col" class="num">{showOver ? "took" : "for"}</th><th scope="col">reason</th>
              </tr>
            </thead>
            <tbody>
              {rows.map((job) => <JobRow key={job.id} job={job} open={open === job.id} toggle={() => setQuery({ why: open === job.id ? null : job.id })} />)}
            </tbody>
          </table>
        </div>
      )}
      {jobs.length >= 1000 && !showOver && <p class="muted">The first 1,000 jobs are shown.</p>}
    </Card>
  );
}

function JobRow({ job, open, toggle }: { job: ClusterJob; open: boolean; toggle: () => void }) {
  const waits = job.state === "waiting" && !job.held;
  return (
    <>
      <tr>
        <th scope="row"><a href={jobUrl(job.id)}>{job.name}</a> <span class="muted num">{job.id}</span></th>
        <td><JobState job={job} /></td>
        <td class="narrow">{job.tenant}</td>
        <td class="num">{gpusOf(job)}</td>
        <td class="num narrow">{job.priority}</td>
        <td class="num">{since(job)}</td>
        <td class="wrap">
          {job.reason || (job.held ? "held by a user" : "")}{" "}
          {waits && <button class="ghost small" aria-expanded={open} onClick={toggle}>why</button>}
        </td>
      </tr>
      {open && waits && <tr class="detail"><td colSpan={7}><Why job={job.id} /></td></tr>}
    </>
  );
}

export function JobState({ job }: { job: ClusterJob }) {
  return <State state={job.held && job.state === "waiting" ? "held" : job.state} />;
}

export function gpusOf(job: ClusterJob): string {
  if (job.sizes?.length) {
    const sizes = job.sizes.join(", ");
    const has = job.placement.reduce((sum, place) => sum + place.gpus.length, 0);
    return ["starting", "running", "ending"].includes(job.state) ? `${has} of ${sizes}` : sizes;
  }
  return job.machines > 1 && job.gpus ? `${job.machines}×${job.gpus / job.machines}` : String(job.gpus);
}

/** How long a job has been in its state, by this machine's clock. */
function since(job: ClusterJob): string {
  const from = job.ended ?? job.started ?? job.submitted;
  return job.ended === null ? duration(Date.now() / 1000 - from) : duration(job.ended - (job.started ?? job.submitted));
}

function Tenants({ tenants, gpus }: { tenants: Tenant[]; gpus: number }) {
  const most = Math.max(gpus, 1);
  return (
    <Card title="Tenants">
      <div class="scroll" tabIndex={0} role="region" aria-label="tenants">
        <table class="plain tenants">
          <thead>
            <tr><th scope="col">tenant</th><th scope="col"><span class="hidden">GPUs held, and the guarantee</span></th><th scope="col" class="num">held</th><th scope="col" class="num">guaranteed</th><th scope="col" class="num">wanted</th><th scope="col" class="num">GPU-hours</th></tr>
          </thead>
          <tbody>
            {tenants.map((tenant, index) => (
              <tr key={tenant.name}>
                <th scope="row"><span class={`square t${index % 8}`} aria-hidden="true" /> {tenant.parent ? `${tenant.parent} / ` : ""}{tenant.name}</th>
                <td class="bar" aria-hidden="true">
                  <svg width="100%" height="12">
                    <rect class="track" x="0" y="5.5" width="100%" height="1" />
                    <rect class={`t${index % 8}`} x="0" y="1" width={`${(100 * tenant.gpus) / most}%`} height="10" />
                    {tenant.guarantee > 0 && <rect class="guarantee" x={`${Math.min(99, (100 * tenant.guarantee) / most)}%`} y="0" width="2" height="12" />}
                  </svg>
                </td>
                <td class="num">{count(tenant.gpus)}</td>
                <td class="num muted">{count(tenant.guarantee)}</td>
                <td class="num">{tenant.wanted_gpus ? count(tenant.wanted_gpus) : "–"}</td>
                <td class="num">{number(tenant.spent_gpu_h)}{tenant.budget_gpu_h != null && <span class="muted"> of {number(tenant.budget_gpu_h)}</span>}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p class="muted">The mark is the guarantee. GPU-hours{tenants.length > 0 && ` of ${tenants[0].month}`}, and the month's budget where there is one.</p>
    </Card>
  );
}
