"""A run that its engine restarts again and again, and that makes no step before it is stopped each time, fails."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from headway.agent.attempt import Attempt
from headway.agent.supervise.outcome import AttemptOutcome
from headway.track import RunFolder, read_ends, record_path

MOST_STARTS = 3
"""Starts in a row without a step, after which a run is not restarted: it has been requeued twice for nothing."""


@dataclass(frozen=True)
class PastAttempt:
    """What matters of an attempt."""

    end: str
    """Its recorded outcome, `recovered` if its agent tried again; empty if its agent died before."""
    stepped: bool
    """Whether it has recorded a step."""
    seconds: float = 0.0


def fail_without_progress(attempt: Attempt, outcome: AttemptOutcome) -> AttemptOutcome:
    """The outcome of an attempt, `failed` instead of `stopped` if restarts do not help."""
    if outcome.state != "stopped" or attempt.engine_start < MOST_STARTS:
        return outcome
    return judge_progress(outcome, past_attempts(attempt.folder, attempt.number), attempt.folder)


def judge_progress(outcome: AttemptOutcome, attempts: Iterable[PastAttempt], run: RunFolder) -> AttemptOutcome:
    """The outcome of an attempt that was stopped and would be restarted: it fails if it is the third in a row without
    a step. `attempts` are those of the run, newest first, with this one."""
    lengths = list[float]()
    for attempt in attempts:
        if attempt.stepped or attempt.end == "failed":
            return outcome
        if attempt.end == "stopped" or not lengths:  # the end of this one is not recorded yet
            lengths.append(attempt.seconds)
        if len(lengths) == MOST_STARTS:
            reason = f"no step in {MOST_STARTS} starts in a row; the last, after {lengths[0]:.0f} s: {outcome.reason}"
            hint = f"raise limit_s or lower grace_s in engines.toml, then {run.command('requeue')}"
            return replace(outcome, state="failed", reason=reason, hint=hint)
    return outcome


def past_attempts(run: RunFolder, number: int) -> Iterator[PastAttempt]:
    """The attempts of a run up to this number, newest first, from the ends of their records."""
    for attempt in range(number, 0, -1):
        agent, leader = (record_path(run.events, attempt, process) for process in ("agent", "rank-0"))
        events = read_ends(agent).events if agent.exists() else []
        last = next((event for event in reversed(events) if event["kind"] == "end"), {})
        end = "recovered" if "recovery" in last else str(last.get("outcome", ""))
        steps = read_ends(leader).events if leader.exists() else []
        seconds = max((event.get("t", 0) for event in events), default=0) / 1e9
        yield PastAttempt(end, any(event["kind"] == "step" for event in steps), seconds)
