"""plan.json: the plan a run started with, for comparison with what was measured."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from headway.track.files import write_json
from headway.track.run_folder import RunFolder


class RunPlan(BaseModel):
    """The settings a run was planned with, and its predicted step time and memory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    cluster: str
    """The devices, as for `headway plan --on`."""
    chip: str
    assumed: bool
    """Whether the chip's specifications are assumed, as for CPUs; the prediction is then rough."""
    fidelity: str
    """Fidelity of the prediction: see `headway plan --fidelity`."""
    mesh: Mapping[str, int]
    """Size of each axis."""
    seq: int
    batch: int
    microbatch: int
    """Sequences per forward pass of a worker."""
    recompute: str
    """What the backward pass recomputes: none, selective (everything but matrix products) or full."""
    recompute_blocks: int | None = None
    """How many of a worker's blocks recompute; None means all."""
    reduces_each: bool = False
    """Whether gradients are reduced over shards in every microbatch."""
    keeps_weights: bool = False
    """Whether gathered weights are kept from the forward to the backward pass."""
    schedule: str = "1f1b"
    """Pipeline schedule."""
    chunks: int = 1
    """Pipeline stages per worker."""
    stages: tuple[int, ...] | None = None
    """Blocks per pipeline stage."""
    precision: str
    """Of matrix products."""
    chosen: Mapping[str, Any]
    """Recipe keys that the plan filled in, with their values."""
    from_step: int = 0
    """The plan is for the steps after this one: a run resumed with other workers gets a new plan."""
    step_s: float
    accounts_s: Mapping[str, float]
    """Seconds of a step, by account."""
    tokens_s: float
    """Over all devices."""
    mfu: float
    """Counts half of causal attention."""
    mfu_full_attention: float
    memory_bytes: Mapping[str, float]
    """Of one device at its peak, by what holds it."""
    capacity_bytes: float
    """Of one device."""

    @property
    def total_bytes(self) -> float:
        """Peak memory of one device."""
        return sum(self.memory_bytes.values())

    @property
    def devices(self) -> int:
        """Number of devices; the expert axis overlaps the others."""
        return math.prod(size for axis, size in self.mesh.items() if axis != "expert")


def read_plan(run: RunFolder) -> RunPlan | None:
    """Return the plan of a run; None if there is none or it cannot be read."""
    try:
        return RunPlan.model_validate_json(run.plan_file.read_bytes())
    except (OSError, ValidationError):
        return None


def write_plan(run: RunFolder, plan: RunPlan) -> None:
    """Write a run's plan.json."""
    write_json(run.plan_file, plan.model_dump())
