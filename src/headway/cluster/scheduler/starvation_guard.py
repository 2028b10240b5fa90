"""Starvation guard: reserves nodes for a waiting gang, and for the first job that has waited far too long.

A gang of whole nodes cannot start while non-preemptible jobs enter its nodes one after the other. So the
nodes with the fewest GPUs of such jobs are reserved for it against those of lower priority: only those enter whose
limits end before the nodes are free of such jobs anyway. Preemptible jobs may run there.

A due job goes first and may preempt all preemptible jobs. But small non-preemptible jobs could enter its nodes one
after the other, and a gang of whole nodes would wait forever. So the first overdue job gets as many nodes as it needs
reserved: those with the fewest GPUs of jobs that it may not preempt. No such job starts there any more, and once none
is left, no other job does. The number of such GPUs never grows from cycle to cycle, whichever nodes have the fewest,
and jobs end: so the job starts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.nodes import NodePool
from headway.cluster.scheduler.placement import ANYWHERE, FreeGpus
from headway.cluster.scheduler.policy import Flags, Policy, PreemptionRules, RankedJobs, Rows
from headway.cluster.scheduler.snapshot import ClusterSnapshot


@dataclass(frozen=True)
class NodeReservation:
    """Nodes of a pool, reserved for a job."""

    row: int
    pool: int
    nodes: Flags
    barred: Flags
    """Per row: jobs that must not use the nodes, either those that it could not preempt or all others."""
    held: int = 0
    """GPUs of the nodes that it cannot get by preemption."""


def reserve_for_overdue(snapshot: ClusterSnapshot, rows: Rows, policy: Policy, now: float) -> NodeReservation | None:
    """Reserve nodes for the first waiting job if it is overdue; None otherwise."""
    if policy.overdue is None or policy.preemption is None or not len(rows):
        return None
    if not policy.overdue(snapshot, rows[:1], now)[0]:
        return None
    head, jobs, nodes = int(rows[0]), snapshot.jobs, snapshot.nodes
    lasting = _lasting(snapshot, rows, policy.preemption, now)
    held = np.zeros(len(nodes.gpus), np.int64)
    for row in snapshot.active[lasting[snapshot.active]].tolist():
        number, placement = snapshot.placements[row]
        held[placement.nodes + nodes.pools[number].first] += placement.gpus
    choices = list[tuple[int, int, Flags, bool]]()
    for pool in nodes.pools:
        if jobs.pools[head] >> pool.number & 1:
            free_gpus, held_here = _free_gpus(snapshot, head, pool, now), held[pool.first : pool.end]
            choices += _choices(pool.number, free_gpus, held_here, int(jobs.gpus[head]), int(jobs.within[head]))
    if not choices:
        return None
    _, number, chosen, ready = min(choices, key=itemgetter(0))
    barred = lasting | ready
    barred[head] = False
    return NodeReservation(head, number, chosen, barred)


def reserve_for_gang(snapshot: ClusterSnapshot, rows: Rows, policy: Policy, now: float) -> NodeReservation | None:
    """Reserve nodes for a waiting gang against non-preemptible jobs that would hold them for longer than others do."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    if not policy.reserve_for_gangs or not nodes.pools or not len(rows):
        return None
    fixed = rows[~jobs.preemptible[rows]]
    gangs = rows[jobs.gpus[rows] >= max(min(pool.size for pool in nodes.pools), 1)]
    if not len(fixed) or not len(gangs):
        return None
    drains = np.zeros(len(jobs.gpus), np.bool_)
    if policy.drains is not None:
        drains[gangs] = policy.drains(snapshot, gangs, now)
    gangs = gangs[jobs.priority[gangs] > jobs.priority[fixed].min() - drains[gangs]]
    gangs = gangs[~snapshot.tenants.over_budget()[jobs.tenant[gangs]]]
    if policy.cap is not None and len(gangs):  # one that its cap holds back does not wait for nodes
        caps = policy.cap(snapshot, gangs, now)
        capped = (caps < snapshot.gpus) & (nodes.fixed.sum() + jobs.gpus[gangs] > caps)
        gangs = gangs[jobs.preemptible[gangs] | ~capped]
    if not len(gangs):
        return None
    head = int(gangs[np.lexsort((jobs.waits_s[gangs], -jobs.priority[gangs].astype(np.int64)))[0]])
    ranked_after = np.isin(fixed, rows[int(np.flatnonzero(rows == head)[0]) :])  # a due job ranks before all priorities
    lower = jobs.priority[fixed] < jobs.priority[head] + drains[head]
    kept_out = fixed[(ranked_after | drains[head]) & lower & (fixed != head)]
    choices = list[tuple[int, int, Flags, bool]]()
    for pool in nodes.pools if len(kept_out) else ():
        if jobs.pools[head] >> pool.number & 1:
            held = nodes.fixed[pool.first : pool.end].astype(np.int64)
            free_gpus = _free_gpus(snapshot, head, pool, now)
            choices += _choices(pool.number, free_gpus, held, int(jobs.gpus[head]), int(jobs.within[head]))
    if not choices:
        return None
    held_gpus, number, chosen, _ = min(choices, key=itemgetter(0))
    drained_s = _drained_s(snapshot, number, chosen)
    left_s = jobs.limit_s[kept_out] - jobs.ran_s[kept_out]
    barred = np.zeros(len(jobs.gpus), np.bool_)
    barred[kept_out] = ~(np.isfinite(left_s) & (now + left_s <= drained_s))
    return NodeReservation(head, number, chosen, barred, held_gpus) if barred.any() else None


