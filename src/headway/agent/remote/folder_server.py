"""The leader's file server for machines that do not see the run folder.

They connect to the port that nodes use, with connections of their own, each served by a thread here:

    bundle    list the small files, with sizes and checksums
    fetch     bytes of one of them
    read      bytes of a file of the checkpoint on disk that the run resumes from
    append    bytes for the end of a record or a log, from its current end here; the reply is its new size
    replace   environment.json as a whole

Clients have the run's key. All the same, no name escapes the files meant for it (bundle.py).
"""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headway.agent.remote.bundle import FileStamps, bundle_names, bundle_path, growing_path
from headway.errors import HeadwayError, RunError
from headway.state import open_checkpoint
from headway.state.signed_stream import FRAME_BYTES, SignedStream
from headway.track import RunFolder, run_id, write_json

PIECE_BYTES = 1 << 20
"""The most that one request appends."""


class RunFolderServer:
    """Serves one run folder."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._stamps, self._lock = run, FileStamps(), threading.Lock()
        self._published: dict[tuple[str, int], tuple[Path, int]] = {}
        """Files of a checkpoint on disk, by name and step: their paths and sizes."""

    def publish(self, checkpoint: Path) -> tuple[int, bytes, list[tuple[str, int]]]:
        """Let other machines read a checkpoint; return its step, its manifest, and the name and size of each file."""
        opened = open_checkpoint(checkpoint)
        step, sizes = opened.manifest.step, {name: entry.bytes for name, entry in opened.manifest.files.items()}
        self._published = {(name, step): (checkpoint / name, size) for name, size in sizes.items()}
        return step, opened.source.manifest(), sorted(sizes.items())

    def serve(self, client: SignedStream, request: Mapping[str, Any]) -> None:
        """Serve one connection until the client closes it; `request` is its first request."""
        client.settimeout(None)
        with contextlib.closing(client), contextlib.suppress(OSError, ValueError):
            while True:
                self._answer(client, request)
                request = json.loads(client.readline())

    def _answer(self, client: SignedStream, request: Mapping[str, Any]) -> None:
        handlers: dict[str, Callable[..., dict[str, Any] | None]] = {
            "bundle": self._bundle, "fetch": self._fetch, "read": self._read, "append": self._append,
            "replace": self._replace,
        }  # fmt: skip
        fields = {key: value for key, value in request.items() if key != "kind"}
        if request.get("kind") in ("append", "replace"):
            fields["content"] = _content(client, fields.pop("size", None))
        try:
            reply = handlers[request["kind"]](client, **fields)
        except (HeadwayError, FileNotFoundError, PermissionError, KeyError, TypeError) as error:
            reply = {"error": getattr(error, "message", None) or str(error) or type(error).__name__}
        if reply is not None:
            client.sendall(json.dumps(reply).encode() + b"\n")

    def _bundle(self, _client: SignedStream) -> dict[str, Any]:
        """List the small files of the run as they are now."""
        identity = run_id(self._run)
        files = [(name, *self._stamps.of(bundle_path(self._run, name))) for name in bundle_names(self._run)]
        return {"run": self._run.name, "id": identity, "files": files}

    def _fetch(self, client: SignedStream, name: str, begin: int, size: int) -> None:
        _send(client, bundle_path(self._run, name), begin, size)

    def _read(self, client: SignedStream, name: str, step: int, begin: int, size: int) -> None:
        path, total = self._published.get((name, step), (None, 0))
        if path is None or begin < 0 or begin + size > total:
            raise RunError(f"{name} of step {step} is not part of the checkpoint that the run resumes from")
        _send(client, path, begin, size)

    def _append(self, _client: SignedStream, name: str, offset: int, content: bytes) -> dict[str, Any]:
        """Append only at the file's end: after a lost reply the client sends bytes again that are already here."""
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

    def _replace(self, _client: SignedStream, name: str, content: bytes) -> dict[str, Any]:
        if name != self._run.environment_file.name:
            raise RunError(f"other machines may not replace {name[:80]!r}")
        try:
            environment = json.loads(content)
        except ValueError:
            environment = None
        if not isinstance(environment, dict):
            raise RunError(f"{name} must be a JSON object")
        write_json(self._run.environment_file, environment)
        return {"size": len(content)}


def _content(client: SignedStream, size: object) -> bytes:
    """Receive the bytes that follow a request."""
    if not isinstance(size, int) or not 0 <= size <= PIECE_BYTES:
        raise ValueError(f"a request carries at most {PIECE_BYTES} bytes")
    content = bytearray(size)
    client.fill(memoryview(content))
    return bytes(content)


def _send(client: SignedStream, path: Path, begin: int, size: int) -> None:
    """Send bytes of a file."""
    with path.open("rb") as file:
        if begin < 0 or size < 0 or begin + size > os.fstat(file.fileno()).st_size:
            raise RunError(f"{path.name} has no {size} bytes at offset {begin}")
        client.sendall(json.dumps({"size": size}).encode() + b"\n")
        for offset in range(begin, begin + size, FRAME_BYTES):
            content = os.pread(file.fileno(), min(FRAME_BYTES, begin + size - offset), offset)
            if len(content) < min(FRAME_BYTES, begin + size - offset):
                raise OSError(f"{path.name} became shorter")
            client.sendall(content)
