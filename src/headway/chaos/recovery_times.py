"""How a run recovered from a fault, computed from its records: detection time, recovery time, lost work, messages.

Pure: records and times in, numbers out. All times are on the machine's monotonic clock, to which every record ties its
own.
"""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headway.chaos.cases import FaultCase, Way
from headway.errors import plural
from headway.track import Event, Record, RunComparison, account, checkpoint_digests
from headway.track.metrics import history

LOST = ("detection", "restart", "rework")
"""Accounts of the ledger that a fault adds to."""


@dataclass(frozen=True)
class TimedEvent:
    """An event, its time and its attempt."""

    at_ns: int
    attempt: int
    event: Event

    @property
    def kind(self) -> str:
        """The event's kind."""
        return str(self.event["kind"])


@dataclass(frozen=True)
class RecoveryTimes:
    """What a fault did to a run; None if there is no such time."""

    noticed_s: float | None
    """From the fault to the agent's first event about it."""
    stepping_s: float | None
    """From the fault to the end of the first step after that; if no step has to wait, the longest gap between two."""
    redone: int
    """Steps done again."""
    lost_s: float
    """Worker-seconds of detection, restart and rework."""


def process_events(records: Sequence[Record], process: str) -> list[TimedEvent]:
    """Return all events of a process over all attempts, in the order in which they happened."""
    events = [
        TimedEvent(record.header.mono + event["t"], record.header.attempt, event)
        for record in records
        if record.header.process == process
        for event in record.events
        if isinstance(event.get("t"), int)
    ]
    return sorted(events, key=lambda event: event.at_ns)


def _step_events(records: Sequence[Record]) -> list[TimedEvent]:
    return [event for event in process_events(records, "rank-0") if event.kind == "step"]


def _agent_events(records: Sequence[Record], since_ns: int) -> list[TimedEvent]:
    return [event for event in process_events(records, "agent") if event.at_ns >= since_ns]


def measure(
    records: Sequence[Record], fault_ns: int, way: Way, signs: Sequence[str], ended_ns: int | None = None
) -> RecoveryTimes:
    """Measure the recovery from a fault; `ended_ns` is when the run's processes had ended, if it had to be resumed."""
    noticed = ended_ns
    if noticed is None:
        noticed = next((event.at_ns for event in _agent_events(records, fault_ns) if event.kind in signs), None)
    return RecoveryTimes(
        noticed_s=None if noticed is None else (noticed - fault_ns) / 1e9,
        stepping_s=_stepping_s(_step_events(records), fault_ns, noticed, way),
        redone=account(records).lost_steps,
        lost_s=lost_s(records),
    )


def _stepping_s(steps: Sequence[TimedEvent], fault_ns: int, noticed_ns: int | None, way: Way) -> float | None:
    if way == "unhurt":
        # the longest gap between the ends of two steps, from the last one before the fault on
        last = max((index for index, step in enumerate(steps) if step.at_ns <= fault_ns), default=0)
        gaps = ((later.at_ns - earlier.at_ns) / 1e9 for earlier, later in itertools.pairwise(steps[last:]))
        return max(gaps, default=None)
    if way == "refused" or noticed_ns is None:
        return None
    before = [step.attempt for step in steps if step.at_ns < fault_ns]
    # The step under way may end and be recorded without counting: only a later attempt has resumed.
    first = max(before, default=0) + (way != "woken")
    ended = next((step.at_ns for step in steps if step.at_ns > noticed_ns and step.attempt >= first), None)
    return None if ended is None else (ended - fault_ns) / 1e9


def lost_s(records: Sequence[Record]) -> float:
    """Return the worker-seconds of detection, restart and rework."""
    ledger = account(records)
    return sum(ledger.seconds(name) for name in LOST)


def median_step_s(records: Sequence[Record]) -> float:
    """Return the median time from the end of a step to that of the next."""
    gaps = [later.at_ns - earlier.at_ns for earlier, later in itertools.pairwise(_step_events(records))]
    return statistics.median_high(gaps) / 1e9 if gaps else 0.0


def known_median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


# -- messages


def agent_messages(records: Sequence[Record], fault_ns: int) -> list[str]:
    """Return the agent's messages about what happened since a fault, without repeats."""
    messages = [_message(timed.event) for timed in _agent_events(records, fault_ns)]
    return list(dict.fromkeys(message for message in messages if message))


def _message(event: Event) -> str:
    match event["kind"]:
        case "node" | "woken" | "adopted" | "straggler":
            return str(event.get("text", ""))
        case "unsaved":
            return str(event.get("message", ""))
        case "end" if event.get("outcome") != "finished":
            return str(event.get("recovery") or event.get("reason", ""))
    return ""


# -- the oracle


def oracle_violations(
    case: FaultCase,
    records: Sequence[Record],
    *,
    statuses: Sequence[int | None],
    fault_ns: int,
    rank: int,
    steps: int,
    against: RunComparison | None,
) -> list[str]:
    """List what a case expects and the run did not do; empty if its oracle is met.

    `rank` is the faulted worker, `steps` are those of the whole run; `against` compares it with the unfaulted run, None
    if this one had to be refused.
    """
    violations = list[str]()
    if tuple(statuses) != case.statuses:
        expected = describe_statuses(case.statuses)
        violations.append(f"its launchers exited with {describe_statuses(statuses)}, not {expected}")
    attempts = max((record.header.attempt for record in records), default=0)
    if attempts != case.attempts:
        violations.append(f"{plural(attempts, 'attempt')}, not {case.attempts}")
    events = _agent_events(records, fault_ns)
    if case.signs and not any(event.kind in case.signs for event in events):
        violations.append(f"not noticed: no {' or '.join(case.signs)} event")
    if case.names:
        named = {event.event.get("rank") for event in events if event.kind in case.signs}
        violations += [f"worker {other} was named for worker {rank}" for other in sorted(map(str, named - {rank}))]
    if case.way == "refused":
        reason = next((str(event.event.get("reason")) for event in reversed(events) if event.kind == "end"), "")
        return violations if "a second time" in reason else [*violations, f"the reason does not say why: {reason!r}"]
    return [*violations, *differences(records, steps, against)]


def differences(records: Sequence[Record], steps: int, against: RunComparison | None) -> list[str]:
    """List how a run differs from the unfaulted one."""
    if against is None:
        return ["there is no unfaulted run to compare with"]
    messages = [] if against.equal else [against.sentence]
    done = [event["step"] for event in history(records)]
    if not done or done[-1] != steps:
        messages.append(f"it reached step {done[-1] if done else 0} of {steps}")
    elif steps not in checkpoint_digests(records):
        messages.append("its last state was not saved")
    return messages


def describe_statuses(statuses: Sequence[int | None]) -> str:
    """Describe the exit statuses of launchers."""
    return ", then ".join("no exit in time" if status is None else f"status {status}" for status in statuses)
