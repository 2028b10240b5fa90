"""`headway train`, `resume` and `stop` as a person types them: real processes, real signals, exit statuses."""

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import psutil
import pytest

from conftest import recorded, send, when
from eventually import CEILING_S, eventually
from headway.agent import Attempt, AttemptOutcome, supervise_run
from headway.agent.workers.zygote import ZygoteClient
from headway.cli.main import main
from headway.recipe import to_toml
from headway.track import RunFolder, lock_holder, read_run


@pytest.fixture
def desk(tmp_path: Path, recipe):
    """A folder with a recipe, and a way to type commands in it."""
    (tmp_path / "r.toml").write_text(to_toml(recipe({"name": "tiny", "checkpoint.every_steps": 4})))
    return Desk(tmp_path)


class Desk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "headway.cli.main", *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, stdout=pipe, stderr=pipe, text=True)

    def type(self, *words: str, status: int = 0) -> tuple[str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=300)
        assert process.returncode == status, (process.returncode, out, err)
        return out, err

    def say(self, *words: str, status: int = 0) -> tuple[str, str]:
        """The same in this process, which has imported everything already: for what starts no other."""
        told = [io.StringIO(), io.StringIO()]
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(told[0]), redirect_stderr(told[1]):
            patch.setattr(sys, "argv", ["headway", *words])
            patch.chdir(self.folder)
            with pytest.raises(SystemExit) as ended:
                main()
        out, err = (one.getvalue() for one in told)
        assert (ended.value.code or 0) == status, (ended.value.code, out, err)
        return out, err

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.folder / "runs" / name)

    def wait_for_step(self, name: str, step: int) -> None:
        def reached() -> bool:
            records = read_run(self.run(name), "rank-0") if self.run(name).events.is_dir() else []
            return any(event.get("step", 0) >= step for record in records for event in record.events)

        eventually(reached, lambda: f"{name} never reached step {step}", poll_s=0.05)


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch, zygote: ZygoteClient, tmp_path: Path) -> None:
    """Has what is said in this process be supervised here too, with workers forked from the tests' zygote."""

    def keep(attempt: Attempt, on_tick: Callable[[int], None], _on_storage: object) -> AttemptOutcome:
        return supervise_run(attempt.model_copy(update={"threads": 1}), on_tick, warm=zygote)

    monkeypatch.setattr("headway.cli.launch.run_launcher", keep)
    monkeypatch.setenv("HEADWAY_RUNS", str(tmp_path / "runs"))  # the zygote stands elsewhere


@pytest.mark.usefixtures("warm")
def test_train_resume_and_inspect(desk) -> None:
    out, err = desk.say("train", "r.toml", "--workers", "2", "--name", "one")
    assert "one: finished at step 8 of 8" in out
    assert "next: headway report one" in out
    assert "plan: shard 2, microbatch 4, no recomputation\n" in err
    assert "a step, " not in err, "a CPU's speed is not predicted"
    assert "step 8/8" in err
    assert "\x1b" not in out + err, "no colours or cursor movements when it is not a terminal"
    out, _ = desk.say("resume", "one", "--set", "train.steps=12", "--json")
    result = json.loads(out)
    assert result["step"] == 12
    assert result["plan"] == json.loads(desk.run("one").plan_file.read_text())
    report = json.loads(desk.say("report", "one", "--json")[0])
    assert report["steps"] == 12
    assert report["plan"]["measured"]["steps"] == 12
    out, _ = desk.say("diff", "one", "one")
    assert "equal" in out


@pytest.mark.slow
def test_a_mesh_on_the_command_line_and_the_plan_in_the_background(desk) -> None:
    out, err = desk.type("train", "r.toml", "--mesh", "shard=2", "--name", "m", "--detach", "--json")
    result = json.loads(out)
    assert result["plan"]["mesh"]["shard"] == 2
    assert "plan: shard 2, " in err
    desk.wait_for_step("m", 8)
    starts = [event for record in read_run(desk.run("m"), "agent") for event in record.events]
    assert starts[0]["workers"] == 2
    assert json.loads(desk.run("m").recipe_file.read_text())["parallel"]["shard"] == 2
    eventually(lambda: lock_holder(desk.run("m")) is None)


