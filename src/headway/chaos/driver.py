"""Runs small real runs under faults: starts a launcher for each, signals it if a case says so, resumes, cleans up.

The runs have the same processes as those of `headway train`. The driver waits for their end and looks for what they
leave behind.
"""

import contextlib
import json
import math
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals

from headway.agent.attempt import Attempt
from headway.agent.launch.prepare import new_run, resume_run
from headway.agent.workers.zygote import log_tail
from headway.chaos.process_tree import SHARED_MEMORY, HeldResources, ProcessTree, held_resources
from headway.errors import HeadwayError
from headway.recipe import FaultPlan, Recipe
from headway.recipe.faults import read_fired_faults
from headway.track import RunFolder, Tail, record_path, summarize

POLL_S = 0.01

Start = Callable[[Attempt], "subprocess.Popen[bytes]"]
"""Starts a launcher that runs an attempt to its end."""


@dataclass(frozen=True)
class ChaosHarness:
    """Where and how runs are started."""

    root: Path
    """Folder of the runs."""
    workers: int
    start: Start
    processes: ProcessTree
    patience_s: float = math.inf
    """How long a run may take before it is given up."""
    keep: bool = True
    """Whether run folders stay once they have been examined."""
    exit_s: float = 10.0
    """How long processes may take to exit after their launcher."""
    shared_memory: Path = SHARED_MEMORY
    """Folder of the named shared memory segments that runs could leave behind."""
    temporary: Path = Path("/tmp")
    """Folder of the profiles that libraries could leave behind."""


@dataclass(frozen=True)
class LauncherSignal:
    """A signal for the launcher when the run reaches a step."""

    signal: Signals
    step: int


@dataclass
class FaultedRun:
    """A run that has ended."""

    run: RunFolder
    fault_times: list[int] = field(default_factory=list)
    """When faults fired (monotonic ns)."""
    statuses: list[int | None] = field(default_factory=list)
    """Exit statuses of its launchers; None if one did not exit in time."""
    ended_ns: int | None = None
    """When its first processes were gone, if it had to be resumed."""
    left: list[str] = field(default_factory=list)
    """What it left behind."""
    seconds: float = 0.0
    """From its first process to its last."""
    not_resumed: str | None = None
    """Why it could not be resumed, if it had to be."""

    @property
    def reason(self) -> str:
        """Why it ended, as its agent recorded it, else as its launcher logged it."""
        logs = sorted(self.run.logs.glob("*-keeper.log"))
        return summarize(self.run).reason or (log_tail(logs[-1], 1) if logs else "it did not start")


def run_with_faults(
    harness: ChaosHarness, recipe: Recipe, name: str, faults: FaultPlan | None = None, *,
    launcher_signal: LauncherSignal | None = None, resumes: bool = False, nodes: int = 1, spares: int = 0,
) -> FaultedRun:  # fmt: skip
    """Run a recipe under faults to its end, and resume it once if its case says so."""
    faults = faults or FaultPlan()
    before, started = held_resources(harness.shared_memory), time.monotonic()
    attempt = new_run(recipe, harness.root, name=name, workers=harness.workers, nodes=nodes, spares=spares)
    faulted = FaultedRun(attempt.folder)
    _run_launcher(harness, attempt.model_copy(update={"faults": faults}), faulted, launcher_signal)
    if resumes:
        faulted.left += _leftover_processes(harness)
        faulted.ended_ns = time.monotonic_ns()
        try:
            again = resume_run(faulted.run, [], workers=harness.workers)
        except HeadwayError as error:
            faulted.not_resumed = error.message
        else:
            _run_launcher(harness, again.model_copy(update={"faults": FaultPlan()}), faulted)
    faulted.seconds = time.monotonic() - started
    fired = read_fired_faults(attempt.folder.faults)
    faulted.fault_times += [fault.at_ns for fault in fired if faults.faults[fault.number].action != "stall"]
    faulted.fault_times.sort()
    faulted.left += [*_leftover_processes(harness), *_leftover_resources(harness, before)]
    faulted.left += leftover_profiles(faulted.run, harness.temporary)
    return faulted


def _run_launcher(
    harness: ChaosHarness, attempt: Attempt, faulted: FaultedRun, launcher_signal: LauncherSignal | None = None
) -> None:
    """Start a launcher, signal it at a step if asked to, and wait for its end."""
    process = harness.start(attempt)
    harness.processes.leave_to_caller(process.pid)
    deadline = time.monotonic() + harness.patience_s
    steps = Tail(record_path(attempt.folder.events, attempt.number, "rank-0"))
    while process.poll() is None:
        if time.monotonic() > deadline:
            harness.processes.kill()
            process.wait()
            faulted.statuses.append(None)
            return
        if launcher_signal is not None and any(
            event["kind"] == "step" and event["step"] >= launcher_signal.step for event in steps.poll()
        ):
            faulted.fault_times.append(time.monotonic_ns())
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, launcher_signal.signal)
            launcher_signal = None
        time.sleep(POLL_S)
    faulted.statuses.append(process.returncode)


def _leftover_processes(harness: ChaosHarness) -> list[str]:
    """Kill the processes that do not exit by themselves, and list them."""
    commands = harness.processes.wait(harness.exit_s)
    harness.processes.kill()
    return [f"process {pid} ({command})" for pid, command in commands.items()]


def leftover_profiles(run: RunFolder, temporary: Path) -> list[str]:
    """List the files that compilers of kernels wrote for processes of a run: perf-PID.map, jit-PID.dump.

    Older ones are of an earlier process with the same number.
    """
    profiles = set[str]()
    for path in run.events.glob("*.jsonl"):
        with path.open("rb") as record, contextlib.suppress(ValueError, KeyError, TypeError):
            opening = json.loads(record.readline())
            for profile in (temporary / f"perf-{opening['pid']}.map", temporary / f"jit-{opening['pid']}.dump"):
                if profile.exists() and profile.stat().st_mtime >= opening["wall"] - 1.0:
                    profiles.add(f"profile {profile}")
    return sorted(profiles)


def _leftover_resources(harness: ChaosHarness, before: HeldResources) -> list[str]:
    """List what this process and this machine hold more than before; others may use shared memory for a moment."""
    deadline = time.monotonic() + harness.exit_s
    while True:
        now = held_resources(harness.shared_memory)
        leftover = [f"shared memory {name}" for name in sorted(now.shared - before.shared)]
        if now.descriptors > before.descriptors:
            leftover.append(f"{now.descriptors - before.descriptors} descriptors")
        if not leftover or time.monotonic() > deadline:
            return leftover
        time.sleep(POLL_S)
