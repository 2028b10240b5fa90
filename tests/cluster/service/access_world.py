"""A service in the process of the test, with tenants, users of each role, jobs and secrets."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import event

from headway.cluster.engines import LaunchRequest
from headway.cluster.engines.submissions import request_to_json
from headway.cluster.service.access_guard import GuardSettings
from headway.cluster.service.accounts import Accounts
from headway.cluster.service.app import make_app
from headway.cluster.service.certificates import Authority
from headway.cluster.service.cycle import run_cycle
from headway.cluster.service.decider import InProcessDecider
from headway.cluster.service.live_service import LiveService
from headway.cluster.service.messages import NodeReport, StartReport
from headway.cluster.service.plane import ControlPlane
from headway.cluster.service.roles import SCOPES, Role
from headway.cluster.service.secret_keys import SecretKeys
from headway.cluster.service.store import ServiceStore
from headway.cluster.service.tables import open_database, sqlite_url
from headway.cluster.service.uploaded_code import CodeStore

NODE_TOKEN, ROOT_TOKEN = "n" * 32, "r" * 32
MACHINE = {"chip": "fake", "gpus": list("abcd"), "cpus": 64, "memory_bytes": 2**36}
SPECS = [{"name": name, **MACHINE} for name in ("n1", "n2")]
TENANTS: list[dict[str, Any]] = [
    {"name": "red", "guarantee": 4},
    {"name": "red-a", "guarantee": 2, "parent": "red"},
    {"name": "blue", "guarantee": 2},
]
NOW = 1_800_000_000.0


@dataclass
class AccessWorld:
    """What a test asks, and what it moves: the clock."""

    app: FastAPI
    client: TestClient
    plane: ControlPlane
    accounts: Accounts
    database: Path
    decider: InProcessDecider
    now: list[float]
    tokens: dict[str, str] = field(default_factory=dict)
    """Of each user."""
    specs: Any = field(default_factory=lambda: SPECS)
    tenants: Any = field(default_factory=lambda: TENANTS)

    def ask(self, user: str | None, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """A request of a user; of nobody if None."""
        headers = {} if user is None else {"authorization": f"Bearer {self.tokens.get(user, user)}"}
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return self.client.request(method, path, params=query or None, headers=headers, **content)

    def add_user(self, name: str, role: Role, tenant: str | None) -> None:
        """Add a user with a token for a day."""
        self.accounts.set_user(name, role, tenant)
        self.tokens[name] = self.accounts.issue(name, SCOPES, "", 86400.0)[1]

    def submit(self, user: str, tenant: str | None = None, **options: Any) -> str:
        """Submit a job as a user, and return its id."""
        answer = self.ask(user, "POST", "/api/v1/jobs", submission(tenant, **options))
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def run_all(self) -> None:
        """Let nodes report that everything runs that they were to start."""
        for spec in SPECS:
            name = str(spec["name"])
            orders = self.plane.sync(NodeReport(name))
            self.plane.sync(NodeReport(name, tuple(StartReport(start.key, "running") for start in orders.starts)))

    def cycle(self) -> None:
        """Let the scheduler decide."""
        run_cycle(self.plane, self.decider)


def submission(
    tenant: str | None = None, name: str = "job", secrets: dict[str, str] | None = None, **options: Any
) -> Any:
    """The body of a submission."""
    site = {**options.pop("site", {}), **({} if tenant is None else {"tenant": tenant})}
    request = LaunchRequest(name, ("true",), Path("/tmp"), site=site, secrets=tuple(secrets or ()), **options)
    return {"request": request_to_json(request), "secrets": secrets or {}}


@contextmanager
def access_world(folder: Path, guard: GuardSettings | None = None) -> Iterator[AccessWorld]:
    """Yield a service whose tenants have users of each role: red-viewer, red-member, red-admin and so on; and root."""
    database, now = folder / "control.db", [NOW]
    engine = open_database(sqlite_url(database))

    @event.listens_for(engine, "connect")
    def fast(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA synchronous = OFF").close()

    engine.dispose()
    store = ServiceStore(engine)
    (folder / "secrets.key").write_text(base64.b64encode(b"k" * 32).decode())
    keys = SecretKeys(folder, store)
    plane = ControlPlane(store, lambda: now[0], secrets=keys.secrets)
    plane.set_cluster(SPECS, TENANTS, "headway")
    decider, accounts = InProcessDecider(), Accounts(store, lambda: now[0])
    service = LiveService(store, plane, print, decider)  # type: ignore[arg-type]
    guard = guard or GuardSettings(NODE_TOKEN, clock=lambda: now[0], wall_clock=lambda: now[0])
    app = make_app(
        service,
        ROOT_TOKEN,
        NODE_TOKEN,
        "127.0.0.1",
        accounts=accounts,
        guard=guard,
        authority=Authority(folder / "tls"),
        code=CodeStore(folder / "code"),
        secret_keys=keys,
    )
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        world = AccessWorld(app, client, plane, accounts, database, decider, now, {"root": ROOT_TOKEN})
        for spec in SPECS:
            plane.sync(NodeReport(str(spec["name"])))
        for tenant in TENANTS:
            for role, suffix in (("viewer", "viewer"), ("member", "member"), ("tenant-admin", "admin")):
                world.add_user(f"{tenant['name']}-{suffix}", role, tenant["name"])  # type: ignore[arg-type]
        yield world
    store.close()
