"""One attempt of a run as plain data, and the assignment of each of its workers."""

import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from headway.recipe import Assignment, FaultPlan, ParityTrial, SpikeReference, SuspectElement
from headway.track import RunFolder


class Attempt(BaseModel):
    """Everything decided before a start, as plain data that can be handed to another process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Path
    number: int
    workers: int
    nodes: int = 1
    """Machines the workers run on, each with an agent; the agent of this run leads them."""
    spares: int = 0
    """Extra machines that wait to replace a lost one."""
    host: str | None = None
    """Address of this machine for the agents of other machines; None emulates them all here."""
    port: int = 0
    """Port for the agents of other machines; 0 picks a free one."""
    apart: bool = False
    """Whether machines share no folder: leases, small files and records go to the run's object store too."""
    engine_start: int = 1
    """Which start of its engine's job this is."""
    lead: str = "here"
    """Name of the leading agent: that of its machine's node, if it has one."""
    device: Literal["cpu", "cuda"]
    threads: int
    checkpoint: str | None = None
    """Checkpoint to resume from: a folder, or an address in an object store."""
    older: tuple[str, ...] = ()
    """Checkpoints of the same source to use instead if that one is damaged, newest first."""
    from_memory: bool = False
    """Whether to resume from the snapshot in the agent's memory."""
    from_step: int = 0
    recipe_changes: dict[str, Any] = {}
    source: Literal["memory", "disk", "store", "start"] | None = None
    """Where the agent itself restored the state from after a failed attempt; None if somebody started this one."""
    judge: SpikeReference | None = None
    """Step whose loss was a spike, to be examined again."""
    doubt: SuspectElement | None = None
    """Element that differed between replicas, to be examined again."""
    accept: tuple[int, ...] = ()
    """Steps whose spikes are accepted."""
    notes: list[str] = []
    """What the user should know before the start."""
    faults: FaultPlan = FaultPlan()
    trial: ParityTrial | None = None
    """What workers do instead of training."""

    @property
    def multi_node(self) -> bool:
        """Whether the attempt has other machines than this one."""
        return self.nodes + self.spares > 1

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return RunFolder(self.run)


def make_assignment(
    attempt: Attempt, rank: int, draw: bool = False, first_rank: int = 0, rendezvous: str | None = None
) -> Assignment:
    """Make the assignment of one worker; each attempt has a new rendezvous, so that nothing stale is read."""
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
        rendezvous=rendezvous or str(attempt.folder.rendezvous / f"{attempt.number:04d}"),
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
