"""Policies: in which order jobs are looked at, and what one that must wait means for those behind it.

name    order                                                       behind one that has no room
fifo    priority, then as they came                                 all wait
kueue   priority, then as they came; guarantees, borrowing          nobody waits
slurm   age, size and past use of the tenant against its share      only those that would delay it, by time limits
sjf     the shortest first; an oracle, which is told durations      nobody waits
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.cluster.snapshot import Snapshot

__all__ = ["PEERS", "Flags", "Policy", "Ranked", "Rows", "Stops"]

Rows = NDArray[np.int64]
Flags = NDArray[np.bool_]
LONGEST_AGE_S = 7 * 86400.0
"""Age counts up to this."""
AGE, SHARE, SIZE = 1000.0, 1000.0, 100.0
"""Weights of a multifactor priority."""


class Ranked(NamedTuple):
    """Jobs and their levels."""

    rows: Rows
    levels: NDArray[np.int64]


class Stops(Protocol):
    """Who may stop whom."""

    def levels(self, snapshot: Snapshot, rows: Rows, now: float) -> NDArray[np.int64]:
        """Of jobs, waiting or running."""
        ...

    def kinds(self, snapshot: Snapshot, waits: Ranked, now: float) -> NDArray[np.int64]:
        """Of jobs that wait, beside their levels: those of one kind may stop the same."""
        ...

    def may(self, snapshot: Snapshot, used: NDArray[np.int64], waits: Ranked, runs: Ranked, now: float) -> Flags:
        """Which of those that run one that waits may stop; `used` are GPUs of tenants as decided so far."""
        ...


@dataclass(frozen=True)
class Policy:
    """One way to share a cluster."""

    name: str
    order: Callable[[Snapshot, float], Rows]
    """Rows of the jobs that wait, the best first."""
    behind: Literal["wait", "pass", "backfill"]
    """What a job that finds no room means for those behind it."""
    stops: Stops | None = None
    """Who may stop whom; None: nobody is ever stopped."""
    bound: Callable[[Snapshot, Rows, float], NDArray[np.float64]] | None = None
    """Of jobs that cannot be stopped: GPUs that all such may hold once it has started; None: as many as there are."""
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


def shortest(snapshot: Snapshot, _: float) -> Rows:
    """By the work that is left, which only an oracle knows."""
    jobs, rows = snapshot.jobs, snapshot.queue
    return _ranked(snapshot, jobs.known_s[rows] - jobs.done_s[rows])


def _ranked(snapshot: Snapshot, scores: NDArray[np.float64]) -> Rows:
    """The lowest first; equals as they came, and by name where they came together."""
    return snapshot.queue[np.argsort(scores, kind="stable")]


PEERS = {
    policy.name: policy
    for policy in (
        Policy("fifo", as_they_came, behind="wait"),
        Policy("kueue", as_they_came, behind="pass", quotas=True),
        Policy("slurm", multifactor, behind="backfill"),
        Policy("sjf", shortest, behind="pass", oracle=True),
    )
}
"""What others do, and an oracle, by name."""
