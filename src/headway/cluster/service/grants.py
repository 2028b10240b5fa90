"""From decisions to placements: which GPU ids of which nodes a job gets, and whose exit its start waits for.

`decide` counts GPUs per node. What is recorded and applied is a Grant: node names with GPU ids, by job. A start takes
free ids first, and then those of jobs that are stopped in the same cycle; it waits until these have exited. What a
stopped job holds and no start will get stays occupied until then.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from headway.cluster.scheduler.decisions import Decision, Reason, ReasonCode
from headway.cluster.scheduler.placement import Kept, Placement
from headway.cluster.scheduler.snapshot import ClusterSnapshot

STOPS = ("stop", "move", "resize")
"""Decisions by which a job saves and stops. One that is resized starts again in its new size, which the next cycles
choose: until it has exited, it is not known which GPUs are free."""
Grant = tuple[tuple[str, tuple[str, ...]], ...]
"""Nodes and the ids of the GPUs used on each, in order of their ranks."""


@dataclass(frozen=True)
class LiveDecision:
    """A decision by names: as it is recorded, applied and shown."""

    kind: str
    """start, stop, move, resize or reserve."""
    job: str
    reason: Reason
    grant: Grant = ()
    """Of a start; of a reservation the nodes without GPU ids."""
    after: tuple[str, ...] = ()
    """Jobs that must have exited before this one starts."""
    at_s: float = 0.0
    """Earliest start of a reservation."""


@dataclass
class Holdings:
    """The GPU ids of each node, and which job holds which."""

    ids: dict[str, tuple[str, ...]] = field(default_factory=dict)
    grants: dict[str, Grant] = field(default_factory=dict)
    """Of each job that starts, runs or ends."""

    def held(self, jobs: Iterable[str], nodes: Container[str]) -> dict[str, set[str]]:
        """Return the GPU ids that jobs hold on some nodes."""
        taken: dict[str, set[str]] = {}
        for job in jobs:
            for node, ids in self.grants.get(job, ()):
                if node in nodes:
                    taken.setdefault(node, set()).update(ids)
        return taken


def placement_of(snapshot: ClusterSnapshot, grant: Grant) -> tuple[int, Placement]:
    """Return the pool of a grant, and how many GPUs it has on each node."""
    rows = [snapshot.nodes.rows[node] for node, _ in grant]
    pool = next(pool for pool in snapshot.nodes.pools if pool.first <= rows[0] < pool.end)
    nodes = np.array(rows, np.int32) - np.int32(pool.first)
    return pool.number, Placement(nodes, np.array([len(ids) for _, ids in grant], np.int32))


def grant_decisions(snapshot: ClusterSnapshot, holdings: Holdings, decisions: Sequence[Decision]) -> list[LiveDecision]:
    """Give each start of a cycle its GPU ids."""
    names = snapshot.jobs.names
    stopped = [names[decision.job] for decision in decisions if decision.kind in STOPS]
    ending = [names[row] for row in snapshot.ending]
    used = _nodes_of_starts(snapshot, decisions)
    taken, leaving = (holdings.held(jobs, used) if used else {} for jobs in (holdings.grants, stopped))
    cpus, memory = _unoccupied(snapshot, ending)
    live, waiting = list[LiveDecision](), [*stopped, *ending]
    for decision in decisions:
        job, first = names[decision.job], snapshot.nodes.pools[decision.pool].first
        counts = zip((decision.placement.nodes + first).tolist(), decision.placement.gpus.tolist(), strict=True)
        if decision.kind != "start":
            nodes = tuple((snapshot.nodes.names[row], ()) for row, _ in counts) if decision.kind == "reserve" else ()
            live.append(LiveDecision(decision.kind, job, decision.reason, nodes, (), decision.at_s))
            continue
        grant, blocked = list[tuple[str, tuple[str, ...]]](), set[str]()
        for row, count in counts:
            node = snapshot.nodes.names[row]
            free = [gpu for gpu in holdings.ids[node] if gpu not in taken.get(node, ())]
            later = [gpu for gpu in holdings.ids[node] if gpu in leaving.get(node, ())]
            able = {*(*free, *later)[:count]}
            chosen = tuple(gpu for gpu in holdings.ids[node] if gpu in able)
            assert len(chosen) == count, "a start gets what decide counted"
            taken.setdefault(node, set()).update(chosen)
            leaving.setdefault(node, set()).difference_update(chosen)
            cpus[row] -= snapshot.jobs.cpus[decision.job]
            memory[row] -= snapshot.jobs.memory_bytes[decision.job]
            if count > len(free) or cpus[row] < 0 or memory[row] < 0:
                blocked.add(node)
            grant.append((node, chosen))
        after = tuple(other for other in waiting if any(node in blocked for node, _ in holdings.grants.get(other, ())))
        live.append(LiveDecision("start", job, decision.reason, tuple(grant), after))
    return live


def _nodes_of_starts(snapshot: ClusterSnapshot, decisions: Sequence[Decision]) -> set[str]:
    """Return the nodes on which something starts."""
    names, pools = snapshot.nodes.names, snapshot.nodes.pools
    return {
        names[row]
        for decision in decisions
        if decision.kind == "start"
        for row in (decision.placement.nodes + pools[decision.pool].first).tolist()
    }


def _unoccupied(snapshot: ClusterSnapshot, ending: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the CPUs and memory per node that no job occupies, stopped ones included."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    cpus, memory = nodes.cpus_free.copy(), nodes.memory_free.copy()
    for name in ending:
        row = jobs.rows[name]
        pool, kept = snapshot.ending[row]
        rows = kept.placement.nodes + nodes.pools[pool].first
        cpus[rows] -= jobs.cpus[row] - kept.cpus
        memory[rows] -= jobs.memory_bytes[row] - kept.memory_bytes
    return cpus, memory


def kept_by_stopped(
    snapshot: ClusterSnapshot, holdings: Holdings, decisions: Sequence[LiveDecision]
) -> dict[str, Kept]:
    """Return what each stopped job of a cycle holds until its exit: all that no start of the cycle will get."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    starts = [decision for decision in decisions if decision.kind == "start"]
    given: dict[str, set[str]] = {}
    cpus_short, memory_short = dict[str, float](), dict[str, float]()
    for start in starts:
        row = jobs.rows[start.job]
        for node, ids in start.grant:
            given.setdefault(node, set()).update(ids)
            for short, free, need in (
                (cpus_short, nodes.cpus_free, jobs.cpus[row]),
                (memory_short, nodes.memory_free, jobs.memory_bytes[row]),
            ):
                short[node] = short.get(node, -float(free[nodes.rows[node]])) + float(need)
    kept = {}
    for decision in decisions:
        if decision.kind in STOPS:
            row, grant = jobs.rows[decision.job], holdings.grants[decision.job]
            counts = [len(set(ids) - given.get(node, set())) for node, ids in grant]
            cpus = [_keep(cpus_short, node, float(jobs.cpus[row])) for node, _ in grant]
            memory = [_keep(memory_short, node, float(jobs.memory_bytes[row])) for node, _ in grant]
            placement = Placement(placement_of(snapshot, grant)[1].nodes, np.array(counts, np.int32))
            kept[decision.job] = Kept(placement, np.array(cpus), np.array(memory))
    return kept


