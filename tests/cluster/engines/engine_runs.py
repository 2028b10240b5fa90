"""What tests of whole runs on engines share: the demo recipe, made short, and a run of it that nothing happens to."""

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
from headway.cluster.engines.engine import OVER, JobStatus
from headway.cluster.submit import runs as submitting
from headway.hardware import parse_on
from headway.recipe import Recipe, load_recipe
from headway.track import RunFolder

__all__ = ["ONE_CORE", "EngineRun", "demo", "headway", "preempt_and_lose_machine", "train_uninterrupted", "wait_for"]

DEMO = Path(__file__).parents[3] / "recipes/demo.toml"
ONE_CORE = "taskset -pc $((HEADWAY_MACHINE % 2)) $$ >/dev/null"
"""For agents to have a core each: as many threads make the same bits."""
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
"""A run of seconds."""


def demo(dataset: Path, **settings: object) -> Recipe:
    """The demo recipe, short, on a data set of the tests; `train__steps=9` sets train.steps."""
    own = {name.replace("__", "."): value for name, value in settings.items()}
    wanted = SHORT | {"data.path": str(dataset)} | own
    return load_recipe(DEMO, [f"{name}={json.dumps(value)}" for name, value in wanted.items()])


def train_uninterrupted(recipe: Recipe, folder: Path, workers: int = 2) -> Lived:
    """The same mesh on this machine, each worker with one thread, as on an engine's machines."""
    attempt = new_run(recipe, folder, workers=workers).model_copy(update={"threads": 1})
    return Lived(attempt.folder, supervise_run(attempt))


def wait_for(there: Callable[[], object], what: str, more: Callable[[], str] = str) -> None:
    """Until something is so."""
    eventually(there, lambda: f"never happened: {what}\n{more()}", poll_s=0.1)


def headway(*words: str) -> str:
    """What a verb prints, in a process of its own, as people see it."""
    program = [sys.executable, "-c", "from headway.cli.main import main; main()", *words]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


@dataclass
class EngineRun:
    """A run that an engine has."""

    root: Path
    name: str

    @classmethod
    def submitted(cls, recipe: Recipe, root: Path, engine: str, on: str = "cpux1x2", spares: int = 0) -> "EngineRun":
        more = {"spares": spares} if spares else {}
        return cls(root, submitting.submit_run(recipe, root, parse_on(on), engine, "demo", **more).request.name)

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.root / self.name)

    @property
    def status(self) -> JobStatus:
        return submitting.submitted_runs(self.root, [self.folder])[0].status

    def reaches(self, step: int, starts: int) -> None:
        """Until a step was taken in a start, and a state of that start is saved."""
        wait_for(lambda: self.status.starts == starts, f"start {starts}", self.diagnosis)
        wait_for(lambda: self._newest() >= step, f"step {step}", self.diagnosis)

    def _newest(self) -> int:
        """The newest step of the newest attempt."""
        records = sorted(self.folder.events.glob("*-rank-0.jsonl"))
        lines = records[-1].read_text().splitlines() if records else []
        steps = [json.loads(line)["step"] for line in lines if '"kind":"step"' in line and line.endswith("}")]
        return max(steps, default=-1)

    def ended(self) -> JobStatus:
        """How its job ended."""
        wait_for(lambda: self.status.state in OVER, "its end", self.diagnosis)
        return self.status

    def diagnosis(self) -> str:
        """All that was printed, for whoever must find out why."""
        logs = [*(self.root / self.name / "jobs").rglob("*.log"), *self.folder.logs.glob("*.log")]
        said = [f"--- {path.relative_to(self.root)}\n{path.read_text()[-3000:]}" for path in sorted(logs)]
        return "\n".join([str(self.status), *said])

    def line_with(self, words: str) -> str:
        """What the processes of its job printed, that has these words in it; nothing where nobody said so."""
        said = [path.read_text() for path in sorted((self.folder.path / "jobs").rglob("*-*.log"))]
        return next((line for text in said for line in text.splitlines() if words in line), "")

    def processes(self) -> list[str]:
        """Command lines of processes that still work for it."""
        mark, found = str(self.root / self.name).encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
            except OSError:
                continue
            if path.name != str(os.getpid()) and any(mark in word for word in words):
                found.append(words[0].replace(b"\0", b" ").decode(errors="replace"))
        return found


def preempt_and_lose_machine(run: EngineRun, lose: Callable[[str], None], which: int) -> JobStatus:
    """Has a run saved and started again, and then one of its machines lost; how it ended. `headway` tells of it."""
    run.reaches(20, starts=1)
    assert headway("requeue", run.name, "--runs", str(run.root))
    run.reaches(60, starts=2)
    lost = run.status.machines[which]
    lose(lost)
    wait_for(lambda: run.status.state == "waiting", "to be started again", run.diagnosis)
    assert "lost" in run.status.reason, run.status
    assert "lost" in headway("jobs", "--runs", str(run.root))
    status = run.ended()
    assert (status.state, status.starts, len(status.machines)) == ("finished", 3, 2), run.diagnosis()
    assert lost not in status.machines
    assert "finished: all steps done" in headway("logs", run.name, "--runs", str(run.root))
    assert "stopped on request, state saved" in run.line_with("stopped")
    assert not run.processes()
    return status
