"""The process of `headway up`: the listener, the database, the scheduler, and agents of this machine's nodes.

Its imports are an extra of the package, so `up` checks that they are installed before it imports this module.
"""

import os
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headway.cli.text import next_line, plural, print_json
from headway.cluster.service.accounts import Accounts
from headway.cluster.service.app import make_app
from headway.cluster.service.certificates import Authority, ServerTls
from headway.cluster.service.connection import NODE_TOKEN, TOKEN, service_folder
from headway.cluster.service.demo import submit_demo
from headway.cluster.service.faults import VARIABLE, WritePoints, write_points
from headway.cluster.service.live_service import LiveService
from headway.cluster.service.local_cluster import keep_local_nodes, starting_tenants
from headway.cluster.service.login import is_loopback
from headway.cluster.service.peer_certificate import PeerCertificateProtocol
from headway.cluster.service.plane import ControlPlane
from headway.cluster.service.secret_keys import SecretKeys
from headway.cluster.service.single import only_service, publish_address
from headway.cluster.service.slow_clients import MOST_CONNECTIONS
from headway.cluster.service.store import ServiceStore
from headway.cluster.service.tables import open_database, sqlite_url
from headway.cluster.service.uploaded_code import CodeStore
from headway.cluster.service.webhooks import EventWebhook
from headway.dashboard.server import serve
from headway.errors import UsageError
from headway.http_server import listen
from headway.track import command

Nodes = list[dict[str, Any]]
"""Nodes as the service's cluster has them: name, GPUs, CPUs."""


@dataclass(frozen=True)
class ServiceStart:
    """What a service is started with."""

    root: Path
    """The folder of runs."""
    host: str
    port: int
    tls: ServerTls | None
    """The certificate to listen with; None for plain HTTP."""
    authority: Authority | None
    """What signs the certificates of nodes, with TLS."""
    nodes: Nodes
    """The nodes of this machine."""
    node_options: str
    """The options that name them."""
    forget_nodes: bool
    """Whether nodes of the last start may be gone."""
    tenants: list[dict[str, Any]] | None
    """Those of cluster.toml, if one was given."""
    webhooks: list[EventWebhook]
    policy: str
    database: str | None
    """URL of a PostgreSQL database; None for SQLite beside the runs."""
    speed: float
    """How much faster the scheduler's clock runs."""
    give_up_after_s: float
    """Silence of a node after which its jobs restart elsewhere."""
    demo: bool
    """Whether to submit the jobs of the demo."""

    @property
    def folder(self) -> Path:
        """The service's own folder."""
        return service_folder(self.root)

    @property
    def fingerprint(self) -> str | None:
        """That of the certificate, with TLS."""
        return None if self.tls is None else self.tls.fingerprint


def serve_cluster(start: ServiceStart, *, as_json: bool) -> None:
    """Serve until a signal ends the process; jobs go on, and the next service finds them."""
    folder = start.folder
    with only_service(folder):
        listener = listen(start.host, start.port)
        url = _url(start.host, listener.getsockname()[1], start.tls is not None)
        points = write_points()
        os.environ.pop(VARIABLE, None)  # the fault is for this process, not for its agents
        store = _open_store(start, points)
        tenants = starting_tenants(store, start.tenants)
        nodes = start.nodes
        if not is_loopback(start.host):
            nodes = _of_one_tenant(nodes, [tenant["name"] for tenant in tenants])
        log = partial(print, file=sys.stderr, flush=True)
        keys = SecretKeys(folder, store, points, log)
        plane = ControlPlane(store, time.time, start.speed, keys.secrets, give_up_after_s=start.give_up_after_s)
        for name in plane.set_cluster(nodes, tenants, start.policy):
            print(f"note: node {name} has changed; it counts as before while jobs are on it", file=sys.stderr)
        service = LiveService(store, plane, log, history=folder / "history", webhooks=start.webhooks)
        accounts = Accounts(store, time.time)
        token = _first_token(accounts, folder / TOKEN)
        app = make_app(
            service,
            token,
            _token(folder / NODE_TOKEN),
            start.host,
            accounts=accounts,
            authority=start.authority,
            code=CodeStore(folder / "code"),
            secret_keys=keys,
        )

        def listening() -> None:
            publish_address(folder, url, start.fingerprint)
            service.start()
            local = [str(node["name"]) for node in nodes]
            service.start_nodes(local, folder / "nodes", url, folder / NODE_TOKEN, start.fingerprint)
            if start.demo:
                submit_demo(plane, folder)
            if as_json:
                facts = {"listening": url, "fingerprint": start.fingerprint}
                print_json({**facts, "runs": str(start.root), "nodes": local})
            else:
                print("\n".join(_greeting(start, url, nodes, len(tenants))))
            sys.stdout.flush()

        try:
            limits = {"http": PeerCertificateProtocol, "limit_concurrency": MOST_CONNECTIONS}
            serve(app, listener, listening, **limits, **({} if start.tls is None else start.tls.options()))
        finally:
            service.close()
        if service.failure is not None:
            raise service.failure
        log("stopped; jobs go on, and the next headway up finds them")


def _open_store(start: ServiceStart, points: WritePoints) -> ServiceStore:
    """Open the database; the nodes of this machine in it are those of this start."""
    store = ServiceStore(open_database(start.database or sqlite_url(start.folder / "control.db")), points)
    keep_local_nodes(store, start.nodes, start.node_options, forget=start.forget_nodes)
    return store


def _of_one_tenant(nodes: Nodes, tenants: list[str]) -> Nodes:
    """Return this machine as a node of the only tenant; UsageError if there are several, all of whose jobs would run as
    one user. Emulated nodes are for trying things out."""
    if len(tenants) > 1 and any(node["chip"] != "fake" for node in nodes):
        raise UsageError(
            f"jobs of {plural(len(tenants), 'tenant')} would run as one user on this machine",
            hint="--no-local-node; headway node join --tenant-user makes it a node that keeps them apart",
        )
    return [node if node["chip"] == "fake" else node | {"tenants": tenants} for node in nodes]


def _greeting(start: ServiceStart, url: str, nodes: Nodes, tenants: int) -> Iterator[str]:
    """Yield what the service prints once it listens."""
    gpus = sum(len(node["gpus"]) for node in nodes)
    yield f"{url}: {plural(len(nodes), 'node')}, {plural(gpus, 'GPU')}, {plural(tenants, 'tenant')}"
    if start.fingerprint is not None:
        yield f"fingerprint {start.fingerprint}"
    if start.speed != 1.0:
        yield f"emulated: the scheduler's clock runs {start.speed:g} times as fast"
    yield "Ctrl-C ends it; jobs go on"
    whose = " --tenant NAME" if tenants > 1 else ""
    yield next_line(command(start.root, "queue"), f"{command(start.root, 'submit')}{whose} -- COMMAND")


def _first_token(accounts: Accounts, file: Path) -> str:
    """Return the token of the first admin; a new one if the one in its file was revoked."""
    token = _token(file)
    if not accounts.admit_first(token):
        file.unlink()
        token = _token(file)
        accounts.admit_first(token)
    return token


def _token(file: Path) -> str:
    """Return the token in a private file; a new one if there is none."""
    try:
        token = file.read_text().strip()
        if len(token) >= 16:
            return token
    except FileNotFoundError:
        pass
    token = secrets.token_urlsafe(24)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        os.fchmod(stream.fileno(), 0o600)
        stream.write(token + "\n")
    return token


def _url(host: str, port: int, secure: bool) -> str:
    """Return where this machine reaches what listens on a host and port."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
