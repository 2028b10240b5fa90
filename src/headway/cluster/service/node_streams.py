"""The streams of a node: to ports of its jobs, and from their logs.

Ports are those of the loopback address, and of them only what the job listens on; logs are those of jobs that ran here.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import psutil

from headway.cluster.service.connection import ServiceConnection
from headway.cluster.service.messages import WantedStream, start_folder
from headway.cluster.service.node_logs import NodeLogs
from headway.cluster.service.stream_carrier import carry, send
from headway.errors import EngineError, HeadwayError

LOOPBACK = "127.0.0.1"
CONNECT_S = 10.0
POLL_S = 0.5
"""Between looks at a log that may grow."""
_LISTENS_THERE = {LOOPBACK, "0.0.0.0", "::", "::ffff:127.0.0.1"}
"""Addresses of listeners that a connection to the loopback address may reach."""


class NodeStreams:
    """The streams of a node, a thread each; `starts` is the folder of its starts."""

    def __init__(self, starts: Path, logs: NodeLogs, connection: ServiceConnection) -> None:
        self._starts, self._logs, self._connection = starts, logs, connection
        self._begun: frozenset[str] = frozenset()
        """Those of the newest orders: an older order may repeat them."""

    def begin(self, wanted: Sequence[WantedStream]) -> None:
        """Carry the streams of orders that are new."""
        for stream in wanted:
            if stream.id not in self._begun:
                threading.Thread(target=self._run, args=(stream,), daemon=True).start()
        self._begun = frozenset(stream.id for stream in wanted)

    def _run(self, stream: WantedStream) -> None:
        path = f"/api/v1/node-streams/{stream.id}"
        error: OSError | HeadwayError | None = None
        try:
            if stream.port:
                error = carry(self._connect(stream), self._connection, path)
            else:
                self._send_log(stream, path)
        except (OSError, HeadwayError) as refusal:
            error = refusal
        if error is None:
            return
        what = f"port {stream.port}" if stream.port else "its log"
        reason = error.message if isinstance(error, HeadwayError) else f"{what}: {error.strerror or error}"
        with contextlib.suppress(HeadwayError), closing(self._connection.another()) as connection:
            connection.post(f"{path}/failure", {"reason": reason[:400]})

    def _send_log(self, stream: WantedStream, path: str) -> None:
        own = self._starts / start_folder(stream.start)

        def runs() -> bool:
            return stream.follow and (own / "start.json").exists() and not (own / "exit").exists()

        with closing(self._connection.another()) as connection:
            send(self._logs.parts(stream.start, runs, POLL_S), connection, path, lambda: True, lambda: None)

    def _connect(self, stream: WantedStream) -> socket.socket:
        if not listens(self._starts, stream.start, stream.port):
            job = stream.start.partition(":")[0]
            raise EngineError(f"no process of job {job} listens on {LOOPBACK}:{stream.port}")
        channel = socket.create_connection((LOOPBACK, stream.port), CONNECT_S)
        channel.settimeout(None)
        return channel


def listens(starts: Path, start: str, port: int) -> bool:
    """Whether whatever listens on a port belongs to a start, by its key: other ports are not for the job's user."""
    try:
        session = int((starts / start_folder(start) / "pid").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return False
    owners = [
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr.port == port
        and connection.laddr.ip in _LISTENS_THERE
    ]
    return bool(owners) and all(pid is not None and _belongs(pid, session) for pid in owners)


def _belongs(pid: int, session: int) -> bool:
    """Whether a process is of a session, or descends from one that is."""
    try:
        process = psutil.Process(pid)
        return any(os.getsid(member.pid) == session for member in (process, *process.parents()))
    except (psutil.Error, ProcessLookupError):
        return False
