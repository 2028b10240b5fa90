"""`headway submit`: submits a run to the local queue, Slurm, Ray or Kubernetes."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import EngineName, Json, NoSharedFolder, Runs, Settings
from headway.cli.text import next_line, print_json
from headway.cluster.submit import runs as submitting
from headway.hardware import parse_on
from headway.recipe import load_recipe
from headway.track import command, runs_root


def submit(
    recipe: Annotated[Path, typer.Argument(help="A recipe in TOML.")],
    on: Annotated[
        str, typer.Option("--on", metavar="CHIPxPERNODExNODES", help="Resources to request: h100x8, h100x8x4 or cpux4.")
    ],
    engine: EngineName = "local",
    name: Annotated[
        str | None, typer.Option(help="Name of the run (default: the recipe's name and four digits).")
    ] = None,
    spares: Annotated[
        int, typer.Option("--spares", min=0, metavar="N", help="Extra machines to request, to replace lost ones.")
    ] = 0,
    no_shared_folder: NoSharedFolder = False,
    runs: Runs = None,
    settings: Settings = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be submitted, and submit nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Submit a run to an engine: this machine's queue, Slurm, Ray or Kubernetes.

    Settings of a site are in ~/.config/headway/engines.toml.
    """
    root, loaded, cluster = runs_root(runs), load_recipe(recipe, settings or ()), parse_on(on)
    if dry_run:
        text = submitting.describe(loaded, root, cluster, engine, name, spares, shared=not no_shared_folder)
        print_json({"engine": engine, "would_send": text}) if json else print(text, end="")
        return
    submission = submitting.submit_run(loaded, root, cluster, engine, name, spares, shared=not no_shared_folder)
    run = submission.request.name
    if json:
        print_json({"run": run, "engine": engine, "job": submission.job, "on": cluster.name})
        return
    print(f"{run}: job {submission.job} of {engine}")
    follow_ups = [command(root, words) for words in ("jobs", f"logs {run} --follow", f"cancel {run}")]
    print(next_line(*follow_ups))
