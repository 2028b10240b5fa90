"""The engine on a real Slurm: four virtual nodes with four GPUs each that are only files."""

import re
from collections.abc import Callable, Iterator

import pytest
from engine_suite import *  # noqa: F403
from engine_suite import Rig, appears
from slurm_cluster import CPUS, GPUS, NODES, SlurmCluster, slurm_cluster

from headway.cluster.engines.slurm.engine import SlurmEngine
from headway.errors import EngineError


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, cluster: SlurmCluster) -> Rig:
    folder = tmp_path_factory.mktemp("jobs")

    def lose(name: str) -> Callable[[], None]:
        cluster.lose_node(name)
        return lambda: cluster.start_node(name)

    # Slurm counts limits in minutes, looks at them every thirty seconds, and tells up to thirty seconds too early: with
    # this grace, no sooner than 25 seconds after a start.
    limits = {"limit_s": 60, "limit_grace_s": 5}
    return Rig(lambda: SlurmEngine(folder / "records", cleared_s=3), folder, NODES, CPUS, GPUS, lose=lose, **limits)


def test_who_is_preempted_saves_and_comes_back(rig: Rig) -> None:
    """A job of a partition that comes first takes the machine; Slurm tells, and leaves a grace."""
    here = {"cpus": CPUS, "avoid": ("n0", "n1", "n2")}
    script = '[ ! -e saved ] || exit 0; trap "echo >saved; exit 75" USR1; echo >up; while :; do sleep 0.1; done'
    request = rig.request(script, **here)
    victim = rig.engine.launch(request)
    appears(request.folder / "up")
    urgent = rig.engine.launch(rig.request("true", site={"partition": "urgent"}, **here))
    assert rig.over(urgent).state == "finished"
    appears(request.folder / "saved")
    status = rig.over(victim)
    assert (status.state, status.starts) == ("finished", 2)


def test_without_requeue_a_job_follows_itself(rig: Rig) -> None:
    request = rig.request('echo >>lives; [ "$(wc -l <lives)" = 2 ] || exit 75', site={"restart": "resubmit"})
    job = rig.engine.launch(request)
    status = rig.over(job)
    assert (status.state, status.starts) == ("finished", 2)
    assert len(rig.engine.logs(job)) == 2
    ids = [path.read_text().split() for path in request.folder.rglob("ids")]
    assert len(ids) == 1
    assert int(ids[0][0]) > int(job)


def test_words_of_slurm_are_quoted(rig: Rig, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    request = rig.request("true", site={"partition": "none"})
    with pytest.raises(EngineError, match="invalid partition specified: none"):
        rig.engine.launch(request)
    conf = request.folder / "slurm.conf"
    text = cluster.conf.read_text()
    conf.write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1\nMessageTimeout=2", text))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    with pytest.raises(EngineError, match="Unable to contact slurm controller"):
        rig.make().inventory()
