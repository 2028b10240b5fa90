"""`headway submit`: a new run of a recipe, started by an engine when there is room."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Apart, EngineName, Json, Runs, Settings

__all__ = ["submit"]


def submit(
    recipe: Annotated[Path, typer.Argument(help="A recipe in TOML.")],
    on: Annotated[str, typer.Option("--on", metavar="CHIPxPERNODExNODES", help="What to ask for: h100x8, or cpux4.")],
    engine: EngineName = "local",
    name: Annotated[str | None, typer.Option(help="The run's name (default: the recipe's and four digits).")] = None,
    spares: Annotated[
        int, typer.Option("--spares", min=0, metavar="N", help="Machines to ask for beyond, for when one is lost.")
    ] = 0,
    apart: Apart = False,
    runs: Runs = None,
    settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be sent, and send nothing.")] = False,
    json: Json = False,
) -> None:
    """Have an engine train a recipe: this machine's own queue, Slurm, or another.

    What a site needs is said once in ~/.config/headway/engines.toml.
    """
    from headway.cli.text import print_json
    from headway.cluster.submit import runs as submitting
    from headway.hardware import parse_on
    from headway.recipe import load_recipe
    from headway.track import runs_root

    root, wanted, cluster = runs_root(runs), load_recipe(recipe, settings or ()), parse_on(on)
    if dry_run:
        text = submitting.describe(wanted, root, cluster, engine, name, spares, shared=not apart)
        print_json({"engine": engine, "would_send": text}) if json else print(text, end="")
        return
    done = submitting.submit_run(wanted, root, cluster, engine, name, spares, shared=not apart)
    run = done.request.name
    if json:
        print_json({"run": run, "engine": engine, "job": done.job, "on": cluster.name})
        return
    print(f"{run}: job {done.job} of {engine}")
    print(f"next: headway jobs, headway logs {run} --follow, headway cancel {run}")
