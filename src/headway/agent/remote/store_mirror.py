"""A run's small files and records in its object store, so that any machine can go on with it, and know what was before.

    folder/...                      recipe, plan, tokenizer and so on (bundle.py), put again when they change
    said/rank-<rank>                what kept an agent from beginning, the last time
    records/<lease>-<number>        what records and logs have grown by: a line of JSON that says of which files and
                                    from which offset, then the bytes

Objects do not grow, and a record put again and again as a whole would cost more with every hour: so only what is new
is put, when there is much or a while has passed, before a checkpoint, as an attempt begins and at the end. Pieces
carry their offsets, so that they make the same files in whatever order they are read. `bring` makes the folder, and
remembers there what it had: who asks again and again asks for what is new.
"""

import contextlib
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

from headway.agent.remote.bundle import READ_BYTES, FileStamps, bundle_names, bundle_path, place_of_record, record_files
from headway.errors import RunError, StateError
from headway.state.object_store import ObjectStore, open_store
from headway.track import RunFolder, lock_holder, write_json

__all__ = ["StoreMirror", "fetch_run", "make_room", "put_folder", "report_start_failure", "said_in"]

FOLDER, RECORDS, SAID = "folder", "records", "said"
LOOK_S = 2.0
EVERY_S = 60.0
MUCH_BYTES = 4 << 20
"""As soon as so much is new it is put, and never more in one object."""
LOG_BYTES = 1 << 20
"""What of a log goes there at most; records go as a whole."""
LAST_S = 60.0
"""How long the end of a run waits for the store."""
_MARKS = "mirrored.json"
_BROUGHT = "brought.json"
_SAID_KEY = re.compile(rf"{SAID}/rank-\d{{1,7}}")
_RECORDS_KEY = re.compile(rf"{RECORDS}/\d{{6,}}-\d{{8,}}")


class StoreMirror:
    """A thread of the agent that leads."""

    def __init__(self, run: RunFolder, url: str, number: int, allowed: Callable[[], bool]) -> None:
        """`number` is that of the lease; nothing is put where `allowed` says no."""
        self._run, self._number, self._allowed = run, number, allowed
        self._sent, self._stamps, self._put = _read_marks(run), FileStamps(), dict[str, tuple[int, str]]()
        self._count, self._last = time.time_ns() // 1_000_000, 0.0  # of one lease, agents after each other count on
        self._ended, self._wake = False, threading.Event()
        self._asked: SimpleQueue[threading.Event] = SimpleQueue()
        self._store, self._trouble = open_store(url, patience_s=LAST_S / 2), ""
        self._thread = threading.Thread(target=self._go, name="mirror", daemon=True)
        self._thread.start()

    def flush(self, timeout_s: float = LAST_S) -> bool:
        """Have all that is new put now, and wait for it that long at most: a checkpoint there should not outlive the
        record of its steps."""
        done = threading.Event()
        self._asked.put(done)
        self._wake.set()
        return done.wait(timeout_s)

    def close(self) -> None:
        """Put what is left; a store that does not answer is waited for LAST_S."""
        self._ended = True
        self._wake.set()
        self._thread.join(LAST_S)

    def _go(self) -> None:
        while True:
            self._wake.wait(LOOK_S)
            self._wake.clear()
            ended, waiting = self._ended, list[threading.Event]()
            while not self._asked.empty():
                waiting.append(self._asked.get())
            new = dict(_grown(self._run, self._sent))
            due = self._last + EVERY_S < time.monotonic() or sum(new.values()) > MUCH_BYTES
            begun = any(name not in self._sent and name.endswith("-agent.jsonl") for name in new)
            if ended or due or begun or waiting:
                self._try()
            for done in waiting:
                done.set()
            if ended:
                return

    def _try(self) -> None:
        """Put what is new, if this agent still leads; what goes wrong is said once, and tried again at its time."""
        trouble = ""
        try:
            if self._allowed():
                self._once()
        except Exception as error:  # whatever it is, training goes on
            trouble = f"records were not put into the store: {error}"
        if trouble and trouble != self._trouble:
            print(trouble, file=sys.stderr, flush=True)
        self._trouble, self._last = trouble, time.monotonic()

    def _once(self) -> None:
        """All that is new."""
        put_folder(self._run, self._store, self._stamps, self._put)
        while new := list(_grown(self._run, self._sent)):
            head, body = list[tuple[str, int, int]](), bytearray()
            for name, size in new:
                offset, part = self._sent.get(name, 0), min(size, MUCH_BYTES - len(body))
                content = _bytes(self._run.path / name, offset, part)
                head.append((name, offset, len(content)))
                body += content
                if len(body) >= MUCH_BYTES:
                    break
            piece = json.dumps({"files": head}).encode() + b"\n" + bytes(body)
            self._count += 1
            self._store.put(f"{RECORDS}/{self._number:06d}-{self._count:014d}", memoryview(piece))
            for name, offset, size in head:
                self._sent[name] = offset + size
            write_json(self._run.path / _MARKS, self._sent)


