"""A requested sweep: the points of a grid, checked before anything is created."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.agent.saving.restore_points import need_store
from headway.cluster.engines.settings import engine_settings
from headway.cluster.submit.grid import GridAxis, point_names, points, short_keys
from headway.cluster.submit.sweeps import SWEEP_NAME, SweepRun
from headway.errors import RecipeError, UsageError
from headway.hardware import Cluster, default_cluster, devices, known_chip, parse_on
from headway.recipe import Recipe, load_recipe


@dataclass(frozen=True)
class SweepRequest:
    """A requested sweep: everything that is known before anything is created."""

    name: str
    points: tuple[SweepRun, ...]
    recipes: tuple[Recipe, ...]
    keys: dict[str, str]
    cluster: Cluster
    engine: str
    at_once: int | None = None

    @property
    def no_shared_folder(self) -> bool:
        """Whether runs travel through their object stores."""
        return any(point.address for point in self.points)

    @property
    def identity(self) -> str:
        """Equal for equal recipes on the same devices."""
        parts = [self.engine, self.cluster.name, str(self.at_once)]
        parts += [recipe.model_dump_json() for recipe in self.recipes]
        parts += ["apart"] if self.no_shared_folder else []
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def request_sweep(
    file: Path,
    settings: Sequence[str],
    axes: Sequence[GridAxis],
    *,
    engine: str,
    on: Cluster | None = None,
    name: str | None = None,
    at_once: int | None = None,
    shared: bool = True,
) -> SweepRequest:
    """The request for a sweep; an invalid point raises before anything is created. If no folder is `shared`, each run
    needs an object store."""
    recipes = tuple(_load_recipe(file, settings, point) for point in points(axes))
    by_recipe = dict[str, dict[str, str]]()
    for recipe, point in zip(recipes, points(axes), strict=True):
        first = by_recipe.setdefault(recipe.model_dump_json(), point)
        if first is not point:
            same = " and ".join(" ".join(f"{key}={value}" for key, value in each.items()) for each in (first, point))
            raise UsageError(f"{same} are the same run", hint="remove one of them")
    name = name or f"{recipes[0].name}-{secrets.token_hex(2)}"
    if not SWEEP_NAME.fullmatch(name) or name == "last":
        raise UsageError(
            f"invalid sweep name {name!r}",
            hint="at most 48 letters, digits, dots, dashes and underscores, a letter or digit first; not `last`",
        )
    shared = shared and engine_settings(engine).shared
    runs = tuple(
        SweepRun(run, point, "" if shared else need_store(recipe, run))
        for run, point, recipe in zip(point_names(name, axes), points(axes), recipes, strict=True)
    )
    cluster = on or _default_devices(recipes[0], engine)
    return SweepRequest(name, runs, recipes, short_keys(axes), cluster, engine, at_once)


def _default_devices(recipe: Recipe, engine: str) -> Cluster:
    """One device of this machine, for its own queue; other engines need --on."""
    if engine != "local":
        raise UsageError(f"--engine {engine} needs --on", hint="--on CHIPxPERNODE: h100x8, or cpux4")
    available = devices(recipe.train.device)
    return parse_on("cpux1") if available.kind == "cpu" else default_cluster(known_chip(available.name), 1)


def _load_recipe(file: Path, settings: Sequence[str], point: Mapping[str, str]) -> Recipe:
    try:
        return load_recipe(file, [*settings, *(f"{key}={value}" for key, value in point.items())])
    except RecipeError as error:
        load_recipe(file, settings)  # an error without the grid is reported as such
        message, hint = error.message.replace("--set", "--grid", 1), error.hint
        key = next((key for key in point if key in message), None)
        if key and " list" in message:
            hint = f"a list has brackets: --grid '{key}=[1,2],[3,4]'"
        raise RecipeError(message, hint=hint) from None
