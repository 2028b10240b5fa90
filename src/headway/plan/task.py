"""What is to be trained, what a trainer can run, and what a search may vary."""

from dataclasses import dataclass, field

from headway.hardware import precision
from headway.plan.architecture import Architecture
from headway.plan.settings import AXES, Mesh, Recompute, Schedule, Settings, Software

__all__ = ["RUNNABLE", "Choices", "Limits", "Task"]


@dataclass(frozen=True)
class Task:
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
class Limits:
    """What a trainer can run."""

    axes: tuple[str, ...] = AXES
    """Of the mesh, that may be larger than 1."""
    zero: tuple[int, ...] = (0, 1, 2, 3)
    """On one device there is nothing to spread, and any is right."""
    recompute: tuple[Recompute, ...] = ("none", "attention", "selective", "full")
    schedules: tuple[Schedule, ...] = ("1f1b", "interleaved", "zero-bubble")
    precisions: tuple[str, ...] | None = None
    """By any of their names; None is all."""
    moment_bytes: tuple[float, ...] | None = None
    """Of each of Adam's two moments; None is any."""

    def allows(self, settings: Settings) -> bool:
        """Whether the trainer runs it."""
        return (
            settings.recompute in self.recompute
            and settings.schedule in self.schedules
            and self.allows_mesh(settings.mesh, settings.zero)
            and (self.precisions is None or precision(settings.precision) in map(precision, self.precisions))
            and (self.moment_bytes is None or settings.software.moment_bytes in self.moment_bytes)
        )

    def allows_mesh(self, mesh: Mesh, zero: int) -> bool:
        """Whether it runs on such a mesh."""
        return (mesh.devices == 1 or zero in self.zero) and all(
            getattr(mesh, axis) == 1 or axis in self.axes for axis in AXES
        )


RUNNABLE = Limits(
    axes=("shard",),
    zero=(3,),
    recompute=("none", "full"),
    schedules=("1f1b",),
    precisions=("bf16", "fp32"),
    moment_bytes=(4,),
)
"""What this version's trainer runs."""


@dataclass(frozen=True)
class Choices:
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
    max_tensor: int | None = None
    """Otherwise as many devices as the fastest links join."""
    context: bool | None = None
    """Whether to share sequences among devices; otherwise long ones, and any where nothing else fits."""
    limits: Limits | None = None
    """What the trainer can run, where only that counts."""
