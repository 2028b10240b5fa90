"""Becoming the leader of a run's nodes: a listener that they call, a key, and the leader lease."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headway.agent.attempt import Attempt
from headway.agent.fd_store import FdStore
from headway.agent.nodes.lease import LeaderLease, newest_lease
from headway.agent.nodes.membership import Membership
from headway.agent.nodes.node_group import NodeGroup
from headway.agent.remote.folder_server import RunFolderServer
from headway.agent.saving.restore_points import need_store
from headway.agent.workers.env import worker_variables
from headway.errors import RunError
from headway.state import fence
from headway.state.handshake import HandshakeFailed, connect, key_from_env, new_key
from headway.track import RunFolder, read_recipe
from headway.track.suspects import read_suspects

if TYPE_CHECKING:
    from headway.agent.nodes.store_lease import StoreLease

EXIT_S = 10.0
ANSWER_S = 5.0


@contextlib.contextmanager
def lead_nodes(attempt: Attempt, fd_store: FdStore) -> Iterator[NodeGroup]:
    """Lead the nodes of a run. Emulated nodes are started here; others call by themselves, as do all nodes of a run
    whose leader this agent succeeds."""
    run, door, stored_lease = attempt.folder, fd_store.get("door"), fd_store.get("lease")
    if door is None:
        listener = _listen(attempt.host or "127.0.0.1", attempt.port)
        _write_key(run)
        fd_store.put("door", [listener.fileno()])
    else:
        listener = socket.socket(fileno=door.descriptors[0])
    lease = LeaderLease(run.leases, attempt.lead, *listener.getsockname()[:2])
    succeeds = ""
    if attempt.apart:
        lease.store_lease = acquire_store_lease(attempt, fd_store, lease.lead, lease.host, lease.port)
    if stored_lease is None:
        lease.begin()
        fence(run.checkpoints)
    else:
        lease.number, succeeds = stored_lease.fields["number"], stored_lease.fields.get("after", "")
        lease.lead = stored_lease.fields.get("lead", lease.lead)
    key, silent_s = run.key_file.read_text().strip(), read_recipe(run).train.silent_node_s
    folder_server = RunFolderServer(run)
    nodes = Membership(key, listener, worker_variables(attempt), lease, fd_store, folder_server, silent_s)
    nodes.suspects = {} if attempt.host is None else read_suspects(run.path, time.time())
    group = NodeGroup(nodes, fd_store, folder_server, succeeds)
    fd_store.put("lease", number=lease.number, lead=lease.lead)
    if door is None and attempt.host is None:
        names = [f"n{number}" for number in range(attempt.nodes + attempt.spares)]
        group.processes = _start_nodes(run, names, -(-attempt.workers // attempt.nodes))
    try:
        yield group
    finally:
        group.close()
        if lease.store_lease is not None:
            lease.store_lease.close()
        fd_store.drop("door")
        for node in group.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(0 if nodes.abdicated else EXIT_S)
            if node.poll() is None:
                node.kill()
                node.wait()


def leader_answers(run: RunFolder) -> bool:
    """Whether the leader of this run answers at the address in its newest lease."""
    lease = newest_lease(run.leases)
    if lease is None or not lease.port:
        return False
    try:
        connect((lease.host, lease.port), run.key_file.read_text().strip(), ANSWER_S, ANSWER_S).close()
    except (OSError, HandshakeFailed, ValueError):
        return False
    return True


def acquire_store_lease(attempt: Attempt, fd_store: FdStore, lead: str, host: str = "", port: int = 0) -> "StoreLease":
    """The lease in the object store: that of the agent before this one under the same launcher, or the next. Without
    host and port no node joins: the run is on one machine."""
    from headway.agent.nodes.store_lease import StoreLease  # only runs that name a store need its library

    run, before = attempt.folder, fd_store.get("witness")
    url = need_store(read_recipe(run), run.name)
    lease = StoreLease(run, url, before.fields["number"] if before else 0)
    if before is None:
        lease.begin(lead, host, port)
    fd_store.put("witness", number=lease.number)
    return lease


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=64)
    except OSError as error:
        raise RunError(f"cannot listen on {host}:{port}: {error.strerror}", hint="another --port, or --host") from None


def _write_key(run: RunFolder) -> None:
    """Write the key from the environment, which machines without the run folder have too; else a new one."""
    key = key_from_env() or new_key()
    with contextlib.suppress(FileNotFoundError):
        run.key_file.unlink()
    descriptor = os.open(run.key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(descriptor, key.encode())
    os.close(descriptor)


def _start_nodes(run: RunFolder, names: Sequence[str], slots: int) -> list["subprocess.Popen[bytes]"]:
    """Start emulated nodes, each an agent in a process group of its own."""
    run.logs.mkdir(exist_ok=True)
    started = []
    for name in names:
        command = [sys.executable, "-m", "headway.agent.nodes.node_agent", "--run", str(run.path)]
        with (run.logs / f"{name}.log").open("ab") as log:
            started.append(
                subprocess.Popen(
                    [*command, "--name", name, "--slots", str(slots)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )
            )  # fmt: skip
    return started
