"""`headway chaos` as a person types it, and what it prints."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from eventually import CEILING_S, eventually
from headway.agent import Attempt
from headway.chaos.cases import CASES
from headway.chaos.matrix import CaseResult, CaseRun, FaultMatrix, SoakResult
from headway.chaos.random_faults import draw_fault_plan
from headway.chaos.recovery_times import RecoveryTimes
from headway.chaos.torchrun_baseline import BaselineResult, BaselineRun
from headway.cli.chaos import chaos
from headway.cli.chaos_view import long_lines, long_object, matrix_lines, matrix_object
from headway.cli.main import main
from headway.recipe import to_toml
from headway.track import RunFolder

BY_NAME = {row.name: row for row in CASES}
LONG = "worker 1 (or a neighbouring rank) is hung in step 20: " + "torch/distributed/distributed_c10d.py:4394 " * 5


@pytest.fixture
def desk(tmp_path: Path, recipe) -> Path:
    """A folder with a recipe in it."""
    settings = {"train.steps": 60, "checkpoint.every_steps": 10, "checkpoint.memory_every_steps": 1}
    (tmp_path / "tiny.toml").write_text(to_toml(recipe(settings)))
    (tmp_path / "temporary").mkdir()
    return tmp_path


def start(desk: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "headway.cli.main", "chaos", *words],
        cwd=desk,
        env=os.environ | {"TMPDIR": str(desk / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["none.toml"], 2, "none.toml: no such recipe"),
        (["tiny.toml", "--faults", "kill-everybody"], 2, "unknown fault 'kill-everybody'"),
        (["tiny.toml", "--faults", "slow-rank", "--workers", "1"], 2, "slow-rank needs 2 workers or more, not 1"),
        (["tiny.toml", "--random", "3", "--faults", "all"], 2, "--random chooses its own faults"),
        (["tiny.toml", "--random", "3", "--beside", "torchrun"], 2, "--random chooses its own faults"),
        (["tiny.toml", "--runs", "."], 2, ". is not empty"),
        (["tiny.toml", "--set", "train.steps=3"], 2, "train.steps is 3: too few for a fault and a recovery"),
        (["tiny.toml", "--set", "checkpoint.every_steps=auto"], 2, "faults need known save steps"),
        (["tiny.toml", "--set", "data.path=nowhere"], 2, "nowhere"),
    ],
)
def test_bad_input_is_one_sentence_and_a_hint(
    desk: Path, words: list[str], status: int, message: str, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.setattr(tempfile, "tempdir", str(desk / "temporary"))
    monkeypatch.setattr(sys, "argv", ["headway", "chaos", *words])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (status, "")
    assert message in err
    assert "hint: " in err
    if "nowhere" in message:
        assert "headway data build" in err
    assert list((desk / "temporary").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_was_started_and_removes_its_folder(desk: Path, number, monkeypatch, capsys) -> None:
    """With a keeper that is a line of shell, and sends the signal itself."""
    started, folders = list["subprocess.Popen[bytes]"](), list[Path]()
    shell = f"until [ -e started ]; do sleep 0.01; done; kill -{int(number)} {os.getpid()}; exec sleep 600"

    def start_keeper(attempt: Attempt) -> "subprocess.Popen[bytes]":
        folders.append(attempt.run.parent)
        started.append(subprocess.Popen(["sh", "-c", shell], start_new_session=True))
        Path("started").touch()
        return started[0]

    monkeypatch.chdir(desk)
    monkeypatch.setattr(tempfile, "tempdir", str(desk / "temporary"))
    monkeypatch.setattr("headway.cli.chaos.start_launcher", start_keeper)
    monkeypatch.setattr(sys, "argv", ["headway", "chaos", "tiny.toml", "--faults", "kill-worker"])
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert capsys.readouterr().out == ""
    assert started[0].wait() == -signal.SIGKILL
    assert folders[0].parent == desk / "temporary"
    assert list((desk / "temporary").iterdir()) == []
    assert signal.getsignal(number) is before


def command_of(process: psutil.Process) -> list[str]:
    """What a process was started with; nothing of one that has ended meanwhile."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_what_was_started_and_removes_its_folder(desk: Path, number: signal.Signals) -> None:
    process = start(desk, "tiny.toml", "--faults", "kill-worker")
    family = set[psutil.Process]()

    def agent_is_there() -> bool:
        family.update(psutil.Process(process.pid).children(recursive=True))
        return any("headway.agent" in command_of(one) for one in family)

    eventually(agent_is_there)
    assert list((desk / "temporary").glob("headway-chaos-*"))
    process.send_signal(number)
    process.communicate(timeout=CEILING_S)
    assert process.returncode == 130
    assert [command for one in family if (command := command_of(one))] == []
    assert list((desk / "temporary").glob("headway-chaos-*")) == []


# -- what it prints


def tried(*, figures: RecoveryTimes | None = None, **more: Any) -> CaseRun:
    return CaseRun(**{"figures": figures, "said": (), "complaints": (), "left": (), "seconds": 9.0} | more)


