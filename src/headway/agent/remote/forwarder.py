"""Passes what workers write on a machine without the run's folder on to the agent that leads, as it grows.

A thread with a connection of its own looks at the files that grow (bundle.py) and sends what is new, a bounded piece at
a time, each from where the file ends over there. So a line that was cut is gone on with, and nothing comes twice. What
the agent must have before it hears of something (the record of a state's steps, the last words of a worker) is waited
for with `flush`.
"""

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from headway.agent.remote.bundle import grown_files
from headway.agent.remote.folder_server import PIECE_BYTES
from headway.state.handshake import HandshakeFailed, call
from headway.state.peer_read import read_line
from headway.track import RunFolder

__all__ = ["RecordForwarder"]

EVERY_S = 0.2
LATER_S = 1.0
"""After the agent that leads could not be reached."""
PIECE = PIECE_BYTES // 4
"""So that several machines have their turns."""


class RecordForwarder:
    """The thread, and what it has passed on."""

    def __init__(
        self, run: RunFolder, address: Callable[[], tuple[str, int]], key: str, environment: bytes = b""
    ) -> None:
        """`environment` is environment.json as it came from there."""
        self._run, self._address, self._key = run, address, key
        self._sent: dict[str, int] = {}
        self._environment = environment
        self._refused = set[str]()
        self._end: socket.socket | None = None
        self._asked: SimpleQueue[threading.Event] = SimpleQueue()
        self._wake, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._pass_on, name="forward", daemon=True)
        self._thread.start()

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was written so far is over there, that long at most; False if it is not."""
        done = threading.Event()
        self._asked.put(done)
        self._wake.set()
        return done.wait(timeout_s)

    def close(self) -> None:
        """Pass on no more."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _pass_on(self) -> None:
        waiting = list[threading.Event]()
        while not self._closed:
            pause_s = EVERY_S
            while not self._asked.empty():
                waiting.append(self._asked.get())
            try:
                self._all_files()
                for done in waiting:
                    done.set()
                waiting = []
            except (OSError, HandshakeFailed, ValueError):
                self._hang_up()
                pause_s = LATER_S
            self._wake.wait(pause_s)
            self._wake.clear()
        self._hang_up()

    def _all_files(self) -> None:
        for name in grown_files(self._run):
            if name not in self._refused:
                self._file(name)
        self._whole()

    def _file(self, name: str) -> None:
        """What is new of one file."""
        with (self._run.path / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while (sent := self._sent.get(name, 0)) < size or name not in self._sent:  # also where it is empty
                content = os.pread(file.fileno(), min(PIECE, size - sent), sent)
                there = self._say("append", content, name=name, offset=sent)
                if there is None or there > size:
                    self._give_up(name, "it is another one over there")
                    return
                self._sent[name] = there

    def _whole(self) -> None:
        """environment.json, which is replaced; what came with the bundle is what is over there."""
        with contextlib.suppress(FileNotFoundError):
            content = self._run.environment_file.read_bytes()
            if content != self._environment and len(content) <= PIECE_BYTES:
                self._say("replace", content, name=self._run.environment_file.name)
                self._environment = content

    def had(self, environment: bytes) -> None:
        """environment.json as it came from there."""
        self._environment = environment

    def _say(self, kind: str, content: bytes, **fields: Any) -> int | None:
        """Send bytes for a file; its size over there now, None where they are refused."""
        if self._end is None:
            self._end = call(self._address(), self._key)
        self._end.sendall(json.dumps({"kind": kind, "size": len(content), **fields}).encode() + b"\n" + content)
        told = json.loads(read_line(self._end))
        if "error" in told:
            self._give_up(fields["name"], told["error"])
            return None
        return int(told["size"])

    def _give_up(self, name: str, why: str) -> None:
        self._refused.add(name)
        print(f"{name} is not passed on any more: {why}", file=sys.stderr, flush=True)

    def _hang_up(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None
