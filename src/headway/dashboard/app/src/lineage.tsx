// What something came from and what it became, as two trees.
import { useAsk } from "./api";
import { number } from "./format";
import { Card, Problem } from "./parts";
import { runUrl } from "./router";
import type { LineageBranch, LineageNode } from "./types";

interface Answer extends LineageNode {
  came_from: LineageBranch[];
  became: LineageBranch[];
}

export const lineageUrl = (what: string) => `/models?of=${encodeURIComponent(what)}`;

export function Lineage({ of }: { of: string }) {
  const { data, error } = useAsk<Answer>("/api/lineage", { of });
  return (
    <Card title={`Lineage of ${of}`} id="lineage" aside={<a href="/models">close</a>}>
      {error && <Problem error={error} />}
      {!data && !error && <div class="placeholder" />}
      {data && (
        <div class="two">
          <section aria-label="came from"><h3>Came from</h3><Tree branches={data.came_from} /></section>
          <section aria-label="became"><h3>Became</h3><Tree branches={data.became} /></section>
        </div>
      )}
    </Card>
  );
}

function Tree({ branches }: { branches: LineageBranch[] }) {
  if (!branches.length) return <p class="muted">Nothing is recorded.</p>;
  return (
    <ul class="tree">
      {branches.map((branch, index) => (
        <li key={index}>
          <span class="kind">{branch.kind}</span>
          <Name node={branch} />
          {branch.digest && <span class="mono muted"> {branch.digest.slice(0, 12)}</span>}
          {Object.entries(branch.scores).slice(0, 2).map(([name, value]) => <span key={name}> {name} {number(value)}</span>)}
          {branch.how && <span class="muted"> {branch.how}</span>}
          {branch.gone && <span class="wrong"> gone</span>}
          {branch.repeated && <span class="muted"> (above)</span>}
          {branch.branches.length > 0 && <Tree branches={branch.branches} />}
        </li>
      ))}
    </ul>
  );
}

function Name({ node }: { node: LineageNode }) {
  if (node.kind === "run") return <a href={runUrl(node.name)}>{node.name}</a>;
  if (node.kind === "checkpoint" || node.kind === "name") return <a href={lineageUrl(node.name)}>{node.name}</a>;
  if (node.kind === "dataset" && node.id) return <><a href={lineageUrl(node.id)}>{node.name}</a> <span class="mono muted">{node.id}</span></>;
  return <span>{node.name}</span>;
}
