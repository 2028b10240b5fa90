"""`headway queue`: lists the jobs of the service."""

from typing import Annotated

import typer

from headway.cli.options import Json, Runs
from headway.cli.service_jobs import job_table, summary
from headway.cli.text import next_line, print_json
from headway.cluster.service.connection import connect
from headway.track import command, runs_root


def queue(
    over: Annotated[bool, typer.Option("--over", help="List the newest jobs that are over instead.")] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """List the jobs of the service that wait, run or end."""
    root = runs_root(runs)
    rows = connect(root).get("/api/v1/jobs", over="true" if over else "false")
    if json:
        print_json(rows)
        return
    if not rows:
        print("no jobs are over" if over else "no jobs wait or run")
        print(f"next: {command(root, 'submit')} -- COMMAND")
        return
    print("\n".join(job_table(rows)))
    print(summary(rows))
    print(next_line(*(command(root, words) for words in ("why JOB", "logs JOB", "cancel JOB"))))
