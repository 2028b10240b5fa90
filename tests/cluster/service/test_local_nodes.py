"""Nodes of this machine from one start of the service to the next: jobs on them are never taken for lost."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from headway.cluster.engines import LaunchRequest
from headway.cluster.service.cycle import run_cycle
from headway.cluster.service.decider import InProcessDecider
from headway.cluster.service.local_cluster import emulated_nodes, keep_local_nodes
from headway.cluster.service.messages import NodeReport, StartReport
from headway.cluster.service.outcome import RankResult
from headway.cluster.service.plane import ControlPlane
from headway.cluster.service.store import ServiceStore
from headway.cluster.service.tables import node_conditions, open_database, sqlite_url
from headway.errors import UsageError

TENANTS = [{"name": "default"}]
OTHER = [{"name": "host", "chip": "cpu", "gpus": [], "cpus": 4, "memory_bytes": 2**34}]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[ServiceStore]]:
    stores = [ServiceStore(open_database(sqlite_url(tmp_path / "control.db")))]
    yield stores
    for store in stores:
        store.close()


def start(store: ServiceStore, nodes: list[dict[str, Any]], options: str, *, forget: bool = False) -> ControlPlane:
    keep_local_nodes(store, nodes, options, forget=forget)
    plane = ControlPlane(store)
    plane.set_cluster(nodes, TENANTS, "headway")
    return plane


def test_start_without_the_nodes_that_have_jobs_is_refused_and_changes_nothing(stores: list[ServiceStore]) -> None:
    store, emulated = stores[0], emulated_nodes("2x4")
    plane = start(store, emulated, "--emulate 2x4")
    plane.sync(NodeReport("node-1"))
    job = plane.submit(LaunchRequest("job", ("true",), Path("/tmp"), gpus=4))
    run_cycle(plane, InProcessDecider())
    running = StartReport(f"{job}:1:0", "running")
    plane.sync(NodeReport("node-1", (running,)))
    lines = len(store.lines)
    for other, options in ((OTHER, ""), ([], "--no-local-node"), (emulated[1:], "")):
        with pytest.raises(UsageError, match=r"this start leaves out: 1 on node-1$") as refused:
            start(store, other, options)
        assert refused.value.hint is not None
        assert refused.value.hint.startswith("headway up --emulate 2x4 keeps these nodes; --forget-nodes")
    assert len(store.lines) == lines
    plane = start(store, emulated, "--emulate 2x4")
    plane.take_events()
    assert [order.action for order in plane.sync(NodeReport("node-1", (running,))).starts] == ["run"]
    plane.sync(NodeReport("node-1", (StartReport(running.key, "exited", RankResult(0)),)))
    start(store, OTHER, "")


def test_forgotten_nodes_give_their_jobs_up(stores: list[ServiceStore]) -> None:
    plane = start(stores[0], emulated_nodes("1x4"), "--emulate 1x4")
    plane.sync(NodeReport("node-1"))
    job = plane.submit(LaunchRequest("job", ("true",), Path("/tmp")))
    run_cycle(plane, InProcessDecider())
    plane = start(stores[0], OTHER, "", forget=True)
    plane.sync(NodeReport("host"))
    run_cycle(plane, InProcessDecider())
    run_cycle(plane, InProcessDecider())
    assert [order.key for order in plane.sync(NodeReport("host")).starts] == [f"{job}:2:0"]


def test_nodes_that_have_joined_from_elsewhere_do_not_stand_in_the_way(stores: list[ServiceStore]) -> None:
    plane = start(stores[0], emulated_nodes("1x4"), "--emulate 1x4")
    plane.sync(NodeReport("node-1"))
    job = plane.submit(LaunchRequest("job", ("true",), Path("/tmp")))
    run_cycle(plane, InProcessDecider())
    with stores[0].write() as transaction:
        transaction.execute(node_conditions.update().values(fingerprint="ab"))
    plane = start(stores[0], [], "--no-local-node")
    (wanted,) = plane.sync(NodeReport("node-1"), "ab").starts
    assert (wanted.key, wanted.action) == (f"{job}:1:0", "run")
