"""Records of submissions: requests as JSON, and the list of jobs in a run folder."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from headway.cluster.engines.engine import LaunchRequest
from headway.errors import RunError
from headway.track.access import umask_of

FORMAT = 1
_REQUEST = TypeAdapter(LaunchRequest)


def request_to_json(request: LaunchRequest) -> dict[str, Any]:
    """A request as JSON values."""
    fields: dict[str, Any] = _REQUEST.dump_python(request, mode="json")
    return fields


def request_from_json(fields: Mapping[str, Any]) -> LaunchRequest:
    """A request from JSON values."""
    return _REQUEST.validate_python(fields)


@dataclass(frozen=True)
class Submission:
    """A job that was submitted for a run."""

    engine: str
    job: str
    on: str
    """The devices it asks for, as given to --on."""
    request: LaunchRequest
    time: float = 0.0
    """Unix seconds."""


def note_submission(run: Path, submission: Submission) -> None:
    """Append a job to the list in a run folder."""
    fields = {"engine": submission.engine, "job": submission.job, "on": submission.on, "time": time.time()}
    line = to_json({"format": FORMAT, **fields, "request": request_to_json(submission.request)}) + b"\n"
    with umask_of(run), (run / "jobs.jsonl").open("ab") as file:
        file.write(line)


def last_submission(run: Path) -> Submission | None:
    """The newest job of a run; None if it was never submitted to an engine."""
    try:
        lines = (run / "jobs.jsonl").read_bytes().split(b"\n")[:-1]  # without a torn last line
    except FileNotFoundError:
        return None
    if not lines:
        return None
    try:
        fields = from_json(lines[-1])
        request = request_from_json(fields["request"])
        return Submission(fields["engine"], fields["job"], fields["on"], request, float(fields["time"]))
    except (ValidationError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{run / 'jobs.jsonl'} is not a list of jobs: {error}", hint="restore the file") from None
