"""What the trainer runs with the libraries that are installed here."""

from dataclasses import replace
from functools import lru_cache
from importlib import metadata

from headway.plan.task import RUNNABLE, Limits
from headway.recipe import Model

__all__ = ["old_torch", "runnable"]

SPLIT_BACKWARD = (2, 13)
"""PyTorch 2.11 does not split the backward pass of functions written in Python, as losses are; 2.13 does, and 2.12 was
never tried."""


@lru_cache
def old_torch() -> str | None:
    """The installed PyTorch, where it is too old for a zero-bubble pipeline; None where it is not, or there is none."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    return version if numbers < SPLIT_BACKWARD else None


def runnable(model: Model) -> Limits:
    """What this version's trainer runs here of such a model."""
    limits = RUNNABLE
    if old_torch() is not None:
        limits = replace(limits, schedules=tuple(kind for kind in limits.schedules if kind != "zero-bubble"))
    if model.UNCUT:
        limits = replace(limits, axes=tuple(axis for axis in limits.axes if axis != "tensor"))
    return limits