@pytest.mark.usefixtures("warm")
def test_run_that_fails_before_its_first_step_frees_its_name_and_can_be_read_and_resumed(desk, monkeypatch) -> None:
    fault = {"action": "raise", "step": 1, "point": "restore", "attempt": 1}
    monkeypatch.setenv("HEADWAY_FAULTS", json.dumps({"faults": [fault]}))
    _, err = desk.say("train", "r.toml", "--name", "k", status=1)
    assert "error: k: worker 0 failed: RuntimeError: injected at restore" in err
    assert "the name k is free again: this run is now in " in err
    assert not desk.run("k").path.exists()
    assert "injected" in desk.say("logs", "k", "--rank", "0")[0]
    assert "k  failed, step 0" in desk.say("report", ".failed/k")[0]
    assert "1 run failed before the first step: headway runs --runs" in " ".join(desk.say("runs")[0].split())
    _, err = desk.say("resume", "k", "--set", "train.lr=1e-3", status=2)
    assert "this run has saved nothing: headway train RECIPE --set train.lr=0.001" in " ".join(err.split())
    assert ".failed" not in err, "a command to start a run in that folder"
    assert desk.say("resume", "k")[0].startswith("k: finished at step 8")
    assert desk.run("k").path.exists()
    # After its first step a run keeps its name, however it ends.
    monkeypatch.setenv("HEADWAY_FAULTS", json.dumps({"faults": [{"action": "raise", "step": 2}]}))
    desk.say("train", "r.toml", "--name", "later", status=1)
    assert desk.run("later").path.exists()


@pytest.mark.usefixtures("warm")
def test_ctrl_c_saves_and_exits_75(desk) -> None:
    when(lambda: recorded(desk.folder / "runs", "step", 3), send(signal.SIGINT), patience_s=CEILING_S)
    out, _ = desk.say("train", "r.toml", "--name", "long", "--set", "train.steps=100000", status=75)
    assert_stopped(desk, out)


