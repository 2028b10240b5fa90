"""Faults during saves: agent and launcher are killed, disks are slow or full, checkpoints are tampered with.

In each case training continues or stops with an explanation, the newest good checkpoint is intact, and a run resumed
from it ends with the chain and the digest of an undisturbed one.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from conftest import Lived, assert_same, left_alone, recorded
from eventually import CEILING_S, eventually
from headway.agent import resume_run
from headway.errors import DamagedState
from headway.recipe import FaultPlan, to_toml
from headway.recipe.faults import AGENT, KEEPER
from headway.state import list_checkpoints, verify_checkpoint
from headway.state.address import open_address
from headway.track import RunFolder, account, read_run

STEPS = 8
SETTINGS = {"train.steps": STEPS, "checkpoint.every_steps": 2, "checkpoint.keep_last": 9}
AT = 4
"""The step whose save gets the fault."""
POINTS = [("written", 2, 2)]
"""Where agent and launcher are killed, the number of workers, and the step of the newest checkpoint then."""
MORE = [("write", 1, 2), ("commit", 1, 2), ("committed", 1, 4), ("upload", 2, 4), ("uploaded", 1, 4)]
"""The tests of headway.state kill between any two calls of a save and of an upload, without complete runs."""


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_lab, recipe) -> dict[int, Lived]:
    """Undisturbed runs of one and of two workers."""
    return left_alone(tmp_path_factory.mktemp("unharmed"), make_lab, recipe(SETTINGS))


def intact_steps(run: RunFolder) -> list[int]:
    """Steps of the checkpoints, each verified."""
    return [verify_checkpoint(entry.path).step for entry in list_checkpoints(run.checkpoints)]


def left_over(run: RunFolder) -> list[str]:
    return [path.name for path in run.checkpoints.iterdir() if not path.name.startswith("step-")]


# -- agent and launcher are killed: the commands run beside the disk tests, and mostly import torch


@dataclass(frozen=True)
class Killed:
    """A `headway train` that was killed with its agent during a save, and whose processes have exited."""

    folder: Path
    status: int

    @property
    def run(self) -> RunFolder:
        """What it left."""
        return RunFolder(self.folder / "runs" / "a")


def train_and_be_killed(folder: Path, recipe: str, point: str, cores: set[int]) -> Killed:
    """Give each worker one core, and so one thread, as the other runs here do."""
    folder.mkdir()
    (folder / "r.toml").write_text(recipe)
    os.sched_setaffinity(0, cores)  # of this thread, and of what it starts
    arguments = ["train", "r.toml", "--workers", str(len(cores)), "--name", "a"]
    process = subprocess.Popen(
        [sys.executable, "-m", "headway.cli.main", *arguments],
        cwd=folder,
        env=os.environ
        | {"HEADWAY_FAULTS": FaultPlan().kill(AT, KEEPER, point).kill(AT, AGENT, point).model_dump_json()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        status = process.wait(timeout=CEILING_S)
    finally:
        process.kill()
        process.wait()
    eventually(lambda: not living(folder), lambda: living(folder))
    return Killed(folder, status)


def living(folder: Path) -> list[int]:
    """Live processes with this working directory."""
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder.resolve()) and is_alive(process.pid):
                pids.append(process.pid)
    return pids


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture(scope="module")
def killed(tmp_path_factory, recipe, request) -> Iterator[dict[str, Future[Killed]]]:
    """Runs killed at every point that the selected tests need, two at a time."""
    selected = {item.callspec.params.get("point") for item in request.session.items if hasattr(item, "callspec")}
    root, cores = tmp_path_factory.mktemp("killed"), sorted(os.sched_getaffinity(0))
    with ThreadPoolExecutor(2) as pool:
        runs = {}
        for number, (point, workers, _) in enumerate(case for case in POINTS + MORE if case[0] in selected):
            store = {"checkpoint.store": {"url": f"file://{root}/{point}/store", "every_steps": 4}}
            toml = to_toml(recipe(SETTINGS | store))
            some = cores[:workers] if number % 2 else cores[-workers:]
            runs[point] = pool.submit(train_and_be_killed, root / point, toml, point, set(some))
        yield runs
        pool.shutdown(cancel_futures=True)


# -- disks


@pytest.mark.slow
@pytest.mark.usefixtures("killed")
@pytest.mark.parametrize(("workers", "buffers"), [(1, 1), (2, 2)])
def test_slow_disk_delays_saves_and_not_training(
    lab, recipe, unharmed, monkeypatch, workers: int, buffers: int
) -> None:
    """The first save lasts until training is three steps ahead of what fits into memory."""
    (memory,) = unharmed[workers].events("memory", "agent")
    room = (buffers + 0.5) * memory["bytes"] / memory["buffers"] / 1e9
    settings = SETTINGS | {"checkpoint.every_steps": 1, "checkpoint.memory_gb": room}
    far_ahead = partial(recorded, lab.root, "step", buffers + 3)
    monkeypatch.setattr(
        "headway.agent.saving.coordinator.AgentFaultInjector", lambda *_: FakeInjector(1, lambda: eventually(far_ahead))
    )
    lived = lab.train(recipe(settings), workers)
    assert_same(lived, unharmed[workers])
    saved, skipped, written = (
        [event["step"] for event in lived.events(kind, "agent")] for kind in ("kept", "skipped", "checkpoint")
    )
    assert sorted(saved + skipped) == list(range(1, STEPS + 1))
    assert saved == written == intact_steps(lived.run)
    assert skipped
    first = moments(lived, "checkpoint", "agent")[1]
    assert sum(moment < first for moment in moments(lived, "step").values()) > buffers + 1
    assert sum(moment < first for moment in moments(lived, "kept", "agent").values()) <= buffers
    incidents = [incident.text for incident in account(read_run(lived.run)).incidents]
    many = f"{len(skipped)} saves" if len(skipped) > 1 else "one save"
    assert f"{many} skipped, first at step {skipped[0]}: the previous save was still being written" in incidents


def moments(lived: Lived, kind: str, process: str = "rank-0") -> dict[int, int]:
    """When each step had an event of this kind, in nanoseconds of the monotonic clock."""
    (record,) = read_run(lived.run, process)
    return {event["step"]: record.header.mono + event["t"] for event in record.events if event["kind"] == kind}


class FakeInjector:
    """Replaces the agent's fault injector: acts on the disk when a save is about to write."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.step, self.action = step, action

    def reach(self, point: str, step: int, _attempt: int) -> None:
        if (point, step) == ("write", self.step):
            self.action()


