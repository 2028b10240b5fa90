"""The start message of a worker: plain data, sent as JSON."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from headway.recipe.faults import FaultPlan


class ParityTrial(BaseModel):
    """A few steps whose numbers are all written out, for comparison with another mesh."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    """Where to write losses, gradients and parameters."""
    steps: int
    """Number of steps of plain gradient descent."""


class SpikeReference(BaseModel):
    """What a step's loss is compared with in a replay after a spike."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    usual: float
    """The median of the preceding losses."""
    spread: float
    """Their robust standard deviation."""


class SuspectElement(BaseModel):
    """An element of a parameter that differed between replicas in an earlier attempt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """The step after which it differed; replicas are always compared there."""
    rank: int
    """A worker that holds it."""
    tensor: str
    index: int
    """Its index in that worker's part of the tensor, in memory order."""


class Assignment(BaseModel):
    """A worker's role in an attempt of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    """The run's folder."""
    attempt: int
    """Number of the attempt, from 1."""
    rank: int
    """This worker's rank, from 0."""
    workers: int
    """Number of workers."""
    first_rank: int = 0
    """The first rank on this node."""
    device: Literal["cpu", "cuda"]
    """The kind of device; a worker uses the one of its local rank."""
    threads: int
    """Compute threads per worker."""
    log: str
    """File for this worker's stdout and stderr."""
    rendezvous: str
    """Rendezvous of this attempt's workers: a file, or tcp://HOST:PORT of rank 0's node."""
    asked_ns: int
    """When the agent requested this worker (monotonic): its start-up counts from here."""
    checkpoint: str | None = None
    """The checkpoint to resume from, a folder or an object store URL; None starts at step 0."""
    from_memory: bool = False
    """Resume from a snapshot in the agent's memory, sent over the channel."""
    judge: SpikeReference | None = None
    """Reference for the replay of a step whose loss was a spike."""
    doubt: SuspectElement | None = None
    """An element to record in the replay, since replicas differed there."""
    accept: tuple[int, ...] = ()
    """Steps whose spikes recurred in a replay and are accepted."""
    draw: bool = False
    """Only initialize the weights of a custom model, and store them in the run's folder."""
    trial: ParityTrial | None = None
    """Run a parity trial instead of training."""
    faults: FaultPlan = FaultPlan()
    """Faults to inject."""

    @property
    def local_rank(self) -> int:
        """This worker's rank on its node."""
        return self.rank - self.first_rank
