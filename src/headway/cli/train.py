"""`headway train`: a new run of a recipe, watched until it ends, or detached."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Detach, Json, Runs, Settings, Workers

__all__ = ["train"]


def train(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe in TOML; may be left out with --from.")] = None,
    workers: Workers = None,
    name: Annotated[str | None, typer.Option(help="The run's name (default: the recipe's and four digits).")] = None,
    origin: Annotated[
        str | None,
        typer.Option("--from", metavar="RUN@STEP", help="Go on from another run's state, as a new run."),
    ] = None,
    runs: Runs = None,
    settings: Settings = None,
    detach: Detach = False,
    json: Json = False,
) -> None:
    """Train a recipe on this machine."""
    from headway.agent import new_run
    from headway.cli.launch import launch
    from headway.errors import UsageError
    from headway.recipe import load_recipe, with_settings
    from headway.track import find_run, parse_ref, read_recipe, runs_root

    root = runs_root(runs)
    if recipe is not None:
        wanted = load_recipe(recipe, settings or ())
    elif origin is not None:
        source = find_run(root, parse_ref(origin)[0])
        wanted = with_settings(read_recipe(source), settings or ())
    else:
        raise UsageError("nothing to train", hint="headway train RECIPE, or headway train --from RUN@STEP")
    launch(new_run(wanted, root, name=name, workers=workers, origin=origin), detach=detach, json=json)
