"""`headway hold`: keeps a waiting job of the service from starting."""

from typing import Annotated

import typer

from headway.cli.options import Json, Runs
from headway.cli.service_jobs import change_job
from headway.track import runs_root


def hold(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Id or name of a job.")],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Keep a waiting job of the service from starting, until it is released."""
    change_job(runs_root(runs), job, "hold", json)
