"""What a policy is: in which order jobs are looked at, what one that must wait means for others, who may stop whom."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.snapshot import ClusterSnapshot

__all__ = ["Flags", "Policy", "PreemptionRules", "RankedJobs", "Rows", "above"]

Rows = NDArray[np.int64]
Flags = NDArray[np.bool_]


class RankedJobs(NamedTuple):
    """Jobs and their levels."""

    rows: Rows
    levels: NDArray[np.int64]


def above(snapshot: ClusterSnapshot, levels: NDArray[np.int64], runs: RankedJobs) -> NDArray[np.int64]:
    """GPUs of jobs that run and are above each of some levels."""
    order = np.argsort(runs.levels)
    gpus = np.concatenate(([0], np.cumsum(snapshot.jobs.gpus[runs.rows[order]])))
    found: NDArray[np.int64] = gpus[-1] - gpus[np.searchsorted(runs.levels[order], levels, side="right")]
    return found


class PreemptionRules(Protocol):
    """Who may stop whom."""

    def levels(self, snapshot: ClusterSnapshot, rows: Rows, now: float) -> NDArray[np.int64]:
        """Of jobs, waiting or running."""
        ...

    def kinds(self, snapshot: ClusterSnapshot, waits: RankedJobs, now: float) -> NDArray[np.int64]:
        """Of jobs that wait, beside their levels and priorities: those of one kind may stop the same."""
        ...

    def reach(
        self, snapshot: ClusterSnapshot, used: NDArray[np.int64], waits: RankedJobs, runs: RankedJobs, now: float
    ) -> NDArray[np.int64]:
        """Of all that wait: GPUs of those that run and that it may stop, or more. Quick, to ask `may` of few."""
        ...

    def may(
        self, snapshot: ClusterSnapshot, used: NDArray[np.int64], waits: RankedJobs, runs: RankedJobs, now: float
    ) -> Flags:
        """Which of those that run one that waits may stop; `used` are GPUs of tenants as decided so far."""
        ...


@dataclass(frozen=True)
class Policy:
    """One way to share a cluster."""

    name: str
    order: Callable[[ClusterSnapshot, float], Rows]
    """Rows of the jobs that wait, the best first."""
    behind: Literal["wait", "pass", "backfill"]
    """What a job that finds no room means for those behind it."""
    stops: PreemptionRules | None = None
    """Who may stop whom; None: nobody is ever stopped."""
    bound: Callable[[ClusterSnapshot, Rows, float], NDArray[np.float64]] | None = None
    """Of jobs that cannot be stopped: GPUs that all such may hold once it has started; None: as many as there are."""
    apart: bool = False
    """Whether jobs that cannot be stopped lie beside one another, so that other nodes can be emptied for a gang."""
    overdue: Callable[[ClusterSnapshot, Rows, float], Flags] | None = None
    """Who has waited for so long that nodes are kept for it; None: nobody."""
    elastic: bool = False
    """Whether elastic jobs have more GPUs when some idle."""
    quotas: bool = False
    """Whether tenants keep to their guarantees and limits."""
    oracle: bool = False
    """Whether it is told how long jobs will take, which nobody knows."""
