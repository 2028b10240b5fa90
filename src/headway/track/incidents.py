"""What went wrong in an attempt, described for people, from what its processes recorded."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from headway.track.attempt_records import NO_EVENTS, AttemptRecords, is_violent, plausible_count
from headway.track.events import Event
from headway.track.intervals import time_of
from headway.track.replica_vote import blame_replica

_WITH_TEXT = ("adopted", "alone", "corrupted", "hang", "node", "numbers", "storage", "straggler", "tracker", "woken")
"""Kinds of agent events with a `text` that is shown as it is."""
_RAISED_BY_ALL = ("BadNumbers", "Corrupted")
"""Errors that every worker raises at the same time."""


class Incident(NamedTuple):
    """Something that happened to a run, described for people."""

    wall: float
    """Unix seconds."""
    attempt: int
    text: str


def find_incidents(attempt: AttemptRecords, lost: int, before: AttemptRecords | None = None) -> Iterable[Incident]:
    """Yield what went wrong, and where the attempt resumed from the previous one."""
    failure = attempt.end.get("failure") or {}
    nodes_lost = failure.get("cause") in ("lost", "room")
    if nodes_lost:
        yield Incident(attempt.lost_at() or attempt.wall(attempt.end_t), attempt.number, str(failure.get("what", "")))
    for rank, event in {}.items() if nodes_lost else attempt.exits.items():
        code, t = time_of(event, "code") or 0, time_of(event) or 0
        if is_violent(event) and not _is_collateral(attempt, rank, t):
            how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
            yield Incident(attempt.wall(t), attempt.number, f"worker {rank} {how} {_last_step(attempt, rank)}")
    if attempt.outcome == "failed" and not any(is_violent(event) for event in attempt.exits.values()):
        yield Incident(attempt.wall(attempt.end_t), attempt.number, f"failed: {attempt.end.get('reason', '')}")
    skipped = [event for event in attempt.agent.events if event["kind"] == "skipped"]
    if skipped:
        first, many = skipped[0], f"{len(skipped)} saves" if len(skipped) > 1 else "one save"
        skips = f"{many} skipped, first at step {first.get('step')}: the previous save was still being written"
        yield Incident(attempt.wall(time_of(first) or 0), attempt.number, skips)
    if attempt.outcome is None and attempt.failed:
        why = "the agent vanished without recording an end"
        why = "no end was recorded: the storage had failed" if attempt.ended_in_outage else why
        yield Incident(attempt.wall(attempt.end_t), attempt.number, why)
    events_by_process = {"agent": attempt.agent.events} | {
        f"worker {rank}": worker.rest for rank, worker in attempt.ranks.items()
    }
    for process, events in events_by_process.items():
        for event in events:
            text = _incident_text(event, process)
            if event["kind"] == "resumed" and attempt.number > 1 and process == "worker 0":
                text = _resumed(attempt, event, lost, before)
            if text is not None:
                yield Incident(attempt.wall(time_of(event) or 0), attempt.number, text)
    yield from _common_errors(attempt)
    yield from _replica_at_fault(attempt, before)


def _is_collateral(attempt: AttemptRecords, rank: int, t: int) -> bool:
    """Whether a worker died only because of another: it lost the connection, or was killed because of a hang."""
    raised = [event for event in attempt.ranks.get(rank, NO_EVENTS).rest if event["kind"] == "error"]
    if raised and raised[-1].get("type") == "PeerFailed":
        return True
    hangs = [event for event in attempt.agent.events if event["kind"] == "hang" and event.get("ends")]
    return any((time_of(event) or 0) <= t for event in hangs)


def _replica_at_fault(attempt: AttemptRecords, before: AttemptRecords | None) -> Iterable[Incident]:
    """Yield which replica was corrupted, once this attempt has replayed the suspect step."""
    doubts = [event for worker in attempt.ranks.values() for event in worker.rest if event["kind"] == "doubt"]
    errors = {} if before is None else before.errors("Corrupted")
    text = blame_replica(errors, doubts) if errors else None
    if text is not None:
        t = time_of(doubts[0]) if doubts else attempt.begin_t
        yield Incident(attempt.wall(t or 0), attempt.number, text)


def _common_errors(attempt: AttemptRecords) -> Iterable[Incident]:
    """Yield once what every worker raised, unless the agent reported it; prefer an error that names tensors."""
    rest = (event for worker in attempt.ranks.values() for event in worker.rest)
    raised = [event for event in rest if event["kind"] == "error" and event.get("type") in _RAISED_BY_ALL]
    if raised and not any(event["kind"] in ("corrupted", "numbers") for event in attempt.agent.events):
        event = max(raised, key=lambda event: bool(event.get("tensors")))
        yield Incident(attempt.wall(time_of(event) or 0), attempt.number, str(event.get("message", "")))


def _resumed(attempt: AttemptRecords, event: Event, lost: int, before: AttemptRecords | None) -> str:
    text = f"resumed after step {event.get('step')}, {lost} step{'s' * (lost != 1)} to redo"
    text += "".join(f"; {key} {_change(pair)}" for key, pair in _changes(attempt).items())
    return text + _restart_time(attempt, attempt.wall(time_of(event) or 0), before)


def _restart_time(attempt: AttemptRecords, wall: float, before: AttemptRecords | None) -> str:
    """Return where an automatic restart got its state from, and how long after the failure."""
    source, lost_at = attempt.start.get("source"), before.lost_at() if before else None
    if not isinstance(source, str):
        return ""
    origin = "" if source == "start" else f"; from {'the object store' if source == 'store' else source}"
    return origin + (f", {wall - lost_at:.1f} s after the failure" if lost_at is not None else "")


def _changes(attempt: AttemptRecords) -> Mapping[str, object]:
    changed = attempt.start.get("recipe_changes")
    return changed if isinstance(changed, dict) else {}


def _last_step(attempt: AttemptRecords, rank: int) -> str:
    steps = attempt.ranks.get(rank, NO_EVENTS).steps
    return f"after step {steps[-1].get('step')}" if steps else "before its first step"


def _incident_text(event: Event, process: str) -> str | None:
    """Return the text of an event that is an incident by itself, else None."""
    match event["kind"]:
        case "error" if event.get("type") not in ("PeerFailed", *_RAISED_BY_ALL):
            return f"{process}: {event.get('message', '')}"
        case kind if kind in _WITH_TEXT and process == "agent" and event.get("text"):
            return str(event["text"])
        case "waiting":
            return str(event.get("text", "")).partition(": headway agent")[0]  # how to start it is in the log
        case "rhythm":
            every, cost = plausible_count(event.get("seconds")), plausible_count(event.get("cost"))
            return f"saving every {every:,.0f} s from now on; each save stalls for {cost:.3f} s"
        case "lost":
            return f"{process}: {event.get('text', '')}"
        case "unsaved":
            what = "uploaded" if event.get("tier") == "store" else "saved"
            return f"step {event.get('step')} was not {what}: {event.get('message')}"
        case "log" if isinstance(event.get("changed"), dict):
            return f"{event.get('message')}: {', '.join(map(str, event['changed']))} changed"
    return None


def _change(pair: object) -> str:
    return f"{pair[0]} -> {pair[1]}" if isinstance(pair, list) and len(pair) == 2 else str(pair)
