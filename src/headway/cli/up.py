"""`headway up`: starts the service that schedules jobs on a cluster."""

import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.options import Json, Runs
from headway.cli.text import next_line, plural, print_json
from headway.cluster.service.login import is_loopback
from headway.errors import UsageError
from headway.track import command, runs_root
from headway.track.runs import create_private_folder

if TYPE_CHECKING:
    from headway.cluster.service.accounts import Accounts
    from headway.cluster.service.certificates import Authority, ServerTls
    from headway.cluster.service.webhooks import EventWebhook

NEEDED = ("fastapi", "prometheus_client", "sqlalchemy", "uvicorn")
_ANY = ("0.0.0.0", "::")
"""Hosts that stand for all addresses of this machine."""


def up(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port (0 = any free one).")] = 8324,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback with TLS.")] = "127.0.0.1",
    tls: Annotated[bool, typer.Option("--tls", help="TLS on loopback, too.")] = False,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate (default: one of its own).")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="FILE", help="Private key of --tls-cert.")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", metavar="FILE", help="cluster.toml with tenants (default: one tenant).")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=0, metavar="N", help="GPUs that jobs may use (default: all).")
    ] = None,
    cpus: Annotated[
        int | None, typer.Option("--cpus", min=1, metavar="N", help="CPUs per node that jobs may use (default: all).")
    ] = None,
    emulate: Annotated[
        str | None, typer.Option("--emulate", metavar="NODESxGPUS", help="Nodes with fake GPUs on this machine.")
    ] = None,
    no_local_node: Annotated[
        bool, typer.Option("--no-local-node", help="Run no jobs on this machine; others join as nodes.")
    ] = False,
    forget_nodes: Annotated[
        bool, typer.Option("--forget-nodes", help="Nodes of the last start are gone: restart their jobs.")
    ] = False,
    give_up_after: Annotated[
        float,
        typer.Option(
            "--give-up-after", min=60.0, metavar="SECONDS", help="Restart the jobs of a silent node elsewhere then."
        ),
    ] = 600.0,
    speed: Annotated[
        float, typer.Option("--speed", min=1.0, help="How much faster the scheduler's clock runs, with --emulate.")
    ] = 1.0,
    demo: Annotated[
        bool, typer.Option("--demo", help="Emulate 3 nodes of 4 GPUs and submit jobs that preempt each other.")
    ] = False,
    policy: Annotated[str, typer.Option(help="Scheduling policy.")] = "headway",
    database: Annotated[
        str | None, typer.Option("--database", metavar="URL", help="PostgreSQL (default: SQLite beside the runs).")
    ] = None,
    webhooks: Annotated[
        Path | None, typer.Option("--webhooks", metavar="FILE", help="TOML with addresses that are told of events.")
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Start the service that schedules jobs: queue, decisions and record in a database, an agent per node.

    Verbs with the same --runs folder find it, and its token, there. Jobs go on when it ends; the next one finds them.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f"headway up needs {missing[0]}", hint="pip install 'headway[control]'")
    _check_options(emulate, speed, demo)
    if no_local_node and (emulate or demo or gpus is not None or cpus is not None):
        raise UsageError("--no-local-node has no GPUs, CPUs or emulated nodes", hint="leave those options out")
    if (tls_cert is None) != (tls_key is None):
        raise UsageError("--tls-cert and --tls-key belong together", hint="give both, or none")
    from headway.cluster.scheduler.policies import POLICIES
    from headway.cluster.service.connection import service_folder
    from headway.cluster.service.demo import DEMO_SHAPE, DEMO_SPEED, DEMO_TENANTS
    from headway.cluster.service.local_cluster import emulated_nodes, tenants_of, this_machine
    from headway.cluster.service.webhooks import read_webhooks

    if policy not in POLICIES:
        raise UsageError(f"unknown policy {policy!r}", hint=f"one of {', '.join(POLICIES)}")
    root = runs_root(runs)
    os.umask(0o077)  # the database and what lies beside it
    create_private_folder(root)
    folder = service_folder(root)
    folder.mkdir(mode=0o700, exist_ok=True)
    options = _node_options(no_local_node, demo, emulate, gpus, cpus)
    emulate, speed = (DEMO_SHAPE, DEMO_SPEED) if demo else (emulate, speed)
    nodes = [] if no_local_node else [this_machine(gpus, cpus)] if emulate is None else emulated_nodes(emulate, cpus)
    tenants = DEMO_TENANTS if demo else tenants_of(cluster)
    secure = authority = None
    if tls or tls_cert or not is_loopback(host):
        secure, authority = _server_tls(folder / "tls", host, tls_cert, tls_key)
    _serve(
        root,
        folder,
        (host, port),
        secure,
        authority,
        nodes,
        options,
        forget_nodes,
        tenants,
        [] if webhooks is None else read_webhooks(webhooks),
        policy,
        database,
        speed,
        give_up_after,
        demo,
        json,
    )


def _of_one_tenant(nodes: list[dict[str, Any]], tenants: list[str]) -> list[dict[str, Any]]:
    """Return this machine as a node of the only tenant; UsageError if there are several, all of whose jobs would run as
    one user. Emulated nodes are for trying things out."""
    if len(tenants) > 1 and any(node["chip"] != "fake" for node in nodes):
        raise UsageError(
            f"jobs of {plural(len(tenants), 'tenant')} would run as one user on this machine",
            hint="--no-local-node; headway node join --tenant-user makes it a node that keeps them apart",
        )
    return [node if node["chip"] == "fake" else node | {"tenants": tenants} for node in nodes]


