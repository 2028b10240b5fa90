"""Nodes of other machines: who may join, who may report for whom, what operators and silence do to them."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from cryptography import x509
from sqlalchemy import select

from headway.cluster.engines import LaunchRequest
from headway.cluster.service import join as joining
from headway.cluster.service.certificates import Authority, fingerprint_of, read_request, signing_request
from headway.cluster.service.cycle import run_cycle
from headway.cluster.service.decider import InProcessDecider
from headway.cluster.service.join import JoinRequest, NodeSpec, join, make_join_token, remove_node
from headway.cluster.service.live_state import LiveState
from headway.cluster.service.messages import PROTOCOL, NodeReport, StartReport, WantedStart
from headway.cluster.service.node_health import LEAST_BYTES, NodeFacts, problems
from headway.cluster.service.node_state import LONGEST_LOOK_S, NodeSilence, node_state
from headway.cluster.service.outcome import RankResult, outcome_of
from headway.cluster.service.plane import ControlPlane
from headway.cluster.service.store import ServiceStore
from headway.cluster.service.tables import jobs, nodes, open_database, sqlite_url
from headway.cluster.service.views import list_nodes
from headway.errors import UsageError

TENANTS = [{"name": "red"}, {"name": "blue"}]


@dataclass
class Cluster:
    """A control plane, its authority and clock, and the certificates of those that have joined."""

    folder: Path
    now: float = 1000.0
    peers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = ServiceStore(open_database(sqlite_url(self.folder / "control.db")))
        self.authority = Authority(self.folder / "tls")
        self.plane = ControlPlane(self.store, lambda: self.now, monotonic=lambda: self.now, give_up_after_s=90)
        self.decider = InProcessDecider()
        self.plane.set_cluster([], TENANTS, "headway")

    def request(self, name: str, token: str, key: str = "", **options: Any) -> JoinRequest:
        spec = {"chip": "fake", "gpus": ["a", "b"], "cpus": 4, "memory_bytes": 2**34, "tenants": ["red", "blue"]}
        spec |= options.pop("spec", {})
        csr = signing_request(self.folder / f"{key or name}.key", name)
        return JoinRequest(token=token, name=name, spec=NodeSpec(**spec), request=csr, **options)

    def join(self, request: JoinRequest) -> None:
        answer = join(self.plane, self.store, self.authority, request)
        certificate = x509.load_pem_x509_certificate(answer["certificate"].encode())
        self.peers[request.name] = fingerprint_of(certificate)

    def token(self, replaces: str | None = None) -> str:
        return make_join_token(self.store, self.now, replaces)[0]

    def admit(self, *names: str, **options: Any) -> None:
        for name in names:
            self.join(self.request(name, self.token(), **options))
            self.sync(name)

    def sync(self, name: str, *starts: StartReport, problems: tuple[str, ...] = ()) -> list[WantedStart]:
        return list(self.plane.sync(NodeReport(name, starts, problems), self.peers[name]).starts)

    def submit(self, tenant: str = "red", **options: Any) -> str:
        site = {"tenant": tenant, "preemptible": "yes"}
        return self.plane.submit(LaunchRequest("job", ("true",), Path("/tmp"), site=site, **options))

    def cycle(self) -> None:
        run_cycle(self.plane, self.decider)

    def wait(self, seconds: float) -> None:
        """Let time pass in steps that the service is awake for."""
        for _ in range(int(seconds // 10)):
            self.now += 10
            self.plane.take_events()

    def node(self, name: str) -> dict[str, Any]:
        with self.store.read() as connection:
            return next(node for node in list_nodes(connection) if node["name"] == name)

    def job(self, name: str) -> Any:
        with self.store.read() as connection:
            return connection.execute(select(jobs).where(jobs.c.id == name)).one()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.store.close()


def test_token_admits_one_node_whose_answer_may_be_lost(cluster: Cluster) -> None:
    token = cluster.token()
    request = cluster.request("m1", token)
    cluster.join(request)
    first = cluster.peers["m1"]
    cluster.join(request)  # the first answer was lost
    with pytest.raises(UsageError, match="another certificate"):
        cluster.plane.sync(NodeReport("m1"), first)
    assert cluster.sync("m1") == []
    with pytest.raises(UsageError, match="has been used"):
        cluster.join(cluster.request("m2", token))
    with pytest.raises(UsageError, match="has been used"):
        cluster.join(cluster.request("m3", token, key="m1"))
    assert [node["name"] for node in cluster.plane.cluster.values["nodes"]] == ["m1"]


Ask = Callable[[Cluster], JoinRequest]


def late(cluster: Cluster) -> JoinRequest:
    token = cluster.token()
    cluster.now += joining.TOKEN_S + 1
    return cluster.request("m2", token)


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda cluster: cluster.request("m2", "x" * 43), "unknown join token"),
        (late, "has expired, 1 s ago"),
        (lambda cluster: cluster.request("m1", cluster.token(), key="m2"), "there is a node named 'm1'"),
        (lambda cluster: cluster.request("m2", cluster.token("m1")), "is for node 'm1', not 'm2'"),
        (lambda cluster: cluster.request("m2", cluster.token(), protocol=PROTOCOL + 1), "speaks version 2 of the node"),
        (lambda cluster: cluster.request("m2", cluster.token(), spec={"tenants": None}), "does not say whose jobs"),
        (lambda cluster: cluster.request("m2", cluster.token(), spec={"tenants": ["g"]}), "unknown tenant 'g'"),
        (lambda cluster: cluster.request("m2", cluster.token(), spec={"gpus": ["a", "a"]}), "lists a GPU twice"),
        (lambda cluster: cluster.request("m2", cluster.token()).model_copy(update={"request": "no"}), "not a signing"),
    ],
)
def test_node_that_may_not_join_is_told_why(cluster: Cluster, ask: Ask, sentence: str) -> None:
    cluster.admit("m1")
    with pytest.raises(UsageError, match=sentence):
        cluster.join(ask(cluster))
    assert [node["name"] for node in cluster.plane.cluster.values["nodes"]] == ["m1"]


def test_signing_request_of_a_stranger_s_key_is_refused(cluster: Cluster) -> None:
    genuine = signing_request(cluster.folder / "m1.key", "m1")
    broken = genuine.splitlines()
    broken[-2] = broken[-2][:-8] + "AAAAAAA="
    with pytest.raises(UsageError, match="not a signing request"):
        read_request("\n".join(broken))


def test_node_reports_for_itself_only(cluster: Cluster) -> None:
    cluster.admit("m1", "m2")
    for peer in (cluster.peers["m2"], None, "0" * 64):
        with pytest.raises(UsageError, match="another certificate"):
            cluster.plane.sync(NodeReport("m1"), peer)
    cluster.plane.set_cluster(
        [{"name": "here", "chip": "fake", "gpus": [], "cpus": 1, "memory_bytes": 1}], TENANTS, "headway"
    )
    with pytest.raises(UsageError, match="another certificate"):
        cluster.plane.sync(NodeReport("here"), cluster.peers["m1"])
    cluster.plane.sync(NodeReport("here"))
    with pytest.raises(UsageError, match="'m1' has joined from elsewhere"):
        cluster.plane.set_cluster(
            [{"name": "m1", "chip": "fake", "gpus": [], "cpus": 1, "memory_bytes": 1}], TENANTS, "headway"
        )


def test_replaced_node_is_locked_out_and_its_jobs_wait_again(cluster: Cluster) -> None:
    cluster.admit("m1")
    before = cluster.peers["m1"]
    job = cluster.submit(gpus=1)
    cluster.cycle()
    (start,) = cluster.sync("m1")
    cluster.sync("m1", StartReport(start.key, "running"))
    cluster.join(cluster.request("m1", cluster.token("m1"), key="successor"))
    with pytest.raises(UsageError, match="another certificate"):
        cluster.plane.sync(NodeReport("m1", (StartReport(start.key, "running"),)), before)
    (wanted,) = cluster.sync("m1")
    assert wanted.request == {}  # it ran there already: the new machine says that it has lost it
    cluster.sync("m1", StartReport(start.key, "exited", RankResult(lost=True)))
    assert cluster.job(job).state == "waiting"


def test_removed_node_is_unknown_and_one_with_jobs_stays(cluster: Cluster) -> None:
    cluster.admit("m1", "m2")
    cluster.submit(gpus=2, machines=2)
    cluster.cycle()
    with pytest.raises(UsageError, match=r"job 1 is on node 'm1'"):
        remove_node(cluster.plane, cluster.store, "m1")
    cluster.plane.cancel("1")
    for name, rank in (("m1", 0), ("m2", 1)):
        cluster.sync(name, StartReport(f"1:1:{rank}", "exited", RankResult()))
    remove_node(cluster.plane, cluster.store, "m1")
    with pytest.raises(UsageError, match="unknown node 'm1'"):
        cluster.sync("m1")
    cluster.submit(gpus=2)
    cluster.cycle()
    assert [start.machines for start in cluster.sync("m2")] == [("m2",)]


def test_jobs_go_to_nodes_that_run_their_tenant_s(cluster: Cluster) -> None:
    cluster.admit("m1", spec={"tenants": ["red"]})
    with pytest.raises(UsageError, match="the largest gang is 0"):
        cluster.submit("blue", gpus=1)
    cluster.admit("m2", spec={"tenants": ["blue"]})
    with pytest.raises(UsageError, match="the largest gang is 2"):
        cluster.submit("blue", gpus=2, machines=2)
    for tenant in ("blue", "red", "blue", "red"):
        cluster.submit(tenant, gpus=1)
    cluster.cycle()
    assert sorted(start.tenant for start in cluster.sync("m1")) == ["red", "red"]
    assert sorted(start.tenant for start in cluster.sync("m2")) == ["blue", "blue"]


def test_service_without_nodes_says_so_when_a_job_is_submitted(cluster: Cluster) -> None:
    for asked in ({"gpus": 1}, {"cpus": 1}):
        with pytest.raises(UsageError, match=r"^job job cannot run: no node has joined yet$") as refused:
            cluster.submit(**asked)
        assert (refused.value.hint or "").startswith("headway node token")
    cluster.admit("m1")
    cluster.submit(gpus=1)


def test_cordoned_node_keeps_its_jobs_and_gets_no_new_ones(cluster: Cluster) -> None:
    cluster.admit("m1")
    first = cluster.submit(gpus=1)
    cluster.cycle()
    (start,) = cluster.sync("m1")
    assert cluster.plane.fleet.cordon("m1")
    assert not cluster.plane.fleet.cordon("m1")
    cluster.submit(gpus=1)
    cluster.cycle()
    running = StartReport(start.key, "running")
    assert [wanted.key for wanted in cluster.sync("m1", running)] == [start.key]
    assert (cluster.job(first).state, cluster.node("m1")["reason"]) == ("running", "cordoned")
    assert cluster.plane.fleet.cordon("m1", False)
    cluster.sync("m1", running)
    cluster.cycle()
    assert len(cluster.sync("m1", running)) == 2
    with pytest.raises(UsageError, match="unknown node 'm9'"):
        cluster.plane.fleet.cordon("m9")


def test_drained_node_s_jobs_save_and_start_elsewhere(cluster: Cluster) -> None:
    cluster.admit("m1", "m2")
    job = cluster.submit(gpus=2)
    cluster.cycle()
    (start,) = cluster.sync("m1")
    cluster.sync("m1", StartReport(start.key, "running"))
    assert cluster.plane.fleet.drain("m1") == [job]
    assert [wanted.action for wanted in cluster.sync("m1", StartReport(start.key, "running"))] == ["end"]
    cluster.sync("m1", StartReport(start.key, "exited", RankResult(75, 1.0)))
    assert cluster.job(job).reason == "stopped to empty its node after it saved"
    cluster.cycle()
    assert [wanted.machines for wanted in cluster.sync("m2")] == [("m2",)]


def test_maintenance_empties_a_node_in_time_and_gives_it_back(cluster: Cluster) -> None:
    cluster.admit("m1")
    job = cluster.submit(gpus=2)
    cluster.cycle()
    (start,) = cluster.sync("m1")
    cluster.sync("m1", StartReport(start.key, "running"))
    cluster.plane.fleet.schedule_maintenance("m1", cluster.now + 1000, cluster.now + 2000)
    cluster.now += 390  # ten minutes before
    cluster.sync("m1", StartReport(start.key, "running"))
    cluster.cycle()
    assert cluster.job(job).state == "running"
    cluster.now += 20
    cluster.sync("m1", StartReport(start.key, "running"))
    cluster.cycle()
    assert cluster.job(job).state == "ending"
    cluster.sync("m1", StartReport(start.key, "exited", RankResult(75, 1.0)))
    cluster.cycle()
    assert cluster.sync("m1") == []
    cluster.now += 1700  # after it
    cluster.sync("m1")
    cluster.cycle()
    assert [wanted.key for wanted in cluster.sync("m1")] == [f"{job}:2:0"]
    assert cluster.node("m1")["maintenance"] is None


def test_maintenance_keeps_its_time_while_no_service_runs(cluster: Cluster) -> None:
    """The scheduler's time stands still meanwhile."""
    cluster.admit("m1")
    cluster.plane.fleet.schedule_maintenance("m1", cluster.now + 5000, cluster.now + 6000)
    before = [line for line in cluster.plane.lines if "maintenance" in line]
    cluster.now += 3000
    store = ServiceStore(open_database(sqlite_url(cluster.folder / "control.db")))
    plane = ControlPlane(store, lambda: cluster.now, monotonic=lambda: cluster.now)
    plane.set_cluster([], TENANTS, "headway")
    plane.take_events()
    after = [line for line in plane.lines if "maintenance" in line]
    assert [line["away_s"] - line["at"] for line in before + after[1:]] == pytest.approx([5000, 2000])
    state = LiveState()
    for line in plane.lines:
        state.apply(line)
    assert state.snapshot.nodes.away_s[0] == pytest.approx(plane.now_s + 2000)
    assert plane.fleet.cancel_maintenance("m1")
    assert not plane.fleet.cancel_maintenance("m1")
    store.close()


