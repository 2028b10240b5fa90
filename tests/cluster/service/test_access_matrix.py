"""Every endpoint, asked by every role, about its own tenant, one below it and another: against a table by hand."""

import gzip
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from access_world import NODE_TOKEN, NOW, AccessWorld, access_world, submission

from headway.cluster.scheduler import wait_reasons
from headway.cluster.scheduler.start_estimate import StartEstimate
from headway.cluster.service.roles import PERMISSIONS, SCOPES, Permission

CALLERS = {"viewer": "red-viewer", "member": "red-member", "tenant-admin": "red-admin", "admin": "root"}
"""A caller of each role; all but the admin are of tenant red."""
PLACES = {"own": "red", "below": "red-a", "other": "blue"}
"""Whose a thing is that they ask about."""

ALL, MEMBERS = "viewer member tenant-admin admin", "member tenant-admin admin"
ADMINS, ROOT, NOBODY = "tenant-admin admin", "admin", ""
# who may: about its own tenant, one below, another. `mine` is a job or token of the caller's own.
MAY: dict[str, tuple[str, str, str]] = {
    "GET /openapi.json": (ALL, ALL, ALL),
    "GET /api/v1/whoami": (ALL, ALL, ALL),
    "POST /api/v1/jobs": (MEMBERS, MEMBERS, ROOT),
    "GET /api/v1/jobs": (ALL, ALL, ALL),
    "GET /api/v1/jobs/{job}": (ALL, ALL, ROOT),
    "GET /api/v1/jobs/{job}/why": (ALL, ALL, ROOT),
    "POST /api/v1/jobs/{job}/signal": (ADMINS, ADMINS, ROOT),
    "PUT /api/v1/code/{digest}": (MEMBERS, MEMBERS, MEMBERS),
    "POST /api/v1/jobs/{job}/{verb}": (ADMINS, ADMINS, ROOT),
    "POST /api/v1/jobs/{job}/{verb} mine": (MEMBERS, MEMBERS, ROOT),
    "POST /api/v1/jobs:batch": (MEMBERS, MEMBERS, ROOT),
    "POST /api/v1/jobs/{job}/priority": (ADMINS, ADMINS, ROOT),
    "POST /api/v1/jobs/{job}/priority mine": (MEMBERS, MEMBERS, ROOT),
    "POST /api/v1/jobs/{job}/streams": (ADMINS, ADMINS, ROOT),
    "POST /api/v1/jobs/{job}/streams mine": (MEMBERS, MEMBERS, ROOT),
    "PUT /api/v1/streams/{stream}": (NOBODY, NOBODY, NOBODY),
    "PUT /api/v1/streams/{stream} mine": (MEMBERS, MEMBERS, MEMBERS),
    "GET /api/v1/streams/{stream}": (NOBODY, NOBODY, NOBODY),
    "GET /api/v1/streams/{stream} mine": (ALL, ALL, ALL),
    "DELETE /api/v1/streams/{stream}": (NOBODY, NOBODY, NOBODY),
    "DELETE /api/v1/streams/{stream} mine": (ALL, ALL, ALL),
    "GET /api/v1/nodes": (ALL, ALL, ALL),
    "POST /api/v1/join-tokens": (ROOT, ROOT, ROOT),
    "POST /api/v1/nodes/{node}/{verb}": (ROOT, ROOT, ROOT),
    "PUT /api/v1/nodes/{node}/maintenance": (ROOT, ROOT, ROOT),
    "DELETE /api/v1/nodes/{node}/maintenance": (ROOT, ROOT, ROOT),
    "DELETE /api/v1/nodes/{node}": (ROOT, ROOT, ROOT),
    "GET /api/v1/events": (ALL, ALL, ALL),
    "GET /api/v1/usage": (ALL, ALL, ALL),
    "POST /api/v1/simulate": (ALL, ALL, ROOT),
    "POST /api/v1/simulate policy": (ALL, ALL, ALL),
    "GET /api/v1/jobs/{job}/logs": (ALL, ALL, ROOT),
    "POST /api/v1/jobs/{job}/logs": (ALL, ALL, ROOT),
    "GET /metrics": (ROOT, ROOT, ROOT),
    "GET /api/v1/record": (ROOT, ROOT, ROOT),
    "GET /api/v1/users": (ADMINS, ADMINS, ADMINS),
    "PUT /api/v1/users/{user}": (ADMINS, ADMINS, ROOT),
    "PUT /api/v1/users/{user} to admin": (ROOT, ROOT, ROOT),
    "DELETE /api/v1/users/{user}": (ADMINS, ADMINS, ROOT),
    "GET /api/v1/tokens": (ALL, ALL, ALL),
    "POST /api/v1/tokens": (ADMINS, ADMINS, ROOT),
    "POST /api/v1/tokens mine": (ALL, ALL, ALL),
    "DELETE /api/v1/tokens/{token}": (ADMINS, ADMINS, ROOT),
    "DELETE /api/v1/tokens/{token} mine": (ALL, ALL, ALL),
    "GET /api/v1/tenants": (ALL, ALL, ALL),
    "PUT /api/v1/tenants/{tenant}": (ROOT, ADMINS, ROOT),
    "PUT /api/v1/tenants/{tenant} new": (ADMINS, ADMINS, ROOT),
    "DELETE /api/v1/tenants/{tenant}": (ADMINS, ADMINS, ROOT),
    "GET /api/v1/secrets": (MEMBERS, MEMBERS, MEMBERS),
    "POST /api/v1/secrets:rekey": (ROOT, ROOT, ROOT),
    "PUT /api/v1/secrets/{tenant}/{secret}": (MEMBERS, MEMBERS, ROOT),
    "DELETE /api/v1/secrets/{tenant}/{secret}": (MEMBERS, MEMBERS, ROOT),
    "GET /api/v1/audit": (ADMINS, ADMINS, ADMINS),
}
FOR_OTHERS = {
    "GET /health": "anybody",
    "POST /api/v1/join": "whoever has a join token",
    "POST /api/v1/sync": "nodes",
    "POST /api/v1/renew-certificate": "nodes",
    "GET /api/v1/code/{digest}": "nodes",
    "PUT /api/v1/node-streams/{stream}": "nodes",
    "GET /api/v1/node-streams/{stream}": "nodes",
    "POST /api/v1/node-streams/{stream}/failure": "nodes",
}
ARCHIVE = gzip.compress(b"")
CANNOT = {
    "POST /api/v1/jobs/{job}/signal": 409,
    "POST /api/v1/jobs/{job}/streams": 409,
    "POST /api/v1/jobs/{job}/streams mine": 409,
    "POST /api/v1/jobs/{job}/logs": 409,
    "DELETE /api/v1/nodes/{node}": 400,
}
"""What whoever may is told: the job waits, there is no such node."""
number = count()


