"""Serves the snapshots in a node's memory to the other nodes and the leader.

A node's memory holds the files that its own workers have saved, and copies of another node's. Clients prove that they
know the run's key, and get a thread each. Requests:

    read      bytes of a file
    write     a file into a checkpoint that is being written; returns its manifest entry
    describe  the manifest entry of a file that the client writes itself
    copy      a file of another node into this node's memory
    trim      drop older copies
    stacks    what this node's workers are doing
    port      a free port
    lead      whether this node has heard from the leader recently

Files are identified by name and step. Marks before and after a read show whether a file was overwritten meanwhile.
"""

import contextlib
import itertools
import json
import mmap
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.agent.saving.restore_points import newest_on_disk
from headway.agent.supervise.stack_dumps import collect
from headway.errors import HeadwayError, StateError
from headway.state import SaveBuffer, ShardEntry, describe_shard, open_checkpoint, shard_name, write_shard
from headway.state.handshake import MOST_PENDING, HandshakeFailed, PendingHandshakes, server_handshake
from headway.state.peer_read import PeerFile, PeerReader
from headway.state.save_buffer import FilePlan
from headway.state.signed_stream import SignedStream

CHUNK_BYTES = 4 << 20
PACE_BYTES_S = 2e9
"""Copies use no more network bandwidth than this: training needs it too."""
WRITING_THREADS = 2
HEARS_S = 3.0
MOST_TEXT = 1 << 20


@dataclass(frozen=True)
class _Copy:
    """A file of another node."""

    descriptor: int
    memory: mmap.mmap


