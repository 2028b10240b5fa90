"""What-if: free GPUs and quotas of a snapshot, to try decisions on. The snapshot learns nothing of it."""

import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.placement import ANYWHERE, FreeGpus, Placement
from headway.cluster.scheduler.policy import Policy, Rows
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.starvation_guard import NodeReservation

__all__ = ["WORTH_S", "WhatIf"]

WORTH_S = 1800.0
"""A start, or another size, must be good for so long to be worth a restart."""


class WhatIf:
    """Free GPUs and quotas, as they would be after what was decided so far."""

    def __init__(self, snapshot: ClusterSnapshot, policy: Policy, now: float) -> None:
        self.snapshot, self.now = snapshot, now
        queue, active = snapshot.queue, snapshot.active
        self.broke = self._broke(queue, policy)
        """Jobs that wait whose tenants have spent their budgets, and that nobody could stop again."""
        self._most: NDArray[np.float64] | None = None
        """Of each that waits: GPUs that jobs that cannot be stopped may hold once it has started."""
        self.fixed = 0
        """GPUs of jobs that cannot be stopped, where that is bounded."""
        if policy.bound is not None or len(self.broke):
            self._most = np.full(len(snapshot.jobs.gpus), np.inf)
            fixed = queue[~snapshot.jobs.preemptible[queue]]
            if policy.bound is not None and len(fixed):
                self._most[fixed] = policy.bound(snapshot, fixed, now)
            self._most[self.broke] = -1.0
            self.fixed = int(snapshot.jobs.least[active[~snapshot.jobs.preemptible[active]]].sum())
        self.windows = snapshot.nodes.announced and bool(np.isfinite(self.stays_s).any())
        """Whether nodes will be away."""
        self.kept: NodeReservation | None = None
        """Nodes that are kept for a job that has waited far too long."""
        self.rooms = [snapshot.nodes.room(pool, now) for pool in snapshot.nodes.pools]
        self.largest = [room.largest() for room in self.rooms]
        held = [snapshot.nodes.fixed[pool.first : pool.end].copy() for pool in snapshot.nodes.pools]
        self._beside = held if policy.apart else None
        """Of each pool, GPUs on its nodes that jobs hold that cannot be stopped, where these lie together."""
        self.quotas = policy.quotas
        self.used = snapshot.tenants.used[: len(snapshot.tenants)].copy()
        self.allowed = self._allowed()

    @cached_property
    def stays_s(self) -> NDArray[np.float64]:
        """How long each node will be there."""
        return self.snapshot.nodes.stays_s(self.now)

    def _broke(self, queue: Rows, policy: Policy) -> Rows:
        broke = self.snapshot.tenants.over_budget() if policy.quotas else np.zeros(0, np.bool_)
        if not broke.any():
            return np.empty(0, np.int64)
        jobs = self.snapshot.jobs
        return queue[broke[jobs.tenant[queue]] & (~jobs.preemptible[queue] | (policy.stops is None))]

    def _held(self, row: int, pool: int, place: Placement, sign: int) -> None:
        """A job holds a place, or no longer."""
        if self._beside is not None and not self.snapshot.jobs.preemptible[row]:
            self._beside[pool][place.nodes] += sign * place.gpus

    def room(self, row: int, pool: int) -> FreeGpus:
        """What a pool has for a job, of the nodes that are there for long enough and not kept for another."""
        room, there = self.rooms[pool], self.snapshot.nodes.pools[pool]
        if not self.windows and self.kept is None:
            return room
        open_ = self.stays_s[there.first : there.end] >= self._needs_s(np.array([row]))
        if self.kept is not None and self.kept.pool == pool and self.kept.barred[row]:
            open_ &= ~self.kept.nodes
        return room if open_.all() else room.only(open_)

    def _needs_s(self, rows: Rows) -> NDArray[np.float64]:
        """How long nodes must be there for jobs: until they are done, by their limits. Who can be stopped can be moved,
        and does with half an hour."""
        jobs = self.snapshot.jobs
        left_s = jobs.limit_s[rows] - jobs.ran_s[rows]
        return np.where(jobs.preemptible[rows], np.minimum(left_s, WORTH_S), left_s)

    def bars(self, rows: Rows) -> NDArray[np.int64]:
        """The same number for jobs that the same nodes are open to."""
        if not self.windows and self.kept is None:
            return np.zeros(len(rows), np.int64)
        barred = 0 if self.kept is None else self.kept.barred[rows]
        return 2 * np.searchsorted(np.unique(self.stays_s), self._needs_s(rows)) + barred

    def _allowed(self) -> NDArray[np.int64] | None:
        """GPUs that each tenant may take, where quotas count."""
        if not self.quotas:
            return None
        return self.snapshot.tenants.room(sum(room.total for room in self.rooms), self.used)

    def fitting(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of these jobs could start now."""
        jobs = self.snapshot.jobs
        gpus, within = jobs.gpus[rows], jobs.within[rows]
        fits = np.zeros(len(rows), np.bool_)
        for number, largest in enumerate(self.largest):
            usable = gpus <= largest
            for level in {*within.tolist()} - {ANYWHERE}:
                usable &= (within != level) | (gpus <= self.rooms[number].largest(level))
            if len(self.largest) > 1:
                usable &= (jobs.pools[rows] >> number) & 1 > 0
            fits |= usable
        if self._most is not None:
            fits &= self.bounded(rows)
        return fits if self.allowed is None else fits & (gpus <= self.allowed[jobs.tenant[rows]])

    def bounded(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of these jobs could start without too many GPUs being held by jobs that cannot be stopped."""
        if self._most is None:
            return np.ones(len(rows), np.bool_)
        within: NDArray[np.bool_] = self.fixed + self.snapshot.jobs.gpus[rows] <= self._most[rows]
        return within

    def fits(self, row: int) -> bool:
        """Whether one could."""
        jobs = self.snapshot.jobs
        if self._most is not None and self.fixed + jobs.gpus[row] > self._most[row]:
            return False
        if self.allowed is not None and jobs.gpus[row] > self.allowed[jobs.tenant[row]]:
            return False
        if jobs.within[row] != ANYWHERE or self.windows or self.kept is not None:
            return self.find(row) is not None
        gpus, pools = int(jobs.gpus[row]), int(jobs.pools[row])
        return any(gpus <= largest and pools >> number & 1 for number, largest in enumerate(self.largest))

    def find(self, row: int, size: int | None = None) -> tuple[int, Placement] | None:
        """A pool and a place there, for as many GPUs as a job waits for, or another size of it."""
        jobs = self.snapshot.jobs
        gpus, pools, within = size or int(jobs.gpus[row]), int(jobs.pools[row]), int(jobs.within[row])
        together = None if jobs.preemptible[row] else self._beside
        for number in range(len(self.rooms)):
            if pools >> number & 1 and gpus <= self.largest[number]:
                place = self.room(row, number).find(gpus, within, None if together is None else together[number])
                if place is not None:
                    return number, place
        return None

    def take(self, row: int, pool: int, place: Placement) -> None:
        """Count a place as used."""
        self.rooms[pool].take(place)
        self._held(row, pool, place, 1)
        self.fixed += 0 if self.snapshot.jobs.preemptible[row] else int(self.snapshot.jobs.least[row])
        self._count(row, pool, place.total)

    def swap(self, row: int, old: tuple[int, Placement] | None, new: tuple[int, Placement] | None) -> None:
        """Count a place of a job as free, and another as used."""
        for sign, held in ((-1, old), (1, new)):
            if held is None:
                continue
            pool, place = held
            (self.rooms[pool].take if sign > 0 else self.rooms[pool].give)(place)
            self._held(row, pool, place, sign)
            self._count(row, pool, sign * place.total)

    def most(self, row: int) -> float:
        """GPUs that jobs that cannot be stopped may hold once a job has started."""
        return math.inf if self._most is None else float(self._most[row])

    def allows(self, row: int, more: int) -> bool:
        """Whether a job's tenant may take as many GPUs, of those that are free and `more`, and all bounds hold."""
        if self._most is not None and self.fixed + self.snapshot.jobs.gpus[row] > self._most[row]:
            return False
        if not self.quotas:
            return True
        jobs, free = self.snapshot.jobs, sum(room.total for room in self.rooms)
        return bool(jobs.gpus[row] <= self.snapshot.tenants.room(free + more, self.used)[jobs.tenant[row]])

    def allows_without(self, row: int, stopped: Rows) -> bool:
        """Whether a job's tenant may take its GPUs once some have been stopped: others keep what they do not lend."""
        snapshot, jobs = self.snapshot, self.snapshot.jobs
        if not self.quotas or snapshot.tenants.boundless:
            return True
        used, free = self.used.copy(), sum(room.total for room in self.rooms)
        for one in stopped.tolist():
            pool, place = snapshot.places[one]
            used[snapshot.tenants.path(jobs.tenant[one])] -= place.total
            free += int(place.gpus[self.rooms[pool].usable[place.nodes]].sum())
        return bool(jobs.gpus[row] <= snapshot.tenants.room(free, used)[jobs.tenant[row]])

    def give(self, row: int) -> None:
        """Count the place of a job that runs as free."""
        pool, place = self.snapshot.places[row]
        self.rooms[pool].give(place)
        self._held(row, pool, place, -1)
        self.fixed -= 0 if self.snapshot.jobs.preemptible[row] else int(self.snapshot.jobs.least[row])
        self._count(row, pool, -place.total)

    def _count(self, row: int, pool: int, gpus: int) -> None:
        """A job has so many GPUs of a pool more."""
        self.largest[pool] = self.rooms[pool].largest()
        if self.quotas:
            for one in self.snapshot.tenants.path(self.snapshot.jobs.tenant[row]).tolist():
                self.used[one] += gpus
            self.allowed = self._allowed()
