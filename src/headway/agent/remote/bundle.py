"""Which files of a run folder are exchanged between machines that do not share it, and under which names.

    to a node              recipe, plan, data facts, tokenizer and so on: small files, each with its checksum
    from a node            records and logs of its workers, which grow at their ends; the marks of injected faults;
                           environment.json, which the first worker writes as a whole

Names come from the other machine and are matched against these patterns before any file is touched: none escapes the
folder, and none names a file that only the leader writes.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from headway.errors import RunError
from headway.track import RunFolder

SINGLE = ("recipe.json", "plan.json", "environment.json", "data.json", "tokenizer.json", "id", "suspects")
FOLDERS = ("huggingface", "initial")
"""Companions of imported weights; the initial weights of a custom model class."""
READ_BYTES = 4 << 20

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"
_BUNDLE = re.compile(rf"(?:{'|'.join(map(re.escape, SINGLE))})|(?:{'|'.join(FOLDERS)})(?:/{_PART}){{1,4}}")
_GROWING = re.compile(
    r"events/\d{4,9}-(?:rank-\d{1,7}|draw)\.jsonl"
    rf"|logs/\d{{4,9}}-(?:rank-\d{{1,7}}|draw|{_PART}-zygote)\.log"
    r"|faults/\d{4,9}-rank-\d{1,7}\.json"
)
_GROWING_FOLDERS = ("events", "logs", "faults")
_RECORD = re.compile(
    r"events/\d{4,9}-(?:agent|draw|rank-\d{1,7})\.jsonl"
    rf"|logs/\d{{4,9}}-(?:agent|draw|keeper|rank-\d{{1,7}}|{_PART}-zygote)\.log"
)


def bundle_names(run: RunFolder) -> list[str]:
    """List the files that another machine needs to work for a run, as far as they exist."""
    names = [name for name in SINGLE if (run.path / name).is_file()]
    for folder in FOLDERS:
        files = (path for path in (run.path / folder).rglob("*") if path.is_file())
        names += sorted(str(path.relative_to(run.path)) for path in files)
    return [name for name in names if _BUNDLE.fullmatch(name)]


def bundle_path(run: RunFolder, name: str) -> Path:
    """Return the path of a file of the bundle; raise RunError for any other name."""
    return _path(run, name, _BUNDLE)


def growing_files(run: RunFolder) -> Iterator[str]:
    """List the files that a node forwards as they grow."""
    return _matching(run, _GROWING)


def record_files(run: RunFolder) -> Iterator[str]:
    """List the records and logs of a run, including those of its leaders."""
    return _matching(run, _RECORD)


def _matching(run: RunFolder, pattern: "re.Pattern[str]") -> Iterator[str]:
    for folder in _GROWING_FOLDERS:
        for path in sorted((run.path / folder).glob("*")):
            if pattern.fullmatch(name := f"{folder}/{path.name}"):
                yield name


def growing_path(run: RunFolder, name: str) -> Path:
    """Return the path of a file that a node appends to; raise RunError for any other name."""
    return _path(run, name, _GROWING)


def stored_record_path(run: RunFolder, name: str) -> Path:
    """Return the path of a record or log from the run's store; raise RunError for any other name."""
    return _path(run, name, _RECORD)


def _path(run: RunFolder, name: str, pattern: "re.Pattern[str]") -> Path:
    if not isinstance(name, str) or not pattern.fullmatch(name):
        raise RunError(f"{str(name)[:80]!r} is not a run file that another machine may read or append to")
    return run.path / name


def fetch_file(path: Path, size: int, read: Callable[[int, memoryview], None], mode: int = 0o666) -> None:
    """Write a file piece by piece with `read(offset, piece)`; it gets its name once it is complete."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}", hint="name another folder with --runs") from None
    with os.fdopen(descriptor, "wb") as file:
        for offset in range(0, size, READ_BYTES):
            piece = bytearray(min(READ_BYTES, size - offset))
            read(offset, memoryview(piece))
            file.write(piece)
    partial.replace(path)


class FileStamps:
    """Sizes and checksums of files, computed again only for files that changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], str]] = {}

    def of(self, path: Path) -> tuple[int, str]:
        """Return a file's size and checksum."""
        with path.open("rb") as file:
            stat = path.stat()
            state = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
            if path not in self._known or self._known[path][0] != state:
                digest = xxhash.xxh3_128()
                while piece := file.read(READ_BYTES):
                    digest.update(piece)
                self._known[path] = (state, digest.hexdigest())
        return stat.st_size, self._known[path][1]