FIGURES = [RecoveryTimes(0.02, stepping, 1, 2.5) for stepping in (1.0, 9.0, 2.0)]
GOOD = CaseResult(BY_NAME["kill-worker"], tuple(tried(figures=one, said=("resuming from step 3",)) for one in FIGURES))
BAD = CaseResult(
    BY_NAME["kill-agent-and-keeper"],
    (
        tried(figures=FIGURES[0], said=(LONG, "and then this")),
        tried(figures=FIGURES[1], left=("process 7 (sleep)",)),
        tried(complaints=("the fault never fired",)),
    ),
)
PEERS = [
    BaselineResult(
        BY_NAME["kill-worker"],
        (BaselineRun("recovered", 0.5, 6.0), BaselineRun("recovered", 0.7, 18.0), BaselineRun("job lost")),
    ),
    BaselineResult(BY_NAME["stop-worker"], (BaselineRun("not in time"),) * 3),
]


def matrix(*results: CaseResult) -> FaultMatrix:
    return FaultMatrix("tiny", 2, 60, 0.0214, results, RunFolder(Path("runs/truth-1")))


def test_the_table_has_medians_and_what_went_wrong_in_80_columns() -> None:
    lines = matrix_lines(matrix(GOOD, BAD), PEERS)
    assert max(map(len, lines)) <= 80
    assert lines[0] == "tiny: 2 workers, 60 steps of 21 ms, medians of 3 tries"
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("  ")}
    assert "  kill-worker             0.0200 s    2.00 s       1    2.50 s  met 3 of 3" in lines
    assert rows["kill-agent-and-keeper,"][0] == "kill-agent-and-keeper,"
    assert "  kill-agent-and-keeper, try 2: left behind: process 7 (sleep)" in lines
    assert "  kill-agent-and-keeper, try 3: the fault never fired" in lines
    assert "  kill-worker              0.600 s    12.0 s     2 of 3  (1 job lost)" in lines
    assert "  stop-worker                    -         -     0 of 3  (3 not in time)" in lines
    assert lines[-1] == "1 of 2 faults handled as expected."
    assert not matrix(GOOD, BAD).met
    assert matrix(GOOD).met


def test_single_try_has_a_one_word_verdict() -> None:
    refused = CaseResult(BY_NAME["same-error"], (tried(figures=RecoveryTimes(0.02, None, 0, 3.0)),))
    lines = matrix_lines(matrix(CaseResult(GOOD.case, GOOD.tries[:1]), CaseResult(BAD.case, BAD.tries[2:]), refused))
    assert any(line.startswith("  kill-worker") and line.endswith("  equal") for line in lines)
    assert any(line.startswith("  kill-agent-and-keeper") and line.endswith("-  NOT MET") for line in lines)
    assert any(line.startswith("  same-error") and line.endswith("  refused") for line in lines)


def long(**more: Any) -> SoakResult:
    faults = draw_fault_plan(1, 30, 2, saved_every=1, disk_every=25)
    facts = {"seed": 1, "faults": faults, "struck": tuple(range(30)), "steps": 500, "attempts": 20, "lost_s": 31.2}
    return SoakResult(**facts | {"complaints": (), "left": (), "seconds": 99.0} | more)


def test_soak_result_as_text() -> None:
    assert long().met
    lines = long_lines(long())
    assert lines[0] == "30 of 30 faults fired in 500 steps (seed 1), 99 s:"
    assert sum(int(line.split()[0]) for line in lines[1:-2]) == 30
    assert lines[-1].startswith("equal: ")
    for wrong in (long(struck=(1, 2)), long(complaints=("they diverge at step 4",)), long(left=("process 7",))):
        assert not wrong.met
        assert not long_lines(wrong)[-1].startswith("equal")
        assert max(map(len, long_lines(wrong))) <= 80


def test_json_keys_match_the_help() -> None:
    text = re.sub(r"\s+", " ", chaos.__doc__ or "")
    both = text.partition("Keys of --json: ")[2].partition(" With --random: ")
    rows, drawn = re.findall(r"\w+", both[0]), re.split(r"[,.] ?| and ", both[2])
    document = json.loads(json.dumps(matrix_object(matrix(GOOD, BAD), PEERS)))
    assert set(document) | set(document["faults"][0]) <= set(rows)
    assert {word.strip() for word in drawn if word} == set(long_object(long(), "tiny", 2))
    worker = document["faults"][0]
    assert (worker["name"], worker["met"], worker["stepping_s"], worker["redone"]) == ("kill-worker", 3, 2.0, 1)
    assert document["beside"][0] | {"tries": None} == {
        "name": "kill-worker", "recovered": 2, "restarted_s": 0.6, "stepping_s": 12.0, "tries": None
    }  # fmt: skip
    assert document["faults"][1]["tries"][1]["left"] == ["process 7 (sleep)"]
