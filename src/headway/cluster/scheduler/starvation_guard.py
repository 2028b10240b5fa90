"""Nodes that are kept for a job that has waited far too long.

Whoever is due goes first, and may stop all who can be stopped. But small jobs that cannot be could enter its nodes one
after the other, and a gang of whole nodes would wait for ever. So the first job that is overdue has as many nodes as
it needs kept for it: those on which fewest GPUs are held by jobs that it may not stop. No such job starts there any
more, and once none is left, nobody does. Those GPUs never become more from cycle to cycle, on whichever nodes they are
fewest, and jobs end: so it starts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.placement import ANYWHERE
from headway.cluster.scheduler.policy import Flags, Policy, PreemptionRules, RankedJobs, Rows
from headway.cluster.scheduler.snapshot import ClusterSnapshot

__all__ = ["NodeReservation", "reserve_for_overdue"]


@dataclass(frozen=True)
class NodeReservation:
    """Nodes of a pool, kept for a job."""

    row: int
    pool: int
    nodes: Flags
    barred: Flags
    """Of all rows, those of jobs that must not use them: such as it could not stop again, or all others."""


def reserve_for_overdue(snapshot: ClusterSnapshot, rows: Rows, policy: Policy, now: float) -> NodeReservation | None:
    """For the first of those that wait, if it is overdue; None if nobody is."""
    if (
        policy.overdue is None
        or policy.stops is None
        or not len(rows)
        or not policy.overdue(snapshot, rows[:1], now)[0]
    ):
        return None
    head, jobs, nodes = int(rows[0]), snapshot.jobs, snapshot.nodes
    lasting = _lasting(snapshot, rows, policy.stops, now)
    stays = np.zeros(len(nodes.gpus), np.int64)
    for row in snapshot.active[lasting[snapshot.active]].tolist():
        number, place = snapshot.places[row]
        stays[place.nodes + nodes.pools[number].first] += place.gpus
    found = list[tuple[int, int, Flags, bool]]()
    for pool in nodes.pools:
        if jobs.pools[head] >> pool.number & 1:
            room, within = nodes.room(pool, now), int(jobs.within[head])
            domains = np.zeros(len(room.usable), np.int32) if within == ANYWHERE else room.domains[within]
            here = stays[pool.first : pool.end]
            found += [
                (count, pool.number, some, ready)
                for count, some, ready in _choices(here, room.usable, domains, int(jobs.gpus[head]), pool.size)
            ]
    if not found:
        return None
    _, number, some, ready = min(found, key=lambda one: one[0])
    barred = lasting | ready
    barred[head] = False
    return NodeReservation(head, number, some, barred)


def _lasting(snapshot: ClusterSnapshot, rows: Rows, stops: PreemptionRules, now: float) -> Flags:
    """Of all rows, those of jobs that the first of those that wait may not stop, once they run."""
    jobs, others = snapshot.jobs, np.concatenate((rows, snapshot.active))
    waits, runs = (RankedJobs(some, stops.levels(snapshot, some, now)) for some in (rows[:1], others))
    used = snapshot.tenants.used[: len(snapshot.tenants)]
    found = np.zeros(len(jobs.gpus), np.bool_)
    found[others] = ~(jobs.preemptible[others] & stops.may(snapshot, used, waits, runs, now))
    return found


def _choices(
    stays: NDArray[np.int64], usable: Flags, domains: NDArray[np.int32], gpus: int, size: int
) -> Iterator[tuple[int, Flags, bool]]:
    """Of each domain the nodes where fewest GPUs stay held: how many, which nodes, and whether a gang could have them
    by stopping others."""
    whole, rest = divmod(gpus, size)
    count = whole + (rest > 0)
    for domain in np.unique(domains[usable]):
        here = np.flatnonzero(usable & (domains == domain))
        chosen = here[np.argsort(stays[here], kind="stable")][:count]
        if len(chosen) == count:
            nodes = np.zeros(len(stays), np.bool_)
            nodes[chosen] = True
            ready = not stays[chosen[:whole]].any() and (not rest or int(stays[chosen[-1]]) <= size - rest)
            yield int(stays[chosen].sum()), nodes, ready
