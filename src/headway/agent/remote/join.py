"""A run whose folder is on another machine: the folder that stands in for it here, and how it is kept alike.

    ROOT/visiting/NODE/RUN/     recipe and so on, as the agent that leads sends them (bundle.py)
                                records and logs of the workers here, which it gets (forwarder.py)

A node here never leads, since it sees no leases; it calls one address, and when nobody answers there any more the run
has to be started again.
"""

import contextlib
import fcntl
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.agent.remote.bundle import FileStamps, bundle_path
from headway.agent.remote.forwarder import RecordForwarder
from headway.errors import DataError, RunError, StateError, UsageError
from headway.recipe import Assignment
from headway.state.address import is_in_store
from headway.state.handshake import HandshakeFailed, call
from headway.state.peer_read import fill, peer_request
from headway.track import RunFolder, read_recipe

__all__ = ["RemoteRun", "join_run", "parse_address"]

AGAIN_S = 0.2
SAY_SO_S = 3.0
FIND_S = 2.0
"""Between two questions to the store, who leads."""
PIECE_BYTES = 4 << 20
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, the host of IPv6 in brackets."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f"{text!r} is no address of an agent", hint="HOST:PORT, as the agent that leads tells it")
    return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass
class RemoteRun:
    """The agent that leads, and the folder here."""

    address: tuple[str, int]
    key: str
    run: RunFolder
    find: Callable[[], tuple[str, int] | None] | None = None
    """Finds out who leads now, where another agent may after this one."""
    lock: int = -1
    """Held as long as an agent of this name is at work here for this run."""
    _asked: float = 0.0
    _stamps: FileStamps = field(default_factory=FileStamps)
    _forward: RecordForwarder | None = None
    _fetching: tuple[int, "Future[None]"] | None = None
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="bundle"))

    def leader_address(self) -> tuple[str, int]:
        """Whom to call."""
        if self.find is not None and time.monotonic() - self._asked > FIND_S:
            self._asked = time.monotonic()
            self.address = self.find() or self.address
        return self.address

    def start_forwarding(self) -> None:
        """Pass on what workers write, from now on."""
        if self._forward is None:
            self._forward = RecordForwarder(self.run, lambda: self.address, self.key, self._environment())

    def _environment(self) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return self.run.environment_file.read_bytes()
        return b""

    def flush(self, timeout_s: float) -> bool:
        """See Forward."""
        return self._forward is None or self._forward.flush(timeout_s)

    def is_fresh(self, attempt: int) -> bool:
        """Whether the folder is as the agent that leads has it for an attempt; it is fetched beside if not."""
        if self._fetching is None or self._fetching[0] != attempt:
            self._fetching = (attempt, self._pool.submit(self.refresh))
        if not self._fetching[1].done():
            return False
        try:
            self._fetching[1].result()
        except (OSError, HandshakeFailed):
            self._fetching = None  # who leads may be gone, which the line tells; else it is asked again
            return False
        return True

    def refresh(self) -> None:
        """Fetch what differs from what the agent that leads has."""
        with _asking(self.address, self.key) as end:
            self._take(end, _bundle(end))

    def _take(self, end: socket.socket, told: dict[str, Any]) -> None:
        for name, size, stamp in told["files"]:
            path = bundle_path(self.run, name)
            if not path.exists() or self._stamps.of(path) != (size, stamp):
                _fetch(end, path, name, size)
                if self._stamps.of(path) != (size, stamp):
                    path.unlink()
                    raise StateError(f"{name} of run {self.run.name} came damaged", hint="it is tried again")
            if path == self.run.environment_file and self._forward is not None:
                self._forward.had(self._environment())

    def localize(self, told: Assignment) -> Assignment:
        """What a worker here is told: paths are this machine's, and so is the clock."""
        log = self.run.logs / Path(told.log).name
        here: dict[str, Any] = {"run": str(self.run.path), "log": str(log), "asked_ns": time.monotonic_ns()}
        if reads_leader_disk(told):
            here |= {"checkpoint": None, "from_memory": True}
        return told.model_copy(update=here)

    def leave(self) -> None:
        """The run is over: what was passed on is no longer needed here; else it stays."""
        done = self.flush(PATIENCE_S)
        if self._forward is not None:
            self._forward.close()
        if done:
            shutil.rmtree(self.run.path, ignore_errors=True)
            _lock_file(self.run.path).unlink(missing_ok=True)
            for folder in (self.run.path.parent, self.run.path.parent.parent):
                with contextlib.suppress(OSError):
                    folder.rmdir()  # unless others are there
        os.close(self.lock)


PATIENCE_S = 5.0


