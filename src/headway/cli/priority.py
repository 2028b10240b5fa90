"""`headway priority`: changes the priority of a job of the service."""

from typing import Annotated

import typer

from headway.cli.options import Json, Runs
from headway.cli.service_jobs import change_job
from headway.track import runs_root


def priority(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Id or name of a job.")],
    number: Annotated[int, typer.Argument(metavar="N", help="A whole number; higher goes first.")],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Change the priority of a job of the service that is not over; higher goes first.

    A negative number goes after --: headway priority -- JOB -1
    """
    change_job(runs_root(runs), job, "priority", json, {"priority": number})
