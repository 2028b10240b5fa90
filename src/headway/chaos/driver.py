"""Lets runs live under faults: starts a keeper for each, strikes from outside where a row says so, resumes, cleans up.

Runs are real: `headway train` starts the same processes. This one starts them, waits for their end, and looks for what
they leave behind.
"""

import contextlib
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals

from headway.agent.attempt import Attempt
from headway.agent.launch.prepare import new_run, resume_run
from headway.agent.workers.zygote import log_tail
from headway.chaos.process_tree import SHARED_MEMORY, HeldResources, ProcessTree, belongings
from headway.errors import HeadwayError
from headway.recipe import FaultPlan, Recipe
from headway.recipe.faults import read_fired_faults
from headway.track import Record, RunFolder, Tail, read_run, record_path, summarize

__all__ = ["ChaosHarness", "FaultedRun", "LauncherSignal", "Start", "forget", "run_with_faults"]

POLL_S = 0.01

Start = Callable[[Attempt], "subprocess.Popen[bytes]"]
"""Starts a keeper that has an attempt run to its end."""


@dataclass(frozen=True)
class ChaosHarness:
    """Where runs live, and by what means."""

    root: Path
    """Folder of their runs."""
    workers: int
    start: Start
    offspring: ProcessTree
    patience_s: float = math.inf
    """How long a run may take before it is given up."""
    keep: bool = True
    """Whether the folders of runs are kept once they have been looked at."""
    leave_s: float = 10.0
    """How long processes may take to go once their keeper is gone."""
    shared_memory: Path = SHARED_MEMORY
    """Where named segments of memory are that runs could leave behind."""


@dataclass(frozen=True)
class LauncherSignal:
    """A signal for the keeper, when the run gets to a step."""

    signal: Signals
    step: int


@dataclass
class FaultedRun:
    """A run that has ended."""

    run: RunFolder
    struck: list[int] = field(default_factory=list)
    """Moments (monotonic ns) at which something struck."""
    statuses: list[int | None] = field(default_factory=list)
    """What its keepers ended with; None is no end in time."""
    seen_ns: int | None = None
    """When its first processes were gone, where somebody had to resume it."""
    left: list[str] = field(default_factory=list)
    """What it left behind, in words."""
    seconds: float = 0.0
    """From its first process to its last."""
    not_resumed: str | None = None
    """Why it could not be resumed, where it had to be."""

    @property
    def reason(self) -> str:
        """Why it ended: in its agent's words, else in its keeper's."""
        logs = sorted(self.run.logs.glob("*-keeper.log"))
        return summarize(self.run).reason or (log_tail(logs[-1], 1) if logs else "it did not start")

    def records(self) -> list[Record]:
        """What its processes wrote."""
        return read_run(self.run)


def run_with_faults(
    stage: ChaosHarness, recipe: Recipe, name: str, faults: FaultPlan | None = None, *,
    blow: LauncherSignal | None = None, resumes: bool = False, nodes: int = 1, spares: int = 0,
) -> FaultedRun:  # fmt: skip
    """Have a run of a recipe live through faults to its end, and once more where it has to be resumed."""
    before, began = belongings(stage.shared_memory), time.monotonic()
    attempt = new_run(recipe, stage.root, name=name, workers=stage.workers, nodes=nodes, spares=spares)
    lived = FaultedRun(attempt.folder)
    blows = _watch_over(stage, attempt.model_copy(update={"faults": faults or FaultPlan()}), lived, blow)
    if resumes:
        lived.left += _still_there(stage)
        lived.seen_ns = time.monotonic_ns()
        _resume(stage, lived)
    lived.seconds = time.monotonic() - began
    waits = {number for number, fault in enumerate((faults or FaultPlan()).faults) if fault.action == "stall"}
    hits = [one.at_ns for one in read_fired_faults(attempt.folder.faults) if one.number not in waits]
    lived.struck = sorted([*blows, *hits])
    lived.left += [*_still_there(stage), *_left_behind(stage, before)]
    return lived


def _resume(stage: ChaosHarness, lived: FaultedRun) -> None:
    try:
        again = resume_run(lived.run, [], workers=stage.workers)
    except HeadwayError as error:
        lived.not_resumed = error.message
        return
    _watch_over(stage, again.model_copy(update={"faults": FaultPlan()}), lived)


def forget(stage: ChaosHarness, lived: FaultedRun) -> None:
    """Remove a run's folder, unless it is to be kept."""
    if not stage.keep:
        shutil.rmtree(lived.run.path, ignore_errors=True)


def _watch_over(
    stage: ChaosHarness, attempt: Attempt, lived: FaultedRun, blow: LauncherSignal | None = None
) -> list[int]:
    """Start a keeper and wait for its end; the moments at which it was struck from here."""
    process = stage.start(attempt)
    stage.offspring.own(process.pid)
    deadline, blows = time.monotonic() + stage.patience_s, list[int]()
    steps = Tail(record_path(attempt.folder.events, attempt.number, "rank-0"))
    while process.poll() is None:
        if time.monotonic() > deadline:
            stage.offspring.end()
            process.wait()
            lived.statuses.append(None)
            return blows
        if blow is not None and not blows and _reached(steps, blow.step):
            blows.append(time.monotonic_ns())
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, blow.signal)
        time.sleep(POLL_S)
    lived.statuses.append(process.returncode)
    return blows


def _reached(steps: Tail, step: int) -> bool:
    return any(event["kind"] == "step" and event["step"] >= step for event in steps.poll())


def _still_there(stage: ChaosHarness) -> list[str]:
    """Processes that do not go by themselves; they are ended."""
    found = stage.offspring.wait(stage.leave_s)
    stage.offspring.end()
    return [f"process {pid} ({command})" for pid, command in found.items()]


def _left_behind(stage: ChaosHarness, before: HeldResources) -> list[str]:
    """What this process and this machine have more than before; others may use shared memory for a moment."""
    deadline = time.monotonic() + stage.leave_s
    while True:
        now = belongings(stage.shared_memory)
        more = [f"shared memory {name}" for name in sorted(now.shared - before.shared)]
        if now.descriptors > before.descriptors:
            more.append(f"{now.descriptors - before.descriptors} descriptors")
        if not more or time.monotonic() > deadline:
            return more
        time.sleep(POLL_S)
