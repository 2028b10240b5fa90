"""A run's small files and records in its object store, so that any machine can resume it and knows its history.

    folder/...                      recipe, plan, tokenizer and so on (bundle.py), put again when they change
    said/rank-<rank>                what last kept an agent from starting
    rollouts/...                    what checkpoints of a policy need (store_rollouts.py)
    records/<lease>-<number>        what records and logs have grown by: a line of JSON with file names, offsets and
                                    sizes, then the bytes

Objects cannot be appended to, and putting a whole record again would cost more every hour. So only what is new is put:
before a checkpoint and at the end; if machines share no folder, also when there is enough of it or a while has passed,
and when an attempt starts. Pieces carry their offsets and make the same files in whatever order they are read.
`fetch_run` makes the folder and remembers there what it has fetched, so that the next call fetches only what is new.
"""

import contextlib
import functools
import json
import mmap
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

from headway.agent.remote.bundle import (
    READ_BYTES,
    FileStamps,
    bundle_names,
    bundle_path,
    fetch_file,
    record_files,
    stored_record_path,
)
from headway.agent.remote.store_rollouts import fetch_rollouts
from headway.errors import RunError, StateError
from headway.state.address import RUN_FILES, address_in_store
from headway.state.object_store import ObjectStore, open_store
from headway.state.store_checkpoint import list_remote
from headway.track import RunFolder, lock_holder, write_json
from headway.track.access import PRIVATE, new_run_mode, umask_of
from headway.track.run_folder import create_private_folder

FOLDER, RECORDS, SAID = RUN_FILES, "records", "said"
LOOK_S = 2.0
EVERY_S = 60.0
OBJECT_BYTES = 4 << 20
"""As soon as this much is new it is put; also the most per object."""
LOG_BYTES = 1 << 20
"""At most this much of each log is put; records are put as a whole."""
COPY_S = 10.0
"""How long each request for the copy of a run with a shared folder may take: its checkpoint matters more."""
LAST_S = 60.0
"""How long the end of a run waits for the store."""
_MIRRORED = "mirrored.json"
_FETCHED = "brought.json"
_SAID_KEY = re.compile(rf"{SAID}/rank-\d{{1,7}}")
_RECORDS_KEY = re.compile(rf"{RECORDS}/\d{{6,}}-\d{{8,}}")


class RunCopy:
    """The copy of a run's small files and records in its store."""

    def __init__(self, run: RunFolder, url: str, number: int = 0, patience_s: float = COPY_S) -> None:
        """`number` is that of the lease, 0 without one."""
        self._run, self._url, self._number, self._patience_s = run, url, number, patience_s
        self.sent = _read_mirrored(run)
        """How much of each record is there."""
        self._stamps, self._known = FileStamps(), dict[str, tuple[int, str]]()
        self._count = time.time_ns() // 1_000_000  # agents that share a lease must not reuse numbers
        self._problem = ""
        self.reached = False
        """Whether the last attempt to put something succeeded."""

    @functools.cached_property
    def _store(self) -> ObjectStore:
        return open_store(self._url, patience_s=self._patience_s)

    def update(self, allowed: Callable[[], bool] = lambda: True) -> None:
        """Put what is new if it is `allowed`; report a problem once: whatever it is, training continues."""
        problem = ""
        try:
            if allowed():
                self._put_new()
        except Exception as error:
            problem = f"cannot put records into the store: {error}"
        if problem and problem != self._problem:
            print(problem, file=sys.stderr, flush=True)
        self._problem, self.reached = problem, not problem

    def close(self) -> None:
        """Put the end of the records, if the store has answered last time."""
        if self.reached:
            self.update()

    def _put_new(self) -> None:
        put_folder(self._run, self._store, self._stamps, self._known)
        while new := list(_grown(self._run, self.sent)):
            head, body = list[tuple[str, int, int]](), bytearray()
            for name, size in new:
                offset = self.sent.get(name, 0)
                with (self._run.path / name).open("rb") as file:
                    content = os.pread(file.fileno(), min(size, OBJECT_BYTES - len(body)), offset)
                head.append((name, offset, len(content)))
                body += content
                if len(body) >= OBJECT_BYTES:
                    break
            piece = json.dumps({"files": head}).encode() + b"\n" + bytes(body)
            self._count += 1
            self._store.put(f"{RECORDS}/{self._number:06d}-{self._count:014d}", memoryview(piece))
            for name, offset, size in head:
                self.sent[name] = offset + size
            write_json(self._run.path / _MIRRORED, self.sent)


