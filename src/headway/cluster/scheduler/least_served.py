"""Headway's own policy: the least served jobs go first, and well served ones are preempted for them.

Run times are unknown, and users are not asked. But most jobs are short, and one that has run for long will likely run
for long still. So jobs have levels by the GPU-hours they have had. A waiting job may preempt one of lower priority, or
of equal priority and higher level; the victims are those that lose least. A service always counts as new, and so yields
to higher priorities only. These rules refine this:

    slack   a job whose deadline is further away than it has run so far counts one level lower; one whose deadline has
            passed goes behind all others
    due     a job that has waited for a week in total (four, if its deadline has passed) goes first and is not
            preempted again
    overdue the first job that has waited for three weeks gets nodes reserved
    reserve a gang of whole nodes gets nodes reserved against non-preemptible jobs of lower priority, unless their
            limits end before those of the non-preemptible jobs that run there
    drain   a large gang (more than an eighth of the cluster) gets nodes reserved after an hour against jobs of equal
            priority too, and passes the band; preemptible jobs move to other free GPUs if it then fits
    turn    a large gang that has waited for a day, and for longer than it has run, goes first of its priority
    saved   in a small cluster (a node is more than an eighth of it), a job that has been started more than four times
            runs until it has saved
    patient in a small cluster, a job waits, times its GPUs, for as long as its victims lose if these have its priority
            and are large gangs or have been started more than once: often they save, or another job ends, before that
    owed    a tenant within its guarantee takes back from borrowers after four hours, or after half an hour if it has
            recently been short
    shield  jobs of a tenant that has recently been short are not preempted for others, unless it borrows, or the others
            are new or due
    budget  jobs of a tenant that has spent its GPU-hours of the month run on idle GPUs only: they go last, all others
            may preempt them, and non-preemptible ones wait; a non-preemptible job starts only if the budget covers its
            size times its limit
    borrow  a non-preemptible job does not borrow while a job of higher priority waits for its tenant's guarantee
    band    non-preemptible gangs do not fill the last of the cluster: the larger a gang, the more stays free of them
    apart   non-preemptible jobs smaller than a node share nodes, so that other nodes can be emptied; in a small cluster
            they go where they keep a node in use for the shortest additional time, by their limits

No cycles: preemption by level queues a job of a higher level for one of a lower level, and levels only rise (slack only
shrinks over time), and never one of a higher priority for one of a lower; what is owed is taken after half an hour of
waiting at the earliest, and due jobs are never preempted. A gang whose turn it is runs for as long as it has waited
before a job of equal priority may preempt it.
"""

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.jobs import INTERACTIVE, SERVICE
from headway.cluster.scheduler.packing import is_small, large_gangs
from headway.cluster.scheduler.policy import Flags, Gpus, Policy, RankedJobs, Rows, gpus_above
from headway.cluster.scheduler.snapshot import ClusterSnapshot

LEVELS_GPU_S = 3600 * 2.0 * 4.0 ** np.arange(6)
"""2, 8, 32 ... 2,048 GPU-hours: a job that has had more is on the next level."""
NEXT_S = 1800.0
"""A job counts with its next half hour, so that a large gang is not new for as long as a single GPU."""
DUE_S, LATE_DUE_S, OVERDUE_S = 7 * 86400.0, 28 * 86400.0, 21 * 86400.0
DUE, TURN, OVER_BUDGET = -2, -1, 99
"""Levels of due jobs, of large gangs that have waited for long, and of jobs whose tenant has spent its budget."""
DRAIN_S, TURN_S = 3600.0, 24 * 3600.0
"""A large gang gets nodes reserved after the first wait, and has its turn after the second."""
MAX_STARTS_UNSAVED = 4
OWED_S, OWED_SOON_S = 4 * 3600.0, 1800.0
SHORT = 0.004
"""A tenant that recently lacked more than this share of its guarantee is short."""
BAND, BAND_GPUS = 0.07, 256
"""Share of the cluster per doubling of a gang. In a cluster larger than BAND_GPUS a gang counts by its share: 1,024 of
6,776 GPUs as 38 of 256."""


