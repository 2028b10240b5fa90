"""`hw.train` starts a run in the background, as `headway train --detach` does; `hw.load` loads what it trained."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from headway.api.run import Run
from headway.errors import RecipeError
from headway.recipe import Recipe, load_recipe, with_settings
from headway.recipe.load import parse_recipe
from headway.track import runs_root

if TYPE_CHECKING:
    from headway.inference import LLM

AnyRecipe: TypeAlias = "str | Path | Recipe | Mapping[str, Any]"
"""A TOML file, a Recipe, or the same as nested dicts."""


def train(
    recipe: AnyRecipe,
    *,
    set: Mapping[str, Any] | None = None,
    name: str | None = None,
    workers: int | None = None,
    origin: str | None = None,
    runs: str | Path | None = None,
) -> Run:
    """Start a run in the background and return it; `run.wait()` waits for its end.

    `set` overrides keys of the recipe: {"train.lr": 3e-4}. `origin` is RUN@STEP to continue from, as --from. The run
    goes on when this process ends; `headway stop` ends it.
    """
    from headway.agent import new_run  # takes 0.35 s
    from headway.cli.launch import start_launcher, wait_for_agent

    root = runs_root(None if runs is None else Path(runs))
    attempt = new_run(recipe_of(recipe, set), root, name=name, workers=workers, origin=origin)
    launcher = start_launcher(attempt, keep_name=False)
    wait_for_agent(attempt, launcher)
    launcher.returncode = 0  # it lives on by itself: no warning when this object goes
    return Run(attempt.folder.path)


def load(model: "str | Path | Run", **options: Any) -> "LLM":
    """Load a model for inference: a run, RUN@STEP, a model's name, a Hugging Face folder, or hf:org/name@revision.

    Options are those of `hw.LLM`, such as device and dtype.
    """
    llm: LLM = importlib.import_module("headway.inference").LLM(str(model.folder if isinstance(model, Run) else model),
                                                               **options)  # fmt: skip
    return llm


def recipe_of(recipe: AnyRecipe, settings: Mapping[str, Any] | None = None) -> Recipe:
    """Return a recipe from a file, a Recipe or dicts, with settings applied."""
    texts = [setting(key, value) for key, value in (settings or {}).items()]
    if isinstance(recipe, str | Path):
        return load_recipe(Path(recipe), texts)
    if isinstance(recipe, Recipe):
        return with_settings(recipe, texts) if texts else recipe
    if not isinstance(recipe, Mapping):
        raise RecipeError(f"a {type(recipe).__name__} is no recipe", hint="a TOML file, a Recipe, or a dict")
    return with_settings(parse_recipe(recipe, {}, "recipe"), texts)


def setting(key: str, value: Any) -> str:
    """Return a setting as `--set` takes it; None unsets the key."""
    if value is None:
        return f"{key}="
    try:
        return f"{key}={_toml(value)}"
    except TypeError:
        raise RecipeError(f"{key} cannot be a {type(value).__name__}", hint="numbers, texts, lists and dicts") from None


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(str(value) if isinstance(value, Path) else value)