class SnapshotServer:
    """Serves one node's memory on a port of its own."""

    def __init__(self, host: str, key: str, checkpoints: Path, stacks: Path | None = None) -> None:
        """`stacks` is where local workers write stack dumps, if not the folder named in a request."""
        self._key, self._checkpoints, self._own_stacks, self._lock = key, checkpoints, stacks, threading.Lock()
        self.buffers: dict[int, list[SaveBuffer]] = {}
        """Of each rank that has run here."""
        self.pids: Mapping[int, int] = {}
        """Live workers here, by rank."""
        self.leader_heard_at = 0.0
        """When the leader was last heard; 0 while the connection to it is lost."""
        self._copies: dict[tuple[str, int], _Copy] = {}
        """By name and step."""
        self._server = _Server((host, 0), self)
        self.host, self.port = host, int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="snapshot-server", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def drop(self) -> None:
        """Free the memory of this node's own files; copies of others stay until newer ones arrive."""
        with self._lock:
            buffers, self.buffers = self.buffers, {}
        for buffer in itertools.chain.from_iterable(buffers.values()):
            buffer.close()

    def find(self, name: str, step: int) -> tuple[int, int, memoryview] | None:
        """A file of a step's state that is here: the descriptor of its memory, its offset there, its bytes."""
        with self._lock:
            copy = self._copies.get((name, step))
            if copy is not None:
                return copy.descriptor, 0, memoryview(copy.memory)
        own = self._find_own(name, step)
        if own is None:
            return None
        buffer, part = own
        return buffer.descriptor, part.begin, buffer.file(part)[: part.layout.bytes]

    def steps(self) -> dict[str, list[int]]:
        """Which files are here, and of which steps."""
        steps = dict[str, list[int]]()
        for name, buffer, _ in self._own_files():
            if buffer.step is not None:
                steps.setdefault(name, []).append(buffer.step)
        for name, step in list(self._copies):
            steps.setdefault(name, []).append(step)
        return steps

    def answer(self, connection: SignedStream, request: Mapping[str, Any]) -> None:
        """Serve one request."""
        methods: dict[str, Callable[..., dict[str, Any]]] = {
            "write": self._write, "copy": self._copy, "trim": self._trim, "stacks": self._stacks, "port": self._port,
            "lead": self._lead, "describe": self._describe,
        }  # fmt: skip
        fields = {key: value for key, value in request.items() if key != "kind"}
        try:
            if request["kind"] == "read":
                return self._read(connection, **fields)
            answer = methods[request["kind"]](**fields)
        except (HeadwayError, OSError, KeyError, TypeError) as error:
            answer = {"error": getattr(error, "message", None) or str(error) or type(error).__name__}
        return _send(connection, answer)

    def _own_files(self) -> Iterator[tuple[str, SaveBuffer, FilePlan]]:
        for rank, buffers in list(self.buffers.items()):
            for buffer in buffers:
                for part in buffer.plan.parts:
                    yield shard_name(rank, part.frozen), buffer, part

    def _find_own(self, name: str, step: int) -> tuple[SaveBuffer, FilePlan] | None:
        files = ((buffer, part) for own, buffer, part in self._own_files() if own == name and buffer.holds(step))
        return next(files, None)

    def _read(self, connection: SignedStream, name: str, step: int, begin: int, size: int) -> None:
        file = self.find(name, step)
        if file is None or begin < 0 or begin + size > len(file[2]):
            return _send(connection, {"error": f"{name} of step {step} is not here"})
        _send(connection, {"size": size})
        return connection.sendall(file[2][begin : begin + size])

    def _write(self, name: str, step: int, folder: str) -> dict[str, Any]:
        partial = Path(folder)
        if partial.parent != self._checkpoints:
            raise StateError(f"{partial} is not in this run's checkpoints folder")

        def write(buffer: SaveBuffer, part: FilePlan) -> ShardEntry:
            before = None
            if part.frozen:  # a frozen file may be hard-linked
                newest, _ = newest_on_disk(self._checkpoints)
                before = None if newest is None else open_checkpoint(Path(newest.address))
            memory, pieces = buffer.file(part), buffer.pieces(part)
            return write_shard(partial, name, pieces, memory=memory, before=before, threads=WRITING_THREADS)

        return self._shard_of(name, step, write)

    def _describe(self, name: str, step: int) -> dict[str, Any]:
        return self._shard_of(
            name, step, lambda buffer, part: describe_shard(name, buffer.pieces(part), WRITING_THREADS)
        )

    def _shard_of(self, name: str, step: int, make: Callable[[SaveBuffer, FilePlan], ShardEntry]) -> dict[str, Any]:
        """The manifest entry of a file; raise StateError if it is not in memory, or overwritten meanwhile."""
        own = self._find_own(name, step)
        if own is None:
            raise StateError(f"{name} of step {step} is no longer in this node's memory")
        shard = make(*own)
        if not own[0].holds(step):
            raise StateError(f"{name} of step {step} was overwritten meanwhile")
        return {"shard": shard.model_dump(mode="json")}

    def _copy(self, name: str, step: int, size: int, host: str, port: int) -> dict[str, Any]:
        """Copy another node's file into memory in chunks, no faster than PACE_BYTES_S."""
        started = time.monotonic()
        file = PeerFile(host, port, name, step, size)
        descriptor = os.memfd_create("headway-copy", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        with contextlib.closing(PeerReader(self._key)) as peer:
            for begin in range(0, size, CHUNK_BYTES):
                peer.read(file, begin, memoryview(memory)[begin : begin + CHUNK_BYTES])
                time.sleep(max(0.0, (begin + CHUNK_BYTES) / PACE_BYTES_S - (time.monotonic() - started)))
            peer.read(file, 0, memoryview(bytearray(1)))  # raises if it was overwritten meanwhile
        with self._lock:
            self._copies[name, step] = _Copy(descriptor, memory)
        return {"bytes": size}

    def _trim(self, step: int) -> dict[str, Any]:
        """Drop copies older than this step."""
        with self._lock:
            old = {key: copy for key, copy in self._copies.items() if key[1] < step}
            self._copies = {key: copy for key, copy in self._copies.items() if key not in old}
        for copy in old.values():
            os.close(copy.descriptor)
        return {"copies": len(old)}

    def _port(self) -> dict[str, Any]:
        """A free port of this node, for the workers' rendezvous."""
        with socket.socket() as free:
            free.bind((self.host, 0))
            return {"port": int(free.getsockname()[1])}

    def _lead(self) -> dict[str, Any]:
        return {"hears": time.monotonic() - self.leader_heard_at < HEARS_S}

    def _stacks(self, folder: str, attempt: int, native: bool) -> dict[str, Any]:
        dump = collect(self.pids, self._own_stacks or Path(folder), attempt, native=native)
        text = {} if self._own_stacks is None or dump.path is None else {"text": dump.path.read_text()[:MOST_TEXT]}
        return {"path": str(dump.path or ""), "seen": [asdict(stack) for stack in dump.workers], **text}


def _send(connection: SignedStream, answer: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 2 * MOST_PENDING  # with the default of 5, callers that come at once wait for seconds

    def __init__(self, address: tuple[str, int], snapshots: SnapshotServer) -> None:
        self.snapshots, self.pending = snapshots, PendingHandshakes()
        super().__init__(address, _Connection)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether a connection may start its handshake."""
        return self.pending.admit(request, client_address[0])

    def handle_error(self, *_: object) -> None:
        """Ignore clients that disconnect."""


class _Connection(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        snapshots = self.server.snapshots
        with contextlib.suppress(HandshakeFailed, OSError, ValueError):
            try:
                stream = server_handshake(self.request, snapshots._key)
            finally:
                self.server.pending.finish(self.client_address[0])
            while True:
                snapshots.answer(stream, json.loads(stream.readline()))
