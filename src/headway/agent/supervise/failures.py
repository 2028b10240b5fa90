"""Classifies how an attempt ended into a Failure, from exits, hangs and the workers' own records."""

import signal
import time
from collections.abc import Sequence
from typing import Any

from headway.agent.attempt import Attempt
from headway.agent.supervise.outcome import AttemptEnd, AttemptOutcome
from headway.agent.supervise.recover import Failure
from headway.track import RunFolder, read_record, record_path

RETRYABLE = "WorkerError"
"""Error type of exceptions in user or library code; every other type is known to repeat."""
OUT_OF_MEMORY = "out of memory"


def classify_failure(attempt: Attempt, ended: AttemptEnd, outcome: AttemptOutcome, snapshot_step: int) -> Failure:
    """Classify the end of an attempt; `snapshot_step` is the newest step in memory, -1 if none."""
    run = attempt.folder
    reached = max(last_step(run, attempt), snapshot_step)
    what = outcome.reason.partition("; the end of its log")[0]
    errors = _last_errors(attempt)
    common: dict[str, Any] = {"what": what, "reached": reached, "step": reached + 1, "at": time.time()}
    if ended.lost_nodes:
        return Failure("lost", **common | {"place": ended.lost_nodes[0][0]})
    if ended.room:
        return Failure("room", **common)
    if ended.hang is not None:
        stall = ended.hang.stall
        return Failure("hung", **common | {"rank": stall.rank, "place": stall.phase})
    if ended.zygote_died:
        return Failure("died", **common | {"place": "zygote"})
    if ended.first_failure is None or ended.killed_for_memory:
        return Failure("other", **common)
    for error in errors:
        match error["type"]:
            case "BadNumbers":
                facts = {key: error[key] for key in ("step", "usual", "spread")}
                return Failure(error["trouble"], **common | facts | {"window": tuple(error["window"])})
            case "Corrupted":
                return Failure("corrupted", **common | {"step": error["step"], "doubt": _doubt(errors)})
            case "DamagedState":
                return Failure(
                    "damaged", **common | {"place": "memory" if attempt.from_memory else attempt.checkpoint or ""}
                )
    first = ended.first_failure
    silent = all(error["rank"] != first.rank for error in errors)
    # A worker that died without an error caused whatever the others raised.
    errors = [] if silent else [error for error in errors if error["type"] != "PeerFailed"]
    if errors and errors[0]["type"] == RETRYABLE and errors[0]["message"] != OUT_OF_MEMORY:
        began = reached > attempt.from_step or attempt.source is not None
        location = {"place": errors[0].get("place", ""), "rank": errors[0]["rank"]}
        return Failure("raised" if began else "other", **common | location)
    if errors or first.code == AttemptOutcome.RECORD_LOST_CODE:
        return Failure("other", **common)
    how = signal.Signals(-first.code).name if first.code < 0 else f"status {first.code}"
    return Failure("died", **common | {"place": how, "rank": first.rank})


def _doubt(errors: Sequence[dict[str, Any]]) -> tuple[int, int, str, int] | None:
    """The first element that differs between replicas, and a rank that has it."""
    for error in errors:
        if error["type"] == "Corrupted" and error["tensors"] and error["index"] is not None:
            return error["step"], error["rank"], error["tensors"][0], error["index"]
    return None


def collateral_ranks(attempt: Attempt) -> set[int]:
    """Ranks that recorded the loss of a peer: simultaneous exits are reported in any order."""
    return {error["rank"] for error in _last_errors(attempt) if error["type"] == "PeerFailed"}


def failures_before(run: RunFolder, number: int) -> tuple[Failure, ...]:
    """Failures of earlier attempts since the run was last started by a user, as their agents recorded them."""
    failures = list[Failure]()
    for earlier in range(number - 1, 0, -1):
        path = record_path(run.events, earlier, "agent")
        events = read_record(path).events if path.exists() else []
        end = next((event for event in reversed(events) if event["kind"] == "end"), {})
        if isinstance(end.get("failure"), dict):
            failures.append(_read(end["failure"]))
        start = next((event for event in events if event["kind"] == "attempt"), {})
        if start.get("source") is None:
            break
    return tuple(reversed(failures))


def _read(fields: dict[str, Any]) -> Failure:
    tuples = {key: tuple(fields[key]) for key in ("window", "doubt") if fields.get(key)}
    return Failure(**fields | tuples)


def last_step(run: RunFolder, attempt: Attempt) -> int:
    """The last step that an attempt recorded."""
    events = reversed(_events(run, attempt, 0))
    return next((event["step"] for event in events if event["kind"] == "step"), attempt.from_step)


def _last_errors(attempt: Attempt) -> list[dict[str, Any]]:
    """The last error that each worker recorded, with its rank."""
    errors = list[dict[str, Any]]()
    for rank in range(attempt.workers):
        events = reversed(_events(attempt.folder, attempt, rank))
        errors += [next(({**event, "rank": rank} for event in events if event["kind"] == "error"), {})]
    return [error for error in errors if error]


def _events(run: RunFolder, attempt: Attempt, rank: int) -> Sequence[dict[str, Any]]:
    path = record_path(run.events, attempt.number, f"rank-{rank}")
    return read_record(path).events if path.exists() else []
