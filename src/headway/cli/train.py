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
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=N,...",
            help="Lay the workers out so, like shard=2,tensor=2; axes left out are 1; may also have schedule=, "
            "chunks=, stages=1:3, keep_weights=, reduce_each=.",
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, metavar="N", help="Emulate so many nodes here, an agent each.")
    ] = 1,
    spares: Annotated[
        int, typer.Option("--spares", min=0, metavar="N", help="Nodes that wait to take the place of a lost one.")
    ] = 0,
    runs: Runs = None,
    settings: Settings = None,
    detach: Detach = False,
    json: Json = False,
) -> None:
    """Train a recipe on this machine.

    What the recipe leaves open, the best plan that this version's trainer runs decides.
    """
    from headway.agent import new_run, recipe_of_ref
    from headway.cli.launch import launch
    from headway.cli.mesh import parse_layout
    from headway.errors import UsageError
    from headway.recipe import load_recipe, with_settings
    from headway.track import runs_root

    root = runs_root(runs)
    if recipe is not None:
        wanted = load_recipe(recipe, settings or ())
    elif origin is not None:
        wanted = with_settings(recipe_of_ref(root, origin), settings or ())
    else:
        raise UsageError("nothing to train", hint="headway train RECIPE, or headway train --from RUN@STEP")
    if mesh is not None:
        wanted = wanted.model_copy(update={"parallel": parse_layout(mesh, wanted.parallel)})
    attempt = new_run(wanted, root, name=name, workers=workers, origin=origin, nodes=nodes, spares=spares)
    launch(attempt, detach=detach, json=json)
