"""How a run took a fault, from its records alone: noticed when, stepping again when, at what cost, in what words.

Pure: records and moments in, numbers out. All moments are on the machine's monotonic clock, which every record ties
its own times to.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from headway.chaos.cases import FaultCase, Way
from headway.track import Event, Record, RunComparison, account, checkpoint_digests
from headway.track.metrics import history

__all__ = [
    "RecoveryTimes",
    "TimedEvent",
    "in_words",
    "lost_s",
    "measure",
    "median_step_s",
    "oracle_violations",
    "parted",
    "said",
    "told",
]

LOST = ("detection", "restart", "rework")
"""Accounts of the ledger that a fault fills."""


@dataclass(frozen=True)
class TimedEvent:
    """An event, and when and in which attempt it was."""

    at_ns: int
    attempt: int
    event: Event

    @property
    def kind(self) -> str:
        """The event's."""
        return str(self.event["kind"])


@dataclass(frozen=True)
class RecoveryTimes:
    """What a fault did to a run; None where there is no such moment."""

    noticed_s: float | None
    """From the strike to the agent's first word about it."""
    stepping_s: float | None
    """From the strike to the end of the first step after that; where no step has to wait, the longest gap between
    two."""
    redone: int
    """Steps that were made again."""
    lost_s: float
    """Of all workers, on noticing, starting again and redoing."""


def told(records: Sequence[Record], process: str) -> list[TimedEvent]:
    """All events of a process over all attempts, in the order in which they happened."""
    found = [
        TimedEvent(record.header.mono + event["t"], record.header.attempt, event)
        for record in records
        if record.header.process == process
        for event in record.events
        if isinstance(event.get("t"), int)
    ]
    return sorted(found, key=lambda one: one.at_ns)


def measure(
    records: Sequence[Record], struck_ns: int, way: Way, signs: Sequence[str], seen_ns: int | None = None
) -> RecoveryTimes:
    """What came of a fault that struck at a moment; `seen_ns` is when its end was seen from outside, if it was."""
    noticed = seen_ns if seen_ns is not None else _noticed(told(records, "agent"), struck_ns, signs)
    steps = [one for one in told(records, "rank-0") if one.kind == "step"]
    ledger = account(records)
    return RecoveryTimes(
        noticed_s=None if noticed is None else (noticed - struck_ns) / 1e9,
        stepping_s=None if noticed is None else _stepping_s(steps, struck_ns, noticed, way),
        redone=ledger.lost_steps,
        lost_s=lost_s(records),
    )


def _noticed(events: Sequence[TimedEvent], struck_ns: int, signs: Sequence[str]) -> int | None:
    return next((one.at_ns for one in events if one.at_ns >= struck_ns and one.kind in signs), None)


def _stepping_s(steps: Sequence[TimedEvent], struck_ns: int, noticed_ns: int, way: Way) -> float | None:
    if way == "refused":
        return None
    if way == "unhurt":
        return _longest_gap_s(steps, struck_ns)
    before = [one.attempt for one in steps if one.at_ns < struck_ns]
    # The step in which it struck may end, be recorded and not count: only a later life has gone on.
    least = max(before, default=0) + (way != "woken")
    after = (one.at_ns for one in steps if one.at_ns > noticed_ns and one.attempt >= least)
    ended = next(after, None)
    return None if ended is None else (ended - struck_ns) / 1e9


def _longest_gap_s(steps: Sequence[TimedEvent], struck_ns: int) -> float | None:
    """Between the ends of two steps, from the last one before the strike on."""
    before = [one.at_ns for one in steps if one.at_ns <= struck_ns][-1:]
    ends = before + [one.at_ns for one in steps if one.at_ns > struck_ns]
    return max(((later - earlier) / 1e9 for earlier, later in itertools.pairwise(ends)), default=None)


def lost_s(records: Sequence[Record]) -> float:
    """Worker-seconds on noticing faults, starting again and redoing steps."""
    ledger = account(records)
    return sum(ledger.seconds(name) for name in LOST)


def median_step_s(records: Sequence[Record]) -> float:
    """From the end of a step to that of the next, as a rule."""
    ends = [one.at_ns for one in told(records, "rank-0") if one.kind == "step"]
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(ends))
    return gaps[len(gaps) // 2] / 1e9 if gaps else 0.0


# -- what it said


def said(records: Sequence[Record], struck_ns: int) -> list[str]:
    """The agent's sentences about what happened since a moment, each once."""
    found = [_sentence(one.event) for one in told(records, "agent") if one.at_ns >= struck_ns]
    return list(dict.fromkeys(sentence for sentence in found if sentence))


def _sentence(event: Event) -> str:
    match event["kind"]:
        case "woken" | "adopted" | "straggler":
            return str(event.get("text", ""))
        case "unsaved":
            return str(event.get("message", ""))
        case "end" if event.get("outcome") != "finished":
            return str(event.get("recovery") or event.get("reason", ""))
    return ""


# -- the oracle


def oracle_violations(
    row: FaultCase,
    records: Sequence[Record],
    *,
    statuses: Sequence[int | None],
    struck_ns: int,
    rank: int,
    steps: int,
    against: RunComparison | None,
) -> list[str]:
    """What of a row is not as it must be; nothing if its oracle is met.

    `rank` is the worker that was struck, `steps` are those of the whole run; `against` compares with the run that
    nothing happened to, None where this one had to be refused.
    """
    found = list[str]()
    if tuple(statuses) != row.statuses:
        found.append(f"its keepers ended with {in_words(statuses)}, not {in_words(row.statuses)}")
    attempts = max((record.header.attempt for record in records), default=0)
    if attempts != row.attempts:
        found.append(f"{attempts} attempts, not {row.attempts}")
    events = [one for one in told(records, "agent") if one.at_ns >= struck_ns]
    if row.signs and not any(one.kind in row.signs for one in events):
        found.append(f"not noticed: no event of {' or '.join(row.signs)}")
    if row.names:
        found += _misnamed(events, row.signs, rank)
    if row.way == "refused":
        reason = next((str(one.event.get("reason")) for one in reversed(events) if one.kind == "end"), "")
        return found if "a second time" in reason else [*found, f"the reason does not say why: {reason!r}"]
    return [*found, *parted(records, steps, against)]


def _misnamed(events: Sequence[TimedEvent], signs: Sequence[str], rank: int) -> list[str]:
    named = {one.event.get("rank") for one in events if one.kind in signs}
    return [f"worker {other} was named for worker {rank}" for other in sorted(map(str, named - {rank}))]


def parted(records: Sequence[Record], steps: int, against: RunComparison | None) -> list[str]:
    """How a run differs from the one that nothing happened to."""
    if against is None:
        return ["there is no run to hold it against"]
    found = [] if against.equal else [against.sentence]
    done = [event["step"] for event in history(records)]
    if not done or done[-1] != steps:
        found.append(f"it got to step {done[-1] if done else 0} of {steps}")
    elif steps not in checkpoint_digests(records):
        found.append("its last state was not saved")
    return found


def in_words(statuses: Sequence[int | None]) -> str:
    """What keepers ended with."""
    return ", then ".join("no end in time" if status is None else f"status {status}" for status in statuses)