def fresh_job(world: AccessWorld, tenant: str, caller: str | None) -> str:
    """Held, so that it changes no more."""
    job = world.submit("root", tenant, site={"user": caller or "somebody"})
    world.plane.hold(job)
    return job


def fresh_user(world: AccessWorld, tenant: str) -> str:
    user = f"user-{next(number)}"
    world.accounts.set_user(user, "member", tenant)
    return user


def fresh_token(world: AccessWorld, user: str) -> str:
    return world.accounts.issue(user, SCOPES, "", 3600.0)[0].id


def fresh_stream(world: AccessWorld, user: str) -> str:
    """One that has ended, so that nobody waits for more of it."""
    stream = world.plane.streams.open_port(user, "n1", None, "1:1:0", 6006)
    for direction in stream.sent.values():
        direction.ended = direction.delivered = True
    return f"{stream.id}?offset=0"


def fresh_tenant(world: AccessWorld, parent: str) -> str:
    tenant = f"tenant-{next(number)}"
    assert world.ask("root", "PUT", f"/api/v1/tenants/{tenant}", {"parent": parent}).status_code == 200
    return tenant


def request_of(world: AccessWorld, row: str, tenant: str, caller: str) -> tuple[str, Any]:
    """The path and body of a request about something of a tenant, which exists."""
    route, _, variant = row.partition(" ")[2].partition(" ")
    mine = caller if variant == "mine" else None
    user = ("admin" if caller == "root" else caller) if variant == "mine" else fresh_user(world, tenant)
    made: dict[str, Callable[[], str]] = {
        "{job}": lambda: fresh_job(world, tenant, mine),
        "{verb}": lambda: "uncordon" if "nodes" in route else "release",
        "{node}": lambda: "none" if route.endswith("{node}") else "n1",
        "{digest}": lambda: sha256(ARCHIVE).hexdigest(),
        "{user}": lambda: fresh_user(world, tenant),
        "{token}": lambda: fresh_token(world, user),
        "{stream}": lambda: fresh_stream(world, user),
        "{secret}": lambda: "NAME",
        "{tenant}": lambda: tenant,
    }
    if variant == "new" or (row.startswith("DELETE") and "tenants" in route):
        made["{tenant}"] = lambda: f"tenant-{next(number)}" if variant else fresh_tenant(world, tenant)
    bodies: dict[str, Any] = {
        "POST /api/v1/jobs": submission(tenant),
        "POST /api/v1/jobs/{job}/priority mine": {"priority": 1},
        "POST /api/v1/simulate": {"request": submission(tenant)["request"]},
        "POST /api/v1/simulate policy": {"policy": "fifo"},
        "POST /api/v1/jobs:batch": {"jobs": [submission(tenant)]},
        "POST /api/v1/jobs/{job}/priority": {"priority": 1},
        "POST /api/v1/jobs/{job}/signal": {"number": 10},
        "POST /api/v1/jobs/{job}/streams": {"port": 6006},
        "POST /api/v1/jobs/{job}/streams mine": {"port": 6006},
        "POST /api/v1/jobs/{job}/logs": {"start": 1},
        "PUT /api/v1/streams/{stream}": {"offset": 0},
        "PUT /api/v1/streams/{stream} mine": {"offset": 0},
        "POST /api/v1/join-tokens": {},
        "PUT /api/v1/nodes/{node}/maintenance": {"begins": NOW + 1e6, "ends": NOW + 1.1e6},
        "PUT /api/v1/code/{digest}": ARCHIVE,
        "PUT /api/v1/users/{user}": {"role": "viewer", "tenant": tenant},
        "PUT /api/v1/users/{user} to admin": {"role": "admin", "tenant": None},
        "POST /api/v1/tokens": {"user": user},
        "POST /api/v1/tokens mine": {},
        "PUT /api/v1/tenants/{tenant}": {"borrow": 3},
        "PUT /api/v1/tenants/{tenant} new": {"parent": tenant},
        "PUT /api/v1/secrets/{tenant}/{secret}": {"value": "x"},
    }
    if "secrets" in row and row.startswith("DELETE"):
        assert world.ask("root", "PUT", f"/api/v1/secrets/{tenant}/NAME", {"value": "x"}).status_code == 200
    path = route
    for part, make in made.items():
        if part in path:
            path = path.replace(part, make())
    return path, bodies.get(row)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AccessWorld]:
    with access_world(tmp_path_factory.mktemp("service")) as world:
        yield world


