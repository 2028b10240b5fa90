"""The engine on a real Ray cluster: three nodes that claim three cores and two GPUs each."""

import functools
import getpass
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import engine_suite
import numpy as np
import pytest
from engine_suite import *  # noqa: F403
from engine_suite import SECRET, EngineHarness, appears
from PIL import Image
from ray_cluster import CPUS, GPUS, HEAD, NODES, RayCluster, ray_cluster

from headway.cluster.engines.ray.encode import ray_encoders
from headway.cluster.engines.ray.engine import RayEngine
from headway.cluster.engines.ray.examine import ray_examiners
from headway.data import BuildOptions, build_dataset
from headway.data.media import MediaOptions, build_media
from headway.errors import EngineError, UsageError

UNTIL_SIGNALLED = (
    'trap "echo >signalled-$HEADWAY_MACHINE; exit 75" USR1; echo $$ >up-$HEADWAY_MACHINE; while :; do sleep 0.1; done'
)


def slow(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of the suite as slow on Ray only, where starting anything takes long."""

    @functools.wraps(test)
    def run(*arguments: object, **named: object) -> None:
        test(*arguments, **named)

    return pytest.mark.slow(run)


# Same code as on one machine, or covered by other tests below.
test_another_process_sees_the_same_job = slow(engine_suite.test_another_process_sees_the_same_job)
test_waiting_array_tasks_can_be_cancelled = slow(engine_suite.test_waiting_array_tasks_can_be_cancelled)
test_array_respects_its_limit_of_tasks_at_a_time = slow(engine_suite.test_array_respects_its_limit_of_tasks_at_a_time)
test_setup_lines_run_before_the_command = slow(engine_suite.test_setup_lines_run_before_the_command)
test_job_killed_by_an_early_sigusr1_is_restarted = slow(engine_suite.test_job_killed_by_an_early_sigusr1_is_restarted)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as started:
        yield started


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory, cluster: RayCluster) -> EngineHarness:
    def lose(name: str) -> Callable[[], None]:
        cluster.send(f"remove {name}")
        return lambda: None  # no test below needs it, and a node takes seconds to start

    limits = {"limit_s": 16, "limit_grace_s": 2, "essential": (HEAD,)}  # starts are slow on a busy machine
    return EngineHarness(
        lambda: RayEngine(cluster.address), tmp_path_factory.mktemp("jobs"), NODES, CPUS, GPUS, lose=lose, **limits
    )


def test_strict_pack_places_bundles_on_one_machine(harness: EngineHarness) -> None:
    job = harness.engine.launch(harness.request("true", machines=2, gpus=1, site={"strategy": "STRICT_PACK"}))
    status = harness.over(job)
    assert (status.state, len(status.machines), len(set(status.machines))) == ("finished", 2, 1)
    with pytest.raises(UsageError, match="it asks for 3 machines with 1 GPU, 1 core each on one machine"):
        harness.engine.launch(harness.request("true", machines=3, gpus=1, site={"strategy": "STRICT_PACK"}))


def test_live_cluster_answers_a_probe(cluster: RayCluster) -> None:
    RayEngine(cluster.address, probe_s=60).probe()


def test_growing_cluster_accepts_jobs_larger_than_itself(harness: EngineHarness) -> None:
    job = harness.engine.launch(harness.request("true", machines=9, site={"grows": "yes"}))
    later = harness.engine.launch(harness.request("true"))
    assert harness.over(later).state == "finished"  # by then the controller has considered all waiting jobs
    assert harness.engine.status([job])[job].state == "waiting"
    harness.engine.cancel(job)
    assert harness.over(job).state == "cancelled"


@pytest.mark.slow
def test_job_outlives_its_submitter(harness: EngineHarness, cluster: RayCluster) -> None:
    request = harness.request("echo >up; until [ -e end ]; do sleep 0.05; done")
    program = (
        "import sys; from pathlib import Path; from headway.cluster.engines import LaunchRequest\n"
        "from headway.cluster.engines.ray.engine import RayEngine\n"
        "print(RayEngine(sys.argv[1]).launch(LaunchRequest('gone', tuple(sys.argv[3:]), Path(sys.argv[2]))))"
    )
    command = [sys.executable, "-c", program, cluster.address, str(request.folder), *request.command]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    appears(request.folder / "up")
    job = done.stdout.strip()
    assert harness.until(job, "running").starts == 1
    (request.folder / "end").touch()
    assert harness.over(job).state == "finished"


def test_next_controller_takes_over_the_jobs_of_a_lost_one(
    harness: EngineHarness, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setenv("A_SECRET", SECRET)
    before = harness.engine.launch(harness.request("exit 3"))
    harness.over(before)
    plain, secret = harness.request(UNTIL_SIGNALLED), harness.request(UNTIL_SIGNALLED, secrets=("A_SECRET",))
    jobs = [harness.engine.launch(plain), harness.engine.launch(secret)]
    pids = [int(appears(request.folder / "up-0")) for request in (plain, secret)]
    (plain.folder / "up-0").unlink()
    ray.kill(ray.get_actor(f"headway-{getpass.getuser()}", namespace="headway"), no_restart=False)
    pids.append(int(appears(plain.folder / "up-0")))
    assert not [pid for pid in pids[:2] if Path(f"/proc/{pid}").exists()], "killed with their controller"
    assert harness.until(jobs[0], "running").starts == 2
    statuses = harness.engine.status([before, jobs[1]])
    assert (statuses[before].state, statuses[before].exit_status) == ("failed", 3)
    assert statuses[jobs[1]].state == "failed"
    assert "the values of A_SECRET with it: submit the job again" in statuses[jobs[1]].reason
    harness.engine.cancel(jobs[0])
    assert harness.over(jobs[0]).state == "cancelled"
    written = [path for path in cluster.folder.rglob("*") if path.is_file() and not path.is_socket()]
    assert written
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_job_restarts_on_other_nodes_after_a_lost_node(harness: EngineHarness, cluster: RayCluster) -> None:
    cluster.send("add spare")
    request = harness.request(UNTIL_SIGNALLED, machines=2)
    job = harness.engine.launch(request)
    pids = [int(appears(request.folder / f"up-{rank}")) for rank in range(2)]
    first = harness.until(job, "running").machines
    lost = 1 if first[0] == HEAD else 0
    for rank in range(2):
        (request.folder / f"up-{rank}").unlink()
    cluster.send(f"remove {first[lost]}")
    for rank in range(2):
        appears(request.folder / f"up-{rank}")
    status = harness.until(job, "running")
    assert status.starts == 2
    assert status.machines[1 - lost] == first[1 - lost], "nodes that were not lost are kept"
    assert status.machines[lost] not in first
    assert (request.folder / f"signalled-{1 - lost}").exists(), "the others had their grace period"
    assert not Path(f"/proc/{pids[lost]}").exists()
    harness.engine.cancel(job)
    assert harness.over(job).state == "cancelled"


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9: nothing listens there"),
        ("nonsense", "invalid Ray address 'nonsense'"),
        ("ray://127.0.0.1:10001", "from a machine of the cluster"),
        ("", "no Ray cluster is named"),
    ],
)
def test_unreachable_cluster_is_reported_at_once(address: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'headway[ray]'")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises((EngineError, UsageError), match=error):
        RayEngine(address).inventory()


def test_missing_ray_hints_what_to_install() -> None:
    program = (
        "import sys; sys.modules['ray'] = None\n"
        "from headway.cluster.engines.ray.engine import RayEngine\n"
        "try: RayEngine('127.0.0.1:9').inventory()\n"
        "except Exception as error: print(error.message, '|', error.hint)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "Ray is not installed | pip install 'headway[ray]'\n"


@pytest.mark.slow
def test_dataset_built_on_the_cluster_has_the_same_bytes(cluster: RayCluster, tmp_path: Path) -> None:
    sources = [f"{Path(json.__file__).parent.parent}/[ab]*.py"]
    options = BuildOptions(vocab_size=300, shard_tokens=100_000)
    here = build_dataset(tmp_path / "here", sources, options)
    remote = build_dataset(
        tmp_path / "there", sources, options, remote_encoders=ray_encoders(RayEngine(cluster.address), 1 << 17)
    )
    assert remote.manifest.version == here.manifest.version
    names = sorted(path.name for path in here.path.iterdir())
    assert len(names) > 4
    assert names == sorted(path.name for path in remote.path.iterdir())
    for name in names:
        if name not in ("sources.json", ".verified.json"):  # they hold times
            assert (here.path / name).read_bytes() == (remote.path / name).read_bytes(), name


@pytest.mark.slow
def test_media_dataset_examined_on_the_cluster_is_the_same(cluster: RayCluster, tmp_path: Path) -> None:
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    (tmp_path / "damaged.png").write_bytes((tmp_path / "0.png").read_bytes()[:500])
    sources, options = [tmp_path / "*.png"], MediaOptions("image", shard_bytes=8_000)
    here = build_media(tmp_path / "here", sources, options)
    examine = ray_examiners(RayEngine(cluster.address))
    remote = build_media(tmp_path / "there", sources, options, examine=examine)
    assert remote.manifest == here.manifest
    assert remote.skipped == here.skipped
    assert set(here.skipped) == {"damaged.png"}
    for file in here.manifest.files:
        assert (here.path / file.name).read_bytes() == (remote.path / file.name).read_bytes()
