"""What the agent that leads has for machines that do not see the run's folder, and what it takes from them.

They ask at the same door that nodes call at, over connections of their own, each a thread here:

    bundle    which small files there are, with sizes and checksums
    fetch     bytes of one of them
    read      bytes of a file of the checkpoint on disk that the run goes on from
    append    bytes for the end of a record or a log, from where this end of it is; the answer is its size now
    replace   environment.json as a whole

Whoever asks has the run's key. All the same, no name leads out of the places meant for it (bundle.py).
"""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headway.agent.remote.bundle import FileStamps, bundle_names, bundle_path, growing_path
from headway.errors import HeadwayError, RunError
from headway.state import open_checkpoint
from headway.state.peer_read import fill, read_line
from headway.track import RunFolder, run_id, write_json

__all__ = ["PIECE_BYTES", "RunFolderServer"]

PIECE_BYTES = 1 << 20
"""The most that is appended by one word."""


class RunFolderServer:
    """Serves one run's folder."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._stamps, self._lock = run, FileStamps(), threading.Lock()
        self._offered: dict[tuple[str, int], tuple[Path, int]] = {}
        """Files of a checkpoint on disk, by name and step: where they lie, and their sizes."""

    def publish(self, checkpoint: Path) -> tuple[int, bytes, list[tuple[str, int]]]:
        """Have other machines read a checkpoint: its step, its manifest, and the name and size of each file."""
        opened = open_checkpoint(checkpoint)
        step, sizes = opened.manifest.step, {name: entry.bytes for name, entry in opened.manifest.files.items()}
        self._offered = {(name, step): (checkpoint / name, size) for name, size in sizes.items()}
        return step, opened.source.manifest(), sorted(sizes.items())

    def serve(self, end: socket.socket, asked: Mapping[str, Any]) -> None:
        """Answer one connection until it is hung up; `asked` is the first thing that it wants."""
        end.settimeout(None)
        with contextlib.closing(end), contextlib.suppress(OSError, ValueError):
            while True:
                self._answer(end, asked)
                asked = json.loads(read_line(end))

    def _answer(self, end: socket.socket, asked: Mapping[str, Any]) -> None:
        deeds: dict[str, Callable[..., dict[str, Any] | None]] = {
            "bundle": self._bundle, "fetch": self._fetch, "read": self._read, "append": self._append,
            "replace": self._replace,
        }  # fmt: skip
        fields = {key: value for key, value in asked.items() if key != "kind"}
        content = _content(end, fields) if asked.get("kind") in ("append", "replace") else None
        try:
            more = {} if content is None else {"content": content}
            told = deeds[asked["kind"]](end, **fields, **more)
        except (HeadwayError, FileNotFoundError, PermissionError, KeyError, TypeError) as error:
            told = {"error": getattr(error, "message", None) or str(error) or type(error).__name__}
        if told is not None:
            end.sendall(json.dumps(told).encode() + b"\n")

    def _bundle(self, _end: socket.socket) -> dict[str, Any]:
        """All small files of the run, as they are now."""
        identity = run_id(self._run)
        files = [(name, *self._stamps.of(bundle_path(self._run, name))) for name in bundle_names(self._run)]
        return {"run": self._run.name, "id": identity, "files": files}

    def _fetch(self, end: socket.socket, name: str, begin: int, size: int) -> None:
        _send(end, bundle_path(self._run, name), begin, size)

    def _read(self, end: socket.socket, name: str, step: int, begin: int, size: int) -> None:
        path, whole = self._offered.get((name, step), (None, 0))
        if path is None or begin < 0 or begin + size > whole:
            raise RunError(f"{name} of step {step} is not what the run goes on from")
        _send(end, path, begin, size)

    def _append(self, _end: socket.socket, name: str, offset: int, content: bytes) -> dict[str, Any]:
        """Only what begins where the file ends: an answer that was lost has its bytes sent again, and they are here."""
        path = growing_path(self._run, name)
        with self._lock:
            path.parent.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                if size == offset:
                    size += os.write(descriptor, content)
            finally:
                os.close(descriptor)
        return {"size": size}

    def _replace(self, _end: socket.socket, name: str, content: bytes) -> dict[str, Any]:
        if name != self._run.environment_file.name:
            raise RunError(f"{name[:80]!r} is not replaced by other machines")
        try:
            told = json.loads(content)
        except ValueError:
            told = None
        if not isinstance(told, dict):
            raise RunError("what a run ran on is told as a table")
        write_json(self._run.environment_file, told)
        return {"size": len(content)}


def _content(end: socket.socket, fields: dict[str, Any]) -> bytes:
    """The bytes that follow what was asked."""
    size = fields.pop("size", None)
    if not isinstance(size, int) or not 0 <= size <= PIECE_BYTES:
        raise ValueError("more than is taken at once")
    content = bytearray(size)
    fill(end, memoryview(content))
    return bytes(content)


def _send(end: socket.socket, path: Path, begin: int, size: int) -> None:
    """Bytes of a file: straight from the disk, past this process."""
    with path.open("rb") as file:
        if begin < 0 or size < 0 or begin + size > os.fstat(file.fileno()).st_size:
            raise RunError(f"{path.name} has no {size} bytes from {begin} on")
        end.sendall(json.dumps({"size": size}).encode() + b"\n")
        if size and end.sendfile(file, begin, size) != size:
            raise OSError(f"{path.name} became shorter")
