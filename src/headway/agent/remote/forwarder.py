"""Forwards what workers write on a machine without the run folder to the leader, as it grows.

A thread with a connection of its own watches the growing files (bundle.py) and sends what is new in bounded pieces,
each from the file's end at the leader: after a broken connection it resumes there, and nothing arrives twice. `flush`
waits for what the leader must have before it acts on something: the record of a snapshot's steps, a worker's last log.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from headway.agent.remote.bundle import growing_files
from headway.agent.remote.folder_server import PIECE_BYTES
from headway.state.handshake import HandshakeFailed, connect
from headway.state.signed_stream import SignedStream
from headway.track import RunFolder

EVERY_S = 0.2
RETRY_S = 1.0
"""After the leader could not be reached."""
FORWARD_BYTES = PIECE_BYTES // 4
"""Small pieces, so that several machines take turns."""


class RecordForwarder:
    """The forwarding thread, and how far each file is at the leader."""

    def __init__(
        self, run: RunFolder, address: Callable[[], tuple[str, int]], key: str, environment: bytes = b""
    ) -> None:
        """`environment` is environment.json as the leader sent it."""
        self._run, self._address, self._key = run, address, key
        self._sent: dict[str, int] = {}
        self.environment = environment
        """environment.json as the leader has it."""
        self._rejected = set[str]()
        self._socket: SignedStream | None = None
        self._flushes: SimpleQueue[threading.Event] = SimpleQueue()
        self._wake, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._forward, name="forward", daemon=True)
        self._thread.start()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the leader has what was written so far; return False after `timeout_s`."""
        done = threading.Event()
        self._flushes.put(done)
        self._wake.set()
        return done.wait(timeout_s)

    def close(self) -> None:
        """Stop forwarding."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _forward(self) -> None:
        waiting = list[threading.Event]()
        while not self._closed:
            pause_s = EVERY_S
            while not self._flushes.empty():
                waiting.append(self._flushes.get())
            try:
                self._forward_all()
                for done in waiting:
                    done.set()
                waiting = []
            except (OSError, HandshakeFailed, ValueError):
                self._disconnect()
                pause_s = RETRY_S
            self._wake.wait(pause_s)
            self._wake.clear()
        self._disconnect()

    def _forward_all(self) -> None:
        for name in growing_files(self._run):
            if name not in self._rejected:
                self._forward_file(name)
        self._replace_environment()

    def _forward_file(self, name: str) -> None:
        """Send what is new of one file."""
        with (self._run.path / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while (sent := self._sent.get(name, 0)) < size or name not in self._sent:  # empty files too
                content = os.pread(file.fileno(), min(FORWARD_BYTES, size - sent), sent)
                leader_size = self._send("append", content, name=name, offset=sent)
                if leader_size is None or leader_size > size:
                    self._reject(name, "the leader has a different file of this name")
                    return
                self._sent[name] = leader_size

    def _replace_environment(self) -> None:
        """Send environment.json, unless the leader has it."""
        with contextlib.suppress(FileNotFoundError):
            content = self._run.environment_file.read_bytes()
            if content != self.environment and len(content) <= PIECE_BYTES:
                self._send("replace", content, name=self._run.environment_file.name)
                self.environment = content

    def _send(self, kind: str, content: bytes, **fields: Any) -> int | None:
        """Send bytes of a file; return its size at the leader, None if the leader rejects them."""
        if self._socket is None:
            self._socket = connect(self._address(), self._key)
        self._socket.sendall(json.dumps({"kind": kind, "size": len(content), **fields}).encode() + b"\n" + content)
        reply = json.loads(self._socket.readline())
        if "error" in reply:
            self._reject(fields["name"], reply["error"])
            return None
        return int(reply["size"])

    def _reject(self, name: str, reason: str) -> None:
        self._rejected.add(name)
        print(f"{name} is no longer forwarded: {reason}", file=sys.stderr, flush=True)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
