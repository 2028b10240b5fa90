"""Shared by tests of whole runs on engines: a short demo recipe, and an uninterrupted run of it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conftest import Lived
from eventually import eventually
from headway.agent import new_run, supervise_run
from headway.cli.requeue import requeue
from headway.cluster.engines.engine import OVER, JobStatus
from headway.cluster.engines.settings import open_engine
from headway.cluster.submit import runs as submitting
from headway.hardware import parse_on
from headway.recipe import Recipe, load_recipe
from headway.track import RunFolder

__all__ = ["ONE_CORE", "EngineRun", "demo", "headway", "preempt_and_lose_machine", "train_uninterrupted", "wait_for"]

DEMO = Path(__file__).parents[3] / "recipes/demo.toml"
ONE_CORE = "taskset -pc $((HEADWAY_MACHINE % 2)) $$ >/dev/null"
"""Gives each agent one core: equal thread counts give equal bits."""
SHORT = {
    "model.layers": 2,
    "model.dim": 64,
    "model.heads": 2,
    "model.kv_heads": 1,
    "data.seq": 64,
    "train.steps": 120,
    "eval.every_steps": 60,
    "eval.windows": 8,
    "checkpoint.every_steps": 40,
    "checkpoint.memory_every_steps": 10,
}
"""A run of a few seconds."""


def demo(dataset: Path, **settings: object) -> Recipe:
    """The short demo recipe on a dataset of the tests; `train__steps=9` sets train.steps."""
    keys = {name.replace("__", "."): value for name, value in settings.items()}
    values = SHORT | {"data.path": str(dataset)} | keys
    return load_recipe(DEMO, [f"{name}={json.dumps(value)}" for name, value in values.items()])


def train_uninterrupted(recipe: Recipe, folder: Path, workers: int = 2) -> Lived:
    """Train the same mesh on this machine, one thread per worker, as on an engine's machines."""
    attempt = new_run(recipe, folder, workers=workers).model_copy(update={"threads": 1})
    return Lived(attempt.folder, supervise_run(attempt))


def wait_for(condition: Callable[[], object], what: str, details: Callable[[], str] = str) -> None:
    eventually(condition, lambda: f"never happened: {what}\n{details()}", poll_s=0.1)


def headway(*arguments: str) -> str:
    """The output of a headway command, run in its own process."""
    program = [sys.executable, "-c", "from headway.cli.main import main; main()", *arguments]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return done.stdout


@dataclass
class EngineRun:
    """A run submitted to an engine."""

    root: Path
    name: str

    @classmethod
    def submitted(cls, recipe: Recipe, root: Path, engine: str, on: str = "cpux1x2", spares: int = 0) -> "EngineRun":
        submission = submitting.submit_run(recipe, root, parse_on(on), engine, "demo", spares)
        return cls(root, submission.request.name)

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.root / self.name)

    @property
    def status(self) -> JobStatus:
        return submitting.submitted_runs(self.root, [self.folder])[0].status

    def advised_status(self) -> JobStatus:
        """Its status; what `headway jobs` suggests is done."""
        submitted = submitting.submitted_runs(self.root, [self.folder])[0]
        engine, job = open_engine(submitted.submission.engine, self.root), submitted.submission.job
        if submitted.status.remedy == "requeue":
            engine.release(job)
        elif submitted.status.remedy == "cancel":
            engine.cancel(job)
        return submitted.status

    def reaches(self, step: int, starts: int) -> None:
        """Wait until a start has taken a step."""
        wait_for(lambda: self.advised_status().starts == starts, f"start {starts}", self.diagnosis)
        wait_for(lambda: self._newest() >= step, f"step {step}", self.diagnosis)

    def _newest(self) -> int:
        """The newest step of the newest attempt."""
        records = sorted(self.folder.events.glob("*-rank-0.jsonl"))
        lines = records[-1].read_text().splitlines() if records else []
        steps = [json.loads(line)["step"] for line in lines if '"kind":"step"' in line and line.endswith("}")]
        return max(steps, default=-1)

    def ended(self) -> JobStatus:
        """Wait for the end of its job, and return its status."""
        wait_for(lambda: self.advised_status().state in OVER, "its end", self.diagnosis)
        return self.status

    def diagnosis(self) -> str:
        """Its status and all logs, to explain a failure."""
        logs = [*(self.root / self.name / "jobs").rglob("*.log"), *self.folder.logs.glob("*.log")]
        texts = [f"--- {path.relative_to(self.root)}\n{path.read_text()[-3000:]}" for path in sorted(logs)]
        return "\n".join([str(self.status), *texts])

    def line_with(self, text: str) -> str:
        """The first line of its logs that contains a text, or nothing."""
        logs = [path.read_text() for path in sorted((self.folder.path / "jobs").rglob("*-*.log"))]
        return next((line for log in logs for line in log.splitlines() if text in line), "")

    def processes(self) -> list[str]:
        """Command lines of its processes that are still alive."""
        folder, command_lines = str(self.root / self.name).encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                content = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
            except OSError:
                continue
            if path.name != str(os.getpid()) and any(folder in part for part in content):
                command_lines.append(content[0].replace(b"\0", b" ").decode(errors="replace"))
        return command_lines


def preempt_and_lose_machine(run: EngineRun, lose: Callable[[str], None], which: int) -> JobStatus:
    """Requeue a run, then lose one of its machines; return how it ended. The command line reports both."""
    run.reaches(20, starts=1)
    requeue(run.name, runs=run.root)  # a process of its own starts too late on a busy machine: the run ends before
    run.reaches(60, starts=2)
    lost = run.status.machines[which]
    lose(lost)
    wait_for(lambda: run.status.state == "waiting", "its restart", run.diagnosis)
    assert "lost" in run.status.reason, run.status
    listed = headway("jobs", "--runs", str(run.root))
    assert "lost" in listed or run.status.starts == 3, listed  # it may be running again by now
    status = run.ended()
    assert (status.state, status.starts, len(status.machines)) == ("finished", 3, 2), run.diagnosis()
    assert lost not in status.machines
    assert "finished: all steps done" in headway("logs", run.name, "--runs", str(run.root))
    assert "stopped on request, state saved" in run.line_with("stopped")
    assert not run.processes()
    return status
