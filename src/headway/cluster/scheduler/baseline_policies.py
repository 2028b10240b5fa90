"""Policies that others have, and two oracles, to compare with.

name    order                                                       behind one that has no room
fifo    priority, then as they came                                 all wait
kueue   priority, then as they came; guarantees, borrowing          nobody waits
slurm   age, size and past use of the tenant against its share      only those that would delay it, by time limits
edf     the earliest deadline first                                 nobody waits; those with later ones yield
las     the least attained service first, in levels                 nobody waits; higher levels yield
sjf     the shortest first; an oracle, which is told durations      nobody waits
srtf    the least work left first; an oracle too                    nobody waits; those with more left yield
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.policy import Flags, Policy, RankedJobs, Rows, above
from headway.cluster.scheduler.snapshot import ClusterSnapshot

__all__ = ["BASELINES"]

LONGEST_AGE_S = 7 * 86400.0
"""Age counts up to this."""
AGE, SHARE, SIZE = 1000.0, 1000.0, 100.0
"""Weights of a multifactor priority."""
ATTAINED_GPU_S = 3600 * 2.0 ** np.arange(12)
"""1, 2, 4 ... 2,048 GPU-hours: beyond each a job is of the next level."""
UNKNOWN_S = 1e12
"""Seconds left of jobs of which an oracle was told nothing, or that have no deadline: they are last."""


def by_submit_time(snapshot: ClusterSnapshot, _: float) -> Rows:
    """By priority, then by the time they were submitted."""
    return _ranked(snapshot, -snapshot.jobs.priority[snapshot.queue].astype(np.float64))


def multifactor(snapshot: ClusterSnapshot, now: float) -> Rows:
    """By priority, then by weighted age, size and how little of its share a tenant has used."""
    jobs, rows = snapshot.jobs, snapshot.queue
    if len(rows) < 2:
        return rows
    age = np.minimum((now - jobs.submit_s[rows]) / LONGEST_AGE_S, 1.0)
    unused = 2.0 ** -snapshot.tenants.shares()
    size = jobs.gpus[rows] / max(snapshot.gpus, 1)
    score = AGE * age + SHARE * unused[jobs.tenant[rows]] + SIZE * size + 1e6 * jobs.priority[rows]
    return _ranked(snapshot, -score)


def shortest(snapshot: ClusterSnapshot, _: float) -> Rows:
    """By the work that is left, which only an oracle knows."""
    jobs, rows = snapshot.jobs, snapshot.queue
    return _ranked(snapshot, jobs.known_s[rows] - jobs.done_s[rows])


@dataclass(frozen=True)
class LevelPreemption:
    """A job that waits may stop all of higher levels, whoever they are of, unless they have a higher priority."""

    levels: Callable[[ClusterSnapshot, Rows, float], NDArray[np.int64]]

    def kinds(self, _: ClusterSnapshot, waits: RankedJobs, __: float) -> NDArray[np.int64]:
        """One: levels are all that counts."""
        return np.zeros(len(waits.rows), np.int64)

    def reach(
        self, snapshot: ClusterSnapshot, _: NDArray[np.int64], waits: RankedJobs, runs: RankedJobs, __: float
    ) -> NDArray[np.int64]:
        """All of a higher level."""
        return above(snapshot, waits.levels, runs)

    def may(
        self, snapshot: ClusterSnapshot, _: NDArray[np.int64], waits: RankedJobs, runs: RankedJobs, __: float
    ) -> Flags:
        """Those of a higher level."""
        priority = snapshot.jobs.priority
        may: Flags = (runs.levels > waits.levels) & (priority[runs.rows] <= priority[waits.rows])
        return may


def attained(snapshot: ClusterSnapshot, rows: Rows, now: float) -> NDArray[np.int64]:
    """Levels by the GPU-seconds that jobs have had."""
    return np.searchsorted(ATTAINED_GPU_S, snapshot.had_gpu_s(rows, now), side="right")


def deadlines(snapshot: ClusterSnapshot, rows: Rows, _: float) -> NDArray[np.int64]:
    """Whole seconds; jobs without one are last."""
    return np.ceil(np.minimum(snapshot.jobs.deadline_s[rows], UNKNOWN_S)).astype(np.int64)


def left(snapshot: ClusterSnapshot, rows: Rows, now: float) -> NDArray[np.int64]:
    """GPU-seconds of work that jobs have left, with their next restart: only an oracle knows."""
    jobs = snapshot.jobs
    again = np.where(jobs.starts[rows] > 0, jobs.restart_s[rows], 0.0)
    seconds = np.where(
        jobs.running[rows],
        jobs.known_s[rows] - snapshot.worked_s(rows, now),
        jobs.known_s[rows] - jobs.done_s[rows] + again,
    )
    return np.ceil(np.nan_to_num(seconds, nan=UNKNOWN_S) * jobs.gpus[rows]).astype(np.int64)


def by_level(
    levels: Callable[[ClusterSnapshot, Rows, float], NDArray[np.int64]],
) -> Callable[[ClusterSnapshot, float], Rows]:
    """By priority, then by level, then as they came."""

    def order(snapshot: ClusterSnapshot, now: float) -> Rows:
        rows = snapshot.queue
        return rows[np.lexsort((levels(snapshot, rows, now), -snapshot.jobs.priority[rows].astype(np.int64)))]

    return order


def _ranked(snapshot: ClusterSnapshot, scores: NDArray[np.float64]) -> Rows:
    """The lowest first; equals as they came, and by name where they came together."""
    return snapshot.queue[np.argsort(scores, kind="stable")]


BASELINES = (
    Policy("fifo", by_submit_time, behind="wait"),
    Policy("kueue", by_submit_time, behind="pass", quotas=True),
    Policy("slurm", multifactor, behind="backfill"),
    Policy("edf", by_level(deadlines), behind="pass", stops=LevelPreemption(deadlines)),
    Policy("las", by_level(attained), behind="pass", stops=LevelPreemption(attained)),
    Policy("sjf", shortest, behind="pass", oracle=True),
    Policy("srtf", by_level(left), behind="pass", stops=LevelPreemption(left), oracle=True),
)
