// What each GPU does: nodes by chip and network domain, their GPUs coloured by tenant.
import { Card } from "./parts";
import { count } from "./format";
import { go } from "./router";
import type { Cluster, ClusterJob, ClusterNode } from "./types";

export const jobUrl = (id: string) => `/cluster/job/${encodeURIComponent(id)}`;

/** Nodes above which a GPU is a small square without the number of its job, and above which a node is one cell. */
const LARGE = 48;
const HUGE = 600;
const COLORS = 8;

interface Holder {
  job: ClusterJob;
  tenant: number;
}

export function ClusterMap({ cluster }: { cluster: Cluster }) {
  const order = new Map(cluster.tenants.map((tenant, index) => [tenant.name, index]));
  const holders = new Map<string, Holder>();
  for (const job of cluster.jobs)
    if (job.state !== "waiting")
      for (const place of job.placement)
        for (const gpu of place.gpus) holders.set(`${place.node}\n${gpu}`, { job, tenant: order.get(job.tenant) ?? 0 });
  const size = cluster.nodes.length > HUGE ? "huge" : cluster.nodes.length > LARGE ? "large" : "";
  const away = cluster.nodes.filter((node) => node.state !== "healthy").length;
  return (
    <Card
      title="Map"
      aside={
        <span class="map-legend muted">
          {cluster.tenants.map((tenant, index) => <span key={tenant.name}><span class={`square t${index % COLORS}`} aria-hidden="true" /> {tenant.name}</span>)}
          <span><span class="square free" aria-hidden="true" /> free</span>
          {away > 0 && <span><span class="square away" aria-hidden="true" /> not healthy</span>}
        </span>
      }
    >
      {groups(cluster.nodes).map(([title, nodes]) => (
        <section key={title} class={`pool ${size}`} aria-label={title}>
          <h3>{title} <span class="muted">{count(nodes.length)} {nodes.length === 1 ? "node" : "nodes"}</span></h3>
          <ul>{nodes.map((node) => (size === "huge" ? <Cell key={node.name} node={node} holders={holders} /> : <Node key={node.name} node={node} holders={holders} small={size === "large"} />))}</ul>
        </section>
      ))}
    </Card>
  );
}

/** Nodes by chip, GPUs per node, and network domain where that is known. */
function groups(nodes: ClusterNode[]): [string, ClusterNode[]][] {
  const byTitle = new Map<string, ClusterNode[]>();
  for (const node of nodes) {
    const domain = Object.values(node.domains ?? {}).join(" / ");
    const title = [node.gpus.length ? `${node.chip} × ${node.gpus.length}` : "without GPUs", domain].filter(Boolean).join(", ");
    byTitle.set(title, [...(byTitle.get(title) ?? []), node]);
  }
  return [...byTitle].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
}

function Node({ node, holders, small }: { node: ClusterNode; holders: Map<string, Holder>; small: boolean }) {
  const healthy = node.state === "healthy";
  const side = small ? 10 : 34;
  const across = Math.min(node.gpus.length, small ? 8 : 4) || 1;
  const rows = Math.ceil(node.gpus.length / across);
  const gap = small ? 2 : 4;
  const held = node.gpus.filter((gpu) => holders.has(`${node.name}\n${gpu}`));
  // Whose jobs the caller may not see: how many GPUs they hold is known, not which.
  const others = new Set(node.gpus.filter((gpu) => !held.includes(gpu)).slice(0, Math.max(0, node.gpus.length - node.gpus_free - held.length)));
  const said = `${node.name}, ${node.state}: ${node.gpus.length - node.gpus_free} of ${node.gpus.length} GPUs in use${node.jobs.length ? ` by ${node.jobs.length === 1 ? "job" : "jobs"} ${node.jobs.join(", ")}` : ""}`;
  return (
    <li class={healthy ? "node" : "node away"}>
      {!small && <div class="node-name"><span>{node.name}</span>{!healthy && <span class="wrong">{node.state}</span>}</div>}
      {node.gpus.length > 0 ? (
        <svg width={across * (side + gap) - gap} height={rows * (side + gap) - gap} role="img" aria-label={said}>
          <title>{said}</title>
          {node.gpus.map((gpu, index) => {
            const holder = holders.get(`${node.name}\n${gpu}`);
            const x = (index % across) * (side + gap);
            const y = Math.floor(index / across) * (side + gap);
            return (
              <g key={gpu} class={holder ? `gpu t${holder.tenant % COLORS}` : others.has(gpu) ? "gpu others" : "gpu free"} onClick={holder && (() => go(jobUrl(holder.job.id)))}>
                <title>{holder ? `GPU ${gpu} of ${node.name}: ${holder.job.name} (job ${holder.job.id}) of ${holder.job.tenant}, ${holder.job.state}` : `GPU ${gpu} of ${node.name}: ${others.has(gpu) ? "another tenant's" : healthy ? "free" : node.state}`}</title>
                <rect x={x + 0.5} y={y + 0.5} width={side - 1} height={side - 1} rx={small ? 1 : 4} class={holder?.job.state === "ending" ? "ending" : undefined} />
                {holder && !small && <text x={x + side / 2} y={y + side / 2 + 4} text-anchor="middle">{holder.job.id.length > 4 ? `${holder.job.id.slice(0, 3)}…` : holder.job.id}</text>}
              </g>
            );
          })}
        </svg>
      ) : (
        <span class="muted">{node.cpus - node.cpus_free} of {node.cpus} CPUs</span>
      )}
    </li>
  );
}

/** Of thousands of nodes: one cell each, filled by how much of it is in use. */
function Cell({ node, holders }: { node: ClusterNode; holders: Map<string, Holder> }) {
  const held = node.gpus.map((gpu) => holders.get(`${node.name}\n${gpu}`)).filter((holder) => holder !== undefined);
  const tenant = held.length ? held[0].tenant % COLORS : null;
  return (
    <li class={node.state === "healthy" ? "cell" : "cell away"} title={`${node.name}, ${node.state}: ${held.length} of ${node.gpus.length} GPUs in use`}>
      <svg width="10" height="10" aria-hidden="true">
        {tenant !== null && <rect class={`t${tenant}`} x="0" y={10 - (10 * held.length) / node.gpus.length} width="10" height={(10 * held.length) / node.gpus.length} />}
      </svg>
    </li>
  );
}