class LeastServedPreemption:
    """Which jobs may preempt which."""

    def levels(self, snapshot: ClusterSnapshot, rows: Rows, now: float) -> NDArray[np.int64]:
        """Return levels by GPU-seconds had and deadlines; a job that lost a node counts as new."""
        jobs = snapshot.jobs
        levels = np.searchsorted(LEVELS_GPU_S, snapshot.attained_gpu_s(rows, now, NEXT_S), side="right")
        if (jobs.deadline_s[rows] < np.inf).any():
            levels[self._has_slack(snapshot, rows, now) & (levels > 0)] -= 1
            levels[jobs.deadline_s[rows] <= now] += len(LEVELS_GPU_S)
        levels[jobs.failed[rows] | (jobs.kind[rows] == SERVICE)] = 0
        levels[_turn(snapshot, rows, now)] = TURN
        levels[due(snapshot, rows, now)] = DUE
        if snapshot.tenants.has_budgets:
            levels[snapshot.tenants.over_budget()[jobs.tenant[rows]]] = OVER_BUDGET
        return levels

    def _has_slack(self, snapshot: ClusterSnapshot, rows: Rows, now: float) -> Flags:
        """Return which deadlines can be met: a job that has run for long will likely run as long again."""
        left_s = snapshot.jobs.deadline_s[rows] - now
        slack: Flags = (left_s > np.maximum(snapshot.held_s(rows, now), NEXT_S)) & (left_s < np.inf)
        return slack

    def groups(self, snapshot: ClusterSnapshot, waiting: RankedJobs, now: float) -> NDArray[np.int64]:
        """Group by tenant where it matters: if it is owed GPUs, or if others are shielded."""
        owed = self._owed(snapshot, snapshot.tenants.used[: len(snapshot.tenants)], waiting.rows, now)
        shielded = (waiting.levels > 0) & _short(snapshot).any()
        tenants = snapshot.jobs.tenant[waiting.rows].astype(np.int64)
        return np.where(owed, 2 * tenants + 2, np.where(shielded, 2 * tenants + 1, 0))

    def reach(
        self, snapshot: ClusterSnapshot, used: Gpus, waiting: RankedJobs, running: RankedJobs, now: float
    ) -> Gpus:
        """Return the GPUs of all higher levels, or all GPUs if it is owed some or outranks the lowest priority."""
        jobs = snapshot.jobs
        every = jobs.priority[waiting.rows] > jobs.priority[running.rows].min()
        every |= self._owed(snapshot, used, waiting.rows, now)
        return np.where(every, jobs.gpus[running.rows].sum(), gpus_above(snapshot, waiting.levels, running))

    def may_preempt(
        self, snapshot: ClusterSnapshot, used: Gpus, waiting: RankedJobs, running: RankedJobs, now: float
    ) -> Flags:
        """Return unshielded jobs of lower priority or higher level, and borrowers if its tenant is owed GPUs."""
        (level,), jobs = waiting.levels.tolist(), snapshot.jobs
        tenants, tenant = jobs.tenant[running.rows], int(jobs.tenant[waiting.rows[0]])
        borrows = (used > snapshot.tenants.guarantee[: len(used)])[tenants]
        above = jobs.priority[waiting.rows[0]].astype(np.int64) - jobs.priority[running.rows]
        services = (jobs.kind[running.rows] == SERVICE) & (running.levels != OVER_BUDGET)
        may: Flags = self._outranks(above, level, running.levels) & (~services | (above > 0))
        if level > 0:
            may &= (tenants == tenant) | borrows | ~_short(snapshot)[tenants] | (running.levels == OVER_BUDGET)
        if self._owed(snapshot, used, waiting.rows, now)[0]:
            may |= borrows & (tenants != tenant) & (running.levels > TURN) & ~services
        return may

    @staticmethod
    def _outranks(above: NDArray[np.int64], level: int, running: NDArray[np.int64]) -> Flags:
        """Return which levels a job outranks; `above`: by how much its priority is higher."""
        higher: Flags = running > level
        if level in (DUE, OVER_BUDGET):  # regardless of priorities
            return higher
        outranks: Flags = ((above > 0) | ((above == 0) & higher)) & (running != DUE) | (running == OVER_BUDGET)
        return outranks

    def _owed(self, snapshot: ClusterSnapshot, used: Gpus, rows: Rows, now: float) -> Flags:
        """Return which jobs may take back what others borrowed from their tenants."""
        jobs, tenants = snapshot.jobs, snapshot.jobs.tenant[rows]
        patience = np.where(_short(snapshot)[tenants], OWED_SOON_S, OWED_S)
        within = used[tenants] + jobs.gpus[rows] <= snapshot.tenants.guarantee[tenants]
        owed: Flags = within & (now - jobs.waits_s[rows] >= patience) & ~snapshot.tenants.over_budget()[tenants]
        return owed


def _short(snapshot: ClusterSnapshot) -> Flags:
    """Return which tenants recently lacked much of their guarantees."""
    short: Flags = snapshot.tenants.shortfalls() > SHORT
    return short


