"""Policies: in which order jobs are looked at, and what one that must wait means for those behind it.

name    order                                                       behind one that has no room
fifo    priority, then as they came                                 all wait
kueue   priority, then as they came; guarantees, borrowing          nobody waits
slurm   age, size and past use of the tenant against its share      only those that would delay it, by time limits
sjf     the shortest first; an oracle, which is told durations      nobody waits
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.cluster.snapshot import Snapshot

__all__ = ["MIN_RUN_S", "POLICIES", "Policy", "Rows"]

Rows = NDArray[np.int64]
LONGEST_AGE_S = 7 * 86400.0
"""Age counts up to this."""
LEVELS_GPU_S = np.array([0.5, 4.0, 16.0, 64.0]) * 3600
"""GPU-seconds after which a job is of the next level."""
STARVING, STARVING_FROM_S = 20.0, 6 * 3600.0
"""Who has waited so many times as long as it has run, or as these seconds, is served as if it were new."""
OWED_AFTER_S = 4 * 3600.0
"""So is a job that was stopped this long ago, while its tenant uses less than its guarantee, or that lost a node."""
MIN_RUN_S = 300.0
"""Whoever was started runs so long before it may be stopped."""
AGE, SHARE, SIZE = 1000.0, 1000.0, 100.0
"""Weights of a multifactor priority."""


@dataclass(frozen=True)
class Policy:
    """One way to share a cluster."""

    name: str
    order: Callable[[Snapshot, float], Rows]
    """Rows of the jobs that wait, the best first."""
    behind: Literal["wait", "pass", "backfill"]
    """What a job that finds no room means for those behind it."""
    level: Callable[[Snapshot, Rows, float], NDArray[np.int64]] | None = None
    """Of jobs, waiting or running: one that waits may stop those of a higher level, if they can be stopped."""
    quotas: bool = False
    """Whether tenants keep to their guarantees and limits."""
    oracle: bool = False
    """Whether it is told how long jobs will take, which nobody knows."""


def as_they_came(snapshot: Snapshot, _: float) -> Rows:
    """By priority, then by the time they were submitted."""
    return _ranked(snapshot, -snapshot.jobs.priority[snapshot.queue].astype(np.float64))


def multifactor(snapshot: Snapshot, now: float) -> Rows:
    """By priority, then by weighted age, size and how little of its share a tenant has used."""
    jobs, rows = snapshot.jobs, snapshot.queue
    age = np.minimum((now - jobs.submit_s[rows]) / LONGEST_AGE_S, 1.0)
    unused = 2.0 ** -snapshot.tenants.shares()
    size = jobs.gpus[rows] / max(snapshot.gpus, 1)
    score = AGE * age + SHARE * unused[jobs.tenant[rows]] + SIZE * size + 1e6 * jobs.priority[rows]
    return _ranked(snapshot, -score)


def served(snapshot: Snapshot, rows: Rows, now: float) -> NDArray[np.int64]:
    """The level of jobs: by the GPU-seconds they have had, lower for those that have waited too long."""
    jobs, tenants = snapshot.jobs, snapshot.tenants
    held = snapshot.held_s(rows, now)
    levels = np.searchsorted(LEVELS_GPU_S, held * jobs.gpus[rows], side="right")
    waited = now - jobs.submit_s[rows] - held
    starving = waited > STARVING * np.maximum(held, STARVING_FROM_S)
    count = len(tenants)
    unused = (tenants.guarantee[:count] - tenants.used[:count])[jobs.tenant[rows]]
    owed = (jobs.starts[rows] > 0) & (jobs.gpus[rows] <= unused) & (now - jobs.waits_s[rows] > OWED_AFTER_S)
    return np.where(~jobs.running[rows] & (starving | owed | jobs.failed[rows]), 0, levels)


def least_served(snapshot: Snapshot, now: float) -> Rows:
    """By priority, then by level, smaller gangs first."""
    jobs, rows = snapshot.jobs, snapshot.queue
    sizes = np.log2(jobs.gpus[rows]) / 64
    return _ranked(snapshot, served(snapshot, rows, now) + sizes - 1e6 * jobs.priority[rows])


def shortest(snapshot: Snapshot, _: float) -> Rows:
    """By the work that is left, which only an oracle knows."""
    jobs, rows = snapshot.jobs, snapshot.queue
    return _ranked(snapshot, jobs.known_s[rows] - jobs.done_s[rows])


def _ranked(snapshot: Snapshot, scores: NDArray[np.float64]) -> Rows:
    """The lowest first; equals as they came, and by name where they came together."""
    return snapshot.queue[np.argsort(scores, kind="stable")]


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("fifo", as_they_came, behind="wait"),
        Policy("kueue", as_they_came, behind="pass", quotas=True),
        Policy("slurm", multifactor, behind="backfill"),
        Policy("headway", least_served, behind="pass", level=served, quotas=True),
        Policy("sjf", shortest, behind="pass", oracle=True),
    )
}
"""By name."""
