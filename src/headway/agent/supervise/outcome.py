"""How an attempt ended, in one sentence: which worker failed, why, and what to try."""

import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from headway.agent.supervise.worker_monitor import LostWorker
from headway.agent.workers.workers import WorkerExit
from headway.agent.workers.zygote import log_tail
from headway.errors import USAGE_TYPES, StateError, plural
from headway.track import RunFolder, read_record, record_path

COMMON_ERRORS = ("BadNumbers", "Corrupted")
"""Errors that all workers raise at the same step: none of them is to blame."""


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
    usage: bool = False
    """Whether it failed by a mistake in the recipe."""

    @property
    def exit_status(self) -> int:
        """What the command exits with: 75 means that the run is worth resuming, 2 that the recipe must change."""
        return {"finished": 0, "stopped": 75, "failed": 2 if self.usage else 1}[self.state]


@dataclass
class AttemptEnd:
    """How an attempt's workers ended."""

    exits: list[WorkerExit] = field(default_factory=list)
    """In the order in which they were reported."""
    hang: LostWorker | None = None
    """The hang for which they were ended."""
    bystanders: set[int] = field(default_factory=set)
    """Ranks that the agent ended, or that ended because another had."""
    lost_nodes: list[tuple[str, str]] = field(default_factory=list)
    """Nodes that were lost, and how."""
    room: int = 0
    """The number of workers that fit again, for which they were ended."""
    leaving: tuple[str, ...] = ()
    """Nodes that leave as they were asked to, for which workers were told to save and stop."""
    killed_for_memory: bool = False
    zygote_died: bool = False

    @property
    def codes(self) -> dict[int, int]:
        """Exit codes by rank."""
        return {exited.rank: exited.code for exited in self.exits}

    @property
    def first_failure(self) -> WorkerExit | None:
        """The first that neither finished nor stopped as asked; a bystander only where there is no other."""
        failed = [exited for exited in self.exits if exited.code not in (0, AttemptOutcome.STOPPED_CODE)]
        return min(failed, key=lambda exited: exited.rank in self.bystanders, default=None)


@dataclass(frozen=True)
class ExitEvidence:
    """What is known of an attempt after its workers have ended."""

    run: RunFolder
    """For the names of its files; nothing is read."""
    end: AttemptEnd
    stops_requested: int = 0
    unsaved: StateError | None = None
    """Why the last state could not be saved to disk."""
    uploaded: bool = False
    """Whether the last state is in the object store."""
    outage: str | None = None
    """The failure of the storage for which the run was stopped."""
    errors: Mapping[int, dict[str, Any] | None] = field(default_factory=dict)
    """The error that each worker recorded, if any; the first to fail comes first."""
    log_tail: str = ""
    """The last lines of the log of the first that failed."""
    free_bytes: int = 0
    """Space on the run folder's disk."""


def collect_evidence(
    run: RunFolder, attempt: int, end: AttemptEnd, stops_requested: int, unsaved: StateError | None = None
) -> ExitEvidence:
    """Read the workers' records and logs."""
    if end.first_failure is None:
        return ExitEvidence(run, end, stops_requested, unsaved)
    rank = end.first_failure.rank
    errors = {
        other: _recorded_error(record_path(run.events, attempt, f"rank-{other}"))
        for other in (rank, *sorted(end.codes))
    }
    tail = log_tail(run.logs / f"{attempt:04d}-rank-{rank}.log", 3)
    free_bytes = shutil.disk_usage(run.path).free if run.path.exists() else 0
    return ExitEvidence(run, end, stops_requested, unsaved, errors=errors, log_tail=tail, free_bytes=free_bytes)


