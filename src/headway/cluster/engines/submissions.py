"""What is kept of a submission: requests in JSON's words, and the list of jobs in a run's folder."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from headway.cluster.engines.engine import LaunchRequest
from headway.errors import RunError

__all__ = ["Submission", "last_submission", "note_submission", "request_from_json", "request_to_json"]

FORMAT = 1
_REQUEST = TypeAdapter(LaunchRequest)


def request_to_json(request: LaunchRequest) -> dict[str, Any]:
    """A request in JSON's words."""
    fields: dict[str, Any] = _REQUEST.dump_python(request, mode="json")
    return fields


def request_from_json(fields: Mapping[str, Any]) -> LaunchRequest:
    """A request from JSON's words."""
    return _REQUEST.validate_python(fields)


@dataclass(frozen=True)
class Submission:
    """A job that was submitted for a run."""

    engine: str
    job: str
    on: str
    """What it asks for, as --on says it."""
    request: LaunchRequest
    time: float = 0.0
    """Unix seconds."""


def note_submission(run: Path, submission: Submission) -> None:
    """Add a job to the list in a run's folder."""
    fields = {"engine": submission.engine, "job": submission.job, "on": submission.on, "time": time.time()}
    line = to_json({"format": FORMAT, **fields, "request": request_to_json(submission.request)}) + b"\n"
    with (run / "jobs.jsonl").open("ab") as file:
        file.write(line)


def last_submission(run: Path) -> Submission | None:
    """The newest job of a run; None for one that no engine was asked to start."""
    try:
        lines = (run / "jobs.jsonl").read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    whole = lines[:-1]  # a torn last line is none
    if not whole:
        return None
    try:
        fields = from_json(whole[-1])
        request = request_from_json(fields["request"])
        return Submission(fields["engine"], fields["job"], fields["on"], request, float(fields["time"]))
    except (ValidationError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{run / 'jobs.jsonl'} is no list of jobs: {error}", hint="put back what was there") from None
