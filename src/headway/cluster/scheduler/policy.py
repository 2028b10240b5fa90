"""What a scheduling policy is: the order of jobs, what a blocked job means for others, and the preemption rules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.snapshot import ClusterSnapshot

Rows = NDArray[np.int64]
Flags = NDArray[np.bool_]
Gpus = NDArray[np.int64]


class RankedJobs(NamedTuple):
    """Jobs and their levels."""

    rows: Rows
    levels: NDArray[np.int64]


def gpus_above(snapshot: ClusterSnapshot, levels: NDArray[np.int64], running: RankedJobs) -> NDArray[np.int64]:
    """Return, per level, the GPUs of the running jobs above it."""
    order = np.argsort(running.levels)
    gpus = np.concatenate(([0], np.cumsum(snapshot.jobs.gpus[running.rows[order]])))
    above: NDArray[np.int64] = gpus[-1] - gpus[np.searchsorted(running.levels[order], levels, side="right")]
    return above


class PreemptionRules(Protocol):
    """Which jobs may preempt which; `used` are the GPUs of tenants after the decisions so far."""

    def levels(self, snapshot: ClusterSnapshot, rows: Rows, now: float) -> NDArray[np.int64]:
        """Return the levels of waiting or running jobs."""
        ...

    def groups(self, snapshot: ClusterSnapshot, waiting: RankedJobs, now: float) -> NDArray[np.int64]:
        """Group waiting jobs: of equal level, priority and group, all may preempt the same jobs."""
        ...

    def reach(
        self, snapshot: ClusterSnapshot, used: Gpus, waiting: RankedJobs, running: RankedJobs, now: float
    ) -> Gpus:
        """Return, per waiting job, an upper bound of the GPUs that it may preempt; a quick filter for `may_preempt`."""
        ...

    def may_preempt(
        self, snapshot: ClusterSnapshot, used: Gpus, waiting: RankedJobs, running: RankedJobs, now: float
    ) -> Flags:
        """Return which running jobs one waiting job may preempt."""
        ...


@dataclass(frozen=True)
class Policy:
    """A way to share a cluster."""

    name: str
    order: Callable[[ClusterSnapshot, float], Rows]
    """Rows of the waiting jobs, the highest-ranked first."""
    when_blocked: Literal["wait", "pass", "backfill"]
    """What jobs do that rank behind one that does not fit."""
    preemption: PreemptionRules | None = None
    """None: no job is ever preempted."""
    cap: Callable[[ClusterSnapshot, Rows, float], NDArray[np.float64]] | None = None
    """GPUs that all non-preemptible jobs may hold once one of these has started; None: no cap."""
    pack_non_preemptible: bool = False
    """Whether non-preemptible jobs share nodes, so that other nodes can be emptied for a gang."""
    overdue: Callable[[ClusterSnapshot, Rows, float], Flags] | None = None
    """Which jobs have waited so long that nodes are reserved for them; None: none."""
    reserve_for_gangs: bool = False
    """Whether nodes are reserved for gangs of whole nodes against non-preemptible jobs of lower priority."""
    drains: Callable[[ClusterSnapshot, Rows, float], Flags] | None = None
    """Which gangs have waited so long that nodes are reserved for them against jobs of equal priority too; None: none,
    and no job moves to other nodes for a gang."""
    max_starts_unsaved: int | None = None
    """Starts after which a job of a small cluster is preempted only once it has saved; None: no limit."""
    patience: Callable[[ClusterSnapshot, RankedJobs, RankedJobs, float], Flags] | None = None
    """Which victims a job preempts only once it has waited, times its GPUs, for as long as they lose; None: it never
    waits for that."""
    elastic: bool = False
    """Whether elastic jobs grow onto idle GPUs."""
    quotas: bool = False
    """Whether guarantees and limits of tenants apply."""
    oracle: bool = False
    """Whether it is told how long jobs will take, which no real scheduler knows."""
