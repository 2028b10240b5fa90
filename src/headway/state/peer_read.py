"""Read checkpoint files of another machine over TCP.

A SnapshotServer (agent/nodes) serves those in a node's memory, a RunFolderServer (agent/remote) those on disk. A
request is a line of JSON, the answer a line of JSON and the bytes. Several threads of a worker may read at once, each
over its own connection.
"""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.errors import DamagedState
from headway.state.handshake import HandshakeFailed, connect
from headway.state.signed_stream import SignedStream
from headway.state.source import CheckpointSource

HINT = "the machine that has it is down, or resumed the run without this one"


@dataclass(frozen=True)
class PeerFile:
    """A file of the state of one step, and the address of the peer that has it."""

    host: str
    port: int
    name: str
    step: int
    size: int


@dataclass
class PeerReader:
    """A pool of connections to peers; `key` is the run's."""

    key: str
    _free: dict[tuple[str, int], list[SignedStream]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, file: PeerFile, begin: int, out: memoryview) -> None:
        """Fill `out` with a file's bytes from `begin` on; raise DamagedState if that fails."""
        address, end = (file.host, file.port), None
        try:
            end = self._take(address)
            answer = peer_request(end, "read", name=file.name, step=file.step, begin=begin, size=len(out))
            if "error" in answer:
                raise OSError(answer["error"])
            end.fill(out)
        except (OSError, HandshakeFailed, ValueError) as error:
            if end is not None:
                end.close()
            raise DamagedState(f"{file.name} cannot be read from {file.host}: {error}", hint=HINT) from None
        with self._lock:
            self._free.setdefault(address, []).append(end)

    def _take(self, address: tuple[str, int]) -> SignedStream:
        with self._lock:
            free = self._free.get(address)
            if free:
                return free.pop()
        return connect(address, self.key)

    def close(self) -> None:
        """Close all connections."""
        for ends in self._free.values():
            for end in ends:
                end.close()


class PeerCheckpoint(CheckpointSource):
    """A checkpoint on the disk of another machine; unlike one in memory, it has checksums."""

    def __init__(self, location: str, manifest: bytes, files: Sequence[PeerFile], reader: PeerReader) -> None:
        self.location, self._manifest, self._reader = location, manifest, reader
        self._files = {file.name: file for file in files}

    def manifest(self) -> bytes:
        """See CheckpointSource."""
        return self._manifest

    def size(self, file: str) -> int:
        """See CheckpointSource."""
        if file not in self._files:
            raise DamagedState(f"{self.name(file)} does not exist", hint=HINT)
        return self._files[file].size

    def read(self, file: str, begin: int, out: memoryview) -> None:
        """See CheckpointSource."""
        self._reader.read(self._files[file], begin, out)


def peer_request(end: SignedStream, kind: str, **fields: Any) -> dict[str, Any]:
    """Send a request to a server of files and return its answer."""
    end.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")
    answer: dict[str, Any] = json.loads(end.readline())
    return answer
