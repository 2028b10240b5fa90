"""The agent of one node: reports what runs here, obeys, and does it again; the process behind `ClusterNode`.

Started as NAME FOLDER URL TOKEN_FILE PARENT [FINGERPRINT]. It ends when its parent does, even one that was gone before
it began, and jobs go on: the next one finds them.
"""

import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from pydantic_core import to_jsonable_python

from headway.cluster.service.connection import ServiceConnection
from headway.cluster.service.faults import write_points
from headway.cluster.service.host_starts import HostStarts
from headway.cluster.service.messages import ORDERS
from headway.cluster.service.node import ClusterNode
from headway.errors import EngineError, HeadwayError

BUSY_S, IDLE_S = 0.1, 2.0
"""How long orders may take to come while jobs run here, whose exits must be reported, and while none do."""
RETRY_S = 0.2


def main() -> int:
    """Serve until the parent process is gone."""
    name, place, url, token_file, parent_pid, *fingerprint = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which then ends this process
    token, parent = Path(token_file).read_text().strip(), int(parent_pid)
    connection = ServiceConnection(url, token, keep=True, fingerprint=next(iter(fingerprint), None))
    return run_agent(name, Path(place), connection, lambda: os.getppid() == parent)


def run_agent(name: str, folder: Path, connection: ServiceConnection, go_on: Callable[[], bool]) -> int:
    """Report and obey for as long as `go_on` says so; then jobs go on, and the next agent of the folder finds them."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        while not _locked(lock):  # the agent before this one may be about to end
            if not go_on():
                return 0
            time.sleep(RETRY_S)
        starts = HostStarts(folder, write_points())
        agent = ClusterNode(name, starts)
        version: int | None = None
        sent: object = None
        while go_on():
            report = to_jsonable_python(agent.report())
            sent_at = time.monotonic()
            wait_s = 0.0 if report != sent else BUSY_S if starts.busy else IDLE_S
            try:
                answer = connection.post("/api/v1/sync", {"report": report, "version": version, "wait_s": wait_s})
            except EngineError:
                version = None
                time.sleep(RETRY_S)
                continue
            except HeadwayError as error:
                print(f"node {name}: {error.message}", file=sys.stderr, flush=True)
                time.sleep(10 * RETRY_S)
                continue
            version, sent = answer["version"], report
            if not agent.obey(ORDERS.validate_python(answer["orders"]), time.monotonic() - sent_at):
                print(
                    f"node {name}: refused orders of an older service, or another cluster", file=sys.stderr, flush=True
                )
                return 1
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
