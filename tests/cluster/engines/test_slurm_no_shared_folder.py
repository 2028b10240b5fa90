"""Jobs of a real Slurm without a shared folder: the script contains its task and reports in its comment."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from engine_suite import (
    EngineHarness,
    appears,
    test_cancel_of_a_running_job,
    test_cancel_of_a_waiting_job,
    test_describe_submits_nothing,
    test_failing_command_fails_the_job,
    test_next_start_avoids_suspect_machines,
    test_sigusr1_makes_a_job_save_and_restart,
    test_waiting_array_tasks_can_be_cancelled,
)
from slurm_cluster import CPUS, GPUS, NODES, SlurmCluster, slurm_cluster

from headway.cluster.engines import JobStatus, LaunchRequest
from headway.cluster.engines.slurm.engine import SlurmEngine
from headway.errors import EngineError

__all__ = [
    "test_cancel_of_a_running_job",
    "test_cancel_of_a_waiting_job",
    "test_describe_submits_nothing",
    "test_failing_command_fails_the_job",
    "test_next_start_avoids_suspect_machines",
    "test_sigusr1_makes_a_job_save_and_restart",
    "test_waiting_array_tasks_can_be_cancelled",
]


@dataclass
class NoSharedFolderHarness(EngineHarness):
    """Commands change to the test's folder themselves, to leave their marks there; the engine may not use it."""

    def request(self, script: str, *arguments: str, **options: object) -> LaunchRequest:
        plain = super().request(script, *arguments, **options)
        return replace(plain, shared=False, setup=(f"cd -- '{plain.folder}'", *plain.setup))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory, cluster: SlurmCluster) -> Iterator[EngineHarness]:
    folder = tmp_path_factory.mktemp("jobs")
    yield NoSharedFolderHarness(lambda: SlurmEngine(folder / "records", cleared_s=3), folder, NODES, CPUS, GPUS)
    for job in folder.glob("*/jobs/slurm-*"):  # left on the machines, which are this one
        shutil.rmtree(on_the_machine(job), ignore_errors=True)


def on_the_machine(job: Path) -> Path:
    return Path(f"/tmp/headway-{os.getuid()}") / job.name


def only_job(request: LaunchRequest) -> Path:
    (job,) = (request.folder / "jobs").iterdir()
    return job


def test_logs_stay_on_the_machines(harness: EngineHarness) -> None:
    request = harness.request('echo "$HEADWAY_MACHINE of $HEADWAY_MACHINES"; pwd', machines=2)
    job = harness.engine.launch(replace(request, setup=()))
    status = harness.over(job)
    assert (status.state, status.exit_status, status.starts) == ("finished", 0, 1)
    folder = on_the_machine(only_job(request))
    names = ",".join(status.machines)
    assert [(folder / f"0001-{index}.log").read_text() for index in (0, 1)] == [
        f"{index} of {names}\n{folder}\n" for index in (0, 1)
    ]
    assert folder.parent.stat().st_mode & 0o077 == 0
    assert harness.engine.logs(job) == []
    assert sorted(path.name for path in only_job(request).iterdir()) == ["ended", "ids", "job.sh", "starts"]


def test_starts_are_counted_across_machines(harness: EngineHarness) -> None:
    """Requeued by Slurm on another machine, where nothing of the first start exists."""
    script = 'echo "$HEADWAY_MACHINES" >>attempts; [ "$(wc -l <attempts)" = 2 ] && exit; '
    script += 'rm -rf "${HEADWAY_LOG%/*}"; mkdir "${HEADWAY_LOG%/*}"; exit 75'
    request = harness.request(script)
    status = harness.over(harness.engine.launch(request))
    assert (status.state, status.exit_status, status.starts) == ("finished", 0, 2)


@pytest.mark.parametrize("array", [None, 2])
def test_resubmitted_job_is_found(harness: EngineHarness, array: int | None) -> None:
    script = 'own="attempts-${HEADWAY_ARRAY_INDEX:-0}"; echo >>"$own"; [ "$(wc -l <"$own")" = 3 ] || exit 75'
    request = harness.request(script, array=array, site={"restart": "resubmit"})
    job = harness.engine.launch(request)
    status = harness.over(job)
    assert (status.state, status.starts) == ("finished", 3 * (array or 1))
    numbers = [path.read_text().strip() for path in only_job(request).rglob("ids")]
    assert len(numbers) == (array or 1)
    assert all(int(number.partition("_")[0]) > int(job) for number in numbers)


def test_observed_state_is_known_after_slurm_has_forgotten(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = harness.engine.launch(harness.request("exit 7"))
    seen = harness.over(job)
    monkeypatch.setattr(SlurmEngine, "_comments", lambda self: {})
    monkeypatch.setattr(SlurmEngine, "_rows", lambda self, numbers: {})
    assert harness.engine.status([job]) == {job: JobStatus("failed", seen.reason, seen.machines, 7, 1)}


def test_unobserved_end_is_unknown_after_slurm_has_forgotten(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not failed: it may have finished. The run's records say so (tests/agent/remote/test_store_mirror.py)."""
    request = harness.request("echo >up; until [ -e end ]; do sleep 0.05; done")
    job = harness.engine.launch(request)
    appears(request.folder / "up")
    assert harness.until(job, "running").starts == 1
    with monkeypatch.context() as forgotten:
        forgotten.setattr(SlurmEngine, "_comments", lambda self: {})
        forgotten.setattr(SlurmEngine, "_rows", lambda self, numbers: {})
        assert harness.engine.status([job])[job].state == "unknown"
    (request.folder / "end").touch()
    with monkeypatch.context() as restricted:  # a site where only administrators may write comments
        restricted.setattr(SlurmEngine, "_comments", lambda self: {})
        status = harness.over(job)
    assert (status.state, status.exit_status) == ("finished", 0)


def test_job_without_a_record_is_cancelled(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that could not be recorded must not run, whether its id is known or not."""
    monkeypatch.setattr(SlurmEngine, "_record", lambda *_: (_ for _ in ()).throw(EngineError("no room")))
    request = harness.request("echo >up; sleep 1000", cpus=CPUS, machines=NODES)
    with pytest.raises(EngineError, match="no room"):
        harness.engine.launch(request)
    monkeypatch.undo()
    after = harness.request("echo >up", cpus=CPUS, machines=NODES)
    assert harness.over(harness.engine.launch(after)).state == "finished"
    appears(after.folder / "up")
    assert not (request.folder / "jobs").exists() or not list((request.folder / "jobs").iterdir())