def put_folder(
    run: RunFolder,
    store: ObjectStore,
    stamps: FileStamps | None = None,
    known: dict[str, tuple[int, str]] | None = None,
) -> None:
    """Put a run's small files into its store, but for those that are `known` to be there as they are."""
    stamps, known = stamps or FileStamps(), {} if known is None else known
    for name in bundle_names(run):
        path = bundle_path(run, name)
        stamp = stamps.of(path)
        if known.get(name) != stamp:
            store.put(f"{FOLDER}/{name}", _mapped(path))
            known[name] = stamp


def report_start_failure(url: str, rank: int, words: str) -> None:
    """Leave a line in the store of a run that could not begin, if there is such a run."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(words.split())}\n"
    store = open_store(url, patience_s=LAST_S / 2)
    if store.find(f"{FOLDER}/id") is not None:
        store.put(f"{SAID}/rank-{rank}", memoryview(line.encode()))


def said_in(run: RunFolder) -> list[Path]:
    """Such lines, as far as they were brought here."""
    return sorted((run.path / SAID).glob("rank-*"))


def make_room(url: str, root: Path) -> None:
    """Remove what another run of the same name has left in a folder of this machine's own, unless somebody uses it:
    that run's store has all of it."""
    run = RunFolder(root / url.rstrip("/").rpartition("/")[2])
    if run.path.exists() and lock_holder(run) is None:
        identity = open_store(url).find(f"{FOLDER}/id")
        if identity is not None and (not run.id_file.exists() or run.id_file.read_bytes().strip() != identity.strip()):
            shutil.rmtree(run.path)


