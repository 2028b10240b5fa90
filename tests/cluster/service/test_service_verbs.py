"""Verbs of the service as its users type them: what each role sees, and what is said to mistakes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from access_world import AccessWorld, access_world
from fastapi.testclient import TestClient
from service_verbs import URL, Terminal

from headway.cluster.service.connection import ServiceConnection
from headway.dashboard import make_app


@pytest.fixture
def world(tmp_path: Path) -> Iterator[AccessWorld]:
    with access_world(tmp_path) as world:
        yield world


@pytest.fixture
def terminal(
    world: AccessWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Terminal:
    return Terminal(world, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("user", ["red-viewer", "red-admin"])
def test_cluster_pages_show_who_is_no_admin_its_own_tenants(
    world: AccessWorld, terminal: Terminal, tmp_path: Path, user: str
) -> None:
    mine, other = world.submit("red-member"), world.submit("blue-member")
    world.cycle()
    (tmp_path / "runs").mkdir()
    app = make_app(tmp_path / "runs", "t" * 32, service=lambda: ServiceConnection(URL, world.tokens[user]))
    with TestClient(app, base_url="http://127.0.0.1:8321") as browser:
        browser.headers["authorization"] = f"Bearer {'t' * 32}"
        page = browser.get("/api/cluster").json()
        timeline = browser.get("/api/cluster/timeline").json()
        job = browser.get("/api/cluster/job", params={"job": mine}).json()
    assert [node["name"] for node in page["nodes"]] == ["n1", "n2"]
    assert [row["id"] for row in page["jobs"]] == [mine]
    assert {row["name"] for row in page["tenants"]} == {"red", "red-a"}
    assert mine in {event["job"] for event in page["newest"]}
    assert other not in {event["job"] for event in timeline["events"]}
    assert (timeline["jobs"], job["spans"]) == ([], []), "spans are of the record, which is for admins"
    assert timeline["refusal"]
