"""What the trainer supports with the libraries installed here."""

from dataclasses import replace
from functools import lru_cache
from importlib import metadata

from headway.plan.task import RUNNABLE, TrainerLimits
from headway.recipe import Recipe
from headway.recipe.families.diffusion import DiffusionModel

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


def supported_limits(recipe: Recipe) -> TrainerLimits:
    """Return the limits of this version's trainer for a recipe here."""
    limits, model = RUNNABLE, recipe.model
    if outdated_torch() is not None:
        limits = replace(limits, schedules=tuple(kind for kind in limits.schedules if kind != "zero-bubble"))
    missing = {"tensor"} if model.UNCUT else set[str]()
    missing |= {"context"} if whole_sequences(recipe) else set()
    missing |= {"tensor", "pipeline", "expert"} if recipe.inference.exact else set()
    return replace(limits, axes=tuple(axis for axis in limits.axes if axis not in missing))


def working_axes(recipe: Recipe) -> str:
    """Return, in words, the axes that a recipe which needs whole sequences or an uncut model may split over."""
    model, axes = recipe.model, ["shard", "replicate"]
    if not recipe.inference.exact:
        axes += ["tensor"] * (not model.UNCUT) + ["pipeline"] * (not isinstance(model, DiffusionModel))
    return f"{', '.join(axes[:-1])} and {axes[-1]}"


def whole_sequences(recipe: Recipe) -> str | None:
    """Return what of a recipe needs whole sequences on each worker; None if the context axis can split them."""
    if recipe.model.class_ is not None:
        return f"model.class {recipe.model.class_}"
    if isinstance(recipe.model, DiffusionModel):
        return f"family {recipe.model.family}"
    return "inference.exact" if recipe.inference.exact else None
