"""What one worker is told when it is started: plain data, sent as JSON."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from headway.recipe.faults import FaultPlan

__all__ = ["Assignment", "ParityTrial", "SpikeReference", "SuspectElement"]


class ParityTrial(BaseModel):
    """A few steps whose every number is written down, to be held against those of another mesh."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    """Where to write losses, gradients and parameters."""
    steps: int
    """How many steps of plain gradient descent to make."""


class SpikeReference(BaseModel):
    """What a step's loss is held against, when it is made again after a spike."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    usual: float
    """The median of the losses before it."""
    spread: float
    """Their robust standard deviation."""


class SuspectElement(BaseModel):
    """A parameter's element that differed between replicas in an attempt before this one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """After which it differed: replicas are compared then in any case."""
    rank: int
    """A worker that holds it."""
    tensor: str
    index: int
    """Its number in that worker's part of the tensor, in the order of its memory."""


class Assignment(BaseModel):
    """One worker's place in an attempt of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    """The run's folder."""
    attempt: int
    """Which life of the run this is, from 1."""
    rank: int
    """This worker's number, from 0."""
    workers: int
    """How many workers there are."""
    first_rank: int = 0
    """The first worker of those on this node."""
    device: Literal["cpu", "cuda"]
    """The kind of device; a worker takes the one of its rank on its node."""
    threads: int
    """Threads for one worker's arithmetic."""
    log: str
    """The file that takes this worker's standard output and error."""
    rendezvous: str
    """Where the workers of this attempt find each other: a file, or tcp://HOST:PORT of rank 0's node."""
    asked_ns: int
    """When the agent asked for this worker (monotonic): its start-up counts from here."""
    checkpoint: str | None = None
    """The checkpoint to go on from, a folder or an address in an object store; None starts at step 0."""
    from_memory: bool = False
    """Go on from the state in the agent's memory, which comes over the line."""
    judge: SpikeReference | None = None
    """A step whose loss was a spike before: what to hold it against now that it comes again."""
    doubt: SuspectElement | None = None
    """What differed between replicas before: the record says what it is this time."""
    accept: tuple[int, ...] = ()
    """Steps whose spikes came again and are taken as they are."""
    draw: bool = False
    """Only make the first weights of a class of the user's own, and leave them in the run's folder."""
    trial: ParityTrial | None = None
    """Make a trial instead of training."""
    faults: FaultPlan = FaultPlan()
    """What to break on purpose."""

    @property
    def local_rank(self) -> int:
        """This worker's number on its node."""
        return self.rank - self.first_rank