@pytest.mark.slow
def test_ctrl_c_reaches_an_agent_of_its_own_process(desk) -> None:
    process = desk.start("train", "r.toml", "--name", "long", "--set", "train.steps=100000")
    desk.wait_for_step("long", 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 75, (out, err)
    assert_stopped(desk, out)


def assert_stopped(desk: Desk, out: str) -> None:
    assert "stopped" in out
    assert "headway resume long" in out
    saved = [event for record in read_run(desk.run("long")) for event in record.events if event["kind"] == "checkpoint"]
    steps = [event for record in read_run(desk.run("long")) for event in record.events if event["kind"] == "step"]
    assert saved[-1]["step"] == steps[-1]["step"]


def test_closed_pipe_does_not_end_the_run() -> None:
    """Every line that a run prints while it goes on takes this way."""
    program = (
        "import os; from headway.cli.view import tell; read, write = os.pipe(); os.close(read); os.dup2(write, 2); "
        "tell('nobody reads this'); tell('nor this'); print('the run goes on')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "the run goes on\n")


def test_errors_are_json_too_when_asked(desk) -> None:
    out, err = desk.say("train", "r.toml", "--set", "train.lr=50", "--json", status=2)
    assert json.loads(out)["error"] in err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    json.loads(desk.say("recipe", "schema", "--json")[0])


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_ends_at_once_and_resumes_from_nothing(desk) -> None:
    """And a terminal that closes saves and stops what was resumed."""
    process = desk.start("train", "r.toml", "--name", "early")
    eventually(lambda: lock_holder(desk.run("early")) is not None)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 75, (out, err)
    assert psutil.wait_procs(children, timeout=300)[1] == []
    assert "stopped at step 0 of 8" in out
    report = json.loads(desk.say("report", "early", "--json")[0])
    shares = report["shares"]
    assert shares["compute"] == shares["data stall"] == shares["rework"] == 0
    assert shares["start-up"] + shares["shut-down"] + shares["unattributed"] == pytest.approx(1)
    assert shares["start-up"] > shares["shut-down"]
    process = desk.start("resume", "early", "--set", "train.steps=100000")
    desk.wait_for_step("early", 3)
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 75
    assert "state saved" in out
    (resumed,) = [e for record in read_run(desk.run("early")) for e in record.events if e["kind"] == "resumed"]
    assert resumed["step"] == 0


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_detached_runs_are_stopped_by_name(desk) -> None:
    out, err = desk.type(
        "train", "r.toml", "--name", "bg", "--set", "train.steps=100000", "--mesh", "shard=2", "--detach"
    )
    assert out.strip() == "bg"
    assert "plan: shard 2, " in err
    assert json.loads(desk.run("bg").recipe_file.read_text())["parallel"]["shard"] == 2
    pid = lock_holder(desk.run("bg"))
    assert pid is not None
    desk.wait_for_step("bg", 2)
    _, err = desk.say("resume", "bg", status=1)
    assert f"run bg is in use by process {pid}" in err
    assert "hint:" in err
    out, _ = desk.say("stop", "bg")
    assert "bg: stopped at step" in out
    assert "state saved" in out
    eventually(lambda: not alive(pid))
    # its keeper, who wrote the log, outlives it by a moment
    eventually(lambda: "stopped: stopped on request" in desk.say("logs", "bg")[0], lambda: desk.say("logs", "bg"))
    _, err = desk.say("stop", "bg", status=1)
    assert "is not running" in err


@pytest.mark.slow
def test_a_killed_worker_is_named_on_the_command_line(desk, monkeypatch) -> None:
    monkeypatch.setenv("HEADWAY_FAULTS", json.dumps({"faults": [{"action": "kill", "step": 3, "rank": 1}]}))
    _, err = desk.type("train", "r.toml", "--workers", "2", "--name", "k", status=1)
    assert "error: k: worker 1 was killed by signal 9 (SIGKILL)" in err
    monkeypatch.delenv("HEADWAY_FAULTS")
    out, _ = desk.type("resume", "k")
    assert "k: finished at step 8" in out


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["train"], 2, "nothing to train"),
        (["train", "none.toml"], 2, "no such recipe"),
        (["train", "r.toml", "--set", "train.learning_rate=1"], 2, 'train has no key "learning_rate"'),
        (["train", "r.toml", "--workers", "3"], 2, "3 workers cannot share evenly"),
        (["train", "r.toml", "--mesh", "context=2", "--set", "data.seq=30"], 2, "context 2 does not divide"),
        (["train", "r.toml", "--mesh", "tensor=3"], 2, "tensor 3 does not divide"),
        (["train", "r.toml", "--mesh", "shard=2,tensor=2", "--workers", "3"], 2, "4 workers, but 3 were requested"),
        (
            ["train", "r.toml", "--mesh", "tensor=2", "--set", "inference.exact=true"],
            2,
            "tensor=2: inference.exact needs",
        ),
        (["train", "r.toml", "--mesh", "row=2"], 2, "expected AXIS=SIZE, got 'row=2'"),
        (["train", "r.toml", "--mesh", "shard=2", "--workers", "4"], 2, "shard 2: 2 workers, but 4 were"),
        (["train", "r.toml", "--mesh", "shrad=2"], 2, "expected AXIS=SIZE, got 'shrad=2'"),
        (["train", "r.toml", "--set", "parallel.pipeline=3"], 2, "layers cannot fill 3 pipeline stages"),
        (["train", "r.toml", "--set", "data.path=nowhere"], 2, "nowhere"),
        (["train", "r.toml", "--set", "data.version=0123456789"], 2, "version"),
        (["train", "r.toml", "--set", "data.seq=100000000"], 2, "no window of 100000000 + 1 tokens fits"),
        (["train", "r.toml", "--set", "model.vocab_size=17"], 2, "model.vocab_size is 17"),
        (["train", "r.toml", "--set", "model.init=nowhere"], 2, "neither a folder nor a run"),
        (["train", "r.toml", "--name", "../x"], 2, "invalid run name"),
        (["train", "r.toml", "--from", "none@3"], 2, "no runs"),
        (["resume", "none"], 2, "no runs"),
        (["stop", "none"], 2, "no runs"),
    ],
)
def test_bad_input_is_one_sentence_and_changes_nothing(desk, words: list[str], status: int, message: str) -> None:
    _, err = desk.say(*words, status=status)
    assert message in err
    assert err.startswith("error: ")
    assert not (desk.folder / "runs").exists() or not any((desk.folder / "runs").iterdir())


def test_a_corrupt_shard_is_found_before_training(desk, dataset: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    shard = copy / "tokens-00000.bin"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(bytes(content))
    _, err = desk.say("train", "r.toml", "--set", f"data.path={copy}", status=1)
    assert "tokens-00000.bin" in err
    assert not (desk.folder / "runs").exists()
