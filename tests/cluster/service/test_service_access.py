"""Tokens that expire, rates, the audit log, secrets that stay secret, tenants that change, slow clients."""

import json
import logging
import socket
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from access_world import NODE_TOKEN, NOW, ROOT_TOKEN, AccessWorld, access_world, submission
from hypothesis import given, settings
from hypothesis import strategies as st

from eventually import eventually
from headway.cluster.engines import LaunchRequest
from headway.cluster.service.access_guard import FAILURES_BURST, GuardSettings
from headway.cluster.service.accounts import Accounts
from headway.cluster.service.host_starts import HostStarts
from headway.cluster.service.local_cluster import starting_tenants
from headway.cluster.service.messages import NodeReport, StartReport
from headway.cluster.service.outcome import RankResult
from headway.cluster.service.peer_certificate import PeerCertificateProtocol
from headway.cluster.service.plane import ControlPlane
from headway.cluster.service.rate_limit import RateLimiter
from headway.cluster.service.secret_store import SecretStore
from headway.cluster.service.store import ServiceStore
from headway.cluster.service.tables import open_database, sqlite_url
from headway.cluster.service.tenant_changes import parents_first, tenants_at_start
from headway.cluster.service.tokens import LONGEST_S
from headway.dashboard.server import serve
from headway.errors import UsageError
from headway.http_server import listen

MARKER = "marker-4f1d0c55e2"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[AccessWorld]:
    with access_world(tmp_path) as world:
        yield world


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AccessWorld]:
    """For tests that disturb no others."""
    with access_world(tmp_path_factory.mktemp("shared")) as world:
        yield world


def everything_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


# -- tokens


def test_token_ends_at_its_time_and_when_it_is_revoked(shared: AccessWorld) -> None:
    made = shared.ask("red-member", "POST", "/api/v1/tokens", {"lifetime_s": 3600, "label": "laptop"}).json()
    shared.tokens["laptop"] = made["token"]
    shared.now[0] += 3599
    assert shared.ask("laptop", "GET", "/api/v1/whoami").json()["token"] == made["id"]
    shared.now[0] += 1
    assert shared.ask("laptop", "GET", "/api/v1/whoami").status_code == 401
    made = shared.ask("red-member", "POST", "/api/v1/tokens", {}).json()
    shared.tokens["other"] = made["token"]
    assert shared.ask("other", "GET", "/api/v1/whoami").status_code == 200
    assert shared.ask("red-member", "DELETE", f"/api/v1/tokens/{made['id']}").json()["revoked"] == shared.now[0]
    assert shared.ask("other", "GET", "/api/v1/whoami").status_code == 401
    too_long = shared.ask("red-member", "POST", "/api/v1/tokens", {"lifetime_s": LONGEST_S + 1})
    assert too_long.status_code == 422


def test_token_makes_none_that_may_do_more(shared: AccessWorld) -> None:
    made = shared.ask("red-member", "POST", "/api/v1/tokens", {"scopes": ["read", "manage"]}).json()
    shared.tokens["narrow"] = made["token"]
    assert shared.ask("narrow", "POST", "/api/v1/tokens", {"scopes": ["jobs"]}).status_code == 400
    assert shared.ask("narrow", "POST", "/api/v1/tokens", {"scopes": ["read"]}).status_code == 200


def test_changed_role_and_removed_user_take_effect_at_once(shared: AccessWorld) -> None:
    shared.add_user("red-guest", "member", "red")
    viewer = {"role": "viewer", "tenant": "red"}
    assert shared.ask("red-admin", "PUT", "/api/v1/users/red-guest", viewer).status_code == 200
    assert shared.ask("red-guest", "POST", "/api/v1/jobs", submission()).status_code == 403
    assert shared.ask("red-admin", "DELETE", "/api/v1/users/red-guest").status_code == 200
    assert shared.ask("red-guest", "GET", "/api/v1/whoami").status_code == 401


def test_last_admin_stays(shared: AccessWorld) -> None:
    for method, body in (("DELETE", None), ("PUT", {"role": "viewer", "tenant": "red"})):
        answer = shared.ask("root", method, "/api/v1/users/admin", body)
        assert (answer.status_code, "the only admin" in answer.text) == (400, True)


