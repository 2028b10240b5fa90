"""Compaction: preemptible jobs move to other free GPUs, so that a large gang fits for which enough are free, but
scattered.

A job that moves saves first: it loses a restart and no work. It moves only if its new place is free now, so that it
waits for no other job, and only after half an hour, so that restarts take little of its time. If a gang preempts jobs,
those that fit elsewhere move as well, and only the others stop.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.decisions import Decision, Reason, ReasonCode
from headway.cluster.scheduler.jobs import BATCH
from headway.cluster.scheduler.packing import large_gangs
from headway.cluster.scheduler.placement import ANYWHERE, FreeGpus, Placement
from headway.cluster.scheduler.policy import Rows
from headway.cluster.scheduler.what_if import PAYBACK_S, WhatIf

MAX_TRIES = 8
"""Gangs that one cycle tries to place."""
MAX_MOVES = 16
"""Jobs that move for one gang, at most."""


def compact_for_gangs(trial: WhatIf, rows: Rows, able: Rows, now: float) -> list[Decision]:
    """Move some of the `able` running jobs so that waiting gangs start, the highest-ranked first."""
    snapshot, jobs = trial.snapshot, trial.snapshot.jobs
    able = able[
        (jobs.gpus[able] > 0)
        & jobs.preemptible[able]
        & (now - jobs.since_s[able] >= PAYBACK_S)
        & (jobs.kind[able] == BATCH)
    ]
    waiting = rows[large_gangs(snapshot, rows) & (jobs.gpus[rows] <= max(free_gpus.total for free_gpus in trial.pools))]
    if not len(able) or not len(waiting) or trial.maintenance_ahead:
        return []
    movable = _Movable(trial, able)
    decisions = list[Decision]()
    for row in waiting[:MAX_TRIES].tolist():
        if not trial.admits(row, 0) or trial.find(row) is not None:
            continue
        for pool in range(len(trial.pools)):
            usable = jobs.pools[row] >> pool & 1 and trial.pools[pool].size
            if usable and (moves := movable.make_room(row, pool)) is not None:
                placement, targets = moves
                if not trial.has_room_without(row, pool, placement, [mover for mover, _ in targets]):
                    continue
                head = ("head", jobs.names[row])
                for mover, target in targets:
                    decisions.append(
                        Decision("move", mover, *snapshot.placements[mover], Reason(ReasonCode.COMPACTS, (head,)))
                    )
                    trial.release(mover)
                    trial.take(mover, pool, target)  # it starts there in the next cycle
                    movable.moved(mover)
                trial.take(row, pool, placement)
                reason = Reason(ReasonCode.COMPACTED, (("count", len(targets)),))
                decisions.append(Decision("start", row, pool, placement, reason))
                break
    return decisions


def move_or_stop(trial: WhatIf, stop: Decision, row: int) -> Decision:
    """Return the move of a job that is preempted for a large gang, if it fits elsewhere, or else its stop."""
    jobs = trial.snapshot.jobs
    if jobs.kind[stop.job] != BATCH or (target := trial.find(stop.job)) is None:
        return stop
    trial.take(stop.job, *target)  # it starts there in the next cycle
    reason = Reason(ReasonCode.COMPACTS, (("head", jobs.names[row]),))
    return Decision("move", stop.job, stop.pool, stop.placement, reason)


class _Movable:
    """Running jobs of one node each that may move."""

    def __init__(self, trial: WhatIf, able: Rows) -> None:
        self._trial = trial
        self._on: dict[tuple[int, int], list[int]] = {}
        for row in able.tolist():
            pool, placement = trial.snapshot.placements[row]
            if len(placement.nodes) == 1 and row not in trial.snapshot.avoided:
                self._on.setdefault((pool, int(placement.nodes[0])), []).append(row)

    def moved(self, row: int) -> None:
        """Forget a job that moves."""
        pool, placement = self._trial.snapshot.placements[row]
        self._on[pool, int(placement.nodes[0])].remove(row)

    def make_room(self, row: int, pool: int) -> tuple[Placement, list[tuple[int, Placement]]] | None:
        """Return a placement for a gang, and new ones for the jobs in its way; None if these do not fit elsewhere."""
        jobs, free_gpus = self._trial.snapshot.jobs, self._trial.free_gpus(row, pool)
        movable = np.zeros(len(free_gpus.free), np.int64)
        for (number, node), movers in self._on.items():
            if number == pool and free_gpus.usable[node]:
                movable[node] = int(jobs.gpus[movers].sum())
        for nodes in _domains(free_gpus, int(jobs.within[row])):
            placement = _cheapest_nodes(free_gpus, movable, nodes, int(jobs.gpus[row]))
            if placement is None:
                continue
            movers = self._in_the_way(pool, placement, free_gpus)
            targets = None if len(movers) > MAX_MOVES else self._targets(pool, placement, movers)
            if targets is not None:
                return placement, targets
        return None

    def _in_the_way(self, pool: int, placement: Placement, free_gpus: FreeGpus) -> list[int]:
        """Return the jobs that must leave the nodes of a placement, of several the smallest."""
        gpus, movers = self._trial.snapshot.jobs.gpus, list[int]()
        for node, needed in zip(placement.nodes.tolist(), placement.gpus.tolist(), strict=True):
            missing = needed - int(free_gpus.free[node])
            for mover in sorted(self._on.get((pool, node), ()), key=lambda job: (int(gpus[job]), job)):
                if missing <= 0:
                    break
                movers.append(mover)
                missing -= int(gpus[mover])
        return movers

    def _targets(self, pool: int, placement: Placement, movers: Sequence[int]) -> list[tuple[int, Placement]] | None:
        """Return new placements of jobs beside a gang, the largest first."""
        snapshot, targets = self._trial.snapshot, list[tuple[int, Placement]]()
        beside = self._trial.pools[pool].copy()
        for mover in movers:
            beside.release(snapshot.placements[mover][1])
        beside.take(placement)
        for mover in sorted(movers, key=lambda job: (-int(snapshot.jobs.gpus[job]), job)):
            target = beside.find(int(snapshot.jobs.gpus[mover]))
            if target is None:
                return None
            beside.take(target)
            targets.append((mover, target))
        return targets


def _domains(free_gpus: FreeGpus, within: int) -> Iterator[NDArray[np.int64]]:
    """Yield the usable nodes of each domain that may hold a gang."""
    if within == ANYWHERE:
        yield np.flatnonzero(free_gpus.usable)
        return
    level = free_gpus.domains[within]
    for domain in np.unique(level[free_gpus.usable]).tolist():
        yield np.flatnonzero(free_gpus.usable & (level == domain))


def _cheapest_nodes(
    free_gpus: FreeGpus, movable: NDArray[np.int64], nodes: NDArray[np.int64], gpus: int
) -> Placement | None:
    """Return the nodes from which the fewest GPUs have to move for a gang."""
    whole, rest = divmod(gpus, free_gpus.size)
    emptied = nodes[free_gpus.free[nodes] + movable[nodes] >= free_gpus.size]
    chosen = emptied[np.argsort(movable[emptied], kind="stable")][:whole]
    if len(chosen) < whole:
        return None
    counts = np.full(whole, free_gpus.size, np.int32)
    if rest:
        others = nodes[(free_gpus.free[nodes] + movable[nodes] >= rest) & ~np.isin(nodes, chosen)]
        if not len(others):
            return None
        last = others[np.argmin(np.maximum(rest - free_gpus.free[others], 0))]
        chosen, counts = np.append(chosen, last), np.append(counts, np.int32(rest))
    return Placement(chosen.astype(np.int32), counts)
