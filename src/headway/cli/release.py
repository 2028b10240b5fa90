"""`headway release`: lets a held job of the service start again."""

from typing import Annotated

import typer

from headway.cli.options import Json, Runs
from headway.cli.service_jobs import change_job
from headway.track import runs_root


def release(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Id or name of a job.")],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Let a held job of the service start; it has kept its place in the queue."""
    change_job(runs_root(runs), job, "release", json)
