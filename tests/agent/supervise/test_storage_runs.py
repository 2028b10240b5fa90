"""Whole runs whose storage fails: the folder vanishes, or its disk is full. They end as an undisturbed one does."""

import contextlib
import os
import shutil
import subprocess

import pytest

from conftest import Lived, assert_same, when
from headway.agent import resume_run
from headway.state import list_checkpoints, verify_checkpoint
from headway.track import Recorder, account, largest_overhead, read_run

SETTINGS = {"train.steps": 10, "checkpoint.every_steps": 2, "checkpoint.memory_every_steps": 1}


LONG = SETTINGS | {"train.steps": 400, "checkpoint.every_steps": 100}
"""A file system may have room for 4 KiB more in each file when it is full, which is for some fifty steps."""


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_lab, recipe) -> Lived:
    """A run that nothing happened to."""
    lived = make_lab(tmp_path_factory.mktemp("unharmed")).train(recipe(SETTINGS))
    assert lived.outcome.state == "finished", lived.outcome
    return lived


@pytest.mark.slow
@pytest.mark.parametrize("bare", [False, True])
def test_run_whose_folder_vanishes_ends_with_the_same_bits(tmp_path, lab, recipe, unharmed, bare):
    """It is renamed in the middle and back when the run waits for it; with and without a bare mount point there."""
    path, away, left = tmp_path / "runs" / "a", tmp_path / "away", []

    def vanish():
        path.rename(away)
        if bare:
            path.mkdir()

    def come_back():
        left.extend(path.iterdir() if bare else path.parent.iterdir())
        if bare:
            path.rmdir()
        away.rename(path)

    def waits():
        record = away / "events" / "0001-agent.jsonl"
        return away.exists() and '"kind":"retry"' in record.read_text()

    record = path / "events" / "0001-rank-0.jsonl"
    when(lambda: record.exists() and '"step":3,' in record.read_text(), vanish, lambda: when(waits, come_back))
    lived = lab.train(recipe(SETTINGS), name="a")
    assert_same(lived, unharmed)
    assert left == []
    texts = [event["text"] for event in lived.events("storage", "agent")]
    assert "in the place of the run's" in texts[0] if bare else "is gone" in texts[0]
    assert "works again after" in texts[-1]
    assert "another agent" not in " ".join(texts)
    assert verify_checkpoint(list_checkpoints(lived.run.checkpoints)[-1].path).step == 10


# -- a full disk, which is a real file system of a few MB


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    disk, mount = tmp_path / "disk", shutil.which("mount")
    disk.mkdir()
    if os.geteuid() != 0 or mount is None:
        pytest.skip("mounting a tmpfs needs root")
    if subprocess.run([mount, "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)  # warm processes may have it open


@pytest.fixture(scope="module")
def long_unharmed(tmp_path_factory, make_lab, recipe) -> Lived:
    """A longer run that nothing happened to."""
    lived = make_lab(tmp_path_factory.mktemp("unharmed")).train(recipe(LONG))
    assert lived.outcome.state == "finished", lived.outcome
    return lived


class Disk:
    """Fills a disk to its last byte, and sees what an agent in this process cannot write there."""

    def __init__(self, path, monkeypatch):
        self.filler, self.recorders = path / "filler", []
        opened, recorders = Recorder.__init__, self.recorders

        def note(recorder, *args, **options):
            opened(recorder, *args, **options)
            recorders.append(recorder)

        monkeypatch.setattr(Recorder, "__init__", note)

    def fill(self):
        with self.filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for size in (1 << 16, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(b"x" * size):
                        pass

    def free(self):
        self.filler.unlink()

    def hides_steps(self):
        """Whether the agent has snapshots of ten more steps, which it cannot record."""
        unwritten = [recorder.unwritten() for recorder in self.recorders]
        return any(part.lines.count(b'"kind":"kept"') > 10 for part in unwritten if part is not None)


def recorded_steps(lived):
    return [event["step"] for event in lived.events("step")]


@pytest.mark.slow
def test_run_continues_on_a_full_disk_and_loses_nothing(small_disk, make_lab, recipe, long_unharmed, monkeypatch):
    """The disk is full from step 3 on, for a while; every step is in the record in the end."""
    disk, root = Disk(small_disk, monkeypatch), small_disk / "runs"
    record = root / "a" / "events" / "0001-rank-0.jsonl"

    when(
        lambda: record.exists() and '"step":3,' in record.read_text(),
        disk.fill,
        lambda: when(disk.hides_steps, disk.free),
    )
    lived = make_lab(root).train(recipe(LONG | {"checkpoint.retry_s": 300}), name="a")
    assert_same(lived, long_unharmed)
    assert recorded_steps(lived) == list(range(1, 401))
    texts = [event["text"] for event in lived.events("storage", "agent")]
    assert "No space left on device; training continues" in texts[0]
    assert "works again after" in texts[-1]
    ledger = account(read_run(lived.run))
    assert sum(ledger.accounts.values()) == ledger.total_ns
    assert not list(lived.events("lost"))


@pytest.mark.slow
def test_full_disk_that_lasts_stops_the_run_with_its_state_in_the_store(
    small_disk, tmp_path, make_lab, recipe, long_unharmed, monkeypatch
):
    """What could not be recorded travels with the state: after the run is resumed, no step is missing."""
    disk, root = Disk(small_disk, monkeypatch), small_disk / "runs"
    store = {"url": f"file://{tmp_path}/store", "every_steps": 0}
    settings = LONG | {"checkpoint.outage_s": 0.3, "checkpoint.store": store}
    record = root / "a" / "events" / "0001-rank-0.jsonl"
    when(lambda: record.exists() and '"step":3,' in record.read_text(), disk.fill)
    lived = make_lab(root).train(recipe(settings), name="a")
    assert lived.outcome.exit_status == 75, lived.outcome
    assert "records could not be written" in lived.outcome.reason
    assert "the last state is in the object store" in lived.outcome.reason
    before = recorded_steps(lived)
    disk.free()
    last = resume_run(lived.run, []).from_step
    assert last > before[-1] >= 3
    resumed = make_lab(root).resume(lived.run)
    assert_same(resumed, long_unharmed)
    assert recorded_steps(resumed) == list(range(1, 401))
    ledger = account(read_run(lived.run))
    assert sum(ledger.accounts.values()) == ledger.total_ns
    overhead = largest_overhead(ledger)
    assert overhead is None or "Save less often" not in overhead.advice
