"""What-if: free GPUs and quotas of a snapshot, to try decisions on without changing it."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.decisions import Decision, Reason, ReasonCode
from headway.cluster.scheduler.months import month_bounds
from headway.cluster.scheduler.packing import busy_until_s, is_small, packing_scores
from headway.cluster.scheduler.placement import ANYWHERE, FreeGpus, PackWith, Placement
from headway.cluster.scheduler.policy import Flags, Policy, Rows
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.starvation_guard import NodeReservation

PAYBACK_S = 1800.0
"""A start or resize must last this long to be worth a restart."""


class WhatIf:
    """Free GPUs and quotas as they would be after the decisions so far."""

    def __init__(self, snapshot: ClusterSnapshot, policy: Policy, now: float) -> None:
        self.snapshot, self.now, self.quotas = snapshot, now, policy.quotas
        nodes, jobs, queue, active = snapshot.nodes, snapshot.jobs, snapshot.queue, snapshot.active
        self.over_budget = self._over_budget(queue, policy)
        """Waiting jobs of tenants over budget that could not be preempted again."""
        self._caps: NDArray[np.float64] | None = None
        """Per waiting job: GPUs that non-preemptible jobs may hold once it has started."""
        self.fixed = 0
        """GPUs of non-preemptible jobs, if they are capped."""
        if policy.cap is not None or len(self.over_budget):
            self._caps = np.full(len(jobs.gpus), np.inf)
            fixed = queue[~jobs.preemptible[queue]]
            if policy.cap is not None and len(fixed):
                self._caps[fixed] = policy.cap(snapshot, fixed, now)
            self._caps[self.over_budget] = -1.0
            self.fixed = int(jobs.least[active[~jobs.preemptible[active]]].sum())
        self._owed = set[int]()
        """Waiting jobs of tenants below their guarantees, if priorities differ."""
        self._owed_counts = Counter[tuple[int, int]]()
        """How many of them each tenant has of each priority."""
        self._yielding = self._yielding_borrowers(queue, policy)
        """Per row: non-preemptible jobs that must not borrow while such a job of higher priority waits."""
        self._needs_gpu_s, self._budget_left = self._budgets(queue, policy)
        self.maintenance_ahead = nodes.has_maintenance and bool(np.isfinite(self.available_s).any())
        self.reservation: NodeReservation | None = None
        """Nodes reserved for an overdue job."""
        self.pools = [nodes.free_gpus(pool, now) for pool in nodes.pools]
        """Free GPUs of each pool."""
        self.largest = [free_gpus.largest_gang() for free_gpus in self.pools]
        self._counted = nodes.counted
        self._cpus_free, self._memory_free = nodes.cpus_free.copy(), nodes.memory_free.copy()
        """Per node, if CPUs and memory are limited."""
        self._pack_with: list[NDArray[np.int32]] | None = None
        """Per pool and node, GPUs of non-preemptible jobs, if these are packed together."""
        if policy.pack_non_preemptible:
            self._pack_with = [nodes.fixed[pool.first : pool.end].copy() for pool in nodes.pools]
        self._by_end = policy.pack_non_preemptible and is_small(snapshot)
        """Whether they are packed by when they end."""
        self.used = snapshot.tenants.used[: len(snapshot.tenants)].copy()
        self.headroom = self._headroom()
        """GPUs that each tenant may take, if quotas apply."""

    @property
    def free(self) -> int:
        """Free GPUs of all pools."""
        return sum(free_gpus.total for free_gpus in self.pools)

    @cached_property
    def available_s(self) -> NDArray[np.float64]:
        """How long each node stays available."""
        return self.snapshot.nodes.available_s(self.now)

    def _over_budget(self, queue: Rows, policy: Policy) -> Rows:
        over = self.snapshot.tenants.over_budget() if policy.quotas else np.zeros(0, np.bool_)
        if not over.any():
            return np.empty(0, np.int64)
        jobs = self.snapshot.jobs
        return queue[over[jobs.tenant[queue]] & (~jobs.preemptible[queue] | (policy.preemption is None))]

    def _yielding_borrowers(self, queue: Rows, policy: Policy) -> Flags | None:
        jobs, tenants = self.snapshot.jobs, self.snapshot.tenants
        if not policy.quotas or policy.preemption is None or not len(queue):
            return None
        priorities = jobs.priority[queue]
        if priorities.min() == priorities.max():
            return None
        owed = queue[tenants.unmet_gpus()[jobs.tenant[queue]] > 0]
        self._owed = set(owed.tolist())
        self._owed_counts = Counter(zip(jobs.tenant[owed].tolist(), jobs.priority[owed].tolist(), strict=True))
        yielding = np.zeros(len(jobs.gpus), np.bool_)
        due = policy.preemption.levels(self.snapshot, queue, self.now) < 0  # these go first
        yielding[queue] = ~jobs.preemptible[queue] & ~due
        return yielding

    def _budgets(self, queue: Rows, policy: Policy) -> tuple[NDArray[np.float64] | None, NDArray[np.float64]]:
        """Return what waiting non-preemptible jobs may use by their limits this month, and what budgets have left.

        What running ones may still use is taken. A job without a limit counts as nothing: it starts on any rest."""
        jobs, tenants = self.snapshot.jobs, self.snapshot.tenants
        count = len(tenants)
        if not policy.quotas or not tenants.has_budgets:
            return None, np.empty(0)
        left = tenants.budget_gpu_s[:count] - tenants.spent_gpu_s[:count]
        active = self.snapshot.active[~jobs.preemptible[self.snapshot.active]]
        needs = np.zeros(len(jobs.gpus))
        unix_s = self.snapshot.unix_zero_s + self.now
        month_s = month_bounds(unix_s)[1] - unix_s
        for rows, ran_s in ((active, self.snapshot.held_s(active, self.now)), (queue, jobs.ran_s[queue])):
            left_s = np.maximum(jobs.limit_s[rows] - ran_s, 0.0)
            needs[rows] = np.where(np.isfinite(left_s), np.minimum(left_s, month_s), 0.0) * jobs.gpus[rows]
        needs[queue[jobs.preemptible[queue]]] = 0.0
        for row in active.tolist():
            left[tenants.path(jobs.tenant[row])] -= needs[row]
        return needs, left

    def refused_by_budget(self, row: int) -> tuple[float, float] | None:
        """Return the GPU-seconds that a job may use by its limit and those left to its tenant, if these are fewer."""
        if self._needs_gpu_s is None or not self._needs_gpu_s[row]:
            return None
        left = float(self._budget_left[self.snapshot.tenants.path(self.snapshot.jobs.tenant[row])].min())
        return (float(self._needs_gpu_s[row]), max(left, 0.0)) if self._needs_gpu_s[row] > left else None

    def must_not_borrow(self, row: int) -> bool:
        """Return whether a job would borrow what a job of higher priority waits for."""
        if self._yielding is None or not self._yielding[row]:
            return False
        jobs, tenant = self.snapshot.jobs, int(self.snapshot.jobs.tenant[row])
        if self.used[tenant] + jobs.gpus[row] <= self.snapshot.tenants.guarantee[tenant]:
            return False
        priority = int(jobs.priority[row])
        return any(owed != tenant and higher > priority for (owed, higher), count in self._owed_counts.items() if count)

    def free_gpus(self, row: int, pool: int) -> FreeGpus:
        """Return the free GPUs of a pool on nodes that stay long enough for a job and are not reserved for another."""
        free_gpus, nodes = self.pools[pool], self.snapshot.nodes.pools[pool]
        if not self._needs_search:
            return free_gpus
        usable = self.available_s[nodes.first : nodes.end] >= self._needed_s(np.array([row]))
        if self._counted:
            usable &= self._cpus_free[nodes.first : nodes.end] >= self.snapshot.jobs.cpus[row]
            usable &= self._memory_free[nodes.first : nodes.end] >= self.snapshot.jobs.memory_bytes[row]
        if self.reservation is not None and self.reservation.pool == pool and self.reservation.barred[row]:
            usable &= ~self.reservation.nodes
        if row in self.snapshot.avoided:
            usable &= self.snapshot.usable_by(row, pool)
        return free_gpus if usable.all() else free_gpus.only(usable)

    @property
    def _needs_search(self) -> bool:
        """Whether jobs of equal size may find different nodes free."""
        others = self.maintenance_ahead or self.reservation is not None
        return self._counted or others or bool(self.snapshot.avoided)

    def _needed_s(self, rows: Rows) -> NDArray[np.float64]:
        """Return how long jobs need their nodes: until their time limit. A preemptible job can be moved, and needs half
        an hour at most."""
        jobs = self.snapshot.jobs
        left_s = jobs.limit_s[rows] - jobs.ran_s[rows]
        return np.where(jobs.preemptible[rows], np.minimum(left_s, PAYBACK_S), left_s)

    def node_access(self, rows: Rows) -> NDArray[np.int64]:
        """Return equal numbers for jobs that can use the same nodes."""
        if not self._needs_search:
            return np.zeros(len(rows), np.int64)
        access = 2 * np.searchsorted(np.unique(self.available_s), self._needed_s(rows))
        if self.reservation is not None:
            access = access + self.reservation.barred[rows]
        if self._counted:
            jobs = self.snapshot.jobs
            shapes = np.stack((jobs.machines[rows], jobs.cpus[rows], jobs.memory_bytes[rows]))
            access = access + 2 * len(self.available_s) * np.unique(shapes, axis=1, return_inverse=True)[1]
        if self.snapshot.avoided:
            avoided = [" ".join(sorted(self.snapshot.avoided.get(row, ()))) for row in rows.tolist()]
            access = access + (1 + int(access.max(initial=0))) * np.unique(avoided, return_inverse=True)[1]
        return access

    def _headroom(self) -> NDArray[np.int64] | None:
        return self.snapshot.tenants.headroom(self.free, self.used) if self.quotas else None

    def fitting(self, rows: Rows) -> Flags:
        """Return which of these jobs could start now."""
        jobs = self.snapshot.jobs
        gpus, within = jobs.gpus[rows], jobs.within[rows]
        fits = np.zeros(len(rows), np.bool_)
        for number, largest in enumerate(self.largest):
            usable = gpus <= np.where(jobs.machines[rows] > 1, self.pools[number].total, largest)
            for level in {*within.tolist()} - {ANYWHERE}:
                most = self.pools[number].largest_gang(level)
                usable &= (within != level) | (gpus <= most) | (jobs.machines[rows] > 1)
            if len(self.largest) > 1:
                usable &= (jobs.pools[rows] >> number) & 1 > 0
            fits |= usable
        if self._caps is not None:
            fits &= self.under_cap(rows)
        return fits if self.headroom is None else fits & (gpus <= self.headroom[jobs.tenant[rows]])

    def under_cap(self, rows: Rows) -> Flags:
        """Return which of these jobs could start without exceeding the cap on non-preemptible jobs."""
        if self._caps is None:
            return np.ones(len(rows), np.bool_)
        under: Flags = self.fixed + self.snapshot.jobs.gpus[rows] <= self._caps[rows]
        return under

    def fits(self, row: int) -> bool:
        """Return whether a job could start now."""
        jobs = self.snapshot.jobs
        if self.must_not_borrow(row) or self.refused_by_budget(row) is not None:
            return False
        if self._caps is not None and self.fixed + jobs.gpus[row] > self._caps[row]:
            return False
        if self.headroom is not None and jobs.gpus[row] > self.headroom[jobs.tenant[row]]:
            return False
        if jobs.within[row] != ANYWHERE or self._needs_search or jobs.machines[row] > 1:
            return self.find(row) is not None
        gpus, pools = int(jobs.gpus[row]), int(jobs.pools[row])
        return any(gpus <= largest and pools >> number & 1 for number, largest in enumerate(self.largest))

    def find(self, row: int, size: int | None = None) -> tuple[int, Placement] | None:
        """Return a pool and a placement there, for a job at its current or another size."""
        jobs = self.snapshot.jobs
        gpus, pools, within = size or int(jobs.gpus[row]), int(jobs.pools[row]), int(jobs.within[row])
        machines = int(jobs.machines[row])
        for number in range(len(self.pools)):
            if pools >> number & 1 and gpus <= (self.pools[number].total if machines > 1 else self.largest[number]):
                packing = self._packing(row, number)
                placement = self.free_gpus(row, number).find(gpus, within, packing, machines)
                if placement is not None:
                    return number, placement
        return None

    def _packing(self, row: int, pool: int) -> PackWith | None:
        """Return how well each node suits a non-preemptible job, if these are packed together."""
        if self._pack_with is None or self.snapshot.jobs.preemptible[row]:
            return None
        if not self._by_end:
            return self._pack_with[pool]
        return packing_scores(self._pack_with[pool], self._busy_until_s[pool], self._ends_s(row))

    @cached_property
    def _busy_until_s(self) -> list[NDArray[np.float64]]:
        return busy_until_s(self.snapshot, self.now)

    def _ends_s(self, row: int) -> float:
        """Return when a job that starts now ends by its limit."""
        jobs = self.snapshot.jobs
        return self.now + float(jobs.limit_s[row] - jobs.ran_s[row])

    def cap(self, row: int) -> float:
        """Return the GPUs that non-preemptible jobs may hold once a job has started."""
        return math.inf if self._caps is None else float(self._caps[row])

    def admits(self, row: int, more: int) -> bool:
        """Return whether cap, budget and quotas admit a job if `more` GPUs become free."""
        if self.must_not_borrow(row) or self.refused_by_budget(row) is not None:
            return False
        if self._caps is not None and self.fixed + self.snapshot.jobs.gpus[row] > self._caps[row]:
            return False
        return self._within_quota(row, self.free + more, self.used)

    def admits_after(self, row: int, stopped: Rows) -> bool:
        """Return whether quotas admit a job once others are stopped: tenants withhold what they do not lend."""
        snapshot = self.snapshot
        if not self.quotas or snapshot.tenants.unlimited:
            return True
        used, free = self.used.copy(), self.free
        for victim in stopped.tolist():
            pool, placement = snapshot.placements[victim]
            used[snapshot.tenants.path(snapshot.jobs.tenant[victim])] -= placement.total
            free += int(placement.gpus[self.pools[pool].usable[placement.nodes]].sum())
        return self._within_quota(row, free, used)

    def _within_quota(self, row: int, free: int, used: NDArray[np.int64]) -> bool:
        jobs, tenants = self.snapshot.jobs, self.snapshot.tenants
        return not self.quotas or bool(jobs.gpus[row] <= tenants.headroom(free, used)[jobs.tenant[row]])

    def start(self, row: int) -> Decision:
        """Start a job that fits, as the highest-ranked one."""
        target = self.find(row)
        assert target is not None, "a job that fits has a placement"
        self.take(row, *target)
        gpus = int(self.snapshot.jobs.gpus[row])
        return Decision("start", row, *target, Reason(ReasonCode.FIRST, (("gpus", gpus),)))

    def take(self, row: int, pool: int, placement: Placement) -> None:
        """Count a waiting job as started."""
        self._count_fixed(row, 1)
        if row in self._owed:
            self._owed.remove(row)
            self._owed_counts[int(self.snapshot.jobs.tenant[row]), int(self.snapshot.jobs.priority[row])] -= 1
        if self.reservation is not None and self.reservation.row == row:
            self.reservation = None
        if self._needs_gpu_s is not None:
            self._budget_left[self.snapshot.tenants.path(self.snapshot.jobs.tenant[row])] -= self._needs_gpu_s[row]
        self._hold(row, pool, placement, 1)
        if self._by_end and not self.snapshot.jobs.preemptible[row]:
            until_s = self._busy_until_s[pool]
            until_s[placement.nodes] = np.maximum(until_s[placement.nodes], self._ends_s(row))

    def release(self, row: int) -> None:
        """Count a running job as stopped."""
        self._count_fixed(row, -1)
        self._hold(row, *self.snapshot.placements[row], -1)

    def take_back(self, row: int) -> None:
        """Count a running job that was released as running again."""
        self._count_fixed(row, 1)
        self._hold(row, *self.snapshot.placements[row], 1)

    def has_room_without(self, row: int, pool: int, placement: Placement, leaving: Sequence[int]) -> bool:
        """Return whether a placement has CPUs and memory for a job once others have left."""
        if not self._counted:
            return True
        jobs, first = self.snapshot.jobs, self.snapshot.nodes.pools[pool].first
        cpus, memory = self._cpus_free.copy(), self._memory_free.copy()
        for other in leaving:
            number, held = self.snapshot.placements[other]
            rows = held.nodes + self.snapshot.nodes.pools[number].first
            cpus[rows] += jobs.cpus[other]
            memory[rows] += jobs.memory_bytes[other]
        rows = placement.nodes + first
        return bool((cpus[rows] >= jobs.cpus[row]).all() and (memory[rows] >= jobs.memory_bytes[row]).all())

    def replace(self, row: int, old: tuple[int, Placement] | None, new: tuple[int, Placement] | None) -> None:
        """Count a placement of a job as free, and another as used."""
        for sign, held in ((-1, old), (1, new)):
            if held is not None:
                self._hold(row, *held, sign)

    def _count_fixed(self, row: int, sign: int) -> None:
        if not self.snapshot.jobs.preemptible[row]:
            self.fixed += sign * int(self.snapshot.jobs.least[row])

    def _hold(self, row: int, pool: int, placement: Placement, sign: int) -> None:
        """Count a placement as used, or with a sign of -1 as free."""
        free_gpus = self.pools[pool]
        (free_gpus.take if sign > 0 else free_gpus.release)(placement)
        if self._counted:
            rows = placement.nodes + self.snapshot.nodes.pools[pool].first
            self._cpus_free[rows] -= sign * self.snapshot.jobs.cpus[row]
            self._memory_free[rows] -= sign * self.snapshot.jobs.memory_bytes[row]
        if self._pack_with is not None and not self.snapshot.jobs.preemptible[row]:
            self._pack_with[pool][placement.nodes] += sign * placement.gpus
        self.largest[pool] = free_gpus.largest_gang()
        if self.quotas:
            for tenant in self.snapshot.tenants.path(self.snapshot.jobs.tenant[row]).tolist():
                self.used[tenant] += sign * placement.total
            self.headroom = self._headroom()
