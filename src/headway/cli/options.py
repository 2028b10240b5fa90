"""Arguments and options that mean the same on every verb."""

import os
from pathlib import Path
from typing import Annotated

import typer


def complete_run(ctx: typer.Context) -> list[str]:
    """Return the names of runs for shell completion; it must be quick, so nothing of a run is read."""
    root = Path(ctx.params.get("runs") or os.environ.get("HEADWAY_RUNS") or "runs")
    return sorted(events.parent.name for events in root.glob("*/events"))


Detach = Annotated[bool, typer.Option("--detach", help="Train in the background and return at once.")]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine", metavar="ENGINE", help="What starts it: local (this machine), service, slurm, ray or kubernetes."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
ModelSource = Annotated[
    str,
    typer.Argument(
        metavar="RUN|FOLDER",
        autocompletion=complete_run,
        help="A run (RUN@STEP for one checkpoint), or a Hugging Face folder.",
    ),
]
NoSharedFolder = Annotated[
    bool,
    typer.Option("--no-shared-folder", help="Machines share no folder; runs sync through their object stores."),
]
Run = Annotated[
    str,
    typer.Argument(metavar="RUN", autocompletion=complete_run, help="A run's name, a unique prefix of it, or `last`."),
]
RunOrSweep = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        autocompletion=complete_run,
        help="A run's name, a unique prefix of it, `last`, or a sweep's name.",
    ),
]
Runs = Annotated[
    Path | None,
    typer.Option("--runs", metavar="DIR", help="Folder of all runs (default: $HEADWAY_RUNS, else ./runs)."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key of the recipe; repeatable."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", min=1, metavar="N", help="Processes to train with (default: one per GPU, or one on CPU)."
    ),
]
TokenFile = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write it there, for you only, not to the terminal.")
]
