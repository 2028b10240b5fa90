"""plan.json: what was planned for a run before it started, to be held against what was measured."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from headway.track.files import write_json
from headway.track.runs import RunFolder

__all__ = ["RunPlan", "read_plan", "write_plan"]


class RunPlan(BaseModel):
    """How a run was planned to go: the settings it runs with, and what they were predicted to take."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    cluster: str
    """The devices, as `headway plan --on` would name them."""
    chip: str
    assumed: bool
    """Whether the chip's figures are assumed, as a CPU's are: the prediction is rough then."""
    fidelity: str
    """How much the prediction knows: see `headway plan --fidelity`."""
    mesh: Mapping[str, int]
    """Size of each axis."""
    seq: int
    batch: int
    microbatch: int
    """Sequences a worker puts through the model at once."""
    recompute: str
    """What is computed again in the backward pass: none, selective (all but products), or full."""
    recompute_blocks: int | None = None
    """How many of a worker's blocks do so; None is all."""
    reduces_each: bool = False
    """Whether gradients are added up over shards in every microbatch."""
    keeps_weights: bool = False
    """Whether gathered weights stay from the forward pass to the backward pass."""
    schedule: str = "1f1b"
    """In which order a pipeline's stages work on microbatches."""
    chunks: int = 1
    """Stages that each worker of a pipeline has."""
    stages: tuple[int, ...] | None = None
    """Blocks of each of a pipeline's stages."""
    precision: str
    """Of the matrix products."""
    chosen: Mapping[str, Any]
    """Keys of the recipe that the plan filled in, with their values."""
    from_step: int = 0
    """It holds for the steps after this one: a run that goes on with other workers gets a new plan."""
    step_s: float
    accounts_s: Mapping[str, float]
    """Where the seconds of a step go."""
    tokens_s: float
    """Of all devices together."""
    mfu: float
    """Causal attention counted half."""
    mfu_full_attention: float
    memory_bytes: Mapping[str, float]
    """At the peak of one device, by what holds it."""
    capacity_bytes: float
    """What a device has."""

    @property
    def total_bytes(self) -> float:
        """What a device needs at its peak."""
        return sum(self.memory_bytes.values())

    @property
    def devices(self) -> int:
        """How many it takes; the expert axis lies across the others."""
        count = 1
        for axis, size in self.mesh.items():
            count *= 1 if axis == "expert" else size
        return count


def read_plan(run: RunFolder) -> RunPlan | None:
    """What was planned for a run; None if nothing was, or nothing that can be read."""
    try:
        return RunPlan.model_validate_json(run.plan_file.read_bytes())
    except (OSError, ValidationError):
        return None


def write_plan(run: RunFolder, plan: RunPlan) -> None:
    """Write a run's plan.json."""
    write_json(run.plan_file, plan.model_dump())
