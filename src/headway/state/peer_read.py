"""Files that lie on another machine, read over the network: the same bytes as if they lay here.

A Shelf (agent/nodes/snapshot_server.py) serves those in a node's memory, a Desk (agent/remote/folder_server.py) those of a checkpoint on disk. A
request is a line of JSON, the answer a line and so many bytes. Several threads of a worker read at once, each over a
connection of its own.
"""

import json
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.errors import DamagedState
from headway.state.handshake import HandshakeFailed, connect
from headway.state.source import CheckpointSource

__all__ = ["PeerCheckpoint", "PeerFile", "PeerReader", "fill", "peer_request", "read_line"]

HINT = "the machine that had it is gone, or has gone on without us"
ANSWER_BYTES = 1 << 16


@dataclass(frozen=True)
class PeerFile:
    """Where a file lies: at whose, and which state's."""

    host: str
    port: int
    name: str
    step: int
    size: int


@dataclass
class PeerReader:
    """Connections to nodes that have files; `key` is the run's."""

    key: str
    _free: dict[tuple[str, int], list[socket.socket]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, file: PeerFile, begin: int, out: memoryview) -> None:
        """Fill `out` with a file's bytes from `begin` on; DamagedState where they cannot be had."""
        address, end = (file.host, file.port), None
        try:
            end = self._take(address)
            answer = peer_request(end, "read", name=file.name, step=file.step, begin=begin, size=len(out))
            if "error" in answer:
                raise OSError(answer["error"])
            fill(end, out)
        except (OSError, HandshakeFailed, ValueError) as error:
            if end is not None:
                end.close()
            raise DamagedState(f"{file.name} cannot be read from {file.host}: {error}", hint=HINT) from None
        with self._lock:
            self._free.setdefault(address, []).append(end)

    def _take(self, address: tuple[str, int]) -> socket.socket:
        with self._lock:
            free = self._free.get(address)
            if free:
                return free.pop()
        return connect(address, self.key)

    def close(self) -> None:
        """Hang up."""
        for ends in self._free.values():
            for end in ends:
                end.close()


class PeerCheckpoint(CheckpointSource):
    """A checkpoint on the disk of another machine; unlike what is in memory, its bytes have checksums."""

    def __init__(self, place: str, manifest: bytes, files: Sequence[PeerFile], far: PeerReader) -> None:
        self.location, self._manifest, self._far = place, manifest, far
        self._files = {file.name: file for file in files}

    def manifest(self) -> bytes:
        """See Source."""
        return self._manifest

    def size(self, file: str) -> int:
        """See Source."""
        if file not in self._files:
            raise DamagedState(f"{self.name(file)} is not there", hint=HINT)
        return self._files[file].size

    def read(self, file: str, begin: int, out: memoryview) -> None:
        """See Source."""
        self._far.read(self._files[file], begin, out)


def peer_request(end: socket.socket, kind: str, **fields: Any) -> dict[str, Any]:
    """Ask a Shelf something; what it answers."""
    end.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")
    answer: dict[str, Any] = json.loads(read_line(end))
    return answer


def read_line(end: socket.socket) -> bytes:
    """Up to the next end of a line; what follows it is left for others to read."""
    found = b""
    while not found.endswith(b"\n"):
        seen = end.recv(ANSWER_BYTES, socket.MSG_PEEK)
        if not seen:
            raise ConnectionError("the other end has hung up")
        found += end.recv(seen.find(b"\n") + 1 or len(seen))
    return found


def fill(end: socket.socket, out: memoryview) -> None:
    """Take as many bytes as there is room for."""
    while out:
        count = end.recv_into(out)
        if not count:
            raise ConnectionError("the other end has hung up")
        out = out[count:]
