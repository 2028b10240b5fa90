"""`headway events`: prints what happened on the cluster of the service."""

import json as jsonlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.options import Json, Runs
from headway.cli.text import duration, print_json
from headway.cluster.service.connection import connect
from headway.track import runs_root

_POLL_S = 0.5


def events(
    job: Annotated[str | None, typer.Option("--job", metavar="JOB", help="Only of this job: its id or name.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new events as they happen.")] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Print what happened on the service's cluster: jobs, decisions and nodes.

    Times are those of the scheduler's clock, from the first start of the service. With --follow, --json prints a line
    per event.
    """
    chosen = (event for event in _events(runs_root(runs), follow) if job in (None, event["job"], event["name"]))
    if json and not follow:
        print_json(list(chosen))
        return
    for event in chosen:
        if json:
            print(jsonlib.dumps(event))
        else:
            name = "" if event["job"] is None else f"job {event['job']} ({event['name']}) "
            print(f"{duration(event['at_s'])}  {name}{event['sentence']}")
        sys.stdout.flush()


def _events(root: Path, follow: bool) -> Iterator[dict[str, Any]]:
    connection, after = connect(root), 0
    while True:
        answer = connection.get("/api/v1/events", after=after)
        yield from answer["events"]
        if answer["after"] == after:
            if not follow:
                return
            time.sleep(_POLL_S)
        after = answer["after"]