def test_database_holds_no_token(shared: AccessWorld) -> None:
    stored = everything_in(shared.database.parent)
    assert b"red-member" in stored
    assert not [name for name, token in shared.tokens.items() if token.encode() in stored]


def test_revoked_first_token_is_not_admitted_again(world: AccessWorld) -> None:
    first = world.ask("root", "GET", "/api/v1/whoami").json()["token"]
    assert world.ask("root", "DELETE", f"/api/v1/tokens/{first}").status_code == 200
    again = Accounts(world.accounts._store, lambda: world.now[0])
    assert not again.admit_first(ROOT_TOKEN)
    assert again.admit_first("another-token-of-the-folder")


# -- rates


@settings(max_examples=30)
@given(st.floats(0.5, 50), st.integers(1, 40), st.lists(st.floats(0, 5), max_size=200))
def test_no_caller_gets_more_than_burst_and_rate(per_s: float, burst: int, gaps: list[float]) -> None:
    now, admitted = [0.0], list[float]()
    limiter = RateLimiter(per_s, burst, lambda: now[0])
    for gap in gaps:
        now[0] += gap
        wait_s = limiter.admit("a")
        assert wait_s >= 0
        if not wait_s:
            admitted.append(now[0])
    for first in range(0, len(admitted), 7):
        for last in range(first, len(admitted), 7):
            assert last - first + 1 <= burst + (admitted[last] - admitted[first]) * per_s + 1e-6


