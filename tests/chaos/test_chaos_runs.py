"""Faults in real runs: a small part of the matrix, with launchers, agents and workers of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from headway.agent import Attempt
from headway.chaos.cases import select_cases
from headway.chaos.driver import ChaosHarness, FaultedRun, leftover_profiles, run_with_faults
from headway.chaos.matrix import CaseResult, FaultMatrix, run_matrix
from headway.chaos.process_tree import track_descendants
from headway.cli.chaos_view import matrix_lines
from headway.cli.launch import start_launcher
from headway.errors import RunError
from headway.recipe import Recipe
from headway.track import Recorder, create_run, record_path

NAMES = ("kill-worker", "kill-agent")
SETTINGS = {"train.steps": 18, "checkpoint.every_steps": 6, "checkpoint.memory_every_steps": 1}


class MatrixRun(NamedTuple):
    """A part of the matrix, its folder, and its progress messages."""

    matrix: FaultMatrix
    root: Path
    progress: list[str]

    def result(self, name: str) -> CaseResult:
        return next(result for result in self.matrix.results if result.case.name == name)

    def events(self, run: str, process: str) -> list[dict[str, Any]]:
        """Read the events of a process over all attempts, without Headway's own reader."""
        paths = sorted((self.root / run / "events").glob(f"*-{process}.jsonl"))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def matrix_run(recipe: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> MatrixRun:
    root, progress = tmp_path_factory.mktemp("chaos"), list[str]()
    with track_descendants() as tree:
        harness = ChaosHarness(root, 2, start_launcher, tree)
        matrix = run_matrix(harness, recipe(SETTINGS), select_cases(",".join(NAMES), 2), 1, progress.append)
    return MatrixRun(matrix, root, progress)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_run_recovers_from_a_fault(matrix_run: MatrixRun, name: str) -> None:
    (run,) = matrix_run.result(name).tries
    assert run.complaints == ()
    assert run.left == ()
    assert run.figures is not None
    assert run.figures.noticed_s is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_faulted_run_ends_bit_for_bit_like_the_unfaulted_one(matrix_run: MatrixRun, name: str) -> None:
    ends = []
    for run in ("reference-1", f"{name}-1"):
        last = [event for event in matrix_run.events(run, "rank-0") if event["kind"] == "step"][-1]
        manifest = matrix_run.root / run / "checkpoints" / "step-00000018" / "manifest.json"
        ends.append((last["step"], last["chain"], json.loads(manifest.read_bytes())["digest"]))
    assert ends[0] == ends[1]
    assert ends[0][0] == 18
    (mark,) = {path.name[:4] for path in (matrix_run.root / f"{name}-1" / "faults").glob("*.json")}
    assert mark == "0000", "the one fault of its plan fired"


@pytest.mark.slow
def test_agent_messages_and_recovery_times(matrix_run: MatrixRun) -> None:
    killed, agent = (matrix_run.result(name).tries[0] for name in NAMES)

    def said(messages: tuple[str, ...]) -> list[str]:  # a busy machine may suspend any agent for seconds
        return [message for message in messages if not message.startswith("the agent was suspended for")]

    assert said(killed.said) == ["worker 1 was killed by signal 9 (SIGKILL); resuming from step 5 (memory)"]
    assert killed.figures is not None
    assert killed.figures.redone == 0
    assert killed.figures.stepping_s > killed.figures.noticed_s > 0
    assert killed.figures.lost_s > 0
    assert said(agent.said) == ["the agent died; a new agent took over its workers"]
    assert not [event for event in matrix_run.events("kill-agent-1", "agent") if event["kind"] == "end-span"][2:]


@pytest.mark.slow
def test_stopped_worker_is_continued_and_repeated_error_is_refused(
    recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    with track_descendants() as tree:
        harness = ChaosHarness(tmp_path, 2, start_launcher, tree)
        matrix = run_matrix(harness, recipe(SETTINGS), select_cases("stop-worker,same-error", 2), 1, lambda _: None)
    assert matrix.met
    (stopped,), (refused,) = (result.tries for result in matrix.results)
    assert any("continued with SIGCONT" in message for message in stopped.said)
    assert "a second time" in refused.said[-1]
    assert refused.figures is not None
    assert refused.figures.stepping_s is None


@pytest.mark.slow
def test_no_process_is_left(matrix_run: MatrixRun) -> None:
    leftover = []
    for process in psutil.process_iter():
        try:
            if str(matrix_run.root) in " ".join(
                [process.cwd(), *process.cmdline(), *(f.path for f in process.open_files())]
            ):
                leftover.append(process)
        except psutil.Error:
            continue
    assert leftover == []


@pytest.mark.slow
def test_progress_is_reported_and_the_table_fits_80_columns(matrix_run: MatrixRun) -> None:
    cases = [f"{name}, {number} of {len(NAMES)}" for number, name in enumerate(NAMES, start=1)]
    assert matrix_run.progress == ["the unfaulted run", *cases]
    lines = matrix_lines(matrix_run.matrix)
    assert max(map(len, lines)) <= 80
    assert matrix_run.matrix.met
    assert lines[-1] == f"{len(NAMES)} of {len(NAMES)} faults handled as expected."


# -- the driver, with fake launchers


@pytest.fixture
def run_fake(recipe: Callable[..., Recipe], tmp_path: Path) -> Iterator[Callable[[str], FaultedRun]]:
    """Run with a shell command as the launcher, on a machine where nobody else has shared memory."""
    (tmp_path / "shared").mkdir()
    with track_descendants() as tree:

        def run_fake(shell: str, patience_s: float = 60.0) -> FaultedRun:
            def start(_: Attempt) -> "subprocess.Popen[bytes]":
                return subprocess.Popen(["sh", "-c", shell], start_new_session=True)

            shared = tmp_path / "shared"
            harness = ChaosHarness(tmp_path / "runs", 1, start, tree, patience_s, exit_s=0.2, shared_memory=shared)
            return run_with_faults(harness, recipe(SETTINGS), "fake")

        yield run_fake
        assert tree.alive() == {}, "what was left has been killed"


def test_leftover_process_is_reported(run_fake: Callable[[str], FaultedRun]) -> None:
    faulted = run_fake("sleep 300 & until grep -q sleep /proc/$!/comm; do :; done; exit 0")
    assert faulted.statuses == [0]
    (left,) = faulted.left
    assert left.startswith("process ")
    assert left.endswith("(sleep: sleep 300)")


def test_run_that_does_not_end_is_given_up(run_fake: Callable[..., FaultedRun]) -> None:
    faulted = run_fake("sleep 300", patience_s=0.5)
    assert faulted.statuses == [None]
    assert faulted.left == []


def test_leftover_shared_memory_is_reported(run_fake: Callable[[str], FaultedRun], tmp_path: Path) -> None:
    assert run_fake(f"touch {tmp_path}/shared/segment").left == ["shared memory segment"]


def test_leftover_profile_of_a_worker_is_reported(tmp_path: Path) -> None:
    """Of the run's own processes: others of this machine have profiles, too."""
    run = create_run(tmp_path, "r", "r")
    with Recorder(record_path(run.events, 1, "rank-0"), attempt=1, process="rank-0"):
        pass
    (tmp_path / "perf-1.map").write_text("another's")
    assert leftover_profiles(run, tmp_path) == []
    own = tmp_path / f"perf-{os.getpid()}.map"
    own.write_text("")
    assert leftover_profiles(run, tmp_path) == [f"profile {own}"]
    os.utime(own, (0, own.stat().st_mtime - 3600))
    assert leftover_profiles(run, tmp_path) == [], "of an earlier process with the same number"


def test_fault_that_never_fires_is_a_violation(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    def start(_: Attempt) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["true"])

    with track_descendants() as tree:
        matrix = run_matrix(
            ChaosHarness(tmp_path, 2, start, tree),
            recipe(SETTINGS),
            select_cases("kill-worker", 2),
            2,
            lambda _: None,
        )
    assert [run.complaints for run in matrix.results[0].tries] == [("the fault never fired",)] * 2
    assert not matrix.met


def test_failed_unfaulted_run_is_an_error(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    def start(_: Attempt) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])

    with track_descendants() as tree, pytest.raises(RunError, match="the unfaulted run failed"):
        run_matrix(
            ChaosHarness(tmp_path, 2, start, tree),
            recipe(SETTINGS),
            select_cases("kill-worker", 2),
            1,
            lambda _: None,
        )
