"""Headway's own policy: whoever has had least of the cluster goes first, and what has had much yields.

Nobody knows how long a job will take, and nobody is asked. But most are short, and one that has run for long will
likely run for long still. So jobs have levels by the GPU-hours they have had; a job that waits may stop one of a lower
priority, or of the same and a higher level, if that can be stopped, and those are stopped first that lose least. A
service is new for ever, and so yields to higher priorities alone. Beside that stand eight rules:

    slack   a job whose deadline is further away than it has run so far counts a level lower; one whose deadline has
            passed gives way to all others
    due     who has waited for a week in all (four, if its deadline has passed) goes first, and is not stopped again
    overdue who has waited for three weeks has nodes kept for it, the first of them at a time
    owed    a tenant within its guarantee takes back from those who borrow, after four hours, or after half an hour
            if it has been short of late
    shield  who has been short of late is not stopped for others, unless it borrows, or they are new or due
    budget  jobs of a tenant that has spent its GPU-hours of the month run on what idles alone: they are last, all may
            stop them, and those that cannot be stopped wait
    band    gangs that cannot be stopped do not fill the last of the cluster: the larger, the more stays free of them
    apart   jobs within a node that cannot be stopped lie beside one another, so that other nodes can be emptied

No circle: a stop by level puts a job of a higher level into the queue for one of a lower level, and levels only rise
(with time, slack only shrinks), and never one of a higher priority for one of a lower;
what is owed is taken after half an hour of waiting at the earliest, and who is due is never stopped.
"""

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.jobs import INTERACTIVE, SERVICE
from headway.cluster.scheduler.policy import Flags, Policy, RankedJobs, Rows, above
from headway.cluster.scheduler.snapshot import ClusterSnapshot

__all__ = ["DUE", "LEAST_SERVED", "LeastServedPreemption"]

LEVELS_GPU_S = 3600 * 2.0 * 4.0 ** np.arange(6)
"""2, 8, 32 ... 2,048 GPU-hours: beyond each a job is of the next level."""
NEXT_S = 1800.0
"""A job counts with the half hour that it would have next: a large gang is not new for as long as a single GPU."""
DUE_S, LATE_DUE_S, OVERDUE_S = 7 * 86400.0, 28 * 86400.0, 21 * 86400.0
DUE, BROKE = -1, 99
OWED_S, OWED_SOON_S = 4 * 3600.0, 1800.0
SHORT = 0.004
"""Of its guarantee: who lacked more of late is short."""
BAND, BAND_GPUS = 0.07, 256
"""Of the cluster, for each doubling of a gang. In a larger cluster than this a gang counts by its share of it: 1,024 of
6,776 GPUs as 38 of 256."""


