"""`headway events`: prints what happened on the cluster of the service."""

import json as jsonlib
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.options import Json, Runs
from headway.cli.text import duration, print_json
from headway.cluster.service.connection import connect, job_path
from headway.errors import UsageError
from headway.track import runs_root

_POLL_S = 0.5


def events(
    job: Annotated[str | None, typer.Option("--job", metavar="JOB", help="Only of this job: its id or name.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new events as they happen.")] = False,
    audit: Annotated[
        bool, typer.Option("--audit", help="Who changed what instead, and which requests were refused.")
    ] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Print what happened on the service's cluster: jobs, decisions and nodes.

    Times are those of the scheduler's clock, from the first start of the service. With --follow, --json prints a line
    per event.
    """
    if audit:
        if job is not None:
            raise UsageError("--audit is of users, not of jobs", hint="leave --job out")
        _print_audit(runs_root(runs), follow, json)
        return
    if job is not None:
        connect(runs_root(runs)).get(job_path(job))  # an error if there is none
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


def _print_audit(root: Path, follow: bool, json: bool) -> None:
    """Print the newest entries of the audit log, and new ones when following."""
    connection = connect(root)
    entries: list[dict[str, Any]] = connection.get("/api/v1/audit")
    if json and not follow:
        print_json(entries)
        return
    last = 0
    while True:
        for entry in entries:
            print(jsonlib.dumps(entry) if json else _audit_line(entry))
        sys.stdout.flush()
        if not follow:
            return
        if not entries:
            time.sleep(_POLL_S)
        last = entries[-1]["seq"] if entries else last
        entries = connection.get("/api/v1/audit", after=last)


def _audit_line(entry: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(entry["at"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    what = f"{entry['action'].split()[0]} {entry['target']}" + (f"  ({entry['detail']})" if entry["detail"] else "")
    refused = "  refused" if entry["outcome"] == "refused" else ""
    return f"{at}  {entry['user']}: {what}{refused}"
