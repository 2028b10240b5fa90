"""Reading a data set: its manifest, and its shards as read-only memory maps.

Sizes are checked each time. Content is checked against the manifest's sha256 when a file is not the one
that was checked last (its size, time of change or inode differ), so a copy is hashed once and then opens at
once.
"""

import functools
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headway.data.manifest import TOKENIZER, DataFile, DatasetManifest, read_manifest, read_stamp, stamp_of, write_stamp
from headway.data.order import Split, count_windows, split_windows
from headway.data.tokenizer import TextTokenizer, load_tokenizer
from headway.errors import DataError

__all__ = ["Dataset", "Document", "Verify", "check_version", "open_dataset", "split_dataset", "verify"]

Verify = Literal["changed", "full", "sizes"]


@dataclass(frozen=True)
class Document:
    """One document's tokens, end of text included; the first `prompt` of them are not trained on."""

    ids: npt.NDArray[Any]
    prompt: int


@dataclass(frozen=True)
class Dataset:
    """An open data set."""

    path: Path
    manifest: DatasetManifest
    version: str
    tokens: tuple[npt.NDArray[Any], ...]
    """The ids of each shard, mapped read-only."""

    @functools.cached_property
    def documents(self) -> tuple[npt.NDArray[np.uint64], ...]:
        """For each shard, (end offset, prompt tokens) of each document, mapped when first asked for."""
        return tuple(_map(self.path / file.name, "<u8").reshape(-1, 2) for _, file in self.manifest.shards())

    @property
    def shard_tokens(self) -> list[int]:
        """Number of tokens in each shard."""
        return [len(shard) for shard in self.tokens]

    def document(self, number: int) -> Document:
        """The document of that number, counted over all shards."""
        if not 0 <= number < self.manifest.documents:
            raise DataError(f"there is no document {number}", hint=f"0 to {self.manifest.documents - 1}")
        for shard, table in zip(self.tokens, self.documents, strict=True):
            if number < len(table):
                start = int(table[number - 1, 0]) if number else 0
                return Document(shard[start : int(table[number, 0])], int(table[number, 1]))
            number -= len(table)
        raise AssertionError("the manifest's document counts were checked when the set was opened")

    def tokenizer(self, special_tokens: bool = False) -> TextTokenizer:
        """The tokenizer the data set was made with; see `load_tokenizer`."""
        path, end_of_text = self.path / TOKENIZER, self.manifest.end_of_text
        return load_tokenizer(path, end_of_text=end_of_text, special_tokens=special_tokens)


def open_dataset(path: str | Path, verify: Verify = "changed") -> Dataset:
    """Open a data set, hashing the files that changed, all of them (`full`) or none (`sizes`)."""
    folder = Path(path)
    manifest = read_manifest(folder)
    version = manifest.version
    _check_content(folder, manifest, version, verify)
    tokens = tuple(_map(folder / file.name, f"<u{_item_bytes(manifest)}") for file, _ in manifest.shards())
    return Dataset(folder, manifest, version, tokens)


def verify(path: str | Path) -> Dataset:
    """Hash every file of a data set and compare with its manifest."""
    return open_dataset(path, verify="full")


def split_dataset(dataset: Dataset, seq: int, holdout: float) -> Split:
    """How the windows of `seq` tokens divide between training and evaluation; DataError when none fits."""
    return split_windows(sum(count_windows(dataset.shard_tokens, seq)), holdout, dataset.version)


def check_version(dataset: Dataset, wanted: str | None) -> None:
    """Refuse a data set whose version does not begin with `wanted`; None accepts any."""
    if wanted is None or (len(wanted) >= 8 and dataset.version.startswith(wanted)):
        return
    if len(wanted) < 8:
        raise DataError(f"data version {wanted!r} is too short to tell", hint="give at least 8 characters")
    raise DataError(
        f"recipe wants data version {wanted}, folder holds {dataset.version} ({dataset.path})",
        hint="point data.path at that version, rebuild it, or change data.version",
    )


def _item_bytes(manifest: DatasetManifest) -> int:
    return 2 if manifest.dtype == "uint16" else 4


def _map(path: Path, dtype: str) -> npt.NDArray[Any]:
    # A plain array over the map: slicing np.memmap itself costs several times as much per window.
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


def _check_content(folder: Path, manifest: DatasetManifest, version: str, level: Verify) -> None:
    files = manifest.all_files()
    now = {file.name: _check_size(folder, file) for file in files}
    if level == "sizes":
        return
    known = {} if level == "full" else read_stamp(folder, version)
    unknown = [file for file in files if known.get(file.name) != now[file.name]]
    if unknown:
        _check_hashes(folder, unknown)
        write_stamp(folder, version, now)


def _check_size(folder: Path, file: DataFile) -> list[int]:
    path = folder / file.name
    try:
        found = stamp_of(path)
    except OSError as error:
        raise _corrupt(path, f"cannot be read ({error.strerror})") from None
    if found[0] != file.bytes:
        raise _corrupt(path, f"should have {file.bytes} bytes and has {found[0]}")
    return found


def _check_hashes(folder: Path, files: Sequence[DataFile]) -> None:
    # Hashing releases the interpreter lock, so threads use the disk and the processors.
    with ThreadPoolExecutor(min(8, len(files))) as pool:
        for file, found in zip(files, pool.map(_sha256, [folder / file.name for file in files]), strict=True):
            if found != file.sha256:
                raise _corrupt(folder / file.name, f"should have sha256 {file.sha256} and has {found}")


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _corrupt(path, f"cannot be read ({error.strerror})") from None


def _corrupt(path: Path, why: str) -> DataError:
    return DataError(f"{path} {why}", hint="copy the data set again, or rebuild it with --force")