def _keep(short: dict[str, float], node: str, amount: float) -> float:
    """Return what is left of an amount once it has covered what starts on a node are short of."""
    given = min(max(short.get(node, 0.0), 0.0), amount)
    if node in short:
        short[node] -= given
    return amount - given


def encode(decision: LiveDecision) -> dict[str, object]:
    """Return a decision as JSON values."""
    fields: dict[str, object] = {"kind": decision.kind, "job": decision.job, "code": decision.reason.code.value}
    fields["numbers"] = [list(pair) for pair in decision.reason.numbers]
    if decision.grant:
        fields["at"] = [[node, list(ids)] for node, ids in decision.grant]
    if decision.after:
        fields["after"] = list(decision.after)
    if decision.at_s:
        fields["at_s"] = decision.at_s
    return fields


def decode(fields: Mapping[str, object]) -> LiveDecision:
    """Return the decision that `encode` wrote."""
    numbers = tuple((key, value) for key, value in fields["numbers"])  # type: ignore[attr-defined]
    grant = tuple((node, tuple(ids)) for node, ids in fields.get("at", ()))  # type: ignore[attr-defined]
    reason = Reason(ReasonCode(str(fields["code"])), numbers)
    return LiveDecision(
        str(fields["kind"]),
        str(fields["job"]),
        reason,
        grant,
        tuple(fields.get("after", ())),  # type: ignore[arg-type]
        float(fields.get("at_s", 0.0)),  # type: ignore[arg-type]
    )
