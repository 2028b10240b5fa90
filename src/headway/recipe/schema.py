"""What a recipe may say: every section, field, unit and allowed range.

Objects are frozen. Fields that follow from others (a head's size from the width) are filled in at
construction, so that a resolved recipe shows every number that will be used.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headway.recipe.data import Data
from headway.recipe.families import AnyModel
from headway.recipe.families.llama import Llama
from headway.recipe.section import DERIVED, NotNegative, Positive, Section
from headway.recipe.train import Train

__all__ = ["Checkpoint", "Data", "Eval", "Health", "Parallel", "Recipe", "Store", "Train"]


class Parallel(Section):
    """How the workers are laid out: a mesh, whose axes but `expert` multiply to the workers there are."""

    replicate: Positive = 1
    """Copies of the whole, which exchange gradients."""
    shard: Positive | None = None
    """Workers that share weights, gradients and optimizer; by default all that the other axes leave."""
    tensor: Positive = 1
    """Workers that share each matrix of a layer."""
    pipeline: Positive = 1
    """Stages that layers are spread over."""
    context: Positive = 1
    """Workers that share each sequence."""
    expert: Positive = 1
    """Workers that share a layer's experts; they lie across the other axes."""
    keep_weights: bool | None = None
    """Keep a block's gathered weights from its forward pass to its backward pass; by default as planned."""
    reduce_each: bool | None = None
    """Add gradients up over shards in every microbatch, instead of keeping them whole to the last; by default as
    planned."""
    schedule: Literal["1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """In which order a pipeline's stages work on microbatches."""
    chunks: Positive = DERIVED
    """Stages that each worker of an interleaved pipeline has; by default 2 of them, else 1."""
    stages: tuple[Positive, ...] | None = None
    """Blocks of each stage, from the first; by default as planned, or as even as can be."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("chunks") is None:
            values = {**values, "chunks": 2 if values.get("schedule") == "interleaved" else 1}
        return values

    def sizes(self, workers: int) -> dict[str, int]:
        """The axes of a mesh of so many workers."""
        given = {axis: getattr(self, axis) for axis in ("pipeline", "replicate", "shard", "context", "tensor")}
        others = math.prod(size for size in given.values() if size is not None)
        return {axis: workers // others if size is None else size for axis, size in given.items()}


class Eval(Section):
    """When to measure the loss on held-out windows."""

    every_steps: NotNegative = 0
    """Evaluate after each so many steps, and after the last; 0 never."""
    windows: Positive = 64
    """Held-out windows to use, at most as many as there are."""


class Store(Section):
    """An object store that checkpoints are also put into."""

    url: Annotated[str, Field(min_length=1)]
    """s3://bucket/prefix, gs://, az:// or file://; the run's name is added. Credentials come from the environment."""
    every_steps: NotNegative = 1000
    """Upload after each so many steps; the last step always is. 0: only the last."""
    keep_last: Positive = 3
    """Newest checkpoints to keep there."""
    keep_every_steps: NotNegative = 0
    """Also keep there every checkpoint whose step is a multiple of this; 0 keeps none of them."""


class Checkpoint(Section):
    """When to make the state durable, and what to keep."""

    every_steps: NotNegative | Literal["auto"] = 100
    """Save to disk after each so many steps; the last step is always saved. 0: only the last. "auto": as often as costs
    least, by what saves cost here and how often things fail."""
    keep_last: Positive = 2
    """Newest checkpoints to keep."""
    keep_every_steps: NotNegative = 0
    """Also keep every checkpoint whose step is a multiple of this; 0 keeps none of them."""
    memory_every_steps: NotNegative = 0
    """Also keep the state in the agent's memory after each so many steps: a worker that died goes on from there. What
    goes to disk is kept as well. 0: only that."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Memory of this machine for states that are kept or wait to be written, in GB; by default two states, or one where
    two would take more than half of what is free. A save that finds no room is left out and recorded."""
    hours_between_failures: Annotated[float, Field(gt=0)] | None = None
    """Hours of one device between its failures, for "auto"; by default what a large published run saw. What this run
    sees of failures itself counts too."""
    retry_s: Annotated[float, Field(ge=0)] = 60.0
    """How long the last save is tried again when the disk or the store refuses; others are left out and recorded."""
    store: Store | None = None
    """An object store that checkpoints are also put into."""


class Health(Section):
    """What counts as numbers gone wrong, how often copies are compared, and what is done when going back does not
    help."""

    spike_z: Annotated[float, Field(ge=0)] = 50.0
    """How far above the last losses, in robust standard deviations, a loss is a spike; 0 looks for none."""
    spike_window: Positive = 64
    """Losses to compare with; as many must be there first."""
    if_not_finite: Literal["stop", "skip", "lower-rate"] = "stop"
    """What to do when a loss or gradient norm that is no number comes again after going back and replaying: stop, pass
    over the step's samples, or lower the learning rate from that step on."""
    if_spike: Literal["go-on", "stop", "skip", "lower-rate"] = "go-on"
    """What to do when a spike comes again after going back and replaying; going on takes it as it is."""
    rate_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """What "lower-rate" multiplies the learning rate by."""
    compare_every_steps: NotNegative = 100
    """Compare the parameters of replicas bit for bit every so many steps, and before every save; 0 never."""


class Recipe(Section):
    """What to train: one complete object, from TOML or from Python."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "run"
    """Runs are called after it."""
    seed: NotNegative = 0
    """Seed of the weights, the data order and everything else random."""
    model: AnyModel = Field(default_factory=Llama)
    """The decoder to train, in plain numbers."""
    data: Data
    """Which tokens to train on."""
    train: Train = Field(default_factory=Train)
    """How to train."""
    parallel: Parallel | None = None
    """How the workers are laid out; without this section the plan decides."""
    eval: Eval = Field(default_factory=Eval)
    """When to measure the loss on held-out windows."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """When to make the state durable, and what to keep."""
    health: Health = Field(default_factory=Health)
    """What counts as numbers gone wrong, and what to do then."""

    def compiles(self, device: str) -> bool:
        """Whether blocks are compiled on a kind of device: where nothing is said, those of our own families on GPUs."""
        if self.train.compile is not None:
            return self.train.compile
        splits_backward = self.parallel is not None and self.parallel.schedule == "zero-bubble"
        return device == "cuda" and self.model.class_ is None and not splits_backward

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.model.mup_base is not None and self.train.optimizer not in ("adamw", "adamw-8bit"):
            raise ValueError(f"model.mup_base says how AdamW's rates follow a width, not {self.train.optimizer}'s")
        return self
