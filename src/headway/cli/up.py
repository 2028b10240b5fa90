"""`headway up`: starts the service that schedules jobs on a cluster."""

import os
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.options import Json, Runs
from headway.cluster.service.login import is_loopback
from headway.errors import UsageError
from headway.track import runs_root
from headway.track.run_folder import create_private_folder

if TYPE_CHECKING:
    from headway.cluster.service.certificates import Authority, ServerTls

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
    from headway.cli.service_process import ServiceStart, serve_cluster
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
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot keep the service's database in {folder}: {error.strerror}",
            hint="--runs names a folder to write into",
        ) from None
    options = _node_options(no_local_node, demo, emulate, gpus, cpus)
    emulate, speed = (DEMO_SHAPE, DEMO_SPEED) if demo else (emulate, speed)
    nodes = [] if no_local_node else [this_machine(gpus, cpus)] if emulate is None else emulated_nodes(emulate, cpus)
    tenants = DEMO_TENANTS if demo else tenants_of(cluster)
    secure = authority = None
    if tls or tls_cert or not is_loopback(host):
        secure, authority = _server_tls(folder / "tls", host, tls_cert, tls_key)
    serve_cluster(
        ServiceStart(
            root=root,
            host=host,
            port=port,
            tls=secure,
            authority=authority,
            nodes=nodes,
            node_options=options,
            forget_nodes=forget_nodes,
            tenants=tenants,
            webhooks=[] if webhooks is None else read_webhooks(webhooks),
            policy=policy,
            database=database,
            speed=speed,
            give_up_after_s=give_up_after,
            demo=demo,
        ),
        as_json=json,
    )


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
