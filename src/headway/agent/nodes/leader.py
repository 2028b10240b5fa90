"""How an agent comes to lead the nodes of a run: by a door that they call at, a key, and a lease that says so."""

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
from headway.agent.nodes.node_group import NodeGroup
from headway.agent.remote.folder_server import RunFolderServer
from headway.agent.saving.restore_points import need_store
from headway.agent.workers.env import worker_variables
from headway.errors import RunError
from headway.state import fence
from headway.state.handshake import HandshakeFailed, call, given_key, new_key
from headway.track import RunFolder, read_recipe
from headway.track.suspects import read_suspects

if TYPE_CHECKING:
    from headway.agent.nodes.store_lease import StoreLease

__all__ = ["acquire_store_lease", "lead_nodes", "leader_answers"]

LEAVE_S = 10.0
ANSWER_S = 5.0


@contextlib.contextmanager
def lead_nodes(attempt: Attempt, kept: FdStore) -> Iterator[NodeGroup]:
    """A team for a run. Its nodes are started here where all of them are this machine; else they call by themselves,
    and so they do where an agent led before this one."""
    run, door, lease = attempt.folder, kept.get("door"), kept.get("lease")
    if door is None:
        listener = _listen(attempt.host or "127.0.0.1", attempt.port)
        _write_key(run)
        kept.put("door", [listener.fileno()])
    else:
        listener = socket.socket(fileno=door.descriptors[0])
    right = LeaderLease(run.leases, attempt.lead, *listener.getsockname()[:2])
    after = ""
    if attempt.apart:
        right.witness = acquire_store_lease(attempt, kept, right.lead, right.host, right.port)
    if lease is None:
        right.begin()
        fence(run.checkpoints)
    else:
        right.number, after = lease.fields["number"], lease.fields.get("after", "")
        right.lead = lease.fields.get("lead", right.lead)
    key = run.key_file.read_text().strip()
    team = NodeGroup(
        key,
        listener,
        worker_variables(attempt),
        right,
        kept,
        RunFolderServer(run),
        read_recipe(run).train.silent_node_s,
    )
    team.after = after
    team.suspects = {} if attempt.host is None else read_suspects(run.path, time.time())
    kept.put("lease", number=right.number, lead=right.lead)
    if door is None and attempt.host is None:
        names = [f"n{number}" for number in range(attempt.nodes + attempt.spares)]
        team.processes = _start_nodes(run, names, -(-attempt.workers // attempt.nodes))
    try:
        yield team
    finally:
        team.close()
        if right.witness is not None:
            right.witness.close()
        kept.drop("door")
        for node in team.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(0 if team.abdicated else LEAVE_S)
            if node.poll() is None:
                node.kill()
                node.wait()


def leader_answers(run: RunFolder) -> bool:
    """Whether an agent that leads this run answers where its newest lease says."""
    lease = newest_lease(run.leases)
    if lease is None or not lease.port:
        return False
    try:
        call((lease.host, lease.port), run.key_file.read_text().strip(), ANSWER_S, ANSWER_S).close()
    except (OSError, HandshakeFailed, ValueError):
        return False
    return True


def acquire_store_lease(attempt: Attempt, kept: FdStore, lead: str, host: str = "", port: int = 0) -> "StoreLease":
    """The lease in the store: that of the agent before this one under the same keeper, or the next. Of a run on one
    machine nobody is to call."""
    from headway.agent.nodes.store_lease import StoreLease  # only runs that name a store need its library

    run, before = attempt.folder, kept.get("witness")
    url = need_store(read_recipe(run), run.name)
    witness = StoreLease(run, url, before.fields["number"] if before else 0)
    if before is None:
        witness.begin(lead, host, port)
    kept.put("witness", number=witness.number)
    return witness


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=64)
    except OSError as error:
        raise RunError(f"cannot listen on {host}:{port}: {error.strerror}", hint="another --port, or --host") from None


def _write_key(run: RunFolder) -> None:
    """That of the environment, which machines without the run's folder have too; else one for each time that somebody
    starts the run."""
    key = given_key() or new_key()
    with contextlib.suppress(FileNotFoundError):
        run.key_file.unlink()
    descriptor = os.open(run.key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(descriptor, key.encode())
    os.close(descriptor)


def _start_nodes(run: RunFolder, names: Sequence[str], slots: int) -> list["subprocess.Popen[bytes]"]:
    """Nodes that are this machine, each an agent in a process group of its own."""
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