def test_callers_have_buckets_of_their_own(tmp_path: Path) -> None:
    now = [0.0]
    guard = GuardSettings(NODE_TOKEN, requests_per_s=1, requests_burst=3, clock=lambda: now[0])
    with access_world(tmp_path, guard) as world:
        statuses = [world.ask("red-viewer", "GET", "/api/v1/whoami").status_code for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        assert world.ask("blue-viewer", "GET", "/api/v1/whoami").status_code == 200
        refused = world.ask("red-viewer", "GET", "/api/v1/whoami")
        now[0] += int(refused.headers["retry-after"])
        assert world.ask("red-viewer", "GET", "/api/v1/whoami").status_code == 200


def test_wrong_tokens_can_be_tried_slowly_and_hinder_nobody(shared: AccessWorld) -> None:
    shared.now[0] += 60
    statuses = [shared.ask("wrong", "GET", "/api/v1/jobs").status_code for _ in range(int(FAILURES_BURST) + 1)]
    assert statuses == [401] * int(FAILURES_BURST) + [429]
    assert shared.ask("red-viewer", "GET", "/api/v1/jobs").status_code == 200


# -- the audit log


def test_every_change_and_refusal_is_in_the_audit_log_once(world: AccessWorld) -> None:
    job = world.submit("red-member")
    world.ask("red-member", "POST", f"/api/v1/jobs/{job}/hold")
    world.ask("red-member", "GET", "/api/v1/jobs")
    world.ask("red-viewer", "POST", f"/api/v1/jobs/{job}/cancel")
    world.ask("red-member", "POST", "/api/v1/jobs", submission("none"))
    world.ask("red-admin", "PUT", "/api/v1/users/new", {"role": "viewer", "tenant": "red"})
    world.ask("blue-member", "POST", "/api/v1/jobs", submission())
    entries = world.ask("red-admin", "GET", "/api/v1/audit").json()
    assert [(entry["user"], entry["target"], entry["detail"], entry["outcome"]) for entry in entries] == [
        ("red-member", "/api/v1/jobs", f"jobs {job}", "done"),
        ("red-member", f"/api/v1/jobs/{job}/hold", "", "done"),
        ("red-viewer", f"/api/v1/jobs/{job}/cancel", "", "refused"),
        ("red-member", "/api/v1/jobs", "unknown tenant 'none'", "refused"),
        ("red-admin", "/api/v1/users/new", "viewer of red", "done"),
    ]
    assert {entry["at"] for entry in entries} == {NOW}
    assert len(world.ask("root", "GET", "/api/v1/audit").json()) == 6
    assert len(world.ask("root", "GET", "/api/v1/audit", after=entries[1]["seq"]).json()) == 4


# -- secrets


def start_and_finish(plane: ControlPlane, world: AccessWorld) -> dict[str, str]:
    """Run the waiting job on its node, and return the secrets that the node was told."""
    world.plane = plane
    for name in ("n1", "n2"):
        plane.sync(NodeReport(name))
    world.cycle()
    for name in ("n1", "n2"):
        for start in plane.sync(NodeReport(name)).starts:
            done = StartReport(start.key, "exited", RankResult(0))
            plane.sync(NodeReport(name, (done,)))
            assert start.secrets is not None
            return start.secrets
    raise AssertionError("no start")


def test_secret_reaches_its_job_and_nothing_else(
    world: AccessWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A value that is planted in every way a user can: whatever the service answers, writes or prints is searched."""
    caplog.set_level(logging.DEBUG)
    sent = submission(name="sent", secrets={"SENT": MARKER})
    answers = [
        world.ask("red-member", "PUT", "/api/v1/secrets/red/STORED", {"value": MARKER}),
        world.ask("red-member", "PUT", "/api/v1/secrets/red/STORED", {"value": MARKER, "more": MARKER}),
        world.ask("red-member", "PUT", "/api/v1/secrets/blue/STORED", {"value": MARKER}),
        world.ask("red-member", "PUT", "/api/v1/secrets/red/bad name", {"value": MARKER}),
        world.ask("red-member", "PUT", "/api/v1/secrets/red/LARGE", {"value": MARKER * 10_000}),
        world.ask("red-viewer", "PUT", "/api/v1/secrets/red/STORED", {"value": MARKER}),
        world.ask(
            "red-member", "POST", "/api/v1/jobs", submission(name="sent", secrets={"SENT": MARKER}) | {"key": "k"}
        ),
        world.ask("red-member", "POST", "/api/v1/jobs", sent | {"more": 1}),
        world.ask("red-member", "POST", "/api/v1/jobs", submission(secrets={"SENT": [MARKER]})),  # type: ignore[dict-item]
        world.ask("red-member", "POST", "/api/v1/jobs", submission(secrets={"SENT": MARKER}, gpus=99)),
    ]
    assert [answer.status_code for answer in answers] == [200, 422, 400, 422, 422, 403, 200, 422, 422, 400]
    paths = ("jobs", "jobs/sent", "jobs/sent/why", "secrets", "audit", "record", "events", "nodes", "whoami")
    answers += [world.ask("root", "GET", f"/api/v1/{path}") for path in paths]
    answers.append(world.ask("root", "GET", "/metrics"))
    assert not [answer.request.url for answer in answers if MARKER in answer.text]
    with sqlite3.connect(world.database) as connection:
        assert MARKER not in "\n".join(connection.iterdump())
    connection.close()
    assert MARKER.encode() not in everything_in(tmp_path)
    assert start_and_finish(world.plane, world) == {"SENT": MARKER}
    assert MARKER.encode() not in everything_in(tmp_path)
    assert MARKER not in caplog.text + "".join(capfd.readouterr())


def test_secrets_survive_a_restart_and_go_when_the_job_is_over(world: AccessWorld) -> None:
    world.ask("red-member", "PUT", "/api/v1/secrets/red/STORED", {"value": "old"})
    world.ask("red-member", "PUT", "/api/v1/secrets/red/STORED", {"value": "new"})
    request = submission(secrets={"SENT": "sent", "STORED": ""})
    request["secrets"] = {"SENT": "sent"}
    assert world.ask("red-member", "POST", "/api/v1/jobs", request).status_code == 200
    store = ServiceStore(open_database(sqlite_url(world.database)))
    plane = ControlPlane(store, lambda: world.now[0], secrets=SecretStore(b"k" * 32))
    plane.set_cluster(world.specs, world.tenants, "headway")
    assert start_and_finish(plane, world) == {"SENT": "sent", "STORED": "new"}
    with store.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM job_secrets").scalar() == 0
    store.close()


def test_secret_cannot_be_moved_to_another_tenant_in_the_database(shared: AccessWorld) -> None:
    shared.ask("blue-member", "PUT", "/api/v1/secrets/blue/KEY", {"value": "theirs"})
    shared.ask("red-member", "PUT", "/api/v1/secrets/red/KEY", {"value": "mine"})
    with sqlite3.connect(shared.database) as connection:
        connection.execute(
            "UPDATE tenant_secrets SET sealed = (SELECT sealed FROM tenant_secrets WHERE tenant = 'blue')"
        )
    connection.close()
    with shared.accounts._store.read() as reading:
        assert shared.plane.secrets.values(reading, "1", ("blue",), ["KEY"]) == {"KEY": "theirs"}
        assert shared.plane.secrets.values(reading, "1", ("red",), ["KEY"]) is None
        assert SecretStore(b"x" * 32).values(reading, "1", ("blue",), ["KEY"]) is None


def test_job_whose_secret_nobody_has_is_refused(shared: AccessWorld) -> None:
    shared.ask("blue-member", "PUT", "/api/v1/secrets/blue/THEIRS", {"value": "theirs"})
    answer = shared.ask("red-member", "POST", "/api/v1/jobs", submission(secrets={"THEIRS": ""}) | {"secrets": {}})
    assert answer.status_code == 400
    assert "headway secrets set THEIRS" in answer.json()["hint"]


def test_secret_file_is_private_and_gone_after_the_job(world: AccessWorld, tmp_path: Path) -> None:
    folder, starts = tmp_path / "job", HostStarts(tmp_path / "node")
    folder.mkdir()
    script = 'stat -c %a "$KEY_FILE"; cat "$KEY_FILE"; echo; echo "${KEY-unset} $PLAIN"'
    request = LaunchRequest(
        "job",
        ("bash", "-c", script),
        folder,
        cpus=1,
        secrets=("KEY", "PLAIN"),
        site={"tenant": "red", "secret_files": "KEY"},
    )
    world.plane.submit(request, {"KEY": "in a file", "PLAIN": "in a variable"})
    world.plane.sync(NodeReport("n1"))
    world.cycle()
    (wanted,) = (start for name in ("n1", "n2") for start in world.plane.sync(NodeReport(name)).starts)
    starts.begin(wanted)
    eventually(lambda: starts.report()[0].state == "exited")
    (log,) = folder.rglob("*.log")
    assert log.read_text() == "600\nin a file\nunset in a variable\n"
    assert not list((tmp_path / "node" / "secrets").iterdir())
    assert b"in a file" not in everything_in(tmp_path / "node")
    with pytest.raises(UsageError, match="none of its secrets"):
        world.plane.submit(LaunchRequest("job", ("true",), folder, site=request.site))


# -- tenants


def test_tenants_and_budgets_change_while_jobs_run(world: AccessWorld) -> None:
    world.submit("red-a-member", name="works", gpus=2)
    world.cycle()
    world.run_all()
    change = {"guarantee": 3, "borrow": 1, "budget_gpu_h": 10.0}
    answer = world.ask("red-admin", "PUT", "/api/v1/tenants/red-a", change).json()
    assert (answer["guarantee"], answer["borrow"], answer["budget_gpu_h"], answer["gpus"]) == (3, 1, 10.0, 2)
    world.now[0] += 1800
    seen = {row["name"]: row["spent_gpu_h"] for row in world.ask("red-viewer", "GET", "/api/v1/tenants").json()}
    assert seen == {"red": pytest.approx(1.0), "red-a": pytest.approx(1.0)}
    answer = world.ask("red-admin", "PUT", "/api/v1/tenants/red-a", {"borrow": None}).json()
    assert (answer["guarantee"], answer["borrow"], answer["spent_gpu_h"]) == (3, None, pytest.approx(1.0))
    for path, body in (("red-a", {"guarantee": 5}), ("red-a", {"parent": "red-a"}), ("red-b", {"parent": "none"})):
        assert world.ask("root", "PUT", f"/api/v1/tenants/{path}", body).status_code == 400
    assert "has users" in world.ask("root", "DELETE", "/api/v1/tenants/red-a").text
    for role in ("viewer", "member", "admin"):
        world.ask("root", "DELETE", f"/api/v1/users/red-a-{role}")
    assert "has jobs" in world.ask("root", "DELETE", "/api/v1/tenants/red-a").text
    world.ask("root", "PUT", "/api/v1/tenants/green", {})
    world.ask("root", "PUT", "/api/v1/tenants/green-a", {"parent": "green"})
    assert "below it" in world.ask("root", "DELETE", "/api/v1/tenants/green").text
    world.ask("root", "DELETE", "/api/v1/tenants/green-a")
    world.ask("root", "PUT", "/api/v1/tenants/green", {})
    world.ask("root", "PUT", "/api/v1/secrets/green/KEY", {"value": "x"})
    assert world.ask("root", "DELETE", "/api/v1/tenants/green").status_code == 200
    world.ask("root", "PUT", "/api/v1/tenants/green", {})
    assert "green" not in world.ask("root", "GET", "/api/v1/secrets").text


@settings(max_examples=30)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=9), st.randoms())
def test_parents_are_listed_first_whatever_the_order(above: list[int], rng: Any) -> None:
    tenants = [
        {"name": str(number), "parent": str(parent % number) if number and parent < number else None}
        for number, parent in enumerate(above)
    ]
    shuffled = rng.sample(tenants, len(tenants))
    ordered = parents_first(shuffled)
    places = {tenant["name"]: place for place, tenant in enumerate(ordered)}
    assert sorted(places) == sorted(tenant["name"] for tenant in tenants)
    assert all(tenant["parent"] is None or places[tenant["parent"]] < places[tenant["name"]] for tenant in ordered)


@pytest.mark.parametrize(
    ("listed", "before", "recorded", "expected"),
    [
        (None, None, None, "default"),
        (None, None, "recorded", "recorded"),
        ("file", None, None, "file"),
        ("file", None, "recorded", "file"),
        ("file", "file", "recorded", "recorded"),
        ("file", "older", "recorded", "file"),
    ],
)
def test_changes_by_users_outlive_a_restart_unless_the_file_changed(
    listed: str | None, before: str | None, recorded: str | None, expected: str
) -> None:
    def tenants(name: str | None) -> Any:
        return None if name is None else [{"name": name}]

    found = tenants_at_start(tenants(listed), tenants(before), tenants(recorded), tenants("default"))
    assert found == tenants(expected)


def test_file_of_tenants_is_remembered(tmp_path: Path) -> None:
    store = ServiceStore(open_database(sqlite_url(tmp_path / "control.db")))
    for name in ("a", "b", "b"):
        assert starting_tenants(store, [{"name": name}]) == [{"name": name}]
    with store.read() as connection:
        rows = connection.exec_driver_sql("SELECT value FROM facts WHERE name = 'tenants of the file'").scalars().all()
    assert [json.loads(row) for row in rows] == [[{"name": "b"}]]
    store.close()


# -- slow clients


def test_clients_that_send_too_slowly_are_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A request whose head never ends, one whose body never ends, one after another: none holds its connection."""
    monkeypatch.setattr(PeerCertificateProtocol, "headers_s", 0.2)
    with access_world(tmp_path, GuardSettings(NODE_TOKEN, body_s=0.2)) as world:
        listener, listening = listen("127.0.0.1", 0), threading.Event()
        monkeypatch.setattr("headway.http_server.signal.signal", lambda *_: None)  # not the main thread
        arguments = (world.app, listener, listening.set)
        options = {"http": PeerCertificateProtocol, "timeout_keep_alive": 1}
        server = threading.Thread(target=serve, args=arguments, kwargs=options, daemon=True)
        server.start()
        assert listening.wait(60)
        head = f"Host: localhost\r\nAuthorization: Bearer {world.tokens['red-member']}\r\n"
        body = "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        good = f"GET /api/v1/whoami HTTP/1.1\r\n{head}\r\n"
        for text in ("", "GET /health HT", f"POST /api/v1/jobs HTTP/1.1\r\n{head}{body}", f"{good}GET /hea"):
            with socket.create_connection(listener.getsockname(), 60) as client:
                client.sendall(text.encode())
                answer = b"".join(iter(lambda: client.recv(4096), b""))
            assert b"500" not in answer, text
            assert (b"red-member" in answer) == text.startswith(good)
        assert "Traceback" not in caplog.text