def reads_leader_disk(told: Assignment) -> bool:
    """Whether a worker goes on from a folder of the machine that leads."""
    return told.checkpoint is not None and not told.from_memory and not is_in_store(told.checkpoint)


def join_run(
    address: tuple[str, int] | None,
    key: str,
    root: Path,
    name: str,
    patience_s: float,
    find: Callable[[], tuple[str, int] | None] | None = None,
) -> RemoteRun:
    """Make a folder for the run that the agent there leads, or the one that `find` finds; RunError if nobody answers
    for so long."""
    began = time.monotonic()
    deadline, said = began + patience_s, False
    while True:
        if not said and time.monotonic() - began > SAY_SO_S:
            said = True
            where = _shown(address, " at ") or ", by its store"
            print(f"{name}: waiting up to {patience_s:.0f} s for a leader{where}", file=sys.stderr, flush=True)
        try:
            whom = address or (find() if find else None)
            if whom is None:
                raise ConnectionError("nobody has a lease to lead it by")
            with _asking(whom, key) as end:
                told = _bundle(end)
                with contextlib.ExitStack() as undo:
                    lock = _only_one(root / "visiting" / name / told["run"])
                    undo.callback(os.close, lock)
                    made = RemoteRun(whom, key, _make_folder(root, name, told), find, lock)
                    made._take(end, told)
                    _check_data(made.run)
                    undo.pop_all()
                    return made
        except HandshakeFailed:
            if find is None or time.monotonic() > deadline:  # else it may be an address of before
                raise RunError(
                    f"the leader at {_shown(whom)} rejected the key",
                    hint="HEADWAY_KEY is what the run's file `key` says",
                ) from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(
                    f"no leader answers{_shown(whom, ' at ')}: {error.strerror or error}",
                    hint="headway agent --run RUN --rank 0 leads one, and tells its address",
                ) from None
        time.sleep(AGAIN_S if find is None else FIND_S)


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _only_one(folder: Path) -> int:
    """See that no other agent of this name is at work here for this run; a lock on it, which goes with this process."""
    path = _lock_file(folder)
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise RunError(f"{path} cannot be made: {error.strerror}", hint="name another one with --runs") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and path.stat().st_ino == os.fstat(lock).st_ino:
                return lock
        except BlockingIOError:
            os.close(lock)
            raise UsageError(
                f"an agent called {folder.parent.name} is at work for run {folder.name} in {folder.parent.parent}",
                hint="each machine has a --rank of its own; two on one machine have a --runs of their own too",
            ) from None
        os.close(lock)  # of one that has just gone


def _shown(address: tuple[str, int] | None, before: str = "") -> str:
    return "" if address is None else f"{before}{address[0]}:{address[1]}"


@contextlib.contextmanager
def _asking(address: tuple[str, int], key: str) -> Any:
    with contextlib.closing(call(address, key)) as end:
        yield end


def _bundle(end: socket.socket) -> dict[str, Any]:
    told = peer_request(end, "bundle")
    if "error" in told or not _RUN.fullmatch(str(told.get("run", ""))):
        raise RunError(f"the agent that leads cannot tell of its run: {told.get('error', 'it has no name')}")
    return told


def _make_folder(root: Path, name: str, told: dict[str, Any]) -> RunFolder:
    """The folder of an earlier visit to the same run goes on; one of another run of its name goes."""
    run = RunFolder(root / "visiting" / name / told["run"])
    try:
        if run.path.exists() and (not run.id_file.exists() or run.id_file.read_text().strip() != told["id"]):
            shutil.rmtree(run.path)
        for folder in (run.events, run.logs, run.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot make a folder for the run in {root}: {error.strerror}", hint="name another one with --runs"
        ) from None
    return run


def _fetch(end: socket.socket, path: Path, name: str, size: int) -> None:
    """A file of the bundle, a piece at a time; it has its name when it is whole."""
    beside = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}", hint="name another folder with --runs") from None
    with open(file, "wb") as out:  # noqa: PTH123 (a descriptor)
        for begin in range(0, size, PIECE_BYTES):
            piece = bytearray(min(PIECE_BYTES, size - begin))
            told = peer_request(end, "fetch", name=name, begin=begin, size=len(piece))
            if "error" in told:
                raise StateError(f"{name} cannot be had from the agent that leads: {told['error']}")
            fill(end, memoryview(piece))
            out.write(piece)
    beside.replace(path)


def _check_data(run: RunFolder) -> None:
    """See that this machine has the run's data, before anybody counts on its workers."""
    for part in read_recipe(run).data.parts.values():
        if not (Path(part.path) / "manifest.json").is_file():
            raise DataError(
                f"the data of run {run.name} is not on this machine: {part.path}",
                hint="without a common folder each machine has it at the same path",
            )