def routes(world: AccessWorld) -> set[str]:
    return {
        f"{method} {route.path}"  # type: ignore[attr-defined]
        for route in world.app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }


def test_every_route_declares_what_it_needs(world: AccessWorld) -> None:
    assert routes(world) == set(PERMISSIONS)


def test_every_route_is_in_the_table(world: AccessWorld) -> None:
    assert routes(world) == {" ".join(row.split()[:2]) for row in MAY} | set(FOR_OTHERS)


SIMULATIONS = [row for row in MAY if row.startswith("POST /api/v1/simulate")]


@pytest.mark.parametrize("row", [row for row in MAY if row not in SIMULATIONS])
def test_who_may_do_what(world: AccessWorld, row: str) -> None:
    assert_only_those_may(world, row)


def test_who_may_simulate(tmp_path: Path) -> None:
    """In a world without jobs: to simulate those that the other rows leave waiting takes a hundred CPU-seconds."""
    with access_world(tmp_path) as world:
        for row in SIMULATIONS:
            assert_only_those_may(world, row)


def assert_only_those_may(world: AccessWorld, row: str) -> None:
    """Ask as every role about each tenant's things, and as nobody."""
    method = row.split()[0]
    for place, allowed in zip(PLACES, MAY[row], strict=True):
        for role, caller in CALLERS.items():
            world.now[0] += 10.0  # nobody asks too often
            path, body = request_of(world, row, PLACES[place], caller)
            answer = world.ask(caller, method, path, body)
            what = f"{role} {row} of {place} tenant: {answer.status_code} {answer.text[:200]}"
            if role in allowed.split():
                assert answer.status_code == CANNOT.get(row, 200), what
            else:
                assert answer.status_code in (400, 403), what
                assert PLACES["other"] not in answer.text.replace(path, "").replace("'blue'", ""), what
    path, body = request_of(world, row, "red", "red-member")
    for nobody in (None, "wrong", NODE_TOKEN):
        assert world.ask(nobody, method, path, body).status_code == 401


