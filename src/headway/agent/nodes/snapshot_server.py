"""What a node has in its memory, for the others: files of states that they read, and that it writes where it is told.

One node's memory holds the files that its own workers have saved, and copies of another node's. Whoever has the run's
key may ask, over a connection of its own; each is a thread here:

    read     bytes of a file
    write    a file into a checkpoint that is being written; the answer is what its manifest will say of it
    describe what a manifest would say of a file, which whoever asks writes elsewhere
    copy     a file of another node into this one's memory
    trim     give up copies that are older
    stacks   what this node's workers are doing
    port     a free one
    lead     whether this node hears the agent that leads

Files are known by name and step. One that is written over while it is read is noticed by its marks, before and after.
"""

import contextlib
import json
import mmap
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.agent.saving.restore_points import newest_on_disk
from headway.agent.supervise.stack_dumps import collect
from headway.errors import HeadwayError, StateError
from headway.state import SaveBuffer, describe_shard, open_checkpoint, shard_name, write_shard
from headway.state.handshake import HandshakeFailed, server_handshake
from headway.state.peer_read import PeerFile, PeerReader, read_line

__all__ = ["SnapshotServer"]

CHUNK_BYTES = 4 << 20
PACE_BYTES_S = 2e9
"""Copies take no more of the network than this: the steps need it too."""
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
        """`stacks` is where workers here leave what they do, if not where whoever asks says."""
        self._key, self._checkpoints, self._own_stacks, self._lock = key, checkpoints, stacks, threading.Lock()
        self.buffers: dict[int, list[SaveBuffer]] = {}
        """Of each rank that has worked here."""
        self.pids: Mapping[int, int] = {}
        """Workers that live here, by rank."""
        self.heard = 0.0
        """When the agent that leads was last heard; 0 while the line to it is cut."""
        self._copies: dict[tuple[str, int], _Copy] = {}
        """By name and step."""
        self._server = _Server((host, 0), self)
        self.host, self.port = host, int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="shelf", daemon=True).start()

    def close(self) -> None:
        """Serve no longer."""
        self._server.shutdown()
        self._server.server_close()

    def drop(self) -> None:
        """Give the memory of this node's own files back; copies of others' stay until newer ones come."""
        with self._lock:
            buffers, self.buffers = self.buffers, {}
        for buffer in (one for some in buffers.values() for one in some):
            buffer.close()

    def find(self, name: str, step: int) -> tuple[int, int, memoryview] | None:
        """A file of a step's state that lies here: the descriptor of its memory, where it begins, its bytes."""
        with self._lock:
            copy = self._copies.get((name, step))
            if copy is not None:
                return copy.descriptor, 0, memoryview(copy.memory)
        found = self._own(name, step)
        if found is None:
            return None
        buffer, part = found
        return buffer.descriptor, part.begin, buffer.file(part)[: part.image.bytes]

    def steps(self) -> dict[str, list[int]]:
        """Which files lie here, of which steps."""
        found = dict[str, list[int]]()
        for rank, buffers in list(self.buffers.items()):
            for buffer in buffers:
                if buffer.step is not None:
                    for part in buffer.plan.parts:
                        found.setdefault(shard_name(rank, part.still), []).append(buffer.step)
        for name, step in list(self._copies):
            found.setdefault(name, []).append(step)
        return found

    def answer(self, end: socket.socket, asked: Mapping[str, Any]) -> None:
        """Do what was asked, and say so."""
        deeds: dict[str, Callable[..., dict[str, Any]]] = {
            "write": self._write, "copy": self._copy, "trim": self._trim, "stacks": self._stacks, "port": self._port,
            "lead": self._lead, "describe": self._describe,
        }  # fmt: skip
        fields = {key: value for key, value in asked.items() if key != "kind"}
        try:
            if asked["kind"] == "read":
                return self._read(end, **fields)
            told = deeds[asked["kind"]](**fields)
        except (HeadwayError, OSError, KeyError, TypeError) as error:
            told = {"error": getattr(error, "message", None) or str(error) or type(error).__name__}
        end.sendall(json.dumps(told).encode() + b"\n")
        return None

    def _own(self, name: str, step: int) -> tuple[SaveBuffer, Any] | None:
        for rank, buffers in list(self.buffers.items()):
            for buffer in buffers:
                for part in buffer.plan.parts:
                    if shard_name(rank, part.still) == name and buffer.holds(step):
                        return buffer, part
        return None

    def _read(self, end: socket.socket, name: str, step: int, begin: int, size: int) -> None:
        found = self.find(name, step)
        if found is None or begin < 0 or begin + size > len(found[2]):
            end.sendall(json.dumps({"error": f"{name} of step {step} is not here"}).encode() + b"\n")
            return
        end.sendall(json.dumps({"size": size}).encode() + b"\n")
        end.sendall(found[2][begin : begin + size])

    def _write(self, name: str, step: int, folder: str) -> dict[str, Any]:
        partial = Path(folder)
        if partial.parent != self._checkpoints:
            raise StateError(f"{partial} is no part of this run's checkpoints")
        found = self._own(name, step)
        if found is None:
            raise StateError(f"{name} of step {step} is not in this node's memory any more")
        buffer, part = found
        before = None
        if part.still:  # a file that never changes may get a second name
            newest, _ = newest_on_disk(self._checkpoints)
            before = None if newest is None else open_checkpoint(Path(newest.address))
        memory = buffer.file(part)
        shard = write_shard(partial, name, buffer.pieces(part), memory=memory, before=before, threads=WRITING_THREADS)
        if not buffer.holds(step):
            raise StateError(f"{name} of step {step} was written over meanwhile")
        return {"shard": shard.model_dump(mode="json")}

    def _describe(self, name: str, step: int) -> dict[str, Any]:
        found = self._own(name, step)
        if found is None:
            raise StateError(f"{name} of step {step} is not in this node's memory any more")
        buffer, part = found
        shard = describe_shard(name, buffer.pieces(part), WRITING_THREADS)
        if not buffer.holds(step):
            raise StateError(f"{name} of step {step} was written over meanwhile")
        return {"shard": shard.model_dump(mode="json")}

    def _copy(self, name: str, step: int, size: int, host: str, port: int) -> dict[str, Any]:
        """Another node's file into memory here, a piece at a time and no faster than PACE_BYTES_S."""
        began = time.monotonic()
        file = PeerFile(host, port, name, step, size)
        descriptor = os.memfd_create("headway-copy", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        with contextlib.closing(PeerReader(self._key)) as far:
            for begin in range(0, size, CHUNK_BYTES):
                far.read(file, begin, memoryview(memory)[begin : begin + CHUNK_BYTES])
                time.sleep(max(0.0, (begin + CHUNK_BYTES) / PACE_BYTES_S - (time.monotonic() - began)))
            far.read(file, 0, memoryview(bytearray(1)))  # it is still there: nothing was written over meanwhile
        with self._lock:
            self._copies[name, step] = _Copy(descriptor, memory)
        return {"bytes": size}

    def _trim(self, step: int) -> dict[str, Any]:
        """Only copies of this step, or of later ones, are needed."""
        with self._lock:
            old = {key: copy for key, copy in self._copies.items() if key[1] < step}
            self._copies = {key: copy for key, copy in self._copies.items() if key not in old}
        for copy in old.values():
            os.close(copy.descriptor)
        return {"copies": len(old)}

    def _port(self) -> dict[str, Any]:
        """One of this node's that nobody uses, for workers to meet at."""
        with socket.socket() as free:
            free.bind((self.host, 0))
            return {"port": int(free.getsockname()[1])}

    def _lead(self) -> dict[str, Any]:
        """Whether this node hears the agent that leads."""
        return {"hears": time.monotonic() - self.heard < HEARS_S}

    def _stacks(self, folder: str, attempt: int, native: bool) -> dict[str, Any]:
        found = collect(self.pids, self._own_stacks or Path(folder), attempt, native=native)
        text = {} if self._own_stacks is None or found.path is None else {"text": found.path.read_text()[:MOST_TEXT]}
        return {"path": str(found.path or ""), "seen": [asdict(one) for one in found.seen], **text}


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], shelf: SnapshotServer) -> None:
        self.shelf = shelf
        super().__init__(address, _Asker)

    def handle_error(self, *_: object) -> None:
        """Whoever hangs up has its reasons."""


class _Asker(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        shelf = self.server.shelf
        with contextlib.suppress(HandshakeFailed, OSError, ValueError):
            server_handshake(self.request, shelf._key)
            while True:
                asked = json.loads(read_line(self.request))
                shelf.answer(self.request, asked)
