"""Open a dataset: its manifest, and its shards as read-only memory maps.

Sizes are checked each time. Content is checked against the manifest's sha256 if a file is not the one that was
verified last (its size, modification time or inode differs), so that a copy is hashed once and then opens instantly.
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

from headway.data.manifest import (
    SAMPLE_TYPE,
    TOKENIZER,
    DataFile,
    DatasetManifest,
    StoredFile,
    read_manifest,
    read_stamp,
    stamp_of,
    write_stamp,
)
from headway.data.order import Split, count_windows, split_windows
from headway.data.tokenizer import TextTokenizer, load_tokenizer
from headway.errors import DamagedData, DataError, WrongDataVersion

Verify = Literal["changed", "full", "sizes"]


@dataclass(frozen=True)
class Document:
    """One document's tokens, end of text included; the first `prompt` of them are not trained on."""

    ids: npt.NDArray[Any]
    prompt: int


@dataclass(frozen=True)
class Dataset:
    """An open dataset."""

    path: Path
    manifest: DatasetManifest
    version: str
    tokens: tuple[npt.NDArray[Any], ...]
    """The ids of each shard, mapped read-only."""

    @functools.cached_property
    def documents(self) -> tuple[npt.NDArray[np.uint64], ...]:
        """(end offset, prompt tokens) of each document, per shard; mapped on first use."""
        return tuple(_map(self.path / file.name, "<u8").reshape(-1, 2) for _, file in self.manifest.shards())

    @functools.cached_property
    def spans(self) -> tuple[npt.NDArray[np.uint32], ...]:
        """(start, end, role, trained) of each message, per shard of chat; see `samples` for whose they are."""
        return tuple(_map(self.path / spans.name, "<u4").reshape(-1, 4) for spans, _ in self._chat_files("spans"))

    @functools.cached_property
    def samples(self) -> tuple[npt.NDArray[Any], ...]:
        """`SAMPLE_TYPE` of each document, per shard of chat."""
        return tuple(_map(self.path / samples.name, SAMPLE_TYPE) for _, samples in self._chat_files("spans"))

    @functools.cached_property
    def fields(self) -> tuple[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]], ...]:
        """(lines of JSON, where each ends), per shard of prompts; see `headway.data.prompts`."""
        files = self._chat_files("fields")
        return tuple((_map(self.path / lines.name, "u1"), _map(self.path / ends.name, "<u8")) for lines, ends in files)

    def _chat_files(self, kind: Literal["spans", "fields"]) -> list[tuple[DataFile, DataFile]]:
        """Return the files beside each shard; none if the dataset has those of the other kind, or none at all."""
        chat = self.manifest.chat
        return [] if chat is None or (chat.kind == "prompts") != (kind == "fields") else chat.shards()

    @property
    def kind(self) -> str:
        """`text`, or the kind of chat; see `ChatFacts.kind`."""
        return "text" if self.manifest.chat is None else self.manifest.chat.kind

    @property
    def shard_tokens(self) -> list[int]:
        """Number of tokens in each shard."""
        return [len(shard) for shard in self.tokens]

    def document(self, number: int) -> Document:
        """Return a document by its number across all shards."""
        if not 0 <= number < self.manifest.documents:
            raise DataError(f"there is no document {number}", hint=f"0 to {self.manifest.documents - 1}")
        for shard, table in zip(self.tokens, self.documents, strict=True):
            if number < len(table):
                start = int(table[number - 1, 0]) if number else 0
                return Document(shard[start : int(table[number, 0])], int(table[number, 1]))
            number -= len(table)
        raise AssertionError("the manifest's document counts were checked when the dataset was opened")

    def tokenizer(self, special_tokens: bool = False) -> TextTokenizer:
        """Load the tokenizer that the dataset was built with; see `load_tokenizer`."""
        path, end_of_text = self.path / TOKENIZER, self.manifest.end_of_text
        return load_tokenizer(path, end_of_text=end_of_text, special_tokens=special_tokens)


def open_dataset(path: str | Path, verify: Verify = "changed") -> Dataset:
    """Open a dataset; hash the files that changed, all of them (`full`) or none (`sizes`)."""
    folder = Path(path)
    manifest = read_manifest(folder)
    version = manifest.version
    check_content(folder, manifest.all_files(), version, verify)
    dtype = np.dtype(manifest.dtype).newbyteorder("<").str
    tokens = tuple(_map(folder / file.name, dtype) for file, _ in manifest.shards())
    return Dataset(folder, manifest, version, tokens)


def verify(path: str | Path) -> Dataset:
    """Open a dataset after checking the hash of every file."""
    return open_dataset(path, verify="full")


def split_dataset(dataset: Dataset, seq: int, holdout: float) -> Split:
    """Split a dataset's windows of `seq` tokens into training and held-out ones; raise DataError if there are none."""
    return split_windows(sum(count_windows(dataset.shard_tokens, seq)), holdout, dataset.version)


def check_version(dataset: Dataset, wanted: str | None) -> None:
    """Raise DataError if a dataset's version does not start with `wanted`; None accepts any."""
    check_data_version(dataset.path, dataset.version, wanted)


def check_data_version(path: Path, version: str, wanted: str | None) -> None:
    """Raise DataError if the version of the dataset in a folder does not start with `wanted`; None accepts any."""
    if wanted is None or (len(wanted) >= 8 and version.startswith(wanted)):
        return
    if len(wanted) < 8:
        raise DataError(f"data version {wanted!r} is too short", hint="give at least 8 characters")
    raise WrongDataVersion(
        f"recipe wants data version {wanted}, folder holds {version} ({path})",
        hint="point data.path at that version, rebuild it, or change data.version",
    )


def _map(path: Path, dtype: Any) -> npt.NDArray[Any]:
    # A plain array over the map: slicing an np.memmap costs several times as much per window.
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


def check_content(folder: Path, files: Sequence[StoredFile], version: str, level: Verify) -> None:
    """Check the sizes of a dataset's files, and the hashes of those that changed since they were verified."""
    now = {file.name: _check_size(folder, file) for file in files}
    if level == "sizes":
        return
    known = {} if level == "full" else read_stamp(folder, version)
    unknown = [file for file in files if known.get(file.name) != now[file.name]]
    if unknown:
        _check_hashes(folder, unknown)
        write_stamp(folder, version, now)


def _check_size(folder: Path, file: StoredFile) -> list[int]:
    path = folder / file.name
    try:
        stamp = stamp_of(path)
    except OSError as error:
        raise _corrupt(path, f"cannot be read ({error.strerror})") from None
    if stamp[0] != file.bytes:
        raise _corrupt(path, f"should have {file.bytes} bytes and has {stamp[0]}")
    return stamp


def _check_hashes(folder: Path, files: Sequence[StoredFile]) -> None:
    # Hashing releases the GIL, so threads use the disk and all processors.
    with ThreadPoolExecutor(min(8, len(files))) as pool:
        for file, sha256 in zip(files, pool.map(_sha256, [folder / file.name for file in files]), strict=True):
            if sha256 != file.sha256:
                raise _corrupt(folder / file.name, f"should have sha256 {file.sha256} and has {sha256}")


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _corrupt(path, f"cannot be read ({error.strerror})") from None


def _corrupt(path: Path, why: str) -> DamagedData:
    return DamagedData(f"{path} {why}", hint="copy the dataset again, or rebuild it with --force")