def test_health_needs_no_token_and_only_nodes_report(world: AccessWorld) -> None:
    assert world.ask(None, "GET", "/health").json() == {"ok": True}
    report = {"report": {"node": "n1"}}
    for nobody in (None, "wrong", *CALLERS.values()):
        world.now[0] += 10.0
        assert world.ask(nobody, "POST", "/api/v1/sync", report).status_code == 401
    assert world.ask(NODE_TOKEN, "POST", "/api/v1/sync", report).status_code == 200


@pytest.mark.parametrize("scope", SCOPES)
def test_token_may_do_what_its_scopes_cover(world: AccessWorld, scope: Any) -> None:
    world.tokens["limited"] = world.accounts.issue("admin", (scope,), "", 3600.0)[1]
    for row, need in PERMISSIONS.items():
        if isinstance(need, Permission) and need.scope != scope:
            method, path = row.split()
            world.now[0] += 10.0
            answer = world.ask("limited", method, path.replace("{verb}", "hold"), {})
            assert answer.status_code == 403, (row, answer.text)
    seen = world.ask("limited", "GET", "/api/v1/whoami").status_code
    assert seen == (200 if scope == "read" else 403)


def test_answers_hold_nothing_of_other_tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = StartEstimate(60.0, 90.0, (60.0, 90.0))  # instead of simulations of what may come
    monkeypatch.setattr(wait_reasons, "estimate_start", lambda *_: estimate)
    with access_world(tmp_path) as world:
        job = world.submit("blue-member", name="theirs", gpus=4, machines=2, site={"preemptible": "yes"})
        world.cycle()
        world.ask("root", "PUT", "/api/v1/secrets/blue/THEIR_KEY", {"value": "x"})
        world.run_all()
        mine = world.submit("red-member", name="mine", gpus=4, site={"preemptible": "yes"})
        world.now[0] += 7200.0  # so long that blue's job yields
        world.run_all()
        world.cycle()
        assert [row["state"] for row in world.ask("root", "GET", "/api/v1/jobs").json()] == ["ending", "starting"]
        waits = world.submit("red-a-member", name="waits", gpus=4, machines=2)
        world.cycle()
        paths = ("jobs", "nodes", "events", "usage", "users", "tokens", "tenants", "secrets", "audit", "whoami")
        for path in (*paths, f"jobs/{mine}/why", f"jobs/{waits}/why"):
            for caller in ("red-viewer", "red-member", "red-admin"):
                answer = world.ask(caller, "GET", f"/api/v1/{path}")
                assert answer.status_code in (200, 403)
                for word in ("blue", "their", f'"{job}"'):
                    assert word not in answer.text.lower(), (path, caller)
            assert world.ask("root", "GET", f"/api/v1/{path}").status_code == 200
        why = world.ask("red-viewer", "GET", "/api/v1/jobs/waits/why").json()["why"]
        assert [holder["tenant"] for holder in why["holders"]] == ["red"]


def test_thing_of_another_tenant_is_like_one_that_does_not_exist(world: AccessWorld) -> None:
    job = fresh_job(world, "blue", None)
    for method, path, name in (
        ("GET", "/api/v1/jobs/{}", job),
        ("GET", "/api/v1/jobs/{}/why", job),
        ("POST", "/api/v1/jobs/{}/cancel", job),
        ("DELETE", "/api/v1/users/{}", "blue-viewer"),
        ("DELETE", "/api/v1/tokens/{}", fresh_token(world, "blue-viewer")),
        ("DELETE", "/api/v1/tenants/{}", "blue"),
        ("DELETE", "/api/v1/secrets/{}/X", "blue"),
    ):
        world.now[0] += 10.0
        answers = [world.ask("red-admin", method, path.format(word)) for word in (name, "none")]
        texts = {
            (answer.status_code, answer.text.replace(word, ""))
            for answer, word in zip(answers, (name, "none"), strict=True)
        }
        assert len(texts) == 1, (path, texts)
