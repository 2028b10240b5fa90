"""What happened to an attempt, as `recover` wants to know it: from exits, hangs and the workers' own records."""

import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headway.agent.attempt import Attempt
from headway.agent.supervise.outcome import AttemptOutcome
from headway.agent.supervise.recover import Failure
from headway.agent.supervise.worker_monitor import LostWorker
from headway.agent.workers.worker_group import WorkerExit
from headway.track import RunFolder, read_record, record_path

__all__ = ["AttemptEnd", "as_fields", "classify_failure", "collateral_ranks", "failures_before", "last_step"]

MENDABLE = "WorkerError"
"""How workers call errors of the code that they run; all others are known, and come again."""
OUT_OF_MEMORY = "out of memory"


@dataclass
class AttemptEnd:
    """How an attempt's workers ended."""

    exits: list[WorkerExit] = field(default_factory=list)
    """In the order in which they were heard of."""
    hang: LostWorker | None = None
    """The hang for which they were ended."""
    bystanders: set[int] = field(default_factory=set)
    """Ranks that the agent ended, or that went because another had gone."""
    lost_nodes: list[tuple[str, str]] = field(default_factory=list)
    """Nodes that were lost, and how."""
    room: int = 0
    """The number of workers that there is room for again, for which they were ended."""
    killed_for_memory: bool = False
    zygote_died: bool = False

    @property
    def codes(self) -> dict[int, int]:
        """Exit codes by rank."""
        return {one.rank: one.code for one in self.exits}

    @property
    def first_failure(self) -> WorkerExit | None:
        """The first that neither finished nor stopped as asked; a bystander only where there is nobody else to name."""
        failed = [one for one in self.exits if one.code not in (0, AttemptOutcome.STOPPED_CODE)]
        return min(failed, key=lambda one: one.rank in self.bystanders, default=None)


def classify_failure(attempt: Attempt, ended: AttemptEnd, outcome: AttemptOutcome, kept_step: int) -> Failure:
    """What the end of an attempt comes to; `kept_step` is that of the newest state in memory, -1 without one."""
    run = attempt.folder
    reached = max(last_step(run, attempt), kept_step)
    what = _what(outcome)
    told = [error for rank in range(attempt.workers) if (error := _error(run, attempt, rank)) is not None]
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
    for error in told:
        match error["type"]:
            case "BadNumbers":
                facts = {key: error[key] for key in ("step", "usual", "spread")}
                return Failure(error["trouble"], **common | facts | {"window": tuple(error["window"])})
            case "Corrupted":
                return Failure("corrupted", **common | {"step": error["step"], "doubt": _doubt(told)})
            case "DamagedState":
                return Failure(
                    "damaged", **common | {"place": "memory" if attempt.from_memory else attempt.checkpoint or ""}
                )
    errors = [error for error in told if error["type"] != "PeerFailed"]
    first = ended.first_failure
    if _error(run, attempt, first.rank) is None:
        errors = []  # whoever died first says nothing, and what the others raised came of it
    if errors and errors[0]["type"] == MENDABLE and errors[0]["message"] != OUT_OF_MEMORY:
        began = reached > attempt.from_step or attempt.source is not None
        where = {"place": errors[0].get("place", ""), "rank": errors[0]["rank"]}
        return Failure("raised" if began else "other", **common | where)
    if errors or first.code == AttemptOutcome.RECORD_LOST_CODE:
        return Failure("other", **common)
    how = signal.Signals(-first.code).name if first.code < 0 else f"status {first.code}"
    return Failure("died", **common | {"place": how, "rank": first.rank})


def _doubt(errors: Sequence[dict[str, Any]]) -> tuple[int, int, str, int] | None:
    """The first element that differs, and a worker that has it."""
    for error in errors:
        if error["type"] == "Corrupted" and error["tensors"] and error["index"] is not None:
            return error["step"], error["rank"], error["tensors"][0], error["index"]
    return None


def collateral_ranks(attempt: Attempt) -> set[int]:
    """Ranks that say that they went because a peer had gone: two ends in one instant are heard of in any order."""
    told = [_error(attempt.folder, attempt, rank) for rank in range(attempt.workers)]
    return {error["rank"] for error in told if error is not None and error["type"] == "PeerFailed"}


def failures_before(run: RunFolder, number: int) -> tuple[Failure, ...]:
    """What happened to the attempts before this one since somebody started the run, as their agents recorded it."""
    found = list[Failure]()
    for earlier in range(number - 1, 0, -1):
        path = record_path(run.events, earlier, "agent")
        events = read_record(path).events if path.exists() else []
        end = next((event for event in reversed(events) if event["kind"] == "end"), {})
        if isinstance(end.get("failure"), dict):
            found.append(_read(end["failure"]))
        start = next((event for event in events if event["kind"] == "attempt"), {})
        if start.get("source") is None:
            break
    return tuple(reversed(found))


def as_fields(failure: Failure) -> dict[str, Any]:
    """A failure as an event has it."""
    return asdict(failure)


def _read(fields: dict[str, Any]) -> Failure:
    lists = {key: tuple(fields[key]) for key in ("window", "doubt") if fields.get(key)}
    return Failure(**fields | lists)


def last_step(run: RunFolder, attempt: Attempt) -> int:
    """The last step that an attempt recorded."""
    events = reversed(_events(run, attempt, 0))
    return next((event["step"] for event in events if event["kind"] == "step"), attempt.from_step)


def _error(run: RunFolder, attempt: Attempt, rank: int) -> dict[str, Any] | None:
    errors = (event for event in reversed(_events(run, attempt, rank)) if event["kind"] == "error")
    return next(({**error, "rank": rank} for error in errors), None)


def _events(run: RunFolder, attempt: Attempt, rank: int) -> Sequence[dict[str, Any]]:
    path = record_path(run.events, attempt.number, f"rank-{rank}")
    return read_record(path).events if path.exists() else []


def _what(outcome: AttemptOutcome) -> str:
    """What happened, without the end of a log."""
    return outcome.reason.partition("; the end of its log")[0]
