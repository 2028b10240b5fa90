"""Baseline policies: rules of other schedulers, and two oracles, for comparison.

name    order                                                    jobs behind one that does not fit
fifo    priority, then submit time                               wait
kueue   priority, then submit time; guarantees, borrowing        pass it
slurm   age, size, and the tenant's usage against its share      pass it unless they would delay it, by time limits
edf     earliest deadline first                                  pass it; later deadlines are preempted
las     least attained service first, in levels                  pass it; higher levels are preempted
sjf     shortest job first; an oracle, which is told run times   pass it
srtf    least remaining work first; an oracle too                pass it; jobs with more work left are preempted
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.policy import Flags, Gpus, Policy, RankedJobs, Rows, gpus_above
from headway.cluster.scheduler.snapshot import ClusterSnapshot

MAX_AGE_S = 7 * 86400.0
"""Age counts up to this."""
AGE, SHARE, SIZE = 1000.0, 1000.0, 100.0
"""Weights of the multifactor priority."""
ATTAINED_GPU_S = 3600 * 2.0 ** np.arange(12)
"""1, 2, 4 ... 2,048 GPU-hours: a job that has had more is on the next level."""
UNKNOWN_S = 1e12
"""Run time or deadline of jobs that have none: they go last."""

Levels = Callable[[ClusterSnapshot, Rows, float], NDArray[np.int64]]


def by_submit_time(snapshot: ClusterSnapshot, _: float) -> Rows:
    """Rank by priority, then submit time."""
    return _ranked(snapshot, -snapshot.jobs.priority[snapshot.queue].astype(np.float64))


def multifactor(snapshot: ClusterSnapshot, now: float) -> Rows:
    """Rank by priority, then by weighted age, size and the unused share of the tenant."""
    jobs, rows = snapshot.jobs, snapshot.queue
    if len(rows) < 2:
        return rows
    age = np.minimum((now - jobs.submit_s[rows]) / MAX_AGE_S, 1.0)
    unused = 2.0 ** -snapshot.tenants.usage_ratios()
    size = jobs.gpus[rows] / max(snapshot.gpus, 1)
    score = AGE * age + SHARE * unused[jobs.tenant[rows]] + SIZE * size + 1e6 * jobs.priority[rows]
    return _ranked(snapshot, -score)


def shortest(snapshot: ClusterSnapshot, _: float) -> Rows:
    """Rank by remaining work, which only an oracle knows."""
    jobs, rows = snapshot.jobs, snapshot.queue
    return _ranked(snapshot, jobs.known_s[rows] - jobs.done_s[rows])


@dataclass(frozen=True)
class LevelPreemption:
    """A waiting job may preempt all jobs of higher levels, of any tenant, unless they have a higher priority."""

    levels: Levels

    def groups(self, _: ClusterSnapshot, waiting: RankedJobs, __: float) -> NDArray[np.int64]:
        """Return one group: only levels and priorities count."""
        return np.zeros(len(waiting.rows), np.int64)

    def reach(self, snapshot: ClusterSnapshot, _: Gpus, waiting: RankedJobs, running: RankedJobs, __: float) -> Gpus:
        """Return the GPUs of all higher levels."""
        return gpus_above(snapshot, waiting.levels, running)

    def may_preempt(
        self, snapshot: ClusterSnapshot, _: Gpus, waiting: RankedJobs, running: RankedJobs, __: float
    ) -> Flags:
        """Return the jobs of higher levels."""
        priority = snapshot.jobs.priority
        may: Flags = (running.levels > waiting.levels) & (priority[running.rows] <= priority[waiting.rows])
        return may


def attained(snapshot: ClusterSnapshot, rows: Rows, now: float) -> NDArray[np.int64]:
    """Return levels by the GPU-seconds that jobs have had."""
    return np.searchsorted(ATTAINED_GPU_S, snapshot.attained_gpu_s(rows, now), side="right")


def deadlines(snapshot: ClusterSnapshot, rows: Rows, _: float) -> NDArray[np.int64]:
    """Return deadlines in whole seconds; jobs without one go last."""
    return np.ceil(np.minimum(snapshot.jobs.deadline_s[rows], UNKNOWN_S)).astype(np.int64)


def remaining(snapshot: ClusterSnapshot, rows: Rows, now: float) -> NDArray[np.int64]:
    """Return remaining GPU-seconds of work with the next restart, which only an oracle knows."""
    jobs = snapshot.jobs
    restart_s = np.where(jobs.starts[rows] > 0, jobs.restart_s[rows], 0.0)
    seconds = np.where(
        jobs.running[rows],
        jobs.known_s[rows] - snapshot.worked_s(rows, now),
        jobs.known_s[rows] - jobs.done_s[rows] + restart_s,
    )
    return np.ceil(np.nan_to_num(seconds, nan=UNKNOWN_S) * jobs.gpus[rows]).astype(np.int64)


def by_level(levels: Levels) -> Callable[[ClusterSnapshot, float], Rows]:
    """Rank by priority, then level, then submit time."""

    def order(snapshot: ClusterSnapshot, now: float) -> Rows:
        rows = snapshot.queue
        return rows[np.lexsort((levels(snapshot, rows, now), -snapshot.jobs.priority[rows].astype(np.int64)))]

    return order


def _ranked(snapshot: ClusterSnapshot, scores: NDArray[np.float64]) -> Rows:
    """Rank by score, the lowest first; equals in order of submission."""
    return snapshot.queue[np.argsort(scores, kind="stable")]


BASELINES = (
    Policy("fifo", by_submit_time, when_blocked="wait"),
    Policy("kueue", by_submit_time, when_blocked="pass", quotas=True),
    Policy("slurm", multifactor, when_blocked="backfill"),
    Policy("edf", by_level(deadlines), when_blocked="pass", preemption=LevelPreemption(deadlines)),
    Policy("las", by_level(attained), when_blocked="pass", preemption=LevelPreemption(attained)),
    Policy("sjf", shortest, when_blocked="pass", oracle=True),
    Policy("srtf", by_level(remaining), when_blocked="pass", preemption=LevelPreemption(remaining), oracle=True),
)
