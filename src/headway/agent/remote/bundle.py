"""What of a run's folder travels between machines that do not share it, and by which names.

    to a node              recipe, plan, data facts, tokenizer and so on: small files, each with its checksum
    from a node            its workers' records and logs, which grow at their ends; the marks of faults on purpose;
                           environment.json, which the first worker writes as a whole

Names come from the other machine, and are held against these patterns before any file is touched: none of them leads
out of the folder, and none to what only the agent that leads writes there.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import xxhash

from headway.errors import RunError
from headway.track import RunFolder

__all__ = [
    "FileStamps",
    "bundle_names",
    "bundle_path",
    "growing_path",
    "grown_files",
    "place_of_record",
    "record_files",
]

SINGLE = ("recipe.json", "plan.json", "environment.json", "data.json", "tokenizer.json", "id", "suspects")
FOLDERS = ("huggingface", "initial")
"""What came with weights from elsewhere; the first weights of a class of the user's own."""
READ_BYTES = 4 << 20

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"
_BUNDLE = re.compile(rf"(?:{'|'.join(map(re.escape, SINGLE))})|(?:{'|'.join(FOLDERS)})(?:/{_PART}){{1,4}}")
_GROWN = re.compile(
    r"events/\d{4,9}-(?:rank-\d{1,7}|draw)\.jsonl"
    rf"|logs/\d{{4,9}}-(?:rank-\d{{1,7}}|draw|{_PART}-zygote)\.log"
    r"|faults/\d{4,9}-rank-\d{1,7}\.json"
)
_GROWN_FOLDERS = ("events", "logs", "faults")
_RECORD = re.compile(
    r"events/\d{4,9}-(?:agent|draw|rank-\d{1,7})\.jsonl"
    rf"|logs/\d{{4,9}}-(?:agent|draw|keeper|rank-\d{{1,7}}|{_PART}-zygote)\.log"
)


def bundle_names(run: RunFolder) -> list[str]:
    """The files that another machine needs to work for a run, as far as they are there."""
    names = [name for name in SINGLE if (run.path / name).is_file()]
    for folder in FOLDERS:
        found = (path for path in (run.path / folder).rglob("*") if path.is_file())
        names += sorted(str(path.relative_to(run.path)) for path in found)
    return [name for name in names if _BUNDLE.fullmatch(name)]


def bundle_path(run: RunFolder, name: str) -> Path:
    """Where a file of the bundle lies; RunError for any other name."""
    return _place(run, name, _BUNDLE)


def grown_files(run: RunFolder) -> Iterator[str]:
    """The files of a folder that are passed on as they grow."""
    return _matching(run, _GROWN)


def record_files(run: RunFolder) -> Iterator[str]:
    """The records and logs of a run, those of the agents that led it too."""
    return _matching(run, _RECORD)


def _matching(run: RunFolder, pattern: "re.Pattern[str]") -> Iterator[str]:
    for folder in _GROWN_FOLDERS:
        for path in sorted((run.path / folder).glob("*")):
            if pattern.fullmatch(name := f"{folder}/{path.name}"):
                yield name


def growing_path(run: RunFolder, name: str) -> Path:
    """Where a file lies that a node adds to; RunError for any other name."""
    return _place(run, name, _GROWN)


def place_of_record(run: RunFolder, name: str) -> Path:
    """Where a record or log lies that comes from the run's store; RunError for any other name."""
    return _place(run, name, _RECORD)


def _place(run: RunFolder, name: str, pattern: "re.Pattern[str]") -> Path:
    if not isinstance(name, str) or not pattern.fullmatch(name):
        raise RunError(f"{str(name)[:80]!r} is no file of a run that another machine may ask for or add to")
    return run.path / name


class FileStamps:
    """Sizes and checksums of files, taken again only of those that have changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], str]] = {}

    def of(self, path: Path) -> tuple[int, str]:
        """A file's size and checksum."""
        with path.open("rb") as file:
            stat = path.stat()
            state = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
            if path not in self._known or self._known[path][0] != state:
                taken = xxhash.xxh3_128()
                while piece := file.read(READ_BYTES):
                    taken.update(piece)
                self._known[path] = (state, taken.hexdigest())
        return stat.st_size, self._known[path][1]
