"""One life of a run as plain data, and what each of its workers is told."""

import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from headway.recipe import Assignment, FaultPlan, ParityTrial, SpikeReference, SuspectElement
from headway.track import RunFolder

__all__ = ["Attempt", "make_assignment"]


class Attempt(BaseModel):
    """What to start: everything decided beforehand, as plain data that can be handed to another process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Path
    number: int
    workers: int
    nodes: int = 1
    """Machines that they are on; each has an agent, and this run's leads them."""
    spares: int = 0
    """Machines beyond these that wait to take the place of one that is lost."""
    host: str | None = None
    """This machine's address, where the agents of other machines call; None emulates them all here."""
    port: int = 0
    """At which they call; 0 takes a free one."""
    apart: bool = False
    """Whether machines see no common folder: leases, small files and records are kept in the run's object store too."""
    lead: str = "here"
    """What the agent that leads is called: as the node of its machine, where there is one."""
    device: Literal["cpu", "cuda"]
    threads: int
    checkpoint: str | None = None
    """The checkpoint to go on from: a folder, or the address of one in an object store."""
    from_memory: bool = False
    """Whether to go on from the state in the agent's memory."""
    from_step: int = 0
    recipe_changes: dict[str, Any] = {}
    source: Literal["memory", "disk", "store", "start"] | None = None
    """Where the agent itself took the state from, after an attempt that failed; None where somebody started it."""
    judge: SpikeReference | None = None
    """The step whose loss was a spike, to be looked at again."""
    doubt: SuspectElement | None = None
    """What differed between replicas, to be looked at again."""
    accept: tuple[int, ...] = ()
    """Steps whose spikes are taken as they are."""
    notes: list[str] = []
    """What the user should know before it starts."""
    faults: FaultPlan = FaultPlan()
    trial: ParityTrial | None = None
    """What workers do instead of training."""

    @property
    def several(self) -> bool:
        """Whether there are more machines than this one."""
        return self.nodes + self.spares > 1

    @property
    def folder(self) -> RunFolder:
        """The run's folder, by its parts."""
        return RunFolder(self.run)


def make_assignment(
    attempt: Attempt, rank: int, draw: bool = False, first_rank: int = 0, meet: str | None = None
) -> Assignment:
    """What one worker of an attempt is told; a new meeting place for every attempt, so that nothing stale is read."""
    process = "draw" if draw else f"rank-{rank}"
    return Assignment(
        run=str(attempt.run),
        attempt=attempt.number,
        rank=rank,
        workers=attempt.workers,
        device=attempt.device,
        threads=attempt.threads,
        log=str(attempt.folder.logs / f"{attempt.number:04d}-{process}.log"),
        first_rank=first_rank,
        rendezvous=meet or str(attempt.folder.rendezvous / f"{attempt.number:04d}"),
        asked_ns=time.monotonic_ns(),
        checkpoint=attempt.checkpoint,
        from_memory=attempt.from_memory,
        judge=attempt.judge,
        doubt=attempt.doubt,
        accept=attempt.accept,
        draw=draw,
        trial=attempt.trial,
        faults=attempt.faults,
    )
