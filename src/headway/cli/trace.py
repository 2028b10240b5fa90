"""`headway trace import`: another scheduler's account of its jobs, made into a log to simulate."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json

__all__ = ["app"]

app = typer.Typer(help="Logs of jobs, for headway simulate.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _trace() -> None:
    """Logs of jobs, for headway simulate."""


@app.command(name="import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="SACCT", help="What sacct --parsable2 printed.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.csv", help="The log to write.")],
    json: Json = False,
) -> None:
    """Turn Slurm's sacct output into a log of jobs, to replay your own last months."""
    from dataclasses import asdict

    from headway.cli.text import print_json
    from headway.cluster.simulate import import_sacct

    found = import_sacct(source, out)
    if json:
        print_json(asdict(found) | {"file": str(out)})
        return
    left = f"{found.without_gpus:,} without GPUs, {found.never_ran:,} that never ran, {found.unfinished:,} unfinished"
    print(f"{out}: {found.jobs:,} jobs (left out: {left})")
    print(f"next: headway simulate {out} --on CHIPxPERNODExNODES")