@pytest.mark.parametrize(("begins", "ends"), [(0, 500), (2000, 2000), (3000, 2000), (2000, 1e9), (5e8, float("nan"))])
def test_impossible_maintenance_is_refused(cluster: Cluster, begins: float, ends: float) -> None:
    cluster.admit("m1")
    with pytest.raises(UsageError, match="maintenance of m1 would be from"):
        cluster.plane.fleet.schedule_maintenance("m1", begins, ends)


def test_silent_node_s_gang_is_given_up_as_a_whole_and_replaced(cluster: Cluster) -> None:
    cluster.admit("m1", "m2", "m3")
    job = cluster.submit(gpus=2, machines=2)
    cluster.cycle()
    for name, key in (("m1", f"{job}:1:0"), ("m2", f"{job}:1:1")):
        cluster.sync(name)
        cluster.sync(name, StartReport(key, "running"))
    assert cluster.job(job).state == "running"
    for _ in range(11):  # m1 says nothing for 110 s
        cluster.now += 10
        cluster.sync("m2", StartReport(f"{job}:1:1", "running"))
        cluster.sync("m3")
        cluster.plane.take_events()
    assert cluster.job(job).state == "ending"
    assert [start.action for start in cluster.sync("m2", StartReport(f"{job}:1:1", "running"))] == ["end"]
    cluster.sync("m2", StartReport(f"{job}:1:1", "exited", RankResult(75, 100.0)))
    assert cluster.job(job).reason == "its node is silent and was given up; waiting to be started again"
    cluster.cycle()
    assert {start.key for name in ("m2", "m3") for start in cluster.sync(name)} == {f"{job}:2:0", f"{job}:2:1"}