def explain_exit(evidence: ExitEvidence) -> AttemptOutcome:
    """What exit codes, recorded errors and logs say together."""
    run, end, unsaved = evidence.run, evidence.end, evidence.unsaved
    resume = run.command("resume")
    first = end.first_failure
    if first is None and unsaved is not None and (evidence.uploaded or evidence.outage is not None):
        where = "the last state is in the object store" if evidence.uploaded else "the last state could not be saved"
        outage = f"{evidence.outage}: " if evidence.outage is not None else ""
        return AttemptOutcome(
            "stopped", f"{outage}{where}; on disk: {unsaved.message}", f"repair the storage, then {resume}"
        )
    if first is None and unsaved is not None:
        return AttemptOutcome("failed", f"the last state could not be saved: {unsaved.message}", unsaved.hint)
    if first is None:
        if evidence.outage is not None:
            return AttemptOutcome("stopped", f"{evidence.outage}: state saved", resume)
        if AttemptOutcome.STOPPED_CODE in end.codes.values():
            if end.leaving and not evidence.stops_requested:
                return AttemptOutcome("stopped", f"{left_on_request(end.leaving)}, state saved", resume)
            return AttemptOutcome("stopped", "stopped on request, state saved", resume)
        return AttemptOutcome("finished", "all steps done", None)
    if evidence.stops_requested >= 2:
        return AttemptOutcome("stopped", "stopped at once on request, state not saved", resume)
    if end.lost_nodes:
        name, how = end.lost_nodes[0]
        return AttemptOutcome("failed", f"node {name} was lost: {how}", resume)
    if end.room:
        return AttemptOutcome("failed", f"there is room for {plural(end.room, 'worker')} again", resume)
    if end.hang is not None:
        return AttemptOutcome("failed", end.hang.text, f"the stacks of all workers are in {run.stacks}")
    rank, code = first.rank, first.code
    if code == AttemptOutcome.RECORD_LOST_CODE:
        free = f"{evidence.free_bytes / 1e6:,.1f} MB are free there"
        return AttemptOutcome(
            "failed",
            f"worker {rank} could not write the run's record in {run.events} ({free})",
            f"free some space, then {resume}",
        )
    if evidence.errors.get(rank) is not None:
        # When all stop together, the one to blame may not be the first to go.
        for other, error in evidence.errors.items():
            if error is not None and error["type"] != "PeerFailed":
                hint = error["hint"] or f"{run.command('logs', f'--rank {other}')} shows all of its log"
                who = "" if error["type"] in COMMON_ERRORS else f"worker {other} failed: "
                return AttemptOutcome("failed", f"{who}{error['message']}", hint, error["type"] in USAGE_TYPES)
    if code == -signal.SIGKILL and end.killed_for_memory:
        return AttemptOutcome(
            "failed",
            f"worker {rank} was killed by the kernel: the machine ran out of memory",
            "lower train.microbatch, or set train.recompute=full",
        )
    how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with status {code}"
    return AttemptOutcome(
        "failed",
        f"worker {rank} {how}; the end of its log: {evidence.log_tail}",
        f"{run.command('logs', f'--rank {rank}')} shows all of it; {resume} continues the run",
    )


def left_on_request(nodes: Sequence[str]) -> str:
    """Which nodes left, in words."""
    return f"node{'s' * (len(nodes) > 1)} {', '.join(nodes)} left on request"


def recorded_exit_status(run: RunFolder) -> int | None:
    """The status that a run ended with, as its leader recorded it; None where it continues, or should."""
    records = sorted(run.events.glob("*-agent.jsonl"))
    events = read_record(records[-1]).events if records else []
    end = next((event for event in reversed(events) if event["kind"] == "end"), None)
    if end is None or "recovery" in end:
        return None
    return {"finished": 0, "stopped": 75}.get(end["outcome"], 1)


def out_of_memory_kills() -> int:
    """How often the kernel has killed for memory since it started; 0 where that is unknown."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def _recorded_error(events: Path) -> dict[str, Any] | None:
    """The error a worker recorded before it ended, if it could."""
    if not events.exists():
        return None
    return next((event for event in reversed(read_record(events).events) if event["kind"] == "error"), None)
