"""What the trainer supports with the libraries installed here."""

from dataclasses import replace
from functools import lru_cache
from importlib import metadata

from headway.plan.task import RUNNABLE, TrainerLimits
from headway.recipe import Model

SPLIT_BACKWARD = (2, 13)
"""PyTorch 2.11 does not split the backward pass of functions written in Python, as losses are; 2.13 does, 2.12 is
untested."""


@lru_cache
def outdated_torch() -> str | None:
    """Return the installed PyTorch version if it is too old for a zero-bubble pipeline; else None."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    return version if numbers < SPLIT_BACKWARD else None


def supported_limits(model: Model) -> TrainerLimits:
    """Return the limits of this version's trainer for a model here."""
    limits = RUNNABLE
    if outdated_torch() is not None:
        limits = replace(limits, schedules=tuple(kind for kind in limits.schedules if kind != "zero-bubble"))
    if model.UNCUT:
        limits = replace(limits, axes=tuple(axis for axis in limits.axes if axis != "tensor"))
    return limits