class StoreMirror:
    """The leader's thread that keeps the copy of a run up to date, if its machines share no folder."""

    def __init__(self, run: RunFolder, url: str, number: int, allowed: Callable[[], bool]) -> None:
        """`number` is that of the lease; nothing is put while `allowed` returns False."""
        self._run, self._allowed, self._last = run, allowed, 0.0
        self._copy = RunCopy(run, url, number, LAST_S / 2)
        self._ended, self._wake = False, threading.Event()
        self._flushes: SimpleQueue[threading.Event] = SimpleQueue()
        self._thread = threading.Thread(target=self._mirror, name="mirror", daemon=True)
        self._thread.start()

    def flush(self, timeout_s: float = LAST_S) -> bool:
        """Put all that is new now; return False after `timeout_s`. A checkpoint there should not outlive the record of
        its steps."""
        done = threading.Event()
        self._flushes.put(done)
        self._wake.set()
        return done.wait(timeout_s)

    def close(self) -> None:
        """Put what is left; wait at most LAST_S for the store."""
        self._ended = True
        self._wake.set()
        self._thread.join(LAST_S)

    def _mirror(self) -> None:
        while True:
            self._wake.wait(LOOK_S)
            self._wake.clear()
            ended, waiting = self._ended, list[threading.Event]()
            while not self._flushes.empty():
                waiting.append(self._flushes.get())
            new = dict(_grown(self._run, self._copy.sent))
            due = self._last + EVERY_S < time.monotonic() or sum(new.values()) > OBJECT_BYTES
            new_attempt = any(name not in self._copy.sent and name.endswith("-agent.jsonl") for name in new)
            if ended or due or new_attempt or waiting:
                self._try_put()
            for done in waiting:
                done.set()
            if ended:
                return

    def _try_put(self) -> None:
        """Put what is new, if this agent still leads; try again later if it fails."""
        self._copy.update(self._allowed)
        self._last = time.monotonic()


def put_folder(
    run: RunFolder,
    store: ObjectStore,
    stamps: FileStamps | None = None,
    known: dict[str, tuple[int, str]] | None = None,
) -> None:
    """Put a run's small files into its store, except those `known` to be there unchanged."""
    stamps, known = stamps or FileStamps(), {} if known is None else known
    for name in bundle_names(run):
        path = bundle_path(run, name)
        stamp = stamps.of(path)
        if known.get(name) != stamp:
            store.put(f"{FOLDER}/{name}", _mapped(path))
            known[name] = stamp


def report_start_failure(url: str, rank: int, message: str) -> None:
    """Leave a line in the store of a run that could not start, if there is such a run."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(message.split())}\n"
    store = open_store(url, patience_s=LAST_S / 2)
    if store.find(f"{FOLDER}/id") is not None:
        store.put(f"{SAID}/rank-{rank}", memoryview(line.encode()))


def start_failures(run: RunFolder) -> list[Path]:
    """List the files with such lines that were fetched."""
    return sorted((run.path / SAID).glob("rank-*"))


def remove_stale_folder(url: str, root: Path) -> None:
    """Remove the local copy of another run of the same name, unless it is in use: that run's store has all of it."""
    run = RunFolder(root / url.rstrip("/").rpartition("/")[2])
    if run.path.exists() and lock_holder(run) is None:
        identity = open_store(url).find(f"{FOLDER}/id")
        if identity is not None and (not run.id_file.exists() or run.id_file.read_bytes().strip() != identity.strip()):
            shutil.rmtree(run.path)


