"""How an attempt ended, in one sentence: who failed, of what, and what to try."""

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from headway.agent.workers.zygote import log_tail
from headway.errors import StateError
from headway.track import RunFolder, read_record, record_path

if TYPE_CHECKING:
    from headway.agent.supervise.failures import AttemptEnd

__all__ = ["AttemptOutcome", "explain_exit", "out_of_memory_kills", "recorded_exit_status"]


ALL_TOGETHER = ("BadNumbers", "Corrupted")
"""Errors that all workers come to at the same step: none of them is to blame."""


@dataclass(frozen=True)
class AttemptOutcome:
    """The end of an attempt."""

    STOPPED_CODE: ClassVar[int] = 75
    """A worker's exit status when it saved and stopped because it was asked to."""
    RECORD_LOST_CODE: ClassVar[int] = 74
    """A worker's exit status when it could no longer write the run's record."""

    state: Literal["finished", "stopped", "failed"]
    reason: str
    hint: str | None

    @property
    def exit_status(self) -> int:
        """What the command exits with: 75 says that the run is worth resuming."""
        return {"finished": 0, "stopped": 75, "failed": 1}[self.state]


def explain_exit(
    run: RunFolder, attempt: int, ended: "AttemptEnd", stops_asked: int, unsaved: StateError | None = None
) -> AttemptOutcome:
    """What the workers' exit codes, their last events and their logs say together."""
    if ended.first_failure is None and unsaved is not None:
        return AttemptOutcome("failed", f"the last state could not be saved: {unsaved.message}", unsaved.hint)
    if ended.first_failure is None:
        if AttemptOutcome.STOPPED_CODE in ended.codes.values():
            return AttemptOutcome("stopped", "stopped on request, state saved", f"headway resume {run.name}")
        return AttemptOutcome("finished", "all steps done", None)
    if stops_asked >= 2:
        return AttemptOutcome("stopped", "stopped at once on request, state not saved", f"headway resume {run.name}")
    if ended.lost_nodes:
        name, how = ended.lost_nodes[0]
        return AttemptOutcome("failed", f"node {name} was lost: {how}", f"headway resume {run.name}")
    if ended.room:
        return AttemptOutcome("failed", f"there is room for {ended.room} workers again", f"headway resume {run.name}")
    if ended.hang is not None:
        return AttemptOutcome("failed", ended.hang.text, f"the stacks of all workers are in {run.stacks}")
    rank, code, codes = ended.first_failure.rank, ended.first_failure.code, ended.codes
    if code == AttemptOutcome.RECORD_LOST_CODE:
        free = shutil.disk_usage(run.path).free
        return AttemptOutcome(
            "failed",
            f"worker {rank} could not write the run's record in {run.events} ({free / 1e6:,.1f} MB are free there)",
            f"free some space, then headway resume {run.name}",
        )
    told = {
        teller: _told_error(record_path(run.events, attempt, f"rank-{teller}")) for teller in (rank, *sorted(codes))
    }
    if told[rank] is not None:
        # When all stop together, the one to blame may not be the first to go.
        for teller, error in told.items():
            if error is not None and error["type"] != "PeerFailed":
                hint = error["hint"] or f"headway logs {run.name} --rank {teller} shows all of its log"
                who = "" if error["type"] in ALL_TOGETHER else f"worker {teller} failed: "
                return AttemptOutcome("failed", f"{who}{error['message']}", hint)
    log = run.logs / f"{attempt:04d}-rank-{rank}.log"
    if code == -signal.SIGKILL and ended.killed_for_memory:
        return AttemptOutcome(
            "failed",
            f"worker {rank} was killed by the kernel: the machine ran out of memory",
            "lower train.microbatch, or set train.recompute=full",
        )
    how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with status {code}"
    return AttemptOutcome(
        "failed",
        f"worker {rank} {how}; the end of its log: {log_tail(log, 3)}",
        f"headway logs {run.name} --rank {rank} shows all of it; headway resume {run.name} goes on",
    )


def recorded_exit_status(run: RunFolder) -> int | None:
    """The status that a run ended with, as whoever led it has recorded; None where it goes on, or should."""
    records = sorted(run.events.glob("*-agent.jsonl"))
    events = read_record(records[-1]).events if records else []
    end = next((event for event in reversed(events) if event["kind"] == "end"), None)
    if end is None or "recovery" in end:
        return None
    return {"finished": 0, "stopped": 75}.get(end["outcome"], 1)


def out_of_memory_kills() -> int:
    """How often the kernel has killed for memory since it started; 0 where it does not say."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def _told_error(events: Path) -> dict[str, Any] | None:
    """The error a worker recorded before it went, if it could."""
    if not events.exists():
        return None
    return next((event for event in reversed(read_record(events).events) if event["kind"] == "error"), None)