def test_node_that_returns_kills_what_was_given_up_before_anything_starts(cluster: Cluster) -> None:
    cluster.admit("m1")
    job = cluster.submit(gpus=2)
    cluster.cycle()
    (start,) = cluster.sync("m1")
    running = StartReport(start.key, "running")
    cluster.sync("m1", running)
    cluster.wait(110)
    assert cluster.job(job).state == "waiting"
    assert cluster.sync("m1", running) == []  # nothing is wanted: it is killed
    cluster.cycle()
    assert cluster.node("m1")["state"] == "draining"
    assert cluster.sync("m1", running) == []  # it still runs
    cluster.sync("m1", StartReport(start.key, "exited", RankResult(137)))
    cluster.cycle()
    assert [wanted.key for wanted in cluster.sync("m1")] == [f"{job}:2:0"]


def test_cancelled_job_of_a_silent_node_is_over_once_it_is_given_up(cluster: Cluster) -> None:
    cluster.admit("m1")
    job = cluster.submit(gpus=2)
    cluster.cycle()
    (start,) = cluster.sync("m1")
    cluster.sync("m1", StartReport(start.key, "running"))
    cluster.plane.cancel(job)
    assert cluster.job(job).state == "ending"
    cluster.wait(110)
    assert cluster.job(job).state == "cancelled"


