"""Whether a Ray cluster is alive, found out in seconds and without connecting to it, which Ray would try for minutes.

A cluster needs its GCS, which knows the nodes; the raylet of the head node, where the job controller runs; and a raylet
on this machine, which a driver connects to. The GCS outlives raylets and lists dead ones as alive for a while, so each
is asked itself.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil

Answer = Literal["yes", "refused", "silent"]
"""Whether a server answers: `refused` means that no process listens there, `silent` that one hangs, or a network."""
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""How a gRPC connection begins; a live server answers at once, even if it is with an error."""


@dataclass(frozen=True)
class RayletAddress:
    """A raylet that the GCS lists as alive."""

    host: str
    port: int
    head: bool
    here: bool
    """Whether it is on this machine."""


@dataclass(frozen=True)
class Liveness:
    """Whether a cluster is alive: all that is needed answers, something is dead for certain, or something hangs."""

    state: Literal["alive", "dead", "hung"]
    reason: str = ""
    loopback: bool = False
    """Whether the live raylet on this machine listens on loopback, where Ray looks only if it is told to."""


def cluster_liveness(address: str, timeout_s: float) -> Liveness:
    """Whether the cluster at HOST:PORT is alive, known within about `timeout_s`. ValueError for another address."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s

    def ask(host: str, port: int) -> Answer:
        return answers(host, port, max(0.1, deadline - time.monotonic()))

    return judge(ask, (host, int(port)), lambda: _raylets(address, max(0.1, deadline - time.monotonic())))


def judge(
    ask: Callable[[str, int], Answer], gcs: tuple[str, int], raylets: Callable[[], Sequence[RayletAddress] | None]
) -> Liveness:
    """Ask the GCS, the head's raylet, and those on this machine until one answers. `raylets` is what the GCS lists."""
    match ask(*gcs):
        case "refused":
            return Liveness("dead", "nothing listens there")
        case "silent":
            return Liveness("hung", "its GCS does not answer")
    listed, loopback = raylets(), False
    if listed is None:
        return Liveness("hung", "its GCS does not list its nodes")
    for role, candidates in (
        ("on its head node", [raylet for raylet in listed if raylet.head]),
        ("on this machine", [raylet for raylet in listed if raylet.here]),
    ):
        replies = set[Answer]()
        for raylet in candidates:
            replies.add(ask(raylet.host, raylet.port))
            if "yes" in replies:
                loopback = raylet.host.startswith("127.")  # the last role is that of this machine
                break
        if "yes" not in replies:
            state: Literal["dead", "hung"] = "hung" if "silent" in replies else "dead"
            return Liveness(state, f"its GCS answers, but no raylet {role} does")
    return Liveness("alive", loopback=loopback)


def answers(host: str, port: int, timeout_s: float) -> Answer:
    """Whether a gRPC server answers at a port."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            with contextlib.suppress(ConnectionError):  # one that hangs up is alive
                connection.sendall(_HTTP2_PREFACE)
                connection.recv(1)
            return "yes"
    except TimeoutError:
        return "silent"
    except OSError:
        return "refused"


def _raylets(address: str, timeout_s: float) -> list[RayletAddress] | None:
    """The raylets that the GCS lists as alive; None if it does not answer."""
    from ray._private.services import GcsClient
    from ray.core.generated.gcs_pb2 import GcsNodeInfo
    from ray.exceptions import RayError

    here = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    try:
        nodes = GcsClient(address=address).get_all_node_info(timeout=timeout_s).values()
    except (RayError, RuntimeError):
        return None
    return [
        RayletAddress(
            node.node_manager_address, node.node_manager_port, node.is_head_node, node.node_manager_address in here
        )
        for node in nodes
        if node.state == GcsNodeInfo.ALIVE
    ]
