"""Faults in real runs: a short part of the matrix, with keepers, agents and workers of their own."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from headway.agent import Attempt
from headway.chaos import CaseResult, ChaosHarness, FaultMatrix, chaos, select_cases, track_descendants
from headway.chaos.driver import FaultedRun, run_with_faults
from headway.cli.chaos_view import matrix_lines
from headway.cli.launch import start_launcher
from headway.errors import RunError
from headway.recipe import Recipe

NAMES = ("kill-worker", "kill-agent")
SETTINGS = {"train.steps": 18, "checkpoint.every_steps": 6, "checkpoint.memory_every_steps": 1}


class Struck(NamedTuple):
    """The part of the matrix that was run, where, and what was said meanwhile."""

    matrix: FaultMatrix
    root: Path
    told: list[str]

    def result(self, name: str) -> CaseResult:
        return next(result for result in self.matrix.results if result.row.name == name)

    def events(self, run: str, process: str) -> list[dict[str, Any]]:
        """What a process wrote over all attempts, without Headway's own reading of it."""
        paths = sorted((self.root / run / "events").glob(f"*-{process}.jsonl"))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def struck(recipe: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Struck:
    root, told = tmp_path_factory.mktemp("chaos"), list[str]()
    with track_descendants() as family:
        stage = ChaosHarness(root, 2, start_launcher, family)
        matrix = chaos(stage, recipe(SETTINGS), select_cases(",".join(NAMES), 2), 1, told.append)
    return Struck(matrix, root, told)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_lived_through(struck: Struck, name: str) -> None:
    (one,) = struck.result(name).tries
    assert one.complaints == ()
    assert one.left == ()
    assert one.figures is not None
    assert one.figures.noticed_s is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_end_is_the_unfaulted_runs_bit_for_bit(struck: Struck, name: str) -> None:
    ends = []
    for run in ("truth-1", f"{name}-1"):
        last = [event for event in struck.events(run, "rank-0") if event["kind"] == "step"][-1]
        manifest = struck.root / run / "checkpoints" / "step-00000018" / "manifest.json"
        ends.append((last["step"], last["chain"], json.loads(manifest.read_bytes())["digest"]))
    assert ends[0] == ends[1]
    assert ends[0][0] == 18
    (mark,) = {path.name[:4] for path in (struck.root / f"{name}-1" / "faults").glob("*.json")}
    assert mark == "0000", "and it was struck, by the one fault of its plan"


@pytest.mark.slow
def test_what_was_done_about_each(struck: Struck) -> None:
    killed, agent = (struck.result(name).tries[0] for name in NAMES)
    assert killed.said == ("worker 1 was killed by signal 9 (SIGKILL); resuming from step 5 (memory)",)
    assert killed.figures is not None
    assert killed.figures.redone == 0
    assert killed.figures.stepping_s > killed.figures.noticed_s > 0
    assert killed.figures.lost_s > 0
    assert agent.said == ("the agent died; a new agent took over its workers",)
    assert not [event for event in struck.events("kill-agent-1", "agent") if event["kind"] == "end-span"][2:]


@pytest.mark.slow
def test_a_stop_and_an_error_that_comes_again(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    with track_descendants() as family:
        stage = ChaosHarness(tmp_path, 2, start_launcher, family)
        matrix = chaos(stage, recipe(SETTINGS), select_cases("stop-worker,same-error", 2), 1, lambda _: None)
    assert matrix.met
    (woken,), (refused,) = (result.tries for result in matrix.results)
    assert any("woken" in words for words in woken.said)
    assert "a second time" in refused.said[-1]
    assert refused.figures is not None
    assert refused.figures.stepping_s is None


@pytest.mark.slow
def test_nothing_of_it_is_left(struck: Struck) -> None:
    mine = []
    for process in psutil.process_iter():
        try:
            if str(struck.root) in " ".join(
                [process.cwd(), *process.cmdline(), *(f.path for f in process.open_files())]
            ):
                mine.append(process)
        except psutil.Error:
            continue
    assert mine == []


@pytest.mark.slow
def test_it_tells_how_far_it_is_and_shows_it_in_80_columns(struck: Struck) -> None:
    rows = [f"{name}, {number} of {len(NAMES)}" for number, name in enumerate(NAMES, start=1)]
    assert struck.told == ["the unfaulted run", *rows]
    lines = matrix_lines(struck.matrix)
    assert max(map(len, lines)) <= 80
    assert struck.matrix.met
    assert lines[-1] == f"{len(NAMES)} of {len(NAMES)} faults handled as expected."


# -- the driver, with keepers that only pretend


@pytest.fixture
def pretend(recipe: Callable[..., Recipe], tmp_path: Path) -> Iterator[Callable[[str], FaultedRun]]:
    """Has a run live whose keeper is a line of shell, on a machine where nobody else has shared memory."""
    (tmp_path / "shared").mkdir()
    with track_descendants() as family:

        def pretend(shell: str, patience_s: float = 60.0) -> FaultedRun:
            def start(_: Attempt) -> "subprocess.Popen[bytes]":
                return subprocess.Popen(["sh", "-c", shell], start_new_session=True)

            shared = tmp_path / "shared"
            stage = ChaosHarness(tmp_path / "runs", 1, start, family, patience_s, leave_s=0.2, shared_memory=shared)
            return run_with_faults(stage, recipe(SETTINGS), "pretends")

        yield pretend
        assert family.living() == {}, "whatever was left has been ended"


def test_a_run_that_leaves_a_process_behind_is_told_of(pretend: Callable[[str], FaultedRun]) -> None:
    lived = pretend("sleep 300 & until grep -q sleep /proc/$!/comm; do :; done; exit 0")
    assert lived.statuses == [0]
    (left,) = lived.left
    assert left.startswith("process ")
    assert left.endswith("(sleep: sleep 300)")


def test_a_run_that_does_not_end_is_given_up(pretend: Callable[..., FaultedRun]) -> None:
    lived = pretend("sleep 300", patience_s=0.5)
    assert lived.statuses == [None]
    assert lived.left == []


def test_a_run_that_leaves_shared_memory_behind_is_told_of(
    pretend: Callable[[str], FaultedRun], tmp_path: Path
) -> None:
    assert pretend(f"touch {tmp_path}/shared/segment").left == ["shared memory segment"]


def test_a_fault_that_never_strikes_proves_nothing(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    def start(_: Attempt) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["true"])

    with track_descendants() as family:
        matrix = chaos(
            ChaosHarness(tmp_path, 2, start, family),
            recipe(SETTINGS),
            select_cases("kill-worker", 2),
            2,
            lambda _: None,
        )
    assert [one.complaints for one in matrix.results[0].tries] == [("the fault never struck",)] * 2
    assert not matrix.met


def test_without_a_truth_there_is_nothing_to_hold_anything_against(
    recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    def start(_: Attempt) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])

    with track_descendants() as family, pytest.raises(RunError, match="the unfaulted run failed"):
        chaos(
            ChaosHarness(tmp_path, 2, start, family),
            recipe(SETTINGS),
            select_cases("kill-worker", 2),
            1,
            lambda _: None,
        )
