"""Clusters from files: hosts and their switches, tenants, maintenance, and mistakes in these files."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.simulate import (
    JobTrace,
    MaintenanceWindow,
    SimulationSetup,
    Site,
    read_away,
    read_site,
    read_topology,
    simulate,
)
from headway.errors import UsageError

HOSTS = "host,tor,agg\n" + "".join(f"h{number},S{number % 2},P{number // 4}\n" for number in range(8))
CLUSTER = """
chip = "a100"
per_node = 4
nodes = 8
topology = "hosts.csv"

[[tenant]]
name = "research"
guarantee = 24

[[tenant]]
name = "red"
parent = "research"
guarantee = 16
borrow = 8

[[tenant]]
name = "blue"
parent = "research"
lend = 0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hosts.csv").write_text(HOSTS)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path


@pytest.mark.parametrize("pack", [str.encode, lambda text: gzip.compress(text.encode())], ids=["plain", "gzipped"])
def test_switches_of_different_parents_are_different_domains(folder: Path, pack) -> None:
    (folder / "hosts.csv").write_bytes(pack(HOSTS))
    site = read_topology(folder / "hosts.csv")
    assert site.hosts == tuple(f"h{number}" for number in range(8))
    assert site.domains["tor"][:5] == ("P0/S0", "P0/S1", "P0/S0", "P0/S1", "P1/S0")
    assert len(set(site.domains["tor"])) == 4
    assert set(site.domains["agg"]) == {"P0", "P1"}


def test_tenants_and_hosts_of_a_cluster_file_are_read(folder: Path) -> None:
    site, snapshot = read_site(folder / "cluster.toml"), ClusterSnapshot()
    site.add_nodes(snapshot, "a100", 4, 8, 0)
    site.add_tenants(snapshot)
    assert snapshot.nodes.levels == ("tor", "agg")
    assert snapshot.tenants.names == ["research", "red", "blue"]
    assert snapshot.tenants.guarantee[:3].tolist() == [24, 16, 0]
    assert snapshot.tenants.parent[:3].tolist() == [-1, 0, 0]
    assert snapshot.tenants.borrow[1] == 8
    assert snapshot.tenants.lend[2] == 0
    snapshot.submit([Job("mine", "red", 8, within="tor")])
    with pytest.raises(UsageError, match="requests 12 GPUs within one tor; the largest gang is 8"):
        snapshot.submit([Job("more", "red", 12, within="tor")])


def test_limits_of_a_cluster_file_apply(folder: Path) -> None:
    """Red may use 24 of the 32 GPUs: two of its three jobs of 12 run at a time."""
    trace = JobTrace(
        ("a", "b", "c"), np.zeros(3), np.full(3, 600.0), np.full(3, 12), np.zeros(3, np.int64), ("red",),
        np.full(3, np.nan), np.full(3, np.nan),
    )  # fmt: skip
    setup = SimulationSetup("a100", 4, 8, site=read_site(folder / "cluster.toml"))
    assert simulate(trace, setup, POLICIES["kueue"]).first_start_s.tolist() == [0.0, 0.0, 600.0]
    with pytest.raises(UsageError, match="tenant green has jobs but no guarantee"):
        simulate(replace(trace, tenants=("green",)), setup, POLICIES["kueue"])


