"""The same faults for a plain training loop under torchrun, as a baseline.

The loop is `headway.train.torchrun_baseline`. torchrun may restart as often as Headway; a try is over once the loop has
made steps after the fault, torchrun has given up, or PATIENCE_S have passed.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL
from typing import Literal

from pydantic_core import from_json

from headway.chaos.cases import CaseContext, FaultCase, make_context
from headway.chaos.driver import ChaosHarness
from headway.chaos.recovery_times import known_median
from headway.recipe import FaultPlan, Recipe
from headway.recipe.faults import read_fired_faults
from headway.track import Event

COMPARABLE = ("kill-worker", "kill-all", "kill-agent", "stop-worker", "exception", "exit-in-save", "hang-data")
"""Cases that apply to torchrun; its own process stands for the agent."""
RESTARTS = 3
PATIENCE_S = 60.0
FIRST_S = 120.0
"""How long it may take to reach the step of the fault."""
STEPS_AFTER = 3
"""Steps after which it has recovered."""
POLL_S = 0.05

Outcome = Literal["recovered", "not in time", "job lost", "not struck"]


@dataclass(frozen=True)
class BaselineRun:
    """One try."""

    outcome: Outcome
    restarted_s: float | None = None
    """From the fault to the start of the first process after it."""
    stepping_s: float | None = None
    """From the fault to the end of the first step after that."""
    left: int = 0
    """Processes that outlived torchrun."""


@dataclass(frozen=True)
class BaselineResult:
    """The tries of a case under torchrun."""

    case: FaultCase
    tries: tuple[BaselineRun, ...]

    @property
    def recovered(self) -> int:
        """Number of tries that recovered."""
        return sum(run.outcome == "recovered" for run in self.tries)

    def median(self, figure: Callable[[BaselineRun], float | None]) -> float | None:
        """Return the median of a figure over the tries that have it."""
        return known_median(map(figure, self.tries))


def run_torchrun(
    harness: ChaosHarness, recipe: Recipe, cases: Sequence[FaultCase], repeat: int, report: Callable[[str], None]
) -> list[BaselineResult]:
    """Run the cases that apply to torchrun under it; all keys of the recipe are filled in."""
    # torchrun saves to disk only.
    context = replace(make_context(recipe, harness.workers), memory_every=0)
    results = []
    for case in (case for case in cases if case.name in COMPARABLE):
        tries = []
        for turn in range(1, repeat + 1):
            report(f"{case.name} under torchrun" + (f", try {turn} of {repeat}" if repeat > 1 else ""))
            tries.append(_run_case(harness, recipe, case, context, harness.root / f"torchrun-{case.name}-{turn}"))
        results.append(BaselineResult(case, tuple(tries)))
    return results


def _run_case(
    harness: ChaosHarness, recipe: Recipe, case: FaultCase, context: CaseContext, folder: Path
) -> BaselineRun:
    folder.mkdir(parents=True)
    kills_torchrun = case.name == "kill-agent"
    (folder / "recipe.json").write_text(recipe.model_dump_json())
    (folder / "faults.json").write_text((FaultPlan() if kills_torchrun else case.plan(context)).model_dump_json())
    process = _start(folder, context.workers)
    harness.processes.leave_to_caller(process.pid)
    try:
        fault_ns = _wait_for_fault(process, folder, context.step if kills_torchrun else None)
        if fault_ns is None:
            return BaselineRun("not struck")
        while (run := baseline_outcome(_read(folder), fault_ns, time.monotonic_ns(), process.poll())) is None:
            time.sleep(POLL_S)
        return replace(run, left=len(harness.processes.alive()) if process.poll() is not None else 0)
    finally:
        harness.processes.kill()
        process.wait()


def _start(folder: Path, workers: int) -> "subprocess.Popen[bytes]":
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # As for Headway's workers (agent/workers/env.py).
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(max(1, cores // workers))}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}",
                f"--max-restarts={RESTARTS}", "-m", "headway.train.torchrun_baseline", str(folder),
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip


def _wait_for_fault(process: "subprocess.Popen[bytes]", folder: Path, kill_at: int | None) -> int | None:
    """Wait for the fault, or kill torchrun itself at a step; return its time, None if none fired."""
    deadline = time.monotonic() + FIRST_S
    while time.monotonic() < deadline and process.poll() is None:
        if kill_at is not None and any(event.get("step", 0) >= kill_at for event in _read(folder)):
            killed_ns = time.monotonic_ns()
            process.send_signal(SIGKILL)
            process.wait()
            return killed_ns
        fired = read_fired_faults(folder / "faults")
        if fired:
            return fired[0].at_ns
        time.sleep(POLL_S)
    return None


def baseline_outcome(events: Sequence[Event], fault_ns: int, now_ns: int, status: int | None) -> BaselineRun | None:
    """Return the outcome of a try, None while it is open; `status` is torchrun's exit status, None while it runs."""
    after = [event for event in events if event["at_ns"] > fault_ns]
    restarted = next((event["at_ns"] for event in after if event["kind"] == "start"), None)
    # The step under way may end after the fault: only steps after a restart count.
    steps = [event["at_ns"] for event in after if event["kind"] == "step" and restarted and event["at_ns"] > restarted]
    restarted_s = (restarted - fault_ns) / 1e9 if restarted else None
    if len(steps) >= STEPS_AFTER or (steps and status == 0):
        return BaselineRun("recovered", restarted_s, (steps[0] - fault_ns) / 1e9)
    if status is not None:
        return BaselineRun("job lost", restarted_s)
    if (now_ns - fault_ns) / 1e9 > PATIENCE_S:
        return BaselineRun("not in time", restarted_s)
    return None


def _read(folder: Path) -> list[Event]:
    """Read what rank 0 has recorded so far, without a line that is half written."""
    path = folder / "rank-0.jsonl"
    data = path.read_bytes() if path.exists() else b""
    return [from_json(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
