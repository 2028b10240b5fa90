"""What is to be trained, what a trainer can run, and what a search may vary."""

from collections.abc import Callable
from dataclasses import dataclass, field

from headway.hardware import precision
from headway.plan.architecture import Architecture
from headway.plan.settings import AXES, Mesh, Recompute, Schedule, Settings, Software

__all__ = ["RUNNABLE", "SearchSpace", "TrainerLimits", "TrainingTask", "pipeline_clash"]


@dataclass(frozen=True)
class TrainingTask:
    """What is to be trained, whatever the way."""

    architecture: Architecture
    seq: int
    batch: int
    """Sequences in one step, over all devices."""
    software: Software = field(default_factory=Software)
    precision: str = "bf16"
    keeps_weights: bool = False
    frozen: bool = False
    imbalance: float = 1.0
    """Tokens of the busiest expert's device over the mean."""


@dataclass(frozen=True)
class TrainerLimits:
    """What a trainer can run."""

    axes: tuple[str, ...] = AXES
    """Of the mesh, that may be larger than 1."""
    zero: tuple[int, ...] = (0, 1, 2, 3)
    """Where there is no shard axis there is nothing to spread, and any is right."""
    recompute: tuple[Recompute, ...] = ("none", "attention", "selective", "full")
    schedules: tuple[Schedule, ...] = ("1f1b", "interleaved", "zero-bubble")
    precisions: tuple[str, ...] | None = None
    """By any of their names; None is all."""
    moment_bytes: tuple[float, ...] | None = None
    """Of each of Adam's two moments; None is any."""
    orders: Callable[[Settings], str | None] = lambda _: None
    """What its pipeline schedules ask for beyond what all do: a sentence of the settings that lack it."""

    def allows(self, settings: Settings) -> bool:
        """Whether the trainer runs it."""
        return (
            settings.recompute in self.recompute
            and settings.schedule in self.schedules
            and self.allows_mesh(settings.mesh, settings.zero)
            and (self.precisions is None or precision(settings.precision) in map(precision, self.precisions))
            and (self.moment_bytes is None or settings.software.moment_bytes in self.moment_bytes)
            and (settings.mesh.pipeline == 1 or self.orders(settings) is None)
        )

    def allows_mesh(self, mesh: Mesh, zero: int) -> bool:
        """Whether it runs on such a mesh."""
        return (mesh.shard * mesh.context == 1 or zero in self.zero) and all(
            getattr(mesh, axis) == 1 or axis in self.axes for axis in AXES
        )


def pipeline_clash(settings: Settings) -> str | None:
    """What PyTorch's schedules, which this version's trainer uses, miss in a pipeline's settings; None for nothing."""
    ranks, count = settings.mesh.pipeline, settings.microbatches
    if settings.schedule == "1f1b" and count < ranks:
        return f"1f1b over {ranks} stages takes {ranks} microbatches at least, and there are {count}"
    if settings.schedule == "zero-bubble" and count % max(1, count // ranks):
        rounds = count // ranks
        return f"zero-bubble takes microbatches in {rounds} equal rounds over {ranks} stages, and there are {count}"
    if settings.schedule == "zero-bubble" and settings.software.fusion == "compiled":
        return "zero-bubble splits backward passes, which compiled blocks do not allow"
    return None


RUNNABLE = TrainerLimits(
    axes=("replicate", "shard", "tensor", "pipeline"),
    zero=(3,),
    recompute=("none", "selective", "full"),
    precisions=("bf16", "fp32"),
    moment_bytes=(2, 4),
    orders=pipeline_clash,
)
"""What this version's trainer runs: the one place that says so."""


@dataclass(frozen=True)
class SearchSpace:
    """What a search may vary; None leaves it to the search, which then tries all that is sensible."""

    mesh: Mesh | None = None
    """The one to use; otherwise all whose sizes divide what they share."""
    microbatches: tuple[int, ...] | None = None
    """Sequences in one pass; otherwise all that divide a data rank's share of the batch, up to MOST_TOKENS."""
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    schedules: tuple[Schedule, ...] = ("1f1b", "interleaved", "zero-bubble")
    chunks: tuple[int, ...] | None = None
    """Of an interleaved pipeline; otherwise 2 to 8 that give all stages as many layers, or 2."""
    precisions: tuple[str, ...] | None = None
    """Otherwise the task's: another one trains another model."""
    moment_bytes: tuple[float, ...] | None = None
    """Otherwise the software's, for the same reason."""
    zero: tuple[int, ...] = (0, 1, 3)
    keeps_weights: tuple[bool, ...] | None = None
    """Of sharded weights without a pipeline; otherwise the task's."""
    reduces_each: tuple[bool, ...] | None = None
    """Of the same; otherwise gradients travel once a step."""
    blocks: int | None = None
    """Layers of a device that are recomputed, where anything is; otherwise all."""
    least_blocks: bool = False
    """Recompute as few of a device's layers as memory allows; otherwise `blocks`."""
    room: float = 0.0
    """Share of the memory that this leaves free, since predictions err; where all layers must be recomputed, none."""
    stages: tuple[int, ...] | None = None
    """Layers of each of a pipeline's stages; otherwise as the software cuts them."""
    max_tensor: int | None = None
    """Otherwise as many devices as the fastest links join."""
    context: bool | None = None
    """Whether to share sequences among devices; otherwise long ones, and any where nothing else fits."""
    limits: TrainerLimits | None = None
    """What the trainer can run, where only that counts."""
