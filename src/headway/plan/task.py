"""Inputs of a search: the training task, the limits of a trainer, and the search space."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from headway.hardware import precision
from headway.plan.architecture import Architecture
from headway.plan.settings import AXES, Mesh, Recompute, Schedule, Settings, Software


@dataclass(frozen=True)
class TrainingTask:
    """What to train, independent of the mesh."""

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
    """The settings that a trainer supports."""

    axes: tuple[str, ...] = AXES
    """Mesh axes that may be larger than 1."""
    zero: tuple[int, ...] = (0, 1, 2, 3)
    """Without a shard axis every stage is the same."""
    recompute: tuple[Recompute, ...] = ("none", "attention", "selective", "except-attention", "full")
    schedules: tuple[Schedule, ...] = ("1f1b", "interleaved", "zero-bubble")
    precisions: tuple[str, ...] | None = None
    """By any of their names; None means all."""
    moment_bytes: tuple[float, ...] | None = None
    """Of each of Adam's two moments; None means any."""
    conflict: Callable[[Settings], str | None] = lambda _: None
    """Why its pipeline schedules cannot run the settings; None if they can."""

    def allows(self, settings: Settings) -> bool:
        """Whether the trainer can run the settings."""
        return (
            settings.recompute in self.recompute
            and settings.schedule in self.schedules
            and self.allows_mesh(settings.mesh, settings.zero)
            and (self.precisions is None or precision(settings.precision) in map(precision, self.precisions))
            and (self.moment_bytes is None or settings.software.moment_bytes in self.moment_bytes)
            and (settings.mesh.pipeline == 1 or self.conflict(settings) is None)
        )

    def allows_mesh(self, mesh: Mesh, zero: int) -> bool:
        """Whether the trainer can run on the mesh."""
        return (mesh.owners == 1 or zero in self.zero) and all(
            getattr(mesh, axis) == 1 or axis in self.axes for axis in AXES
        )


def schedule_conflict(settings: Settings) -> str | None:
    """Why PyTorch's pipeline schedules, which the trainer uses, cannot run the settings; None if they can."""
    ranks, count = settings.mesh.pipeline, settings.microbatches
    if settings.schedule == "1f1b" and count < ranks:
        return f"1f1b over {ranks} stages needs at least {ranks} microbatches, got {count}"
    if settings.schedule == "zero-bubble" and count % max(1, count // ranks):
        rounds = count // ranks
        return f"zero-bubble needs microbatches in {rounds} equal rounds over {ranks} stages, got {count}"
    if settings.schedule == "zero-bubble" and settings.software.fusion == "compiled":
        return "zero-bubble splits backward passes, and compiled blocks cannot be split"
    return None


RUNNABLE = TrainerLimits(
    axes=("replicate", "shard", "tensor", "pipeline", "context", "expert"),
    zero=(3,),
    recompute=("none", "selective", "except-attention", "full"),
    precisions=("bf16", "fp32", "fp8"),
    moment_bytes=(2, 4),
    conflict=schedule_conflict,
)
"""What this version's trainer supports; the single source of truth."""


def trainer_limits(arch: Architecture) -> TrainerLimits:
    """Return what the trainer supports for a model: no tensor axis with experts or latent attention."""
    if not (arch.experts or arch.latent):
        return RUNNABLE
    return replace(RUNNABLE, axes=tuple(axis for axis in RUNNABLE.axes if axis != "tensor"))


@dataclass(frozen=True)
class SearchSpace:
    """What a search may vary; None means every sensible value."""

    mesh: Mesh | None = None
    """Fixed mesh; otherwise all whose sizes divide what they split."""
    microbatches: tuple[int, ...] | None = None
    """Sequences per pass; otherwise all that divide a data rank's share of the batch, up to MOST_TOKENS."""
    recompute: tuple[Recompute, ...] = ("none", "selective", "except-attention", "full")
    """Everything except attention only in long sequences, unless it is the only policy."""
    schedules: tuple[Schedule, ...] = ("1f1b", "interleaved", "zero-bubble")
    chunks: tuple[int, ...] | None = None
    """Of an interleaved pipeline; otherwise 2 to 8 that give stages equal layers, or 2."""
    precisions: tuple[str, ...] | None = None
    """Otherwise the task's, since precision changes the model."""
    moment_bytes: tuple[float, ...] | None = None
    """Otherwise the trainer's, for the same reason."""
    zero: tuple[int, ...] = (0, 1, 3)
    keeps_weights: tuple[bool, ...] | None = None
    """With sharded weights and no pipeline; otherwise the task's."""
    reduces_each: tuple[bool, ...] | None = None
    """Likewise; otherwise gradients are reduced once per step."""
    blocks: int | None = None
    """Recomputed layers per device; otherwise all."""
    least_blocks: bool = False
    """Recompute as few layers as memory allows; otherwise `blocks`."""
    room: float = 0.0
    """Share of memory that `least_blocks` leaves free for prediction errors; 0 if all layers are recomputed."""
    stages: tuple[int, ...] | None = None
    """Layers per pipeline stage; otherwise as the trainer cuts them."""
    max_tensor: int | None = None
    """Otherwise the devices of the fastest network level."""
    context: bool | None = None
    """Whether to try context parallelism; otherwise for long sequences, or if nothing else fits."""
    limits: TrainerLimits | None = None
    """Restricts the search to what a trainer supports."""