def _waited_s(snapshot: ClusterSnapshot, rows: Rows, now: float) -> NDArray[np.float64]:
    """Return the total waiting times of jobs."""
    return now - snapshot.jobs.submit_s[rows] - snapshot.held_s(rows, now)


def _turn(snapshot: ClusterSnapshot, rows: Rows, now: float) -> Flags:
    """Return which large gangs have waited for long, and for longer than they have run."""
    turn = large_gangs(snapshot, rows)
    if turn.any():
        gangs = rows[turn]
        patience_s = np.maximum(snapshot.held_s(gangs, now), TURN_S)
        turn[turn] = _waited_s(snapshot, gangs, now) >= patience_s
    return turn


def drains(snapshot: ClusterSnapshot, rows: Rows, now: float) -> Flags:
    """Return which large gangs have waited long enough that nodes are emptied for them."""
    drains = large_gangs(snapshot, rows)
    if drains.any():
        drains[drains] = _waited_s(snapshot, rows[drains], now) >= DRAIN_S
    return drains


def due(snapshot: ClusterSnapshot, rows: Rows, now: float) -> Flags:
    """Return which jobs have waited long enough to go first."""
    due_s = np.where(snapshot.jobs.deadline_s[rows] <= now, LATE_DUE_S, DUE_S)
    return _waited_s(snapshot, rows, now) > due_s


def patience(snapshot: ClusterSnapshot, waiting: RankedJobs, victims: RankedJobs, now: float) -> Flags:
    """Return which victims a job waits for: in a small cluster jobs that have been started more than once, and large
    gangs if there are three nodes or more, if only levels decide."""
    jobs, (row,) = snapshot.jobs, waiting.rows.tolist()
    if waiting.levels[0] < 0 or jobs.kind[row] == INTERACTIVE or not is_small(snapshot):
        return np.zeros(len(victims.rows), np.bool_)
    costly: Flags = jobs.starts[victims.rows] > 1
    if len(snapshot.nodes) > 2:
        costly |= large_gangs(snapshot, victims.rows)
    costly &= (jobs.priority[victims.rows] == jobs.priority[row]) & (victims.levels != OVER_BUDGET)
    costly &= jobs.deadline_s[victims.rows] > now
    return costly


def overdue(snapshot: ClusterSnapshot, rows: Rows, now: float) -> Flags:
    """Return which due jobs have waited for three weeks or more."""
    long = _waited_s(snapshot, rows, now) > OVERDUE_S
    return long & (PREEMPTION.levels(snapshot, rows, now) == DUE) if long.any() else long


def order(snapshot: ClusterSnapshot, now: float) -> Rows:
    """Rank by priority, level, interactive first, and size; due jobs before all others in order of submission, jobs
    of tenants over budget last."""
    jobs, rows = snapshot.jobs, snapshot.queue
    if len(rows) < 2:
        return rows
    levels = PREEMPTION.levels(snapshot, rows, now)
    sizes = np.where(levels == DUE, 0, jobs.gpus[rows])
    tiers = np.where(levels == OVER_BUDGET, 1, np.where(levels == DUE, -1, 0))
    not_interactive = (jobs.kind[rows] != INTERACTIVE) & (levels != DUE)
    priorities = np.where(levels == DUE, 0, -jobs.priority[rows].astype(np.int64))
    return rows[np.lexsort((sizes, not_interactive, levels, priorities, tiers))]


def non_preemptible_cap(snapshot: ClusterSnapshot, rows: Rows, now: float) -> NDArray[np.float64]:
    """Return the GPUs that non-preemptible jobs may hold with one of these; never less than its own, and all GPUs if it
    is due or drains nodes."""
    gpus = snapshot.jobs.gpus[rows]
    doublings = np.log2(np.maximum(gpus * min(BAND_GPUS / max(snapshot.gpus, 1), 1.0), 1.0))
    lifted = due(snapshot, rows, now) | drains(snapshot, rows, now)
    share = snapshot.gpus * np.where(lifted, 1.0, 1 - BAND * doublings)
    cap: NDArray[np.float64] = np.maximum(share, gpus)
    return cap


PREEMPTION = LeastServedPreemption()
LEAST_SERVED = Policy(
    "headway",
    order,
    when_blocked="pass",
    preemption=PREEMPTION,
    cap=non_preemptible_cap,
    pack_non_preemptible=True,
    overdue=overdue,
    reserve_for_gangs=True,
    drains=drains,
    max_starts_unsaved=MAX_STARTS_UNSAVED,
    patience=patience,
    elastic=True,
    quotas=True,
)