def fetch_run(url: str, root: Path, patience_s: float = 60.0) -> RunFolder:
    """Make the folder of a run from its store, or add what is new to an existing one."""
    url, store = url.rstrip("/"), open_store(url, patience_s=patience_s)
    run = RunFolder(root / url.rpartition("/")[2])
    files = {item.key.removeprefix(f"{FOLDER}/"): item for item in store.list(FOLDER)}
    if "recipe.json" not in files or "id" not in files:
        raise _no_run(url, run.name, store)
    identity = store.get(f"{FOLDER}/id").decode(errors="replace").strip()
    if run.path.exists() and run.id_file.exists() and run.id_file.read_text().strip() != identity:
        raise RunError(f"there is another run {run.name} in {root}", hint="name another folder with --runs")
    try:
        if not run.path.exists():
            create_private_folder(root)
            run.path.mkdir(mode=PRIVATE)
            run.path.chmod(new_run_mode())
        with umask_of(run.path):
            for folder in (run.events, run.logs, run.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            ends, overwritten = _read_mirrored(run), set[str]()
            fetched = _read_fetched(run, identity, ends)
            for name, item in sorted(files.items()):
                path = bundle_path(run, name)
                if fetched.get(item.key) != [item.bytes, item.modified.isoformat(), *_stamp(path)]:
                    fetch_file(path, item.bytes, functools.partial(store.read, item.key))
                    fetched[item.key] = [item.bytes, item.modified.isoformat(), *_stamp(path)]
            fetch_rollouts(store, run, fetched, _stamp)
            for item in store.list(SAID):
                if _SAID_KEY.fullmatch(item.key) and item.bytes <= READ_BYTES:
                    fetch_file(run.path / item.key, item.bytes, functools.partial(store.read, item.key))
            records = [item.key for item in store.list(RECORDS) if _RECORDS_KEY.fullmatch(item.key)]
            first = min((key for key in records if key not in fetched), default="~")
            for key in records:
                if key >= first:  # such objects never change; one that arrived late is applied before its successors
                    overwritten |= _apply_records(run, store.get(key), store.name(key), ends)
                    fetched[key] = []
            write_json(run.path / _MIRRORED, ends)
            write_json(run.path / _FETCHED, {"id": identity, "objects": fetched})
            if overwritten:
                print(
                    f"note: local changes to {', '.join(sorted(overwritten))} were overwritten from the store",
                    file=sys.stderr,
                    flush=True,
                )
    except OSError as error:
        raise RunError(
            f"cannot make the run folder {run.path}: {error.strerror}", hint="name another folder with --runs"
        ) from None
    return run


def _no_run(url: str, name: str, store: ObjectStore) -> RunError:
    """The error for an address without the files of a run: what else is there, and the command that uses it. A new run
    needs another name, since the old one owns the address."""
    steps = [entry.step for entry in list_remote(store)]
    if not steps:
        bucket = url.partition("://")[2].rstrip("/")
        around = url.rpartition("/")[0] if "/" in bucket else url
        hint = f"use checkpoint.store.url and the run's name: {around}/RUN"
        return RunError(f"there is no run at {url}", hint=hint, usage=True)
    which = f"checkpoint {steps[0]} exists" if len(steps) == 1 else f"checkpoints {steps[0]}-{steps[-1]} exist"
    return RunError(
        f"no run metadata at {url}, but {which}",
        hint=f"headway train --from {address_in_store(url, steps[-1])} --name {name}-2 starts a run from the newest",
        usage=True,
    )


def _read_fetched(run: RunFolder, identity: str, ends: dict[str, int]) -> dict[str, list[object]]:
    """Read which objects were fetched, by key; empty if files are missing since, so that everything is read again."""
    try:
        state = json.loads((run.path / _FETCHED).read_bytes())
        intact = all((run.path / name).stat().st_size >= end for name, end in ends.items())
        objects = state["objects"] if intact and state["id"] == identity else {}
        return {str(key): list(of) for key, of in objects.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}


def _stamp(path: Path) -> tuple[int, ...]:
    """Return size and modification time of a file; empty if it does not exist."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return ()
    return stat.st_size, stat.st_mtime_ns


def _apply_records(run: RunFolder, content: bytes, key: str, ends: dict[str, int]) -> set[str]:
    """Write each piece of an object of records to its offset; return the files whose local changes it overwrote."""
    overwritten = set[str]()
    head, _, body = content.partition(b"\n")
    try:
        files = [
            (stored_record_path(run, name), name, int(offset), int(size))
            for name, offset, size in json.loads(head)["files"]
        ]
    except (ValueError, TypeError, KeyError):
        raise StateError(f"{key} is damaged: its header is unreadable", hint="remove that object") from None
    for path, name, offset, size in files:
        piece, body = body[:size], body[size:]
        if offset < 0 or len(piece) != size:
            raise StateError(f"{key} is damaged: it is too short", hint="remove that object")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            if offset + size > ends.get(name, 0) < os.fstat(descriptor).st_size:
                os.ftruncate(descriptor, ends.get(name, 0))  # of an attempt lost here, whose number another took
                overwritten.add(name)
            os.pwrite(descriptor, piece, offset)
        finally:
            os.close(descriptor)
        ends[name] = max(ends.get(name, 0), offset + size)
    return overwritten


def _grown(run: RunFolder, sent: dict[str, int]) -> Iterator[tuple[str, int]]:
    """List by how much each record and log has grown since it was put."""
    for name in record_files(run):
        with contextlib.suppress(FileNotFoundError):
            size = (run.path / name).stat().st_size
            size = min(size, LOG_BYTES) if name.endswith(".log") else size
            if size > sent.get(name, 0):
                yield name, size - sent.get(name, 0)


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _read_mirrored(run: RunFolder) -> dict[str, int]:
    """Read how much of each record is in the store; empty if unknown, so that everything is put again."""
    try:
        return {str(name): int(end) for name, end in json.loads((run.path / _MIRRORED).read_bytes()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
