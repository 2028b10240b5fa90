"""Policies that others have, and an oracle, to compare with.

name    order                                                       behind one that has no room
fifo    priority, then as they came                                 all wait
kueue   priority, then as they came; guarantees, borrowing          nobody waits
slurm   age, size and past use of the tenant against its share      only those that would delay it, by time limits
sjf     the shortest first; an oracle, which is told durations      nobody waits
"""

import numpy as np
from numpy.typing import NDArray

from headway.cluster.policy import Policy, Rows
from headway.cluster.snapshot import Snapshot

__all__ = ["PEERS"]

LONGEST_AGE_S = 7 * 86400.0
"""Age counts up to this."""
AGE, SHARE, SIZE = 1000.0, 1000.0, 100.0
"""Weights of a multifactor priority."""


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


def shortest(snapshot: Snapshot, _: float) -> Rows:
    """By the work that is left, which only an oracle knows."""
    jobs, rows = snapshot.jobs, snapshot.queue
    return _ranked(snapshot, jobs.known_s[rows] - jobs.done_s[rows])


def _ranked(snapshot: Snapshot, scores: NDArray[np.float64]) -> Rows:
    """The lowest first; equals as they came, and by name where they came together."""
    return snapshot.queue[np.argsort(scores, kind="stable")]


PEERS = (
    Policy("fifo", as_they_came, behind="wait"),
    Policy("kueue", as_they_came, behind="pass", quotas=True),
    Policy("slurm", multifactor, behind="backfill"),
    Policy("sjf", shortest, behind="pass", oracle=True),
)