class LeastServedPreemption:
    """Who may stop whom."""

    def levels(self, snapshot: ClusterSnapshot, rows: Rows, now: float) -> NDArray[np.int64]:
        """By the GPU-seconds that jobs have had, and their deadlines; whoever lost a node counts as new, DUE are
        those that are due, and BROKE those of tenants that have spent their budgets."""
        jobs = snapshot.jobs
        levels = np.searchsorted(LEVELS_GPU_S, snapshot.had_gpu_s(rows, now, NEXT_S), side="right")
        if (jobs.deadline_s[rows] < np.inf).any():
            levels[self._has_slack(snapshot, rows, now) & (levels > 0)] -= 1
            levels[jobs.deadline_s[rows] <= now] += len(LEVELS_GPU_S)
        levels[jobs.failed[rows] | (jobs.kind[rows] == SERVICE)] = 0
        levels[due(snapshot, rows, now)] = DUE
        if snapshot.tenants.budgets:
            levels[snapshot.tenants.over_budget()[jobs.tenant[rows]]] = BROKE
        return levels

    def _has_slack(self, snapshot: ClusterSnapshot, rows: Rows, now: float) -> Flags:
        """Whether a deadline could be met: one that has run for long will likely run for as long again."""
        left_s = snapshot.jobs.deadline_s[rows] - now
        slack: Flags = (left_s > np.maximum(snapshot.held_s(rows, now), NEXT_S)) & (left_s < np.inf)
        return slack

    def kinds(self, snapshot: ClusterSnapshot, waits: RankedJobs, now: float) -> NDArray[np.int64]:
        """The tenant, where it matters: of who is owed, and where others are shielded."""
        owed = self._owed(snapshot, snapshot.tenants.used[: len(snapshot.tenants)], waits.rows, now)
        shielded = (waits.levels > 0) & _short(snapshot).any()
        tenants = snapshot.jobs.tenant[waits.rows].astype(np.int64)
        return np.where(owed, 2 * tenants + 2, np.where(shielded, 2 * tenants + 1, 0))

    def reach(
        self, snapshot: ClusterSnapshot, used: NDArray[np.int64], waits: RankedJobs, runs: RankedJobs, now: float
    ) -> NDArray[np.int64]:
        """All of a higher level; for who is owed something, or of a higher priority than anybody, all."""
        jobs = snapshot.jobs
        every = jobs.priority[waits.rows] > jobs.priority[runs.rows].min()
        every |= self._owed(snapshot, used, waits.rows, now)
        return np.where(every, jobs.gpus[runs.rows].sum(), above(snapshot, waits.levels, runs))

    def may(
        self, snapshot: ClusterSnapshot, used: NDArray[np.int64], waits: RankedJobs, runs: RankedJobs, now: float
    ) -> Flags:
        """Those of lower priority or of a higher level that no shield protects, and borrowers where it is owed."""
        (level,), jobs = waits.levels.tolist(), snapshot.jobs
        tenants, tenant = jobs.tenant[runs.rows], int(jobs.tenant[waits.rows[0]])
        borrows = (used > snapshot.tenants.guarantee[: len(used)])[tenants]
        above = jobs.priority[waits.rows[0]].astype(np.int64) - jobs.priority[runs.rows]
        serves = (jobs.kind[runs.rows] == SERVICE) & (runs.levels != BROKE)
        may: Flags = self._outranks(above, level, runs.levels) & (~serves | (above > 0))
        if level > 0:
            may &= (tenants == tenant) | borrows | ~_short(snapshot)[tenants] | (runs.levels == BROKE)
        if self._owed(snapshot, used, waits.rows, now)[0]:
            may |= borrows & (tenants != tenant) & (runs.levels != DUE) & ~serves
        return may

    @staticmethod
    def _outranks(above: NDArray[np.int64], level: int, runs: NDArray[np.int64]) -> Flags:
        """Whether a job of a level goes before those of others; `above`: by how much its priority is higher."""
        higher: Flags = runs > level
        if level in (DUE, BROKE):  # priorities do not count
            return higher
        ranks: Flags = ((above > 0) | ((above == 0) & higher)) & (runs != DUE) | (runs == BROKE)
        return ranks

    def _owed(self, snapshot: ClusterSnapshot, used: NDArray[np.int64], rows: Rows, now: float) -> Flags:
        """Whether the tenants of jobs may take back what others have borrowed."""
        jobs, tenants = snapshot.jobs, snapshot.jobs.tenant[rows]
        patience = np.where(_short(snapshot)[tenants], OWED_SOON_S, OWED_S)
        within = used[tenants] + jobs.gpus[rows] <= snapshot.tenants.guarantee[tenants]
        owed: Flags = within & (now - jobs.waits_s[rows] >= patience) & ~snapshot.tenants.over_budget()[tenants]
        return owed


def _short(snapshot: ClusterSnapshot) -> Flags:
    """Which tenants lacked much of their guarantees of late."""
    short: Flags = snapshot.tenants.shortfalls() > SHORT
    return short


def due(snapshot: ClusterSnapshot, rows: Rows, now: float) -> Flags:
    """Who has waited long enough in all."""
    most = np.where(snapshot.jobs.deadline_s[rows] <= now, LATE_DUE_S, DUE_S)
    long: Flags = now - snapshot.jobs.submit_s[rows] - snapshot.held_s(rows, now) > most
    return long


def overdue(snapshot: ClusterSnapshot, rows: Rows, now: float) -> Flags:
    """Who is due, and has waited for three weeks or more."""
    waited_s = now - snapshot.jobs.submit_s[rows] - snapshot.held_s(rows, now)
    long: Flags = waited_s > OVERDUE_S
    return long & (STOPS.levels(snapshot, rows, now) == DUE) if long.any() else long


def order(snapshot: ClusterSnapshot, now: float) -> Rows:
    """By priority, then by level, interactive jobs and smaller gangs first. Before all others who is due, as they came;
    after them who has spent its budget."""
    jobs, rows = snapshot.jobs, snapshot.queue
    if len(rows) < 2:
        return rows
    levels = STOPS.levels(snapshot, rows, now)
    sizes = np.where(levels == DUE, 0, jobs.gpus[rows])
    tiers = np.where(levels == BROKE, 1, np.where(levels == DUE, -1, 0))
    waits = (jobs.kind[rows] != INTERACTIVE) & (levels != DUE)
    priorities = np.where(levels == DUE, 0, -jobs.priority[rows].astype(np.int64))
    return rows[np.lexsort((sizes, waits, levels, priorities, tiers))]


def non_preemptible_cap(snapshot: ClusterSnapshot, rows: Rows, now: float) -> NDArray[np.float64]:
    """GPUs that jobs that cannot be stopped may hold, with one of these: it alone at least, all of them who is due."""
    gpus = snapshot.jobs.gpus[rows]
    doublings = np.log2(np.maximum(gpus * min(BAND_GPUS / max(snapshot.gpus, 1), 1.0), 1.0))
    share = snapshot.gpus * np.where(due(snapshot, rows, now), 1.0, 1 - BAND * doublings)
    most: NDArray[np.float64] = np.maximum(share, gpus)
    return most


STOPS = LeastServedPreemption()
LEAST_SERVED = Policy(
    "headway",
    order,
    behind="pass",
    stops=STOPS,
    bound=non_preemptible_cap,
    apart=True,
    overdue=overdue,
    elastic=True,
    quotas=True,
)
