"""`headway port-forward`: connects a port of this machine to one of a running job."""

import contextlib
import re
import socket
import sys
import threading
from typing import Annotated

import typer

from headway.cli.options import Json, Runs
from headway.cli.text import print_json
from headway.cluster.service.connection import ServiceConnection, connect, job_path
from headway.cluster.service.service_engine import sole_job
from headway.cluster.service.stream_carrier import Pace, carry, pace_requests
from headway.errors import EngineError, HeadwayError, UsageError
from headway.track import runs_root

LOOPBACK = "127.0.0.1"
_PORTS = re.compile(r"([0-9]{1,5})(?::([0-9]{1,5}))?")


def port_forward(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Id or name of a running job.")],
    ports: Annotated[str, typer.Argument(metavar="PORT[:LOCAL]", help="Its port, and this machine's; 0: any free.")],
    rank: Annotated[
        int, typer.Option("--rank", min=0, metavar="N", help="Of a job of several machines: which of them.")
    ] = 0,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Connect a port of this machine to one that a job of the service listens on.

    On 127.0.0.1 at both ends: that of the rank's machine, and this machine's.
    """
    port, local = _read_ports(ports)
    connection = connect(runs_root(runs))
    (row, *others) = sole_job(connection, job)
    if others:
        raise UsageError(f"job '{job}' is an array of {len(others) + 1} tasks", hint=f"one task: {row['id']}")
    if row["state"] != "running":
        raise EngineError(f"job {row['id']} is {row['state']}: only running jobs have ports")
    if rank >= len(row["placement"]):
        raise UsageError(f"job {row['id']} has no rank {rank}", hint=f"0 to {len(row['placement']) - 1}")
    listener = _listen(local)
    here, node = f"{LOOPBACK}:{listener.getsockname()[1]}", row["placement"][rank]["node"]
    if json:
        print_json({"listening": here, "job": row["id"], "port": port, "rank": rank, "node": node})
    else:
        print(f"{here}: port {port} of job {row['id']} ({row['name']}) on {node}; Ctrl-C ends it")
    sys.stdout.flush()
    pace = pace_requests()
    with listener, contextlib.suppress(KeyboardInterrupt):
        while True:
            channel, _ = listener.accept()
            arguments = (channel, connection, row["id"], {"port": port, "rank": rank}, pace)
            threading.Thread(target=_forward, args=arguments, daemon=True).start()


def _read_ports(text: str) -> tuple[int, int]:
    """Return the port of the job and the local one."""
    match = _PORTS.fullmatch(text)
    port, local = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= port <= 65535 or local > 65535:
        raise UsageError(f"{text}: not PORT[:LOCAL]", hint="for example 6006, or 6006:8080")
    return port, local


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on the loopback address."""
    try:
        return socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise UsageError(
            f"cannot listen on {LOOPBACK}:{port}: {error.strerror}", hint="PORT:LOCAL takes another; 0 any free one"
        ) from None


def _forward(
    channel: socket.socket, connection: ServiceConnection, job: str, target: dict[str, int], pace: Pace
) -> None:
    """Carry one connection, and say why if it breaks."""
    with channel, contextlib.closing(connection.another()) as own:
        try:
            path = f"/api/v1/streams/{own.post(job_path(job, 'streams'), target)['stream']}"
            error = carry(channel, connection, path, pace)
            if isinstance(error, HeadwayError):
                raise error
            at_once = "" if error is None else "?at_once=true"
            while not own.delete(path + at_once)["closed"]:
                pace()
        except HeadwayError as error:
            print(f"error: {error.message}", file=sys.stderr, flush=True)
