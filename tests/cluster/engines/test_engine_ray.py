"""The engine on a real Ray cluster: three nodes with three cores and two GPUs each, by their own account."""

import functools
import getpass
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import engine_suite
import pytest
from engine_suite import *  # noqa: F403
from engine_suite import SECRET, Rig, appears
from ray_cluster import CPUS, GPUS, HEAD, NODES, RayCluster, ray_cluster

from headway.cluster.engines.ray.encode import ray_encoders
from headway.cluster.engines.ray.engine import RayEngine
from headway.data import BuildOptions, build_dataset
from headway.errors import EngineError, UsageError

UNTIL_TOLD = (
    'trap "echo >told-$HEADWAY_MACHINE; exit 75" USR1; echo $$ >up-$HEADWAY_MACHINE; while :; do sleep 0.1; done'
)


def slowly(test: Callable[..., None]) -> Callable[..., None]:
    """A test of the suite, left to make test-all on Ray alone: to start anything there takes long."""

    @functools.wraps(test)
    def run(*arguments: object, **named: object) -> None:
        test(*arguments, **named)

    return pytest.mark.slow(run)


# What these do on Ray is the same code as on one machine, or is done by other tests below.
test_another_process_sees_the_same = slowly(engine_suite.test_another_process_sees_the_same)
test_copies_that_wait_for_their_turn_can_be_cancelled = slowly(
    engine_suite.test_copies_that_wait_for_their_turn_can_be_cancelled
)
test_no_more_of_an_array_at_a_time_than_may_be = slowly(engine_suite.test_no_more_of_an_array_at_a_time_than_may_be)
test_setup_lines_come_first = slowly(engine_suite.test_setup_lines_come_first)
test_who_is_told_before_it_listens_comes_back = slowly(engine_suite.test_who_is_told_before_it_listens_comes_back)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as started:
        yield started


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, cluster: RayCluster) -> Rig:
    def lose(name: str) -> Callable[[], None]:
        cluster.say(f"remove {name}")
        return lambda: None  # nothing below needs it, and a node takes seconds to start

    own = {"limit_s": 16, "limit_grace_s": 2, "essential": (HEAD,)}  # a start takes its time on a busy machine
    return Rig(lambda: RayEngine(cluster.address), tmp_path_factory.mktemp("jobs"), NODES, CPUS, GPUS, lose=lose, **own)


def test_bundles_side_by_side_on_one_machine(rig: Rig) -> None:
    job = rig.engine.launch(rig.request("true", machines=2, gpus=1, site={"strategy": "STRICT_PACK"}))
    status = rig.over(job)
    assert (status.state, len(status.machines), len(set(status.machines))) == ("finished", 2, 1)
    with pytest.raises(UsageError, match="3 machines with 1 GPU and 1 core each on one machine were asked for"):
        rig.engine.launch(rig.request("true", machines=3, gpus=1, site={"strategy": "STRICT_PACK"}))


def test_a_cluster_that_grows_may_be_asked_for_more_than_it_has(rig: Rig) -> None:
    job = rig.engine.launch(rig.request("true", machines=9, site={"grows": "yes"}))
    later = rig.engine.launch(rig.request("true"))
    assert rig.over(later).state == "finished"  # by then the owner has gone through all that wait
    assert rig.engine.status([job])[job].state == "waiting"
    rig.engine.cancel(job)
    assert rig.over(job).state == "cancelled"


@pytest.mark.slow
def test_who_submitted_it_may_go(rig: Rig, cluster: RayCluster) -> None:
    request = rig.request("echo >up; until [ -e end ]; do sleep 0.05; done")
    program = (
        "import sys; from pathlib import Path; from headway.cluster.engines import Request\n"
        "from headway.cluster.engines.ray.engine import Ray\n"
        "print(Ray(sys.argv[1]).launch(Request('gone', tuple(sys.argv[3:]), Path(sys.argv[2]))))"
    )
    words = [sys.executable, "-c", program, cluster.address, str(request.folder), *request.command]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    appears(request.folder / "up")
    job = done.stdout.strip()
    assert rig.until(job, "running").starts == 1
    (request.folder / "end").touch()
    assert rig.over(job).state == "finished"


