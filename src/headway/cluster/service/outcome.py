"""How a job's start ended, from what its nodes report: pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from headway.cluster.engines.engine import (
    CANCELLED,
    REQUEUE,
    State,
    combined_exit_status,
    exit_reason,
    state_after_exit,
)


@dataclass(frozen=True)
class RankResult:
    """How the command of one node ended."""

    status: int | None = None
    """Exit status; None if none was recorded."""
    signalled_after_s: float | None = None
    """Seconds from its start to the first SIGUSR1."""
    at_limit: bool = False
    """Whether it was killed at its time limit."""
    lost: bool = False
    """Whether its node restarted meanwhile."""
    error: str = ""
    """Why it could not be started."""
    reported: int | None = None
    """Exit status of the whole job, if the command knew it."""
    given_up: bool = False
    """Whether its node was silent for too long: how it ended is not known."""


@dataclass(frozen=True)
class JobOutcome:
    """What becomes of a job after a start."""

    state: State
    """`waiting`: it is started again."""
    reason: str
    exit_status: int | None
    saved: bool = False
    """Whether the work of this start counts."""


_STOPPED = {"preempt": "preempted", "drain": "stopped to empty its node"}
"""Why jobs are stopped that wait again."""


def outcome_of(results: Sequence[RankResult], stop: str, limit_s: float | None = None) -> JobOutcome:
    """Return what becomes of a job whose commands have all ended; `stop` says why it was told to, if it was."""
    statuses = [result.status for result in results if result.status is not None]
    reported = combined_exit_status(result.reported for result in results if result.reported is not None)
    status = max(statuses, default=None) if reported is None else reported
    complete = reported is not None or len(statuses) == len(results)
    error = next((result.error for result in results if result.error), "")
    if error:
        return JobOutcome("failed", f"cannot start: {error}", None)
    if stop == "cancel" and not (complete and status == 0):
        return JobOutcome("cancelled", CANCELLED, status)
    if complete and status == 0:
        return JobOutcome("finished", "", 0, saved=True)
    if any(result.given_up for result in results):
        return JobOutcome("waiting", "its node is silent and was given up; waiting to be started again", status)
    if stop in _STOPPED:
        what = _STOPPED[stop]
        reason = f"{what} after it saved" if status == REQUEUE else f"{what}; it did not save when told to"
        return JobOutcome("waiting", reason, status, saved=status == REQUEUE)
    if any(result.lost for result in results):
        return JobOutcome("waiting", "its node restarted; waiting to be started again", status)
    if not complete or status is None:
        return JobOutcome("failed", "its processes were killed; no exit status was recorded", status)
    state = state_after_exit(status, False, next((result.signalled_after_s for result in results), None))
    reason = exit_reason(state, status)
    if state == "failed" and limit_s is not None and any(result.at_limit for result in results):
        reason = f"killed at its time limit of {limit_s:g} s"
    return JobOutcome(state, reason, status, saved=state == "waiting")
