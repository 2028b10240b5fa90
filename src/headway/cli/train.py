"""`headway train`: starts a run of a recipe, in the foreground or detached."""

from pathlib import Path
from typing import Annotated

import typer

from headway.agent import new_run, recipe_of_ref
from headway.cli.launch import launch
from headway.cli.mesh import parse_layout
from headway.cli.options import Detach, Json, Runs, Settings
from headway.errors import UsageError
from headway.recipe import load_recipe, with_mesh, with_settings
from headway.track import runs_root


def train(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe in TOML; optional with --from.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            metavar="N",
            help="Processes to train with (default: one per GPU, or one on CPU; with --from, as in that run).",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run (default: the recipe's name and four digits).")
    ] = None,
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN@STEP",
            help="Start from a checkpoint of another run; RUN alone: the newest intact one.",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=N,...",
            help="Mesh of workers, e.g. shard=2,tensor=2; axes left out are 1. Also takes schedule=, chunks=, "
            "stages=1:3, keep_weights=, reduce_each=.",
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, metavar="N", help="Emulate N nodes on this machine, with one agent each.")
    ] = 1,
    spares: Annotated[
        int, typer.Option("--spares", min=0, metavar="N", help="Spare nodes that replace lost ones.")
    ] = 0,
    runs: Runs = None,
    settings: Settings = None,
    detach: Detach = False,
    json: Json = False,
) -> None:
    """Train a recipe on this machine.

    Keys that the recipe leaves open come from the fastest plan that the trainer can run.
    """
    root = runs_root(runs)
    if recipe is not None:
        loaded = load_recipe(recipe, settings or ())
    elif origin is not None:
        loaded = with_settings(recipe_of_ref(root, origin), settings or ())
    else:
        raise UsageError("nothing to train", hint="headway train RECIPE, or headway train --from RUN@STEP")
    if mesh is not None:
        loaded = with_mesh(loaded, parse_layout(mesh, loaded.parallel), f"--mesh {mesh}")
    attempt = new_run(loaded, root, name=name, workers=workers, origin=origin, nodes=nodes, spares=spares)
    launch(attempt, detach=detach, json=json)
