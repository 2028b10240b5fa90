"""The engine on a real Slurm: four virtual nodes with four fake GPUs each."""

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_suite import *  # noqa: F403
from engine_suite import EngineHarness, appears
from slurm_cluster import CPUS, GPUS, NODES, SlurmCluster, slurm_cluster

from eventually import eventually
from headway.cluster.engines import JobStatus
from headway.cluster.engines.slurm.engine import SlurmEngine
from headway.errors import EngineError, EngineUnreachable


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory, cluster: SlurmCluster) -> EngineHarness:
    folder = tmp_path_factory.mktemp("jobs")

    def lose(name: str) -> Callable[[], None]:
        cluster.lose_node(name)
        return lambda: cluster.start_node(name)

    # Slurm counts limits in minutes, checks them every thirty seconds, and signals up to thirty seconds too early: with
    # this grace period, no sooner than 25 seconds after a start.
    limits = {"limit_s": 60, "limit_grace_s": 5}
    return EngineHarness(
        lambda: SlurmEngine(folder / "records", cleared_s=3),
        folder, NODES, CPUS, GPUS, lose=lose, trace=cluster.trace, **limits
    )  # fmt: skip


def test_preempted_job_saves_and_is_restarted(harness: EngineHarness) -> None:
    """A job of a partition with higher priority takes the machine; Slurm signals, and leaves a grace period."""
    options = {"cpus": CPUS, "avoid": ("n0", "n1", "n2")}
    script = '[ ! -e saved ] || exit 0; trap "echo >saved; exit 75" USR1; echo >up; while :; do sleep 0.1; done'
    request = harness.request(script, **options)
    victim = harness.engine.launch(request)
    appears(request.folder / "up")
    urgent = harness.engine.launch(harness.request("true", site={"partition": "urgent"}, **options))
    assert harness.over(urgent).state == "finished"
    appears(request.folder / "saved")
    status = harness.over(victim)
    assert (status.state, status.starts) == ("finished", 2)


def test_held_job_starts_only_when_it_is_released(harness: EngineHarness) -> None:
    request = harness.request('echo >>attempts; [ "$(wc -l <attempts)" = 2 ] || exit 75')
    job = harness.engine.launch(request)

    def held() -> JobStatus | None:
        status = harness.engine.status([job])[job]
        return status if status.native == "PENDING" and status.remedy else None

    first = eventually(held, poll_s=0.05)
    until = squeue_start(job)
    assert first.reason == f"held by Slurm until {until[11:16]}"
    eventually(lambda: len([harness.make().status([job]) for _ in range(3)]) == 3)
    assert squeue_start(job) == until, "queries change nothing"
    assert harness.engine.release(job)
    status = harness.over(job)
    assert (status.state, status.starts) == ("finished", 2)
    assert not harness.engine.release(job)


def squeue_start(job: str) -> str:
    """When Slurm itself means to start a job."""
    command = ["squeue", "--noheader", "--states=all", "--format=%S", f"--jobs={job}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_job_resubmits_itself_without_requeue(harness: EngineHarness) -> None:
    request = harness.request('echo >>attempts; [ "$(wc -l <attempts)" = 2 ] || exit 75', site={"restart": "resubmit"})
    job = harness.engine.launch(request)
    status = harness.over(job)
    assert (status.state, status.starts) == ("finished", 2)
    assert len(harness.engine.logs(job)) == 2
    ids = [path.read_text().split() for path in request.folder.rglob("ids")]
    assert len(ids) == 1
    assert int(ids[0][0]) > int(job)


def test_slurms_own_messages_are_quoted(
    harness: EngineHarness, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = harness.request("true", site={"partition": "none"})
    with pytest.raises(EngineError, match="invalid partition specified: none"):
        harness.engine.launch(request)
    conf = request.folder / "slurm.conf"
    text = cluster.conf.read_text()
    conf.write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1\nMessageTimeout=2", text))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    with pytest.raises(EngineError, match="Unable to contact slurm controller"):
        harness.make().inventory()


def test_stopped_controller_is_unreachable(cluster: SlurmCluster, tmp_path: Path) -> None:
    SlurmEngine(tmp_path, probe_s=60).probe()
    controller = cluster.processes["slurmctld"]
    controller.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(EngineUnreachable, match=r"scontrol did not answer within 0\.3 s"):
            SlurmEngine(tmp_path, probe_s=0.3).probe()
    finally:
        controller.send_signal(signal.SIGCONT)
    SlurmEngine(tmp_path, probe_s=60).probe()