def only_checkpoints(root: Path) -> Path:
    """The checkpoints folder of the only run below a folder."""
    (folder,) = root.glob("*/checkpoints")
    return folder


def put_a_file_there(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.write_text("in the way")


def put_the_folder_back(folder: Path) -> None:
    folder.unlink()
    folder.with_name("moved").rename(folder)


def make_read_only(folder: Path) -> None:
    """File modes do not stop root, but a mount or a kernel file system does."""
    if os.geteuid():
        folder.chmod(0o555)
    elif subprocess.run(["mount", "--bind", folder, folder], capture_output=True).returncode == 0:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
    else:
        folder.rename(folder.with_name("moved"))
        folder.symlink_to("/sys/kernel")


def make_writable(folder: Path) -> None:
    if folder.is_symlink():
        put_the_folder_back(folder)
    elif os.geteuid():
        folder.chmod(0o755)
    else:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize(
    ("action", "mend", "why"),
    [
        pytest.param(put_a_file_there, put_the_folder_back, "Not a directory|File exists", id="a file in its place"),
        pytest.param(
            make_read_only,
            make_writable,
            "Read-only file system|Permission denied|Operation not permitted",
            id="read-only",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_folder_that_accepts_no_more_saves(lab, recipe, unharmed, monkeypatch, action, mend, why: str) -> None:
    """Training continues to its end; once the folder works again, the run resumes from the last checkpoint."""
    monkeypatch.setattr(
        "headway.agent.saving.coordinator.AgentFaultInjector",
        lambda *_: FakeInjector(AT, lambda: action(only_checkpoints(lab.root))),
    )
    try:
        failed = lab.train(recipe(SETTINGS))
    finally:
        monkeypatch.undo()
        mend(only_checkpoints(lab.root))
    assert [event["step"] for event in failed.events("step")] == list(range(1, STEPS + 1))
    assert failed.chain == unharmed[1].chain
    assert failed.outcome.state == "failed"
    assert "the last state could not be saved: checkpoint of step 8 could not be started" in failed.outcome.reason
    unsaved = failed.events("unsaved", "agent")
    assert [(event["step"], event["tier"]) for event in unsaved] == [(4, "disk"), (6, "disk"), (8, "disk")]
    for event in unsaved:
        assert any(text in event["message"] for text in why.split("|")), event
        assert "Error" not in event["message"], event
        assert event["hint"]
    assert intact_steps(failed.run) == [2]
    lived = lab.resume(failed.run)
    assert lived.events("resumed")[-1]["step"] == 2
    assert_same(lived, unharmed[1])
    assert intact_steps(lived.run) == [2, 4, 6, 8]
    assert left_over(lived.run) == []


# -- tampered checkpoints


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file."""
    content = path.read_bytes()
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


@contextlib.contextmanager
def gone(path: Path) -> Iterator[None]:
    path.rename(path.with_name("elsewhere"))
    yield
    path.with_name("elsewhere").rename(path)


def newest(run: RunFolder) -> tuple[int, list[str]]:
    """The step that a resumed run would start from before reading tensors, and its notes."""
    attempt = resume_run(run, [])
    return attempt.from_step, attempt.notes


@pytest.mark.slow
def test_resume_skips_tampered_checkpoints(lab, recipe, unharmed) -> None:
    run = lab.train(recipe(SETTINGS), workers=2, faults=FaultPlan().kill(7)).run
    newest_one = run.checkpoints / "step-00000006"
    files = sorted(newest_one.iterdir())
    assert [path.name for path in files] == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    assert newest(run) == (6, [])
    for path in files:
        size = path.stat().st_size
        for at in (0, 9, size // 3, size - 1):
            flip(path, at)
            with pytest.raises(DamagedState, match=path.name):
                verify_checkpoint(newest_one)
            if path.name == "manifest.json":
                step, notes = newest(run)
                assert (step, notes[0].startswith("skipped step 6: ")) == (4, True)
                assert str(path) in notes[0]
            flip(path, at)
        with gone(path):
            step, notes = newest(run)
            assert (step, notes[0].startswith("skipped step 6: ")) == (4, True)
            assert path.name in notes[0]
    assert newest(run) == (6, [])

    # One found by its manifest, and one that only a full read finds.
    older = run.checkpoints / "step-00000004" / files[1].name
    flip(older, older.stat().st_size // 2)
    files[1].unlink()
    lived = lab.resume(run)
    assert [event["from_step"] for event in lived.events("attempt", "agent")] == [0, 4, 2]
    assert_same(lived, unharmed[2])
    incidents = [incident.text for incident in account(read_run(run)).incidents]
    assert any(f"{older} is damaged: the checksum of tensor" in text for text in incidents)
    assert any(text.startswith("resumed after step 2, 4 steps to redo") for text in incidents)


# -- and the agent again


@pytest.mark.parametrize(
    ("point", "workers", "durable"), [*POINTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_agent_is_killed_during_a_save(lab, killed, unharmed, point: str, workers: int, durable: int) -> None:
    command = killed[point].result()
    assert command.status == -signal.SIGKILL
    run = command.run
    (agent,) = read_run(run, "agent")
    pids = [event["pid"] for event in agent.events if event["kind"] == "worker"]
    assert len(pids) == workers
    eventually(lambda: not any(is_alive(pid) for pid in pids))
    if point.startswith("upload"):  # beside which the next save may be under way, or even be done
        assert intact_steps(run)[:2] == [2, 4]
        durable = intact_steps(run)[-1]
        assert len(left_over(run)) <= 1
    else:
        assert intact_steps(run) == [2, 4][: durable // 2]
        assert len(left_over(run)) == (durable < AT), "what was begun and not finished"
    in_store = [path.name for path in (command.folder / "store").rglob("step-*.json")]
    assert in_store == (["step-00000004.json"] if point == "uploaded" else [])
    leave_more(run, point)

    lived = lab.resume(run)
    assert lived.events("resumed")[-1]["step"] == durable
    assert_same(lived, unharmed[workers])
    assert intact_steps(run) == [2, 4, 6, 8]
    assert left_over(run) == []
    incidents = [incident.text for incident in account(read_run(run)).incidents]
    assert "the agent vanished without recording an end" in incidents
    assert (
        verify_checkpoint(open_address(f"file://{command.folder}/store/a/step-00000008").source).digest == lived.digest
    )


def leave_more(run: RunFolder, point: str) -> None:
    """Leftovers of a save that replaces another and is killed between its two renames, or after both."""
    own, replaced = run.checkpoints / "step-00000002", run.checkpoints / ".step-00000002.replaced"
    if point == "write":
        own.rename(replaced)
    elif point == "written":
        shutil.copytree(own, replaced)
