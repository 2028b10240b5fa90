"""What the cluster pages ask for: from a service in the process of the test, one that refuses, and none."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from fastapi.testclient import TestClient
from written_runs import TOKEN, falling, write_run

from headway.cluster.engines import LaunchRequest
from headway.cluster.engines.submissions import Submission, note_submission
from headway.cluster.service.app import make_app as make_service
from headway.cluster.service.connection import ServiceConnection
from headway.cluster.service.cycle import run_cycle
from headway.cluster.service.decider import InProcessDecider
from headway.cluster.service.live_service import LiveService
from headway.cluster.service.live_state import LiveState
from headway.cluster.service.messages import NodeReport, StartReport
from headway.cluster.service.outcome import RankResult
from headway.cluster.service.plane import ControlPlane
from headway.cluster.service.store import ServiceStore
from headway.cluster.service.tables import open_database, sqlite_url
from headway.dashboard import make_app
from headway.dashboard.cluster_record import HOLDING, ClusterRecord
from headway.errors import Forbidden, UsageError

USER = "the-token-of-the-service-that-no-browser-gets"
NODES = ("n1", "n2", "n3")
SPECS = [{"name": name, "chip": "fake", "gpus": ["0", "1"], "cpus": 8, "memory_bytes": 2**34} for name in NODES]
TENANTS: list[dict[str, Any]] = [{"name": "red", "guarantee": 4}, {"name": "blue", "guarantee": 2, "budget_gpu_h": 100}]


class InProcess(ServiceConnection):
    """The connection of pages to the service of the test; some paths may be refused, as to who is no admin."""

    def __init__(self, client: TestClient, refused: tuple[str, ...]) -> None:
        super().__init__("http://127.0.0.1:8324", USER)
        self._client, self._refused = client, refused

    def get(self, path: str, **query: Any) -> Any:
        if path in self._refused:
            raise Forbidden("role viewer may not read this")
        answer = self._client.get(path, params=query, headers={"authorization": f"Bearer {USER}"})
        if answer.status_code != 200:
            raise UsageError(answer.json()["error"], hint=answer.json()["hint"])
        return answer.json()


@dataclass
class Cluster:
    """A service without processes: `talk` is what nodes would report."""

    plane: ControlPlane
    client: TestClient
    known: dict[str, dict[str, StartReport]]
    pages: Callable[..., Any]

    def submit(self, name: str, folder: Path, tenant: str = "red", **options: Any) -> str:
        request = LaunchRequest(
            name, ("true",), folder, **{"site": {"tenant": tenant, "preemptible": "yes"}, **options}
        )
        return self.plane.submit(request)

    def talk(self, ends: Callable[[str], bool] = lambda _: False) -> None:
        """Decide, and let every node obey and report; running starts that `ends` names exit."""
        run_cycle(self.plane, self._decider)
        for name, starts in self.known.items():
            orders = self.plane.sync(NodeReport(name, tuple(starts.values()))).starts
            wanted = {order.key: order for order in orders}
            for key in [key for key in starts if key not in wanted]:
                del starts[key]
            for key, order in wanted.items():
                status = 75 if order.action == "end" else 0 if key in starts and ends(key) else None
                exited = StartReport(key, "exited", RankResult(status)) if status is not None else None
                starts[key] = exited or StartReport(key, "running")
            self.plane.sync(NodeReport(name, tuple(starts.values())))

    def __post_init__(self) -> None:
        self._decider = InProcessDecider()


@pytest.fixture
def cluster(tmp_path: Path, runs: Path) -> Iterator[Cluster]:
    store = ServiceStore(open_database(sqlite_url(tmp_path / "control.db")))
    plane = ControlPlane(store)
    plane.set_cluster(SPECS, TENANTS, "headway")
    service = LiveService(store, plane, print, InProcessDecider())  # type: ignore[arg-type]
    with TestClient(make_service(service, USER, "n" * 32, "127.0.0.1"), base_url="http://127.0.0.1") as client:
        for name in NODES:
            plane.sync(NodeReport(name))

        def pages(path: str, refused: tuple[str, ...] = (), **query: Any) -> Any:
            app = apps.setdefault(refused, make_app(runs, TOKEN, service=lambda: InProcess(client, refused)))
            with TestClient(app, base_url="http://127.0.0.1:8321") as browser:
                answer = browser.get(path, params=query, headers={"authorization": f"Bearer {TOKEN}"})
            assert answer.status_code == 200, answer.text
            assert USER not in answer.text
            return answer.json()

        apps: dict[tuple[str, ...], Any] = {}
        yield Cluster(plane, client, {name: {} for name in NODES}, pages)
    store.close()


def test_overview_is_what_the_service_answers(cluster: Cluster, tmp_path: Path) -> None:
    cluster.submit("gang", tmp_path, machines=2, gpus=2)
    cluster.submit("late", tmp_path, "blue", machines=3, gpus=2, site={"tenant": "blue", "priority": "-1"})
    cluster.talk()
    cluster.talk()
    page = cluster.pages("/api/cluster")
    direct = {key: InProcess(cluster.client, ()).get(f"/api/v1/{key}") for key in ("nodes", "jobs")}
    assert {key: page[key] for key in direct} == direct
    assert {job["name"]: job["state"] for job in page["jobs"]} == {"gang": "running", "late": "waiting"}
    assert sum(node["gpus_free"] for node in page["nodes"]) == 2
    assert {tenant["name"]: tenant["gpus"] for tenant in page["tenants"]} == {"red": 4, "blue": 0}
    assert page["newest"][0]["kind"] == "running"
    assert cluster.pages("/api/cluster/why", job="late")["why"]["sentence"]
    assert "no job 'nobody'" in cluster.pages("/api/cluster/job", job="nobody")["problem"]


@pytest.mark.parametrize("seed", range(2))
def test_spans_hold_the_gpus_that_the_scheduler_granted(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    """After each line of the record of a random history, against the scheduler's own fold."""
    rng, names = Random(seed), list[str]()
    for _ in range(40):
        act = rng.random()
        if act < 0.4 or not names:
            site = {"tenant": rng.choice(["red", "blue"]), "priority": str(rng.randrange(3)), "preemptible": "yes"}
            names.append(
                cluster.submit("job", tmp_path, machines=rng.choice([1, 1, 2]), gpus=rng.choice([1, 2]), site=site)
            )
        elif act < 0.5:
            cluster.plane.cancel(rng.choice(names))
        elif act < 0.6:
            cluster.plane.hold(rng.choice(names), rng.random() < 0.5)
        cluster.talk(lambda _: rng.random() < 0.2)
    state, record, kinds = LiveState(), ClusterRecord(), set[str]()
    for line in cluster.plane.lines[:]:
        state.apply(line)
        record.apply(line)
        kinds |= line.keys()
        granted = {job: sum(len(ids) for _, ids in grant) for job, grant in state.holdings.grants.items()}
        held = {name: job.last.gpus for name, job in record.jobs.items() if not job.over and job.last.state in HOLDING}
        assert held == granted
    assert {"job", "decided", "running", "exited"} <= kinds
    for job in record.jobs.values():
        ends = [span.end_s for span in job.spans]
        assert ends[:-1] == [span.begin_s for span in job.spans[1:]], "spans follow each other without a gap"
        assert (ends[-1] is None) == (not job.over)


