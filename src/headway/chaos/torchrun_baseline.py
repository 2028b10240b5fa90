"""The same faults for a plain training loop under torchrun, where they make sense for it.

The loop is `headway.train.torchrun_baseline`. torchrun may restart as often as Headway; a try is over
when the loop has stepped on after the fault, when torchrun has given up, or when PATIENCE_S have passed.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL
from typing import Literal

from pydantic_core import from_json

from headway.chaos.cases import CaseContext, FaultCase, scene_of
from headway.chaos.driver import ChaosHarness
from headway.recipe import FaultPlan, Recipe
from headway.recipe.faults import read_fired_faults
from headway.track import Event

__all__ = ["ANSWERS", "BaselineResult", "BaselineRun", "judge", "run_torchrun"]

ANSWERS = ("kill-worker", "kill-all", "kill-agent", "stop-worker", "exception", "exit-in-save", "hang-data")
"""Rows that mean something for torchrun; its own process stands for the agent."""
RESTARTS = 3
PATIENCE_S = 60.0
FIRST_S = 120.0
"""How long it may take to get to the step where the fault strikes."""
STEPS_ON = 3
"""Steps after which it has recovered."""
POLL_S = 0.05

Outcome = Literal["recovered", "not in time", "job lost", "not struck"]


@dataclass(frozen=True)
class BaselineRun:
    """One try."""

    outcome: Outcome
    restarted_s: float | None = None
    """From the strike to the making of the first process after it."""
    stepping_s: float | None = None
    """From the strike to the end of the first step after that."""
    left: int = 0
    """Processes that outlived torchrun."""


@dataclass(frozen=True)
class BaselineResult:
    """A row's tries under torchrun."""

    row: FaultCase
    tries: tuple[BaselineRun, ...]

    @property
    def recovered(self) -> int:
        """Tries in which it stepped on."""
        return sum(one.outcome == "recovered" for one in self.tries)

    def median(self, figure: Callable[[BaselineRun], float | None]) -> float | None:
        """Of a figure, over the tries that have it."""
        found = [value for one in self.tries if (value := figure(one)) is not None]
        return statistics.median(found) if found else None


def run_torchrun(
    stage: ChaosHarness, recipe: Recipe, rows: Sequence[FaultCase], repeat: int, tell: Callable[[str], None]
) -> list[BaselineResult]:
    """Strike torchrun with those of the rows that it has an answer to; the recipe is one with everything filled in."""
    # It has no tier in memory: what it saves, it saves to disk.
    scene = replace(scene_of(recipe, stage.workers), memory_every=0)
    found = []
    for row in (row for row in rows if row.name in ANSWERS):
        tries = []
        for turn in range(1, repeat + 1):
            tell(f"{row.name} under torchrun" + (f", try {turn} of {repeat}" if repeat > 1 else ""))
            tries.append(_try(stage, recipe, row, scene, stage.root / f"torchrun-{row.name}-{turn}"))
        found.append(BaselineResult(row, tuple(tries)))
    return found


def _try(stage: ChaosHarness, recipe: Recipe, row: FaultCase, scene: CaseContext, folder: Path) -> BaselineRun:
    folder.mkdir(parents=True)
    blow = row.name == "kill-agent"
    (folder / "recipe.json").write_text(recipe.model_dump_json())
    (folder / "faults.json").write_text((FaultPlan() if blow else row.plan(scene)).model_dump_json())
    process = _start(folder, scene.workers)
    stage.offspring.own(process.pid)
    try:
        moment = _strike(process, folder, scene.step if blow else None)
        if moment is None:
            return BaselineRun("not struck")
        while (found := judge(_read(folder), moment, time.monotonic_ns(), process.poll())) is None:
            time.sleep(POLL_S)
        left = len(stage.offspring.living()) if process.poll() is not None else 0
        return replace(found, left=left)
    finally:
        stage.offspring.end()
        process.wait()


def _start(folder: Path, workers: int) -> "subprocess.Popen[bytes]":
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # As Headway's workers have it; see worker_environment.
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(max(1, cores // workers))}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}",
                f"--max-restarts={RESTARTS}", "-m", "headway.train.torchrun_baseline", str(folder),
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip


def _strike(process: "subprocess.Popen[bytes]", folder: Path, kill_at: int | None) -> int | None:
    """Wait for the strike, or kill torchrun itself at a step; the moment, None if there is none."""
    deadline = time.monotonic() + FIRST_S
    while time.monotonic() < deadline and process.poll() is None:
        if kill_at is not None and any(event.get("step", 0) >= kill_at for event in _read(folder)):
            moment = time.monotonic_ns()
            process.send_signal(SIGKILL)
            process.wait()
            return moment
        blows = read_fired_faults(folder / "faults")
        if blows:
            return blows[0].at_ns
        time.sleep(POLL_S)
    return None


def judge(events: Sequence[Event], struck_ns: int, now_ns: int, status: int | None) -> BaselineRun | None:
    """What has become of a try by now; None when that is still open. `status` is torchrun's, None while it lives."""
    after = [event for event in events if event["at_ns"] > struck_ns]
    restarted = next((event["at_ns"] for event in after if event["kind"] == "start"), None)
    # A step that was under way may end after the strike: what counts comes after a restart.
    steps = [event["at_ns"] for event in after if event["kind"] == "step" and restarted and event["at_ns"] > restarted]
    since = (restarted - struck_ns) / 1e9 if restarted else None
    if len(steps) >= STEPS_ON or (steps and status == 0):
        return BaselineRun("recovered", since, (steps[0] - struck_ns) / 1e9)
    if status is not None:
        return BaselineRun("job lost", since)
    if (now_ns - struck_ns) / 1e9 > PATIENCE_S:
        return BaselineRun("not in time", since)
    return None


def _read(folder: Path) -> list[Event]:
    """What rank 0 has written down so far; a line that is half written counts not yet."""
    path = folder / "rank-0.jsonl"
    data = path.read_bytes() if path.exists() else b""
    return [from_json(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
