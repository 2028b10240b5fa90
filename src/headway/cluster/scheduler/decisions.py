"""What the scheduler decides, and why: a code and the numbers, of which a sentence is made when somebody asks."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from headway.cluster.scheduler.placement import Placement

__all__ = ["Decision", "Reason", "ReasonCode"]


class ReasonCode(StrEnum):
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
    ReasonCode.FIRST: "{gpus} GPUs are free, and nobody of higher rank waits for them",
    ReasonCode.BACKFILL: "ends by its limit in {limit_s:.0f} s, and {head} cannot start before {gap_s:.0f} s from now",
    ReasonCode.PAST: "fits beside what is kept for {head}",
    ReasonCode.RESERVED: "{gpus} GPUs are free {wait_s:.0f} s from now, if jobs end by their limits",
    ReasonCode.NO_ROOM: "needs {gpus} GPUs; the largest gang that fits is {largest}",
    ReasonCode.QUOTA: "needs {gpus} GPUs, and tenant {tenant} may take {room} more",
    ReasonCode.BAND: "non-preemptible limit ({held} in use + {gpus} requested > {most:.0f} allowed)",
    ReasonCode.DISPLACES: "{count} of higher levels yield, and lose {lost_gpu_s:.0f} GPU-seconds of work",
    ReasonCode.YIELDS: "preempted for {head}; cheapest victim, loses {lost_gpu_s:.0f} GPU-seconds",
    ReasonCode.BUDGET: "tenant {tenant} has spent its {budget_gpu_h:.0f} GPU-hours of this month; job is not preemptible",
    ReasonCode.AWAY: "node {node} goes away in {in_s:.0f} s: it saves, and starts elsewhere",
    ReasonCode.WINDOW: "finds {gpus} GPUs only on nodes that go away before it would be done, by its limit",
    ReasonCode.GROWS: "grows to {gpus} idle GPUs from {before}, adding {adds:.1f} GPUs' worth of work",
    ReasonCode.SHRINKS: "gives back what it has beyond {gpus} GPUs, so that {head} can start",
    ReasonCode.RUNS: "has {gpus} GPUs since {since_s:.0f} s",
    ReasonCode.BEHIND: "waits behind {head}, which is of higher rank",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """A code and its numbers."""

    code: ReasonCode
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
