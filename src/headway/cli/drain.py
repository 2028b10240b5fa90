"""`headway drain`: empties a node, now or at a time."""

import re
import time
from datetime import datetime
from typing import Annotated, Any

import typer

from headway.cli.options import Json, Runs
from headway.cli.text import plural, print_json
from headway.cluster.service.connection import connect, node_path
from headway.errors import UsageError
from headway.track import command, runs_root

_LENGTH = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|d)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name of a node.")],
    at: Annotated[
        str | None, typer.Option("--at", metavar="TIME", help="When it is to be empty: 2026-12-01T08:00, local time.")
    ] = None,
    length: Annotated[str | None, typer.Option("--for", metavar="LENGTH", help="How long then: 30m, 2h, 1d.")] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="Forget a planned time.")] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Have the jobs of a node save, stop and wait for other nodes.

    At once, until headway node uncordon; or for a time that the scheduler plans around.
    """
    root = runs_root(runs)
    connection, path = connect(root), node_path(node, "maintenance")
    if (at is None) != (length is None) or (cancel and at is not None):
        raise UsageError("--at and --for belong together, and not to --cancel", hint="--at 2026-12-01T08:00 --for 2h")
    if cancel:
        if not connection.delete(path)["changed"]:
            raise UsageError(f"node {node} has no planned maintenance")
        said: dict[str, Any] = {"text": f"node {node} stays", "node": node}
    elif at is not None and length is not None:
        begins = _time(at)
        ends = begins + _length(length)
        connection.put(path, {"begins": begins, "ends": ends})
        until = datetime.fromtimestamp(ends).astimezone().isoformat(" ", "minutes")
        said = {"text": f"node {node} will be empty from {at} to {until}", "node": node, "begins": begins, "ends": ends}
    else:
        jobs = connection.post(node_path(node, "drain"))["jobs"]
        asked = f"{plural(len(jobs), 'job')} asked to save and stop" + (f": {', '.join(jobs)}" if jobs else "")
        said = {"text": f"node {node} gets no new jobs; {asked}", "node": node, "jobs": jobs}
    if json:
        print_json({key: value for key, value in said.items() if key != "text"})
        return
    print(said["text"])
    print(f"next: {command(root, 'nodes')} --engine service")


def _time(text: str) -> float:
    """Return Unix seconds of a time in ISO 8601; without a zone it is this machine's."""
    try:
        begins = datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UsageError(f"--at {text}: not a time", hint="for example 2026-12-01T08:00 or ...T08:00+00:00") from None
    if begins < time.time() - 60:
        raise UsageError(f"--at {text} is past", hint="leave --at and --for out to empty the node now")
    return begins


def _length(text: str) -> float:
    match = _LENGTH.fullmatch(text)
    if match is None or not float(match[1]):
        raise UsageError(f"--for {text}: not a length of time", hint="for example 30m, 2h or 1d")
    return float(match[1]) * _SECONDS[match[2]]
