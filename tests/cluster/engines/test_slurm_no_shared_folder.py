"""Jobs of a real Slurm whose machines see no common folder: the script has all it needs, and its comment tells."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from engine_suite import (
    Rig,
    appears,
    test_a_job_fails,
    test_a_machine_that_the_command_suspects_is_avoided_on_the_next_start,
    test_a_signal_has_it_save_and_come_back,
    test_cancel_while_it_runs,
    test_cancel_while_it_waits,
    test_copies_that_wait_for_their_turn_can_be_cancelled,
    test_to_describe_is_to_do_nothing,
)
from slurm_cluster import CPUS, GPUS, NODES, SlurmCluster, slurm_cluster

from headway.cluster.engines import JobStatus, LaunchRequest
from headway.cluster.engines.slurm.engine import SlurmEngine
from headway.errors import EngineError

__all__ = [
    "test_a_job_fails",
    "test_a_machine_that_the_command_suspects_is_avoided_on_the_next_start",
    "test_a_signal_has_it_save_and_come_back",
    "test_cancel_while_it_runs",
    "test_cancel_while_it_waits",
    "test_copies_that_wait_for_their_turn_can_be_cancelled",
    "test_to_describe_is_to_do_nothing",
]


@dataclass
class Apart(Rig):
    """Commands go to the test's folder by themselves, to leave their marks there; the engine may not."""

    def request(self, script: str, *words: str, **options: object) -> LaunchRequest:
        plain = super().request(script, *words, **options)
        return replace(plain, shared=False, setup=(f"cd -- '{plain.folder}'", *plain.setup))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, cluster: SlurmCluster) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("jobs")
    yield Apart(lambda: SlurmEngine(folder / "records", cleared_s=3), folder, NODES, CPUS, GPUS)
    for job in folder.glob("*/jobs/slurm-*"):  # what the scripts have left on their machines, which are this one
        shutil.rmtree(on_the_machine(job), ignore_errors=True)


def on_the_machine(job: Path) -> Path:
    return Path(f"/tmp/headway-{os.getuid()}") / job.name


def only_job(request: LaunchRequest) -> Path:
    (job,) = (request.folder / "jobs").iterdir()
    return job


def test_what_it_prints_stays_on_its_machines(rig: Rig) -> None:
    request = rig.request('echo "$HEADWAY_MACHINE of $HEADWAY_MACHINES"; pwd', machines=2)
    job = rig.engine.launch(replace(request, setup=()))
    status = rig.over(job)
    assert (status.state, status.exit_status, status.starts) == ("finished", 0, 1)
    there = on_the_machine(only_job(request))
    names = ",".join(status.machines)
    assert [(there / f"0001-{one}.log").read_text() for one in (0, 1)] == [
        f"{one} of {names}\n{there}\n" for one in (0, 1)
    ]
    assert there.parent.stat().st_mode & 0o077 == 0
    assert rig.engine.logs(job) == []
    assert sorted(path.name for path in only_job(request).iterdir()) == ["ended", "ids", "job.sh", "starts"]


def test_starts_are_counted_wherever_they_are(rig: Rig) -> None:
    """Put back by Slurm, and on another machine: nothing of the first start is there."""
    script = 'echo "$HEADWAY_MACHINES" >>lives; [ "$(wc -l <lives)" = 2 ] && exit; '
    script += 'rm -rf "${HEADWAY_LOG%/*}"; mkdir "${HEADWAY_LOG%/*}"; exit 75'
    request = rig.request(script)
    status = rig.over(rig.engine.launch(request))
    assert (status.state, status.exit_status, status.starts) == ("finished", 0, 2)


@pytest.mark.parametrize("array", [None, 2])
def test_a_job_that_follows_itself_is_found(rig: Rig, array: int | None) -> None:
    script = 'own="lives-${HEADWAY_ARRAY_INDEX:-0}"; echo >>"$own"; [ "$(wc -l <"$own")" = 3 ] || exit 75'
    request = rig.request(script, array=array, site={"restart": "resubmit"})
    job = rig.engine.launch(request)
    status = rig.over(job)
    assert (status.state, status.starts) == ("finished", 3 * (array or 1))
    numbers = [path.read_text().strip() for path in only_job(request).rglob("ids")]
    assert len(numbers) == (array or 1)
    assert all(int(number.partition("_")[0]) > int(job) for number in numbers)


def test_what_was_seen_is_known_when_slurm_has_forgotten(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    job = rig.engine.launch(rig.request("exit 7"))
    seen = rig.over(job)
    monkeypatch.setattr(SlurmEngine, "_told", lambda self: {})
    monkeypatch.setattr(SlurmEngine, "_rows", lambda self, numbers: {})
    assert rig.engine.status([job]) == {job: JobStatus("failed", seen.reason, seen.machines, 7, 1)}


def test_what_nobody_saw_and_slurm_has_forgotten_is_not_known(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not failed: it may have done its work. The records of a run say so (tests/agent/remote/test_store_mirror.py)."""
    request = rig.request("echo >up; until [ -e end ]; do sleep 0.05; done")
    job = rig.engine.launch(request)
    appears(request.folder / "up")
    assert rig.until(job, "running").starts == 1
    with monkeypatch.context() as forgotten:
        forgotten.setattr(SlurmEngine, "_told", lambda self: {})
        forgotten.setattr(SlurmEngine, "_rows", lambda self, numbers: {})
        assert rig.engine.status([job])[job].state == "unknown"
    (request.folder / "end").touch()
    with monkeypatch.context() as mute:  # a site where comments are an administrator's
        mute.setattr(SlurmEngine, "_told", lambda self: {})
        status = rig.over(job)
    assert (status.state, status.exit_status) == ("finished", 0)


def test_what_slurm_took_is_taken_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that could not be written down must not run, whether its number is known or not."""
    monkeypatch.setattr(SlurmEngine, "_note", lambda *_: (_ for _ in ()).throw(EngineError("no room")))
    request = rig.request("echo >up; sleep 1000", cpus=CPUS, machines=NODES)
    with pytest.raises(EngineError, match="no room"):
        rig.engine.launch(request)
    monkeypatch.undo()
    after = rig.request("echo >up", cpus=CPUS, machines=NODES)
    assert rig.over(rig.engine.launch(after)).state == "finished"
    appears(after.folder / "up")
    assert not (request.folder / "jobs").exists() or not list((request.folder / "jobs").iterdir())
