"""The service's API and database: who may ask, what is refused, what is remembered."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from fastapi.testclient import TestClient
from sqlalchemy.event import listens_for

from headway.cluster.engines import LaunchRequest
from headway.cluster.engines.submissions import request_to_json
from headway.cluster.service.app import make_app
from headway.cluster.service.cycle import run_cycle
from headway.cluster.service.decider import InProcessDecider
from headway.cluster.service.live_service import LiveService
from headway.cluster.service.messages import NodeReport, StartReport
from headway.cluster.service.outcome import RankResult, outcome_of
from headway.cluster.service.plane import ControlPlane
from headway.cluster.service.store import DamagedRecord, ServiceStore, Superseded
from headway.cluster.service.tables import open_database, sqlite_url
from headway.errors import EngineError, UsageError

USER, NODE = "u" * 32, "n" * 32
SPECS = [{"name": name, "chip": "fake", "gpus": ["0", "1"], "cpus": 4, "memory_bytes": 2**34} for name in ("n1", "n2")]


@dataclass
class Api:
    client: TestClient
    plane: ControlPlane
    decider: InProcessDecider

    def post(self, path: str, body: dict[str, Any] | None = None, token: str = USER) -> Any:
        return self.client.post(path, json=body or {}, headers={"authorization": f"Bearer {token}"})

    def get(self, path: str) -> Any:
        return self.client.get(path, headers={"authorization": f"Bearer {USER}"}).json()

    def submit(self, **options: Any) -> str:
        answer = self.post("/api/v1/jobs", {"request": job(**options)})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def sync(self, *starts: StartReport, node: str = "n1") -> list[Any]:
        run_cycle(self.plane, self.decider)
        return list(self.plane.sync(NodeReport(node, starts)).starts)


def job(**options: Any) -> dict[str, Any]:
    return request_to_json(LaunchRequest("job", ("true",), Path("/tmp"), **options))


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "control.db"


@pytest.fixture
def api(database: Path) -> Iterator[Api]:
    with served(database) as api:
        yield api


@contextmanager
def served(database: Path, **options: Any) -> Iterator[Api]:
    """A service with two nodes of two GPUs; options are those of its plane."""
    store = ServiceStore(open_database(sqlite_url(database)))
    plane = ControlPlane(store, **options)
    plane.set_cluster(SPECS, [{"name": "default"}], "headway")
    decider = InProcessDecider()
    service = LiveService(store, plane, print, decider)  # type: ignore[arg-type]
    with TestClient(make_app(service, USER, NODE, "127.0.0.1"), base_url="http://127.0.0.1") as client:
        for node in ("n1", "n2"):
            plane.sync(NodeReport(node))
        yield Api(client, plane, decider)
    store.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Basic {USER}"}, 401),
        ({"authorization": f"Bearer {NODE}"}, 401),
        ({"authorization": f"Bearer {USER}", "host": "evil.example"}, 403),
        ({"authorization": f"Bearer {USER}", "content-length": "99999999999"}, 413),
        ({"authorization": f"Bearer {USER}"}, 200),
        ({"authorization": f"Bearer {USER}", "host": "localhost:8324"}, 200),
    ],
)
def test_every_route_asks_for_token_and_own_host(api: Api, headers: dict[str, str], status: int) -> None:
    assert api.client.get("/api/v1/jobs", headers=headers).status_code == status


def test_nodes_and_users_cannot_do_each_others_work(api: Api) -> None:
    report = {"report": {"node": "n1"}}
    assert api.post("/api/v1/sync", report, NODE).status_code == 200
    assert api.post("/api/v1/sync", report, USER).status_code == 401
    assert api.post("/api/v1/jobs", {"request": job()}, NODE).status_code == 401
    assert api.client.get("/openapi.json").status_code == 401
    assert api.client.get("/health").json() == {"ok": True}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"gpus": 3}, "at most 2"),
        ({"machines": 3}, "at most 2"),
        ({"cpus": 5}, "at most 4"),
        ({"memory_bytes": 2**40}, "at most 16"),
        ({"site": {"tenant": "red"}}, "known tenants: default"),
        ({"site": {"priorty": "1"}}, "priority"),
        ({"site": {"priority": "high"}}, "whole number"),
        ({"site": {"preemptible": "maybe"}}, "yes or no"),
        ({"machines": 2, "spares": 1}, "spares"),
    ],
)
def test_job_that_can_never_run_is_refused_with_what_could(api: Api, change: dict[str, Any], word: str) -> None:
    answer = api.post("/api/v1/jobs", {"request": job(**change)})
    assert answer.status_code == 400, answer.text
    assert word in answer.text
    assert api.get("/api/v1/jobs") == []


@pytest.mark.parametrize(
    "body", [b"", b"[", b"[]", b'{"request": 5}', b'{"request": {}}', b'{"request": {}, "more": 1}', b"\xff" * 9]
)
def test_malformed_requests_are_refused(api: Api, body: bytes) -> None:
    headers = {"authorization": f"Bearer {USER}", "content-type": "application/json"}
    for path in ("/api/v1/jobs", "/api/v1/jobs/1/signal"):
        answer = api.client.post(path, content=body, headers=headers)
        assert answer.status_code in (400, 422), answer.text
        assert "Traceback" not in answer.text


def test_repeated_submission_is_one_job(api: Api) -> None:
    ids = {api.post("/api/v1/jobs", {"request": job(), "key": "k"}).json()["id"] for _ in range(3)}
    assert len(ids) == 1
    assert len(api.get("/api/v1/jobs")) == 1


def test_gang_starts_on_all_its_nodes_or_on_none(api: Api) -> None:
    api.submit(machines=2, gpus=2)
    first = api.sync(node="n1")
    second = api.sync(node="n2")
    assert [start.key for start in (*first, *second)] == ["1:1:0", "1:1:1"]
    assert first[0].machines == ("n1", "n2")
    assert (first[0].gpus, second[0].gpus) == (("0", "1"), ("0", "1"))
    api.sync(StartReport("1:1:0", "running"))
    assert api.get("/api/v1/jobs/1")[0]["state"] == "starting"
    api.sync(StartReport("1:1:1", "running"), node="n2")
    assert api.get("/api/v1/jobs/1")[0]["state"] == "running"


def test_node_that_cannot_start_its_part_ends_the_whole_job(api: Api) -> None:
    api.submit(machines=2, gpus=1)
    api.sync(StartReport("1:1:0", "running"))
    api.sync(StartReport("1:1:1", "exited", RankResult(error="no such folder")), node="n2")
    assert [start.action for start in api.sync(StartReport("1:1:0", "running"))] == ["end"]
    api.sync(StartReport("1:1:0", "exited", RankResult(138, 1.0)))
    (row,) = api.get("/api/v1/jobs/1")
    assert (row["state"], row["reason"]) == ("failed", "cannot start: no such folder")


def test_node_reports_only_what_it_was_asked_to_start(api: Api) -> None:
    api.submit(gpus=1)
    (start,) = api.sync()
    api.sync(StartReport(start.key, "exited", RankResult(0)), node="n2")
    assert api.get("/api/v1/jobs/1")[0]["state"] == "starting"
    with pytest.raises(UsageError, match="unknown node 'n9'"):
        api.plane.sync(NodeReport("n9"))


def test_held_job_starts_once_released(api: Api) -> None:
    api.submit(gpus=1)
    assert api.post("/api/v1/jobs/1/hold").json()["changed"]
    assert api.sync() == []
    assert "held" in json.dumps(api.get("/api/v1/jobs/1/why"))
    assert not api.post("/api/v1/jobs/1/hold").json()["changed"]
    assert api.post("/api/v1/jobs/1/release").json()["changed"]
    assert [start.key for start in api.sync()] == ["1:1:0"]


def test_waiting_job_is_explained_from_live_state(api: Api) -> None:
    for _ in range(3):
        api.submit(gpus=2, site={"preemptible": "yes"})
    api.sync()
    answer = api.get("/api/v1/jobs/3/why")["why"]
    assert answer["sentence"] == "needs 2 GPUs; the largest gang that fits is 0"
    assert [(holder["tenant"], holder["gpus"]) for holder in answer["holders"]] == [("default", 4)]


def test_silent_node_gets_no_new_jobs_until_it_reports(database: Path) -> None:
    now = [1000.0]
    store = ServiceStore(open_database(sqlite_url(database)))
    plane, decider = ControlPlane(store, monotonic=lambda: now[0]), InProcessDecider()
    plane.set_cluster(SPECS[:1], [{"name": "default"}], "headway")
    plane.sync(NodeReport("n1"))
    for _ in range(4):
        now[0] += 8
        plane.take_events()
    plane.submit(LaunchRequest("job", ("true",), Path("/tmp"), gpus=1))
    assert run_cycle(plane, decider).started == 0
    plane.sync(NodeReport("n1"))
    assert run_cycle(plane, decider).started == 1
    store.close()


def test_changed_node_counts_as_before_while_jobs_are_on_it(api: Api) -> None:
    changed = [SPECS[0] | {"cpus": 2}, SPECS[1]]
    api.submit(gpus=1)
    (start,) = api.sync()
    assert api.plane.set_cluster(changed, [{"name": "default"}], "headway") == ["n1"]
    assert [node["cpus"] for node in api.get("/api/v1/nodes")] == [4, 4]
    api.sync(StartReport(start.key, "exited", RankResult(0)))
    assert api.plane.set_cluster(changed, [{"name": "default"}], "headway") == []
    assert [node["cpus"] for node in api.get("/api/v1/nodes")] == [2, 4]
    api.submit(gpus=2, cpus=3)
    run_cycle(api.plane, api.decider)
    assert api.get("/api/v1/jobs")[0]["placement"] == [{"node": "n2", "gpus": ["0", "1"]}]


def test_older_service_cannot_write_any_more(api: Api, database: Path) -> None:
    newer = ServiceStore(open_database(sqlite_url(database)))
    with pytest.raises(Superseded):
        api.plane.submit(LaunchRequest("job", ("true",), Path("/tmp")))
    assert api.plane.sync(NodeReport("n1")).epoch < newer.epoch
    newer.close()


@pytest.mark.parametrize(
    "change", ["UPDATE record SET line = replace(line, 'default', 'defiant')", "DELETE FROM record WHERE seq = 2"]
)
def test_changed_record_is_noticed(api: Api, database: Path, change: str) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute(change)
    connection.close()
    engine = open_database(sqlite_url(database))
    with pytest.raises(DamagedRecord, match=r"line [12] of the record"):
        ServiceStore(engine)
    engine.dispose()


def test_full_database_is_one_sentence_and_loses_nothing(api: Api, database: Path) -> None:
    api.submit()
    full = open_database(sqlite_url(database))
    listens_for(full, "connect")(lambda connection, _: connection.execute("PRAGMA max_page_count = 1").close())
    full.dispose()
    plane = ControlPlane(ServiceStore(full))
    plane.set_cluster(SPECS, [{"name": "default"}], "headway")
    large = LaunchRequest("job", ("true", "x" * 100_000), Path("/tmp"))
    with pytest.raises(EngineError, match="the database failed: database or disk is full"):
        plane.submit(large)
    assert plane.submit(LaunchRequest("job", ("true",), Path("/tmp"))) == "2"
    assert [row["id"] for row in api.get("/api/v1/jobs")] == ["1", "2"]
    full.dispose()


@pytest.mark.parametrize(
    ("results", "stop", "expected"),
    [
        ([RankResult(0)], "", ("finished", 0, True)),
        ([RankResult(0), RankResult(3)], "", ("failed", 3, False)),
        ([RankResult(75)], "", ("waiting", 75, True)),
        ([RankResult(75)], "preempt", ("waiting", 75, True)),
        ([RankResult(137)], "preempt", ("waiting", 137, False)),
        ([RankResult(0)], "preempt", ("finished", 0, True)),
        ([RankResult(75)], "cancel", ("cancelled", 75, False)),
        ([RankResult(0)], "cancel", ("finished", 0, True)),
        ([RankResult(138, 2.0)], "", ("waiting", 138, True)),
        ([RankResult(138, 40.0)], "", ("failed", 138, False)),
        ([RankResult(lost=True)], "", ("waiting", None, False)),
        ([RankResult(lost=True)], "cancel", ("cancelled", None, False)),
        ([RankResult()], "", ("failed", None, False)),
        ([RankResult(0), RankResult(9, reported=75)], "", ("waiting", 75, True)),
    ],
)
def test_outcome_of_a_start(results: list[RankResult], stop: str, expected: tuple[str, int | None, bool]) -> None:
    outcome = outcome_of(results, stop)
    assert (outcome.state, outcome.exit_status, outcome.saved) == expected