def _server_tls(folder: Path, host: str, certificate: Path | None, key: Path | None) -> tuple["ServerTls", "Authority"]:
    """Return the certificate to listen with, the given one or one of the service's own, and its authority."""
    from headway.cluster.service.certificates import Authority, server_tls

    authority = Authority(folder)
    if certificate is not None and key is not None:
        return server_tls(certificate, key, authority.file), authority
    names = ["localhost", "127.0.0.1", socket.gethostname(), *([] if host in _ANY else [host])]
    return authority.server(folder, list(dict.fromkeys(names))), authority


def _check_options(emulate: str | None, speed: float, demo: bool) -> None:
    if speed != 1.0 and emulate is None:
        raise UsageError("--speed is for emulated nodes", hint="--emulate NODESxGPUS")
    if demo and emulate is not None:
        raise UsageError("--demo emulates nodes of its own", hint="leave --emulate out")


def _node_options(no_local_node: bool, demo: bool, emulate: str | None, gpus: int | None, cpus: int | None) -> str:
    """Return the options that name this machine's nodes, as a later start must repeat them."""
    flags = [flag for flag, given in (("--no-local-node", no_local_node), ("--demo", demo)) if given]
    values = (("--emulate", emulate), ("--gpus", gpus), ("--cpus", cpus))
    return " ".join([*flags, *(f"{flag} {value}" for flag, value in values if value is not None)])


def _serve(
    root: Path,
    folder: Path,
    address: tuple[str, int],
    tls: "ServerTls | None",
    authority: "Authority | None",
    nodes: list[dict[str, Any]],
    options: str,
    forget_nodes: bool,
    listed: list[dict[str, Any]] | None,
    webhooks: list["EventWebhook"],
    policy: str,
    database: str | None,
    speed: float,
    give_up_after: float,
    demo: bool,
    json: bool,
) -> None:
    from headway.cluster.service.accounts import Accounts
    from headway.cluster.service.app import make_app
    from headway.cluster.service.connection import NODE_TOKEN, TOKEN
    from headway.cluster.service.demo import submit_demo
    from headway.cluster.service.faults import VARIABLE, write_points
    from headway.cluster.service.live_service import LiveService
    from headway.cluster.service.local_cluster import keep_local_nodes, starting_tenants
    from headway.cluster.service.peer_certificate import PeerCertificateProtocol
    from headway.cluster.service.plane import ControlPlane
    from headway.cluster.service.secret_keys import SecretKeys
    from headway.cluster.service.single import only_service, publish_address
    from headway.cluster.service.slow_clients import MOST_CONNECTIONS
    from headway.cluster.service.store import ServiceStore
    from headway.cluster.service.tables import open_database, sqlite_url
    from headway.cluster.service.uploaded_code import CodeStore
    from headway.dashboard.server import serve
    from headway.http_server import listen

    host, port = address
    with only_service(folder):
        listener = listen(host, port)
        url = _url(host, listener.getsockname()[1], tls is not None)
        fingerprint = None if tls is None else tls.fingerprint
        engine = open_database(database or sqlite_url(folder / "control.db"))
        points = write_points()
        os.environ.pop(VARIABLE, None)  # the fault is for this process, not for its agents
        store = ServiceStore(engine, points)
        keep_local_nodes(store, nodes, options, forget=forget_nodes)
        tenants = starting_tenants(store, listed)
        if not is_loopback(host):
            nodes = _of_one_tenant(nodes, [tenant["name"] for tenant in tenants])
        log = partial(print, file=sys.stderr, flush=True)
        keys = SecretKeys(folder, store, points, log)
        plane = ControlPlane(store, time.time, speed, keys.secrets, give_up_after_s=give_up_after)
        for name in plane.set_cluster(nodes, tenants, policy):
            print(f"note: node {name} has changed; it counts as before while jobs are on it", file=sys.stderr)
        service = LiveService(store, plane, log, history=folder / "history", webhooks=webhooks)
        accounts = Accounts(store, time.time)
        token = _first_token(accounts, folder / TOKEN)
        app = make_app(
            service,
            token,
            _token(folder / NODE_TOKEN),
            host,
            accounts=accounts,
            authority=authority,
            code=CodeStore(folder / "code"),
            secret_keys=keys,
        )

        def listening() -> None:
            publish_address(folder, url, fingerprint)
            service.start()
            local = [str(node["name"]) for node in nodes]
            service.start_nodes(local, folder / "nodes", url, folder / NODE_TOKEN, fingerprint)
            if demo:
                submit_demo(plane, folder)
            if json:
                print_json({"listening": url, "fingerprint": fingerprint, "runs": str(root), "nodes": local})
            else:
                print("\n".join(_greeting(root, url, fingerprint, nodes, len(tenants), speed)))
            sys.stdout.flush()

        try:
            limits = {"http": PeerCertificateProtocol, "limit_concurrency": MOST_CONNECTIONS}
            serve(app, listener, listening, **limits, **({} if tls is None else tls.options()))
        finally:
            service.close()
        if service.failure is not None:
            raise service.failure


def _greeting(
    root: Path, url: str, fingerprint: str | None, nodes: list[dict[str, Any]], tenants: int, speed: float
) -> Iterator[str]:
    """Yield what the service prints once it listens."""
    gpus = sum(len(node["gpus"]) for node in nodes)
    yield f"{url}: {plural(len(nodes), 'node')}, {plural(gpus, 'GPU')}, {plural(tenants, 'tenant')}"
    if fingerprint is not None:
        yield f"fingerprint {fingerprint}"
    if speed != 1.0:
        yield f"emulated: the scheduler's clock runs {speed:g} times as fast"
    yield "Ctrl-C ends it; jobs go on"
    yield next_line(command(root, "queue"), f"{command(root, 'submit')} -- COMMAND")


def _first_token(accounts: "Accounts", file: Path) -> str:
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
