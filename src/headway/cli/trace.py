"""`headway trace import`: imports job traces from other schedulers for `headway simulate`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json
from headway.cli.text import plural, print_json
from headway.cluster.simulate import import_sacct

app = typer.Typer(help="Import job traces from other schedulers.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _trace() -> None:
    """Import job traces from other schedulers."""


@app.command(name="import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="SACCT", help="Output of sacct --parsable2.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.csv", help="Job trace to write.")],
    json: Json = False,
) -> None:
    """Convert Slurm's sacct output into a job trace."""
    imported = import_sacct(source, out)
    if json:
        print_json(asdict(imported) | {"file": str(out)})
        return
    skipped = [
        f"{imported.without_gpus:,} without GPUs",
        f"{imported.never_ran:,} that never ran",
        f"{imported.unfinished:,} unfinished",
    ]
    print(f"{out}: {plural(imported.jobs, 'job')} (skipped: {', '.join(skipped)})")
    print(f"next: headway simulate {out} --on CHIPxPERNODExNODES")