def test_service_that_was_paused_gives_nobody_up(cluster: Cluster) -> None:
    cluster.admit("m1")
    job = cluster.submit(gpus=2)
    cluster.cycle()
    (start,) = cluster.sync("m1")
    cluster.sync("m1", StartReport(start.key, "running"))
    cluster.now += 10_000
    cluster.plane.take_events()
    assert (cluster.job(job).state, cluster.node("m1")["state"]) == ("running", "healthy")


def test_broken_node_is_quarantined_until_it_is_well(cluster: Cluster) -> None:
    cluster.admit("m1")
    cluster.sync("m1", problems=("GPU a does not answer",))
    cluster.submit(gpus=1)
    cluster.cycle()
    assert cluster.sync("m1", problems=("GPU a does not answer",)) == []
    assert (cluster.node("m1")["state"], cluster.node("m1")["reason"]) == ("quarantined", "GPU a does not answer")
    cluster.sync("m1")
    cluster.cycle()
    assert len(cluster.sync("m1")) == 1


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (NodeFacts(["GPU-1", "GPU-2"], 2**40), ()),
        (NodeFacts(None, 2**40), ()),
        (NodeFacts(["GPU-2"], 2**40), ("GPU GPU-1 does not answer",)),
        (NodeFacts(["GPU-2", "GPU-1"], LEAST_BYTES - 1), ("its disk has 1024 MiB left",)),
        (NodeFacts([], 0, writable=False), ("GPU GPU-1 does not answer", "GPU GPU-2 does not answer", "its folder")),
    ],
)
def test_problems_of_a_node(facts: NodeFacts, expected: tuple[str, ...]) -> None:
    told = problems({"gpus": ["GPU-1", "GPU-2"]}, facts)
    assert len(told) == len(expected)
    assert all(sentence.startswith(start) for sentence, start in zip(told, expected, strict=True))


