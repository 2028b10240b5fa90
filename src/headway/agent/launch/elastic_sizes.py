"""The sizes that an elastic run may have: each planned before it is submitted, on the same recipe and batch."""

from collections.abc import Callable, Iterable

from headway.agent.launch.auto_plan import plan_run
from headway.agent.launch.mesh_checks import check_axes, check_mesh, check_workers, count_workers, mesh_can_run
from headway.errors import HeadwayError, UsageError, plural
from headway.hardware import Devices
from headway.recipe import Recipe

MOST_TRIES = 8
"""Plans that are made to find a size that works, on each side of one that does not."""
REACH = 4
"""How many times as large a size may be that is suggested instead."""


def check_elastic(recipe: Recipe) -> None:
    """Raise UsageError for a recipe whose mesh has one size only."""
    if recipe.parallel is not None and recipe.parallel.shard is not None:
        raise UsageError(
            f"run {recipe.name} cannot be elastic: its mesh is fixed, parallel.shard is {recipe.parallel.shard}",
            hint="leave parallel.shard out: it then takes the GPUs that the other axes leave",
        )


def predicted_speeds(recipe: Recipe, sizes: Iterable[int], on: Callable[[int], Devices]) -> dict[int, float]:
    """Return the tokens per second of a resolved recipe with each number of GPUs, by their plans; UsageError for one
    that does not work, with the nearest that do as its hint."""
    check_axes(recipe)
    speeds = dict[int, float]()
    for size in sizes:
        try:
            speeds[size] = _tokens_s(recipe, size, on(size))
        except HeadwayError as error:
            raise UsageError(
                f"run {recipe.name} cannot have {plural(size, 'GPU')}: {error.message}",
                hint=_nearest(recipe, size, on) or error.hint,
            ) from None
    return speeds


def _tokens_s(recipe: Recipe, size: int, devices: Devices) -> float:
    """Return the tokens per second of a size; HeadwayError if it does not divide or fit."""
    count_workers(recipe, size, size)
    check_workers(recipe, size, devices, resumed=True)
    check_mesh(recipe, size)
    planned = plan_run(recipe, devices, size)
    if planned.plan is None:
        raise UsageError("; ".join(planned.notes))
    if planned.plan.total_bytes > planned.plan.capacity_bytes:
        needs, has = planned.plan.total_bytes / 2**30, planned.plan.capacity_bytes / 2**30
        raise UsageError(f"its plan needs {needs:.1f} GiB per GPU of {has:.1f}")
    return planned.plan.tokens_s


def _nearest(recipe: Recipe, size: int, on: Callable[[int], Devices]) -> str | None:
    """Return the nearest sizes below and above that work, as a hint; None if none was found."""
    below = _first_that_works(recipe, range(size - 1, 0, -1), on)
    above = _first_that_works(recipe, range(size + 1, REACH * size + 1), on)
    nearest = [str(working) for working in (below, above) if working is not None]
    return f"use {' or '.join(nearest)}" if nearest else None


def _first_that_works(recipe: Recipe, sizes: Iterable[int], on: Callable[[int], Devices]) -> int | None:
    tried = 0
    for size in sizes:
        if tried == MOST_TRIES:
            return None
        if mesh_can_run(recipe, size):
            tried += 1
            try:
                _tokens_s(recipe, size, on(size))
            except HeadwayError:
                continue
            return size
    return None