def test_a_lost_owner_is_followed_by_one_that_knows_its_jobs(
    rig: Rig, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setenv("A_SECRET", SECRET)
    before = rig.engine.launch(rig.request("exit 3"))
    rig.over(before)
    plain, secret = rig.request(UNTIL_TOLD), rig.request(UNTIL_TOLD, secrets=("A_SECRET",))
    jobs = [rig.engine.launch(plain), rig.engine.launch(secret)]
    pids = [int(appears(request.folder / "up-0")) for request in (plain, secret)]
    (plain.folder / "up-0").unlink()
    ray.kill(ray.get_actor(f"headway-{getpass.getuser()}", namespace="headway"), no_restart=False)
    pids.append(int(appears(plain.folder / "up-0")))
    assert not [pid for pid in pids[:2] if Path(f"/proc/{pid}").exists()], "nobody watched them any more"
    assert rig.until(jobs[0], "running").starts == 2
    told = rig.engine.status([before, jobs[1]])
    assert (told[before].state, told[before].exit_status) == ("failed", 3)
    assert told[jobs[1]].state == "failed"
    assert "the values of A_SECRET: submit it again" in told[jobs[1]].reason
    rig.engine.cancel(jobs[0])
    assert rig.over(jobs[0]).state == "cancelled"
    written = [path for path in cluster.folder.rglob("*") if path.is_file() and not path.is_socket()]
    assert written
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_what_a_lost_node_leaves(rig: Rig, cluster: RayCluster) -> None:
    cluster.say("add spare")
    request = rig.request(UNTIL_TOLD, machines=2)
    job = rig.engine.launch(request)
    pids = [int(appears(request.folder / f"up-{rank}")) for rank in range(2)]
    had = rig.until(job, "running").machines
    lost = 1 if had[0] == HEAD else 0
    for rank in range(2):
        (request.folder / f"up-{rank}").unlink()
    cluster.say(f"remove {had[lost]}")
    for rank in range(2):
        appears(request.folder / f"up-{rank}")
    status = rig.until(job, "running")
    assert status.starts == 2
    assert status.machines[1 - lost] == had[1 - lost], "what was not lost is kept"
    assert status.machines[lost] not in had
    assert (request.folder / f"told-{1 - lost}").exists(), "the others had their grace"
    assert not Path(f"/proc/{pids[lost]}").exists()
    rig.engine.cancel(job)
    assert rig.over(job).state == "cancelled"


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9: Connection refused"),
        ("nonsense", "'nonsense' is no address"),
        ("ray://127.0.0.1:10001", "from a machine of the cluster"),
        ("", "no Ray cluster is named"),
    ],
)
def test_a_cluster_that_is_not_there_is_told_at_once(address: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'headway[ray]'")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises((EngineError, UsageError), match=error):
        RayEngine(address).inventory()


def test_without_ray_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['ray'] = None\n"
        "from headway.cluster.engines.ray.engine import Ray\n"
        "try: Ray('127.0.0.1:9').inventory()\n"
        "except Exception as error: print(error.message, '|', error.hint)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "Ray is not installed | pip install 'headway[ray]'\n"


@pytest.mark.slow
def test_a_data_set_built_on_the_cluster_has_the_same_bytes(cluster: RayCluster, tmp_path: Path) -> None:
    sources = [f"{Path(json.__file__).parent.parent}/[ab]*.py"]
    options = BuildOptions(vocab_size=300, shard_tokens=100_000)
    here = build_dataset(tmp_path / "here", sources, options)
    there = build_dataset(
        tmp_path / "there", sources, options, elsewhere=ray_encoders(RayEngine(cluster.address), 1 << 17)
    )
    assert there.manifest.version == here.manifest.version
    names = sorted(path.name for path in here.path.iterdir())
    assert len(names) > 4
    assert names == sorted(path.name for path in there.path.iterdir())
    for name in names:
        if name not in ("sources.json", ".verified.json"):  # which say when, not what
            assert (here.path / name).read_bytes() == (there.path / name).read_bytes(), name
