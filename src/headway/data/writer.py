"""Write a dataset's shards, and create its folder atomically."""

import fcntl
import glob
import hashlib
import os
import secrets
import shutil
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from headway.data.manifest import MANIFEST, TOKENIZER, DataFile, DatasetManifest, shard_name, stamp_of, write_stamp
from headway.errors import DamagedData
from headway.track import make_durable


def dtype_for(vocab_size: int) -> str:
    """Return the smaller of the two id types that fits the vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class HashedFile:
    """A file that tracks its size and sha256."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self._file: IO[bytes] = path.open("xb", buffering=1 << 20)
        self._hash = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        """Append bytes."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._hash.update(view)
        self.bytes += len(view)

    def close(self, tokens: int = 0, documents: int = 0) -> DataFile:
        """Finish the file durably; return its entry in a manifest."""
        """Finish the file durably; return its entry in a manifest."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return DataFile(self.path.name, self.bytes, tokens, documents, self._hash.hexdigest())

    def abandon(self) -> None:
        """Close the file without finishing it."""
        self._file.close()


class ShardWriter:
    """Writes consecutive documents into shards, each document followed by the end of text.

    A document is never split between shards: one that would overfill a shard starts the next, and one longer than
    `shard_tokens` has a longer shard of its own.
    """

    def __init__(self, folder: Path, *, dtype: str, end_of_text: int, shard_tokens: int) -> None:
        self.dtype = dtype
        self.end_of_text = end_of_text
        self._folder = folder
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._end = np.array([end_of_text], dtype=self._dtype)
        self._shard_tokens = shard_tokens
        self._buffered: list[npt.NDArray[Any]] = []  # the current document, until its shard is known
        self._document = self._prompt = 0  # tokens of the current document, and of its prompt
        self._file: HashedFile | None = None
        self._written = 0  # tokens in the current shard's file
        self._documents = array("Q")  # (end, prompt) of each document of the current shard, flat
        self.files: list[DataFile] = []
        self.tokens = self.documents = self.prompt_tokens = 0

    def add(self, ids: npt.NDArray[Any], *, prompt: bool = False) -> None:
        """Add tokens to the current document, those of a prompt first."""
        assert not (prompt and self._prompt != self._document), "a prompt comes before the text"
        self._buffered.append(ids.astype(self._dtype))
        self._document += len(ids)
        self._prompt += len(ids) if prompt else 0
        if self._document > self._shard_tokens:
            self._flush()

    def end_document(self) -> None:
        """Close the current document with the end of text."""
        self._buffered.append(self._end)
        self._document += 1
        self._flush()
        self._documents.extend((self._written, self._prompt))
        self.tokens += self._document
        self.documents += 1
        self.prompt_tokens += self._prompt
        self._document = self._prompt = 0

    def close(self) -> tuple[DataFile, ...]:
        """Finish the last shard; return the files written, in order."""
        assert self._document == 0, "the last document was not ended"
        self._close_shard()
        return tuple(self.files)

    def abandon(self) -> None:
        """Close the open file without finishing it."""
        if self._file is not None:
            self._file.abandon()

    def _flush(self) -> None:
        """Write the buffered part of the current document, to a new shard if it does not fit in this one."""
        buffered = sum(map(len, self._buffered))
        # A document that is written in parts started its own shard, so no document precedes it there.
        if self._documents and self._written + buffered > self._shard_tokens:
            self._close_shard()
        if self._file is None:
            self._file = HashedFile(self._folder / shard_name("tokens", len(self.files) // 2))
        for ids in self._buffered:
            self._file.write(ids.data)
        self._written += buffered
        self._buffered = []

    def _close_shard(self) -> None:
        if self._file is None:
            return
        counts = {"tokens": self._written, "documents": len(self._documents) // 2}
        number = len(self.files) // 2
        self.files.append(self._file.close(**counts))
        table = HashedFile(self._folder / shard_name("documents", number))
        table.write(np.array(self._documents, dtype="<u8").data)
        self.files.append(table.close(**counts))
        self._file, self._written, self._documents = None, 0, array("Q")


def finish_dataset(folder: Path, writer: ShardWriter, *, vocab_size: int, tokenizer: bytes) -> DatasetManifest:
    """Close the shards and write the tokenizer, the manifest and the stamp beside them."""
    files = writer.close()
    manifest = DatasetManifest(
        dtype=writer.dtype,
        vocab_size=vocab_size,
        end_of_text=writer.end_of_text,
        tokens=writer.tokens,
        documents=writer.documents,
        prompt_tokens=writer.prompt_tokens,
        files=files,
        tokenizer=write_file(folder / TOKENIZER, tokenizer),
    )
    write_file(folder / MANIFEST, manifest.canonical())
    write_stamp(folder, manifest.version, {file.name: stamp_of(folder / file.name) for file in manifest.all_files()})
    return manifest


def write_file(path: Path, content: bytes) -> DataFile:
    """Write a small file durably."""
    file = HashedFile(path)
    file.write(content)
    return file.close()


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Create a folder beside `out` to write into; it is removed afterwards unless it was renamed.

    A killed build leaves its folder behind, and the next build for the same path removes it: a lock tells whether a
    folder's builder is alive.
    """
    folder = out.parent / f".{out.name}.{os.getpid()}-{secrets.token_hex(4)}.building"
    lock = None
    try:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(out)
            folder.mkdir()
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise DamagedData(f"cannot write in {out.parent}: {error.strerror}", hint="choose another folder") from None
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove_abandoned(out: Path) -> None:
    for folder in out.parent.glob(f".{glob.escape(out.name)}.*.building*"):
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def install_folder(folder: Path, out: Path) -> None:
    """Rename a finished folder into place, durably; an older one is removed only after that."""
    make_durable(folder)
    old = folder.with_name(folder.name + ".old")
    replaced = out.exists()
    if replaced:
        out.rename(old)
    try:
        folder.rename(out)
    except BaseException:
        if replaced:
            old.rename(out)
        raise
    make_durable(out.parent)
    if replaced:
        shutil.rmtree(old, ignore_errors=True)
