"""The agent of one node: reports what runs here, obeys, and does it again; the process behind `ClusterNode`.

Started as NAME FOLDER URL TOKEN_FILE PARENT [FINGERPRINT]. It ends when its parent does, even one that was gone before
it began, and jobs go on: the next one finds them.
"""

import fcntl
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from pydantic_core import to_jsonable_python

from headway.cluster.service.connection import ServiceConnection
from headway.cluster.service.faults import write_points
from headway.cluster.service.host_starts import HostStarts
from headway.cluster.service.isolation import Isolation
from headway.cluster.service.messages import ORDERS, PROTOCOL
from headway.cluster.service.node import ClusterNode
from headway.cluster.service.node_certificate import NodeCertificate
from headway.cluster.service.node_health import CHECK_S, look, problems
from headway.cluster.service.node_streams import NodeStreams
from headway.errors import EngineUnreachable, HeadwayError, UnknownNode

BUSY_S, IDLE_S = 0.1, 2.0
"""How long orders may take to come while jobs run here, whose exits must be reported, and while none do."""
RETRY_S = 0.2


def main() -> int:
    """Serve until the parent process is gone."""
    name, place, url, token_file, parent_pid, *fingerprint = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which then ends this process
    token, parent = Path(token_file).read_text().strip(), int(parent_pid)
    connection = ServiceConnection(url, token, keep=True, fingerprint=next(iter(fingerprint), None))
    try:
        return run_agent(name, Path(place), connection, lambda: os.getppid() == parent)
    except UnknownNode as error:
        print(f"node {name}: {error.message}", file=sys.stderr, flush=True)
        return error.exit_status


def run_agent(
    name: str,
    folder: Path,
    connection: ServiceConnection,
    go_on: Callable[[], bool],
    spec: Mapping[str, Any] | None = None,
    isolation: Isolation | None = None,
    certificate: NodeCertificate | None = None,
) -> int:
    """Report and obey for as long as `go_on` says so; then jobs go on, and the next agent of the folder finds them.

    `spec` is what the node has, which is then looked after; without `isolation` jobs run as this process's user; a
    `certificate` is renewed before it ends. UnknownNode if the node was removed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if isolation is not None and isolation.users:
        folder.chmod(0o711)  # other users get through it to their scratch folders
    with (folder / "lock").open("w") as lock:
        while not _locked(lock):  # the agent before this one may be about to end
            if not go_on():
                return 0
            time.sleep(RETRY_S)
        starts = HostStarts(
            folder, write_points(), isolation, lambda digest: connection.get_bytes(f"/api/v1/code/{digest}")
        )
        agent, streams = ClusterNode(name, starts), NodeStreams(folder / "starts", starts.logs, connection)
        version: int | None = None
        sent: object = None
        printed, checked = "", -math.inf
        while go_on():
            sent_at = time.monotonic()
            if spec is not None and sent_at > checked + CHECK_S:
                agent.problems, checked = problems(spec, look(spec, folder)), sent_at
            report = to_jsonable_python(agent.report())
            wait_s = 0.0 if report != sent else BUSY_S if starts.busy else IDLE_S
            try:
                if certificate is not None and certificate.keep_valid(connection):
                    print(f"node {name}: its certificate is renewed", file=sys.stderr, flush=True)
                fields = {"report": report, "protocol": PROTOCOL}
                answer = connection.post("/api/v1/sync", fields | {"version": version, "wait_s": wait_s})
            except UnknownNode:
                raise
            except HeadwayError as error:
                if error.message != printed:  # once, however long it lasts
                    print(f"node {name}: {error.message}", file=sys.stderr, flush=True)
                printed, version = error.message, None
                time.sleep(RETRY_S if isinstance(error, EngineUnreachable) else 10 * RETRY_S)
                continue
            printed = ""
            version, sent = answer["version"], report
            orders = ORDERS.validate_python(answer["orders"])
            if not agent.obey(orders, time.monotonic() - sent_at):
                print(
                    f"node {name}: refused orders of an older service, or another cluster", file=sys.stderr, flush=True
                )
                return 1
            streams.begin(orders.streams)
    return 0


def _locked(lock: TextIO) -> bool:
    """Whether this process has become the only agent of the folder."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