def test_maintenance_of_a_cluster_file_applies(folder: Path) -> None:
    """Both nodes of red's job of eight have maintenance: it saves, and restarts elsewhere in the next cycle."""
    (folder / "away.csv").write_text("note,node,from_s,to_s\n,h0,5000,9000\nnew fans,h2, 5000 ,9000\n")
    (folder / "cluster.toml").write_text(CLUSTER.replace('"hosts.csv"', '"hosts.csv"\naway = "away.csv"'))
    site = read_site(folder / "cluster.toml")
    none, policy = np.full(1, np.nan), POLICIES["headway"]
    trace = JobTrace(
        ("a",), np.zeros(1), np.full(1, 20_000.0), np.full(1, 8), np.zeros(1, np.int64), ("red",), none, none
    )
    setup = SimulationSetup("a100", 4, 8, site=site, preemptible=1.0)
    equivalent = replace(
        setup,
        site=replace(site, away=()),
        away=(MaintenanceWindow(0, 1, 5000, 9000), MaintenanceWindow(2, 3, 5000, 9000)),
    )
    moved = simulate(trace, setup, policy)
    assert moved.stops["maintenance"] == 1
    assert moved.end_s.tolist() == simulate(trace, equivalent, policy).end_s.tolist() == [20_000 + 30 + setup.restart_s]
    with pytest.raises(UsageError, match="maintenance of unknown node 'h0'"):
        simulate(trace, replace(setup, site=replace(site, hosts=(), domains={})), policy)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty", "", "line 1 lacks node, from_s, to_s"),
        ("no end", "node,from_s\nh0,1\n", "line 1 lacks to_s"),
        ("no name", "node,from_s,to_s\n,1,2\n", "line 2: no node name"),
        ("no time", "node,from_s,to_s\nh0,1,2\nh1,noon,2\n", "line 3: from_s is 'noon'"),
        ("backwards", "node,from_s,to_s\nh0,20,10\n", "line 2: maintenance of h0 ends at 10 s, not after 20 s"),
        ("duplicate node", "node,from_s,to_s\nh0,1,2\nh0,5,6\n", "line 3: duplicate node 'h0'"),
    ],
    ids=lambda value: value if isinstance(value, str) and "," not in value and "\n" not in value else "",
)
def test_error_names_the_line_of_a_mistake_in_maintenance(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / "away.csv").write_text(content)
    with pytest.raises(UsageError, match=message):
        read_away(tmp_path / "away.csv")


def test_number_of_hosts_must_match_nodes(folder: Path) -> None:
    with pytest.raises(UsageError, match="8 hosts, but the cluster has 7 nodes"):
        read_topology(folder / "hosts.csv").add_nodes(ClusterSnapshot(), "a100", 4, 7, 0)
    snapshot = ClusterSnapshot()
    Site().add_nodes(snapshot, "a100", 4, 7, 0)
    assert len(snapshot.nodes) == 7


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty", "", "line 1 must name the host"),
        ("no levels", "host\nh0\n", "line 1 must name the host"),
        ("duplicate level", "host,tor,tor\nh0,a,b\n", "line 1 must name the host"),
        ("no hosts", "host,tor\n", "has no hosts"),
        ("duplicate host", "host,tor\nh0,a\nh0,b\n", "line 3: duplicate host 'h0'"),
        ("a level without a name", "host,tor\nh0,a\nh1,\n", "line 3: expected values for host, tor, got h1,"),
        ("too few", "host,tor,agg\nh0,a\n", "line 2: expected values for host, tor, agg, got h0,a"),
    ],
    ids=lambda value: value if isinstance(value, str) and "," not in value and "\n" not in value else "",
)
def test_error_names_the_line_of_a_mistake_in_a_topology(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / "hosts.csv").write_text(content)
    with pytest.raises(UsageError, match=message):
        read_topology(tmp_path / "hosts.csv")


def test_missing_topology_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no such file: .*hosts\.csv"):
        read_topology(tmp_path / "hosts.csv")


@pytest.mark.parametrize(
    ("tenant", "message"),
    [
        ('name = "a"\nshare = 1', "unknown tenant key 'share'"),
        ("guarantee = 1", "tenant 1 has no name"),
        ('name = "a"\nguarantee = 1.5', "tenant 1: guarantee is 1.5"),
        ('name = "a"\nbudget_gpu_h = "much"', "tenant 1: budget_gpu_h is 'much'"),
    ],
)
def test_invalid_tenant_is_rejected(tmp_path: Path, tenant: str, message: str) -> None:
    (tmp_path / "cluster.toml").write_text(f'chip = "a100"\n[[tenant]]\n{tenant}\n')
    with pytest.raises(UsageError, match=message):
        read_site(tmp_path / "cluster.toml")
