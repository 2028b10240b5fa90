"""Joining a run whose folder is on another machine: a local folder that stands in for it, and how the two stay in sync.

    ROOT/visiting/NODE/RUN/     recipe and so on, as the leader sends them (bundle.py)
                                records and logs of the workers here, which are forwarded to it (forwarder.py)

A node here never leads, since it sees no leases. It calls one address; if no leader answers there any more, the run has
to be started again.
"""

import contextlib
import fcntl
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from headway.agent.remote.bundle import FileStamps, bundle_path, fetch_file
from headway.agent.remote.forwarder import RecordForwarder
from headway.errors import DataError, RunError, StateError, UsageError
from headway.recipe import Assignment
from headway.state.address import is_in_store
from headway.state.handshake import HandshakeFailed, connect
from headway.state.peer_read import peer_request
from headway.state.signed_stream import SignedStream
from headway.track import RunFolder, read_recipe
from headway.track.access import PRIVATE, adopt_umask

RETRY_S = 0.2
REPORT_WAIT_S = 3.0
FIND_S = 2.0
"""Between two lookups of the leader in the store."""
LAST_FLUSH_S = 5.0
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def parse_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, with an IPv6 host in brackets."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f"{text!r} is not an agent address", hint="use HOST:PORT, as the leader prints it")
    return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass
class RemoteRun:
    """A run led on another machine, and its folder here."""

    address: tuple[str, int]
    key: str
    run: RunFolder
    find: Callable[[], tuple[str, int] | None] | None = None
    """Looks up the current leader, where another agent may take over."""
    lock: int = -1
    """Held as long as an agent of this name works here for this run."""
    _looked_up: float = 0.0
    _stamps: FileStamps = field(default_factory=FileStamps)
    _forwarder: RecordForwarder | None = None
    _fetching: tuple[int, "Future[None]"] | None = None
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="bundle"))

    def leader_address(self) -> tuple[str, int]:
        """Return the leader's address, looked up now and then."""
        if self.find is not None and time.monotonic() - self._looked_up > FIND_S:
            self._looked_up = time.monotonic()
            self.address = self.find() or self.address
        return self.address

    def start_forwarding(self) -> None:
        """Forward what workers write from now on."""
        if self._forwarder is None:
            self._forwarder = RecordForwarder(self.run, lambda: self.address, self.key, self._environment())

    def _environment(self) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return self.run.environment_file.read_bytes()
        return b""

    def flush(self, timeout_s: float) -> bool:
        """Wait until the leader has what workers wrote so far; return False after `timeout_s`."""
        return self._forwarder is None or self._forwarder.flush(timeout_s)

    def is_fresh(self, attempt: int) -> bool:
        """Whether the folder is as the leader has it for an attempt; if not, fetch it in the background."""
        if self._fetching is None or self._fetching[0] != attempt:
            self._fetching = (attempt, self._pool.submit(self.refresh))
        if not self._fetching[1].done():
            return False
        try:
            self._fetching[1].result()
        except (OSError, HandshakeFailed):
            self._fetching = None  # the node's channel tells whether the leader is gone; if not, ask again
            return False
        return True

    def refresh(self) -> None:
        """Fetch what differs from the leader's files."""
        with contextlib.closing(connect(self.address, self.key)) as leader:
            self._fetch_changed(leader, _request_bundle(leader))

    def _fetch_changed(self, leader: SignedStream, bundle: dict[str, Any]) -> None:
        for name, size, stamp in bundle["files"]:
            path = bundle_path(self.run, name)
            if not path.exists() or self._stamps.of(path) != (size, stamp):
                fetch_file(path, size, partial(_read, leader, name), mode=0o600)
                if self._stamps.of(path) != (size, stamp):
                    path.unlink()
                    raise StateError(f"{name} of run {self.run.name} arrived damaged", hint="it is fetched again")
            if path == self.run.environment_file and self._forwarder is not None:
                self._forwarder.environment = self._environment()

    def localize(self, assignment: Assignment) -> Assignment:
        """Return a worker's assignment with this machine's paths and clock."""
        log = self.run.logs / Path(assignment.log).name
        local: dict[str, Any] = {"run": str(self.run.path), "log": str(log), "asked_ns": time.monotonic_ns()}
        if reads_leader_disk(assignment):
            local |= {"checkpoint": None, "from_memory": True}
        return assignment.model_copy(update=local)

    def leave(self) -> None:
        """Leave a run that is over; remove its folder here, unless something could not be forwarded."""
        forwarded = self.flush(LAST_FLUSH_S)
        if self._forwarder is not None:
            self._forwarder.close()
        if forwarded:
            shutil.rmtree(self.run.path, ignore_errors=True)
            _lock_file(self.run.path).unlink(missing_ok=True)
            for folder in (self.run.path.parent, self.run.path.parent.parent):
                with contextlib.suppress(OSError):
                    folder.rmdir()  # unless it holds other runs
        os.close(self.lock)