def _free_gpus(snapshot: ClusterSnapshot, head: int, pool: NodePool, now: float) -> FreeGpus:
    """Return the free GPUs of a pool on nodes that a job may have."""
    free_gpus = snapshot.nodes.free_gpus(pool, now)
    return free_gpus.only(snapshot.usable_by(head, pool.number)) if head in snapshot.avoided else free_gpus


def _drained_s(snapshot: ClusterSnapshot, pool: int, nodes: Flags) -> float:
    """Return when the last non-preemptible job on some nodes of a pool ends by its limit."""
    jobs, fixed = snapshot.jobs, snapshot.active[~snapshot.jobs.preemptible[snapshot.active]].tolist()
    here = [(row, snapshot.placements[row][1].nodes) for row in fixed if snapshot.placements[row][0] == pool]
    if not here:
        return -math.inf
    rows = np.repeat([row for row, _ in here], [len(held) for _, held in here])  # one per job and node
    rows = rows[nodes[np.concatenate([held for _, held in here])]]
    return float((jobs.since_s[rows] + jobs.limit_s[rows] - jobs.ran_s[rows]).max(initial=-math.inf))


def _lasting(snapshot: ClusterSnapshot, rows: Rows, rules: PreemptionRules, now: float) -> Flags:
    """Return, per row, which jobs the first waiting job could not preempt once they run."""
    jobs, others = snapshot.jobs, np.concatenate((rows, snapshot.active))
    head, running = (RankedJobs(some, rules.levels(snapshot, some, now)) for some in (rows[:1], others))
    used = snapshot.tenants.used[: len(snapshot.tenants)]
    lasting = np.zeros(len(jobs.gpus), np.bool_)
    lasting[others] = ~(jobs.preemptible[others] & rules.may_preempt(snapshot, used, head, running, now))
    return lasting


def _choices(
    pool: int, free_gpus: FreeGpus, held: NDArray[np.int64], gpus: int, within: int
) -> Iterator[tuple[int, int, Flags, bool]]:
    """Yield, per domain, the nodes with the fewest `held` GPUs: their sum, the pool, the nodes, and whether a gang
    could get them by preemption alone."""
    usable, size = free_gpus.usable, free_gpus.size
    domains = np.zeros(len(usable), np.int32) if within == ANYWHERE else free_gpus.domains[within]
    if not size or not gpus:
        return
    whole, rest = divmod(gpus, size)
    count = whole + (rest > 0)
    for domain in np.unique(domains[usable]):
        here = np.flatnonzero(usable & (domains == domain))
        chosen = here[np.argsort(held[here], kind="stable")][:count]
        if len(chosen) == count:
            nodes = np.zeros(len(held), np.bool_)
            nodes[chosen] = True
            ready = not held[chosen[:whole]].any() and (not rest or int(held[chosen[-1]]) <= size - rest)
            yield int(held[chosen].sum()), pool, nodes, ready
