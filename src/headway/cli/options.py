"""Options that mean the same on every verb."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Apart", "Detach", "EngineName", "Json", "Run", "RunOrSweep", "Runs", "Settings", "Workers"]

Apart = Annotated[
    bool,
    typer.Option("--no-shared-folder", help="Machines do not see the runs' folder: runs go by their object stores."),
]
Detach = Annotated[bool, typer.Option("--detach", help="Train in the background; return at once.")]
EngineName = Annotated[
    str,
    typer.Option("--engine", metavar="ENGINE", help="What starts it: local (this machine), slurm, ray, kubernetes."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, a unique prefix of it, or `last`.")]
RunOrSweep = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's name, a unique prefix of it, `last`, or a sweep's name.")
]
Runs = Annotated[
    Path | None,
    typer.Option("--runs", metavar="DIR", help="Where runs live (default $HEADWAY_RUNS, else ./runs)."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the recipe; repeatable."),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, metavar="N", help="Processes to train with (default: one a GPU; one on CPU)."),
]