def test_timeline_follows_the_record_and_starts_anew_with_another(cluster: Cluster, tmp_path: Path) -> None:
    cluster.submit("first", tmp_path, gpus=1)
    cluster.talk()
    before = cluster.pages("/api/cluster/timeline")
    assert [(lane["name"], [span["state"] for span in lane["spans"]]) for lane in before["jobs"]] == [
        ("first", ["waiting", "starting", "running"])
    ]
    cluster.talk(lambda _: True)
    cluster.talk()
    after = cluster.pages("/api/cluster/timeline")
    assert after["jobs"][0]["spans"][-1]["end_s"] is not None
    assert len(after["events"]) == len(before["events"]) + 1, "nothing is read twice"
    assert after["tenants"] == ["red", "blue"]


def test_viewer_sees_events_where_the_record_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.submit("first", tmp_path, gpus=1)
    cluster.talk()
    page = cluster.pages("/api/cluster/timeline", refused=("/api/v1/record",))
    assert page["jobs"] == []
    assert "viewer" in page["refusal"]
    assert page["events"] == cluster.pages("/api/cluster/timeline")["events"]
    cluster.talk(lambda _: True)
    again = cluster.pages("/api/cluster/timeline", refused=("/api/v1/record",))
    assert len(again["events"]) == len(page["events"]) + 1


def test_job_page_and_run_page_lead_to_each_other(cluster: Cluster, runs: Path, tmp_path: Path) -> None:
    run = write_run(runs, "trained", falling(5))
    job = cluster.submit("trained", run, gpus=1)
    other = cluster.submit("other", tmp_path, gpus=1)
    request = LaunchRequest("trained", ("true",), run)
    note_submission(run, Submission("service", job, "fakex1", request))
    assert cluster.pages("/api/cluster/job", job=job)["run"] == "trained"
    assert cluster.pages("/api/run", run="trained")["job"] == job
    assert cluster.pages("/api/cluster/job", job=other)["run"] is None
    note_submission(run, Submission("local", "77", "fakex1", request))
    assert cluster.pages("/api/cluster/job", job=job)["run"] is None, "its newest job is another engine's"
    (run / "jobs.jsonl").write_text("{}\n")
    assert cluster.pages("/api/cluster/job", job=job)["run"] is None
    assert cluster.pages("/api/run", run="trained")["job"] is None


def test_without_service_the_page_says_how_to_start_one(client: TestClient, runs: Path) -> None:
    for path in ("/api/cluster", "/api/cluster/timeline"):
        answer = client.get(path).json()
        assert (answer["problem"], "headway up" in answer["hint"]) == (f"no service has been started for {runs}", True)
    (runs / ".service").mkdir()
    (runs / ".service" / "token").write_text(USER)
    (runs / ".service" / "service.json").write_text(json.dumps({"format": 1, "url": "http://127.0.0.1:1", "pid": 1}))
    answer = client.get("/api/cluster")
    assert "does not answer" in answer.json()["problem"]
    assert USER not in answer.text


def test_cluster_asks_for_the_token_of_the_dashboard(stranger: TestClient) -> None:
    for path in ("/api/cluster", "/api/cluster/job?job=1", "/api/cluster/why?job=1", "/api/cluster/timeline"):
        assert stranger.get(path).status_code == 401