def fetch_run(url: str, root: Path, patience_s: float = 60.0) -> RunFolder:
    """The folder of a run from what its store has; one that is here already gets what is new."""
    url, store = url.rstrip("/"), open_store(url, patience_s=patience_s)
    run = RunFolder(root / url.rpartition("/")[2])
    parts = {item.key.removeprefix(f"{FOLDER}/"): item for item in store.list(FOLDER)}
    if "recipe.json" not in parts or "id" not in parts:
        raise RunError(
            f"there is no run at {url}",
            hint="the url of checkpoint.store, and the name of the run; runs whose machines see a common folder put "
            "checkpoints there, and no records",
        )
    identity = store.get(f"{FOLDER}/id").decode(errors="replace").strip()
    if run.path.exists() and run.id_file.exists() and run.id_file.read_text().strip() != identity:
        raise RunError(f"there is another run {run.name} in {root}", hint="another folder with --runs")
    try:
        for folder in (run.events, run.logs, run.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        ends, replaced = _read_marks(run), set[str]()
        had = _read_brought(run, identity, ends)
        for name, item in sorted(parts.items()):
            path = bundle_path(run, name)
            if had.get(item.key) != [item.bytes, item.modified.isoformat(), *_stamp(path)]:
                _fetch(store, item.key, path, item.bytes)
                had[item.key] = [item.bytes, item.modified.isoformat(), *_stamp(path)]
        for item in store.list(SAID):
            if _SAID_KEY.fullmatch(item.key) and item.bytes <= READ_BYTES:
                _fetch(store, item.key, run.path / item.key, item.bytes)
        records = [item.key for item in store.list(RECORDS) if _RECORDS_KEY.fullmatch(item.key)]
        first = min((key for key in records if key not in had), default="~")
        for key in records:
            if key >= first:  # no object of records is ever changed; one that came late goes below those after it
                replaced |= _lay_out(run, store.get(key), store.name(key), ends)
                had[key] = []
        write_json(run.path / _MARKS, ends)
        write_json(run.path / _BROUGHT, {"id": identity, "objects": had})
        if replaced:
            print(
                f"note: what {', '.join(sorted(replaced))} had here and the store had not was replaced by the store's",
                file=sys.stderr,
                flush=True,
            )
    except OSError as error:
        raise RunError(
            f"cannot make the run's folder {run.path}: {error.strerror}", hint="another one with --runs"
        ) from None
    return run


def _read_brought(run: RunFolder, identity: str, ends: dict[str, int]) -> dict[str, list[object]]:
    """What of the store was laid out here, by key; nothing where files of it are gone since, and all is read again."""
    try:
        told = json.loads((run.path / _BROUGHT).read_bytes())
        whole = all((run.path / name).stat().st_size >= end for name, end in ends.items())
        return {str(key): list(of) for key, of in told["objects"].items()} if whole and told["id"] == identity else {}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when a file here does."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return ()
    return stat.st_size, stat.st_mtime_ns


def _lay_out(run: RunFolder, content: bytes, where: str, ends: dict[str, int]) -> set[str]:
    """One object of records, each piece to where it belongs; which files lost what they had beyond the store's."""
    replaced = set[str]()
    head, _, body = content.partition(b"\n")
    try:
        files = [
            (place_of_record(run, name), name, int(offset), int(size))
            for name, offset, size in json.loads(head)["files"]
        ]
    except (ValueError, TypeError, KeyError):
        raise StateError(f"{where} is damaged: it does not say what it holds", hint="remove that object") from None
    for path, name, offset, size in files:
        piece, body = body[:size], body[size:]
        if offset < 0 or len(piece) != size:
            raise StateError(f"{where} is damaged: it is too short", hint="remove that object")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            if offset + size > ends.get(name, 0) < os.fstat(descriptor).st_size:
                os.ftruncate(descriptor, ends.get(name, 0))  # of a life that was lost here, whose number another has
                replaced.add(name)
            os.pwrite(descriptor, piece, offset)
        finally:
            os.close(descriptor)
        ends[name] = max(ends.get(name, 0), offset + size)
    return replaced


def _fetch(store: ObjectStore, key: str, path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    with beside.open("wb") as file:
        for begin in range(0, size, READ_BYTES):
            piece = bytearray(min(READ_BYTES, size - begin))
            store.read(key, begin, memoryview(piece))
            file.write(piece)
    beside.replace(path)


def _grown(run: RunFolder, sent: dict[str, int]) -> Iterator[tuple[str, int]]:
    """By how much each record and log has grown since it was put."""
    for name in record_files(run):
        with contextlib.suppress(FileNotFoundError):
            size = (run.path / name).stat().st_size
            size = min(size, LOG_BYTES) if name.endswith(".log") else size
            if size > sent.get(name, 0):
                yield name, size - sent.get(name, 0)


def _bytes(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), size, offset)


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _read_marks(run: RunFolder) -> dict[str, int]:
    """How far each record is in the store; nothing where that is not known, and all is put again."""
    try:
        return {str(name): int(end) for name, end in json.loads((run.path / _MARKS).read_bytes()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
