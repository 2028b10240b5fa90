"""What the scheduler decides, and why: a code and the numbers, of which a sentence is made when somebody asks."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from headway.cluster.room import Placement

__all__ = ["Code", "Decision", "Reason"]


class Code(StrEnum):
    """Why something was decided."""

    FIRST = "first"
    BACKFILL = "backfill"
    PAST = "past"
    RESERVED = "reserved"
    NO_ROOM = "no-room"
    QUOTA = "quota"
    BAND = "band"
    BEHIND = "behind"
    DISPLACES = "displaces"
    YIELDS = "yields"
    BUDGET = "budget"
    AWAY = "away"
    WINDOW = "window"
    GROWS = "grows"
    SHRINKS = "shrinks"
    RUNS = "runs"


_SENTENCES = {
    Code.FIRST: "{gpus} GPUs are free, and nobody of higher rank waits for them",
    Code.BACKFILL: "ends by its limit in {limit_s:.0f} s, and {head} cannot start before {gap_s:.0f} s from now",
    Code.PAST: "fits beside what is kept for {head}",
    Code.RESERVED: "{gpus} GPUs are free {wait_s:.0f} s from now, if jobs end by their limits",
    Code.NO_ROOM: "needs {gpus} GPUs, and the largest gang that finds a place is of {largest}",
    Code.QUOTA: "needs {gpus} GPUs, and tenant {tenant} may take {room} more",
    Code.BAND: "cannot be stopped, as {held} of the GPUs in use; with its {gpus} such jobs may hold {most:.0f} at most",
    Code.DISPLACES: "{count} of higher levels yield, and lose {lost_gpu_s:.0f} GPU-seconds of work",
    Code.YIELDS: "{head} has had less of the cluster, and stopping this loses least: {lost_gpu_s:.0f} GPU-seconds",
    Code.BUDGET: "tenant {tenant} has spent its {budget_gpu_h:.0f} GPU-hours of this month, and this cannot be stopped",
    Code.AWAY: "node {node} goes away in {in_s:.0f} s: it saves, and starts elsewhere",
    Code.WINDOW: "finds {gpus} GPUs only on nodes that go away before it would be done, by its limit",
    Code.GROWS: "{gpus} GPUs instead of {before}, which idle, and it makes {adds:.1f} GPUs' worth of work of them",
    Code.SHRINKS: "gives back what it has beyond {gpus} GPUs, so that {head} can start",
    Code.RUNS: "has {gpus} GPUs since {since_s:.0f} s",
    Code.BEHIND: "waits behind {head}, which is of higher rank",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """A code and its numbers."""

    code: Code
    numbers: tuple[tuple[str, float | int | str], ...] = ()

    @property
    def sentence(self) -> str:
        """For people."""
        return _SENTENCES[self.code].format(**dict(self.numbers))


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with one job."""

    kind: Literal["start", "stop", "move", "resize", "reserve"]
    job: int
    """Its row in the snapshot."""
    pool: int
    place: Placement
    reason: Reason
    at_s: float = 0.0
    """When; of a reservation, at the earliest."""