def reads_leader_disk(assignment: Assignment) -> bool:
    """Whether a worker resumes from a folder on the leader's disk."""
    checkpoint = assignment.checkpoint
    return checkpoint is not None and not assignment.from_memory and not is_in_store(checkpoint)


def join_run(
    address: tuple[str, int] | None,
    key: str,
    root: Path,
    name: str,
    patience_s: float,
    find: Callable[[], tuple[str, int] | None] | None = None,
) -> RemoteRun:
    """Join the run led at an address, or at the one that `find` returns; raise RunError if none answers in time."""
    started = time.monotonic()
    deadline, reported = started + patience_s, False
    while True:
        if not reported and time.monotonic() - started > REPORT_WAIT_S:
            reported = True
            where = _at(address) or ", looked up in its store"
            print(f"{name}: waiting up to {patience_s:.0f} s for a leader{where}", file=sys.stderr, flush=True)
        try:
            leader_address = address or (find() if find else None)
            if leader_address is None:
                raise ConnectionError("no agent holds the leader lease")
            with contextlib.closing(connect(leader_address, key)) as leader, contextlib.ExitStack() as undo:
                bundle = _request_bundle(leader)
                lock = _lock_folder(root / "visiting" / name / bundle["run"])
                undo.callback(os.close, lock)
                remote = RemoteRun(leader_address, key, _make_folder(root, name, bundle), find, lock)
                remote._fetch_changed(leader, bundle)
                _check_data(remote.run)
                undo.pop_all()
                return remote
        except HandshakeFailed:
            if find is None or time.monotonic() > deadline:  # else it may be the address of a former leader
                raise RunError(
                    f"the leader{_at(leader_address)} rejected the key",
                    hint="set HEADWAY_KEY to the contents of the run's file `key`",
                ) from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(
                    f"no leader answers{_at(leader_address)}: {error.strerror or error}",
                    hint="headway agent --run RUN --rank 0 leads a run, and prints its address",
                ) from None
        time.sleep(RETRY_S if find is None else FIND_S)


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _lock_folder(folder: Path) -> int:
    """Lock a run's folder for this process; raise UsageError if another agent of this name works here for this run."""
    path = _lock_file(folder)
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise RunError(f"cannot create {path}: {error.strerror}", hint="name another folder with --runs") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and path.stat().st_ino == os.fstat(lock).st_ino:
                return lock
        except BlockingIOError:
            os.close(lock)
            raise UsageError(
                f"agent {folder.parent.name} already works for run {folder.name} in {folder.parent.parent}",
                hint="give each machine its own --rank, and two agents on one machine their own --runs",
            ) from None
        os.close(lock)  # its agent has just left


def _at(address: tuple[str, int] | None) -> str:
    return "" if address is None else f" at {address[0]}:{address[1]}"


def _request_bundle(leader: SignedStream) -> dict[str, Any]:
    bundle = peer_request(leader, "bundle")
    if "error" in bundle or not _RUN.fullmatch(str(bundle.get("run", ""))):
        raise RunError(f"the leader cannot describe its run: {bundle.get('error', 'it has no name')}")
    return bundle


def _make_folder(root: Path, name: str, bundle: dict[str, Any]) -> RunFolder:
    """Make the run's folder here; reuse one of the same run, replace one of another run of its name."""
    run = RunFolder(root / "visiting" / name / bundle["run"])
    try:
        if run.path.exists() and (not run.id_file.exists() or run.id_file.read_text().strip() != bundle["id"]):
            shutil.rmtree(run.path)
        run.path.mkdir(parents=True, exist_ok=True)
        run.path.chmod(PRIVATE)
        adopt_umask(run.path)  # of this agent, and of its workers
        for folder in (run.events, run.logs, run.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot make a folder for the run in {root}: {error.strerror}", hint="name another folder with --runs"
        ) from None
    return run


def _read(leader: SignedStream, name: str, offset: int, piece: memoryview) -> None:
    """Read a piece of a file of the bundle."""
    reply = peer_request(leader, "fetch", name=name, begin=offset, size=len(piece))
    if "error" in reply:
        raise StateError(f"cannot fetch {name} from the leader: {reply['error']}")
    leader.fill(piece)


def _check_data(run: RunFolder) -> None:
    """Check that this machine has the run's data, before the leader counts on its workers."""
    for part in read_recipe(run).data.parts.values():
        if not (Path(part.path) / "manifest.json").is_file():
            raise DataError(
                f"the data of run {run.name} is not on this machine: {part.path}",
                hint="machines without a shared folder need the data at the same path",
            )
