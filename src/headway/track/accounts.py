"""The accounts of the ledger, what each span of a process belongs to, and what they add up to for one attempt."""

from collections.abc import Mapping
from dataclasses import dataclass

ACCOUNTS = (
    "start-up",
    "compile",
    "generation",
    "scoring",
    "weight sync",
    "rollout wait",
    "data stall",
    "compute",
    "checkpoint stall",
    "evaluation",
    "detection",
    "restart",
    "rework",
    "shut-down",
    "unattributed",
)
"""Every account, in display order."""
OF_POLICIES = ("generation", "scoring", "weight sync", "rollout wait")
"""Those that only runs of reinforcement learning have."""

SPANS = {
    "startup": "start-up",
    "context": "start-up",
    "restore": "start-up",
    "buffers": "start-up",
    "compile": "compile",
    "checkpoint": "checkpoint stall",
    "evaluation": "evaluation",
    "generate": "generation",
    "score": "scoring",
    "sync": "weight sync",
    "idle": "rollout wait",
    "compare": "detection",
    "shutdown": "shut-down",
}
"""The account of each span."""


@dataclass(frozen=True)
class AttemptTime:
    """One attempt's part of a ledger."""

    number: int
    wall: float
    """Unix seconds at the start of its allocation."""
    length_ns: int
    """How long the allocation lasted."""
    workers: tuple[Mapping[str, int], ...]
    """The accounts of each worker's device, by rank."""
    outcome: str | None
    """finished, stopped or failed; None while it runs, or when its agent was killed."""
    reason: str
    """Why it ended, as the agent recorded it."""
    device: str
    resumed_from: int | None
    """The step it resumed after; None if it never got that far."""
    storage_ns: int = 0
    """How much of its checkpoint stall was a wait for storage that had failed."""
    ended_in_outage: bool = False
    """Whether its storage had failed and did not work again before its end."""

    @property
    def accounts(self) -> dict[str, int]:
        """Nanoseconds by account, summed over workers."""
        return {name: sum(worker[name] for worker in self.workers) for name in ACCOUNTS}

    @property
    def total_ns(self) -> int:
        """Device-nanoseconds allocated to it."""
        return self.length_ns * len(self.workers)