def test_only_a_node_that_nothing_speaks_against_gets_jobs() -> None:
    for reports, fenced, cordoned, broken in itertools.product((False, True), repeat=4):
        state = node_state(reports=reports, fenced=fenced, cordoned=cordoned, problems=("bad",) if broken else ())
        assert (state == "healthy") == (reports and not fenced and not cordoned and not broken)
        assert state != "quarantined" or (reports and broken)


def test_silence_counts_only_while_the_service_is_awake() -> None:
    now = [0.0]
    silence = NodeSilence(lambda: now[0])
    assert silence.silent_for(1e9, ["m1"]) == {"m1"}  # nobody expects it
    silence.hear("m1")
    now[0] = LONGEST_LOOK_S
    silence.look()
    assert not silence.silent_for(LONGEST_LOOK_S, ["m1"])
    assert silence.silent_for(LONGEST_LOOK_S - 1e-6, ["m1"]) == {"m1"}
    now[0] += 1000.0
    silence.look()
    assert not silence.silent_for(2 * LONGEST_LOOK_S, ["m1"])
    assert silence.silent_for(2 * LONGEST_LOOK_S - 1e-6, ["m1"]) == {"m1"}


@pytest.mark.parametrize(
    ("results", "stop", "state"),
    [
        ([RankResult(given_up=True)], "given up", "waiting"),
        ([RankResult(given_up=True), RankResult(75, 1.0)], "given up", "waiting"),
        ([RankResult(given_up=True), RankResult(0)], "given up", "waiting"),
        ([RankResult(given_up=True)], "cancel", "cancelled"),
        ([RankResult(75)], "drain", "waiting"),
        ([RankResult(0)], "drain", "finished"),
        ([RankResult(given_up=True, reported=None), RankResult(0, reported=0)], "given up", "finished"),
    ],
)
def test_outcome_of_starts_that_nodes_ended(results: list[RankResult], stop: str, state: str) -> None:
    """A rank that knows that the whole job is done is believed, even of one whose node is gone."""
    assert outcome_of(results, stop).state == state


def test_nodes_outlive_a_restart_of_the_service(cluster: Cluster) -> None:
    cluster.admit("m1")
    cluster.plane.fleet.cordon("m1")
    store = ServiceStore(open_database(sqlite_url(cluster.folder / "control.db")))
    plane = ControlPlane(store, lambda: cluster.now, monotonic=lambda: cluster.now)
    plane.set_cluster([], TENANTS, "headway")
    plane.sync(NodeReport("m1"), cluster.peers["m1"])
    with store.read() as connection:
        assert connection.execute(select(nodes.c.state)).scalar() == "draining"  # still cordoned
    assert Authority(cluster.folder / "tls").file.read_text() == cluster.authority.file.read_text()
    store.close()
