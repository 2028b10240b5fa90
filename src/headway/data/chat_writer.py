"""Write the shards of a chat dataset (format 2)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.data.chat_tokens import EncodedSample
from headway.data.manifest import SAMPLE_TYPE, DataFile, ShardFile, shard_name
from headway.data.writer import HashedFile

_BUFFERED_TOKENS = 1 << 20
_BUFFERED_LINES = 1 << 12


class ChatWriter:
    """Writes samples one after another, or prompts; samples that are added together stay in one shard."""

    def __init__(self, folder: Path, *, dtype: str, shard_tokens: int) -> None:
        self._folder, self._dtype = folder, np.dtype(dtype).newbyteorder("<")
        self._shard_tokens = shard_tokens
        self._file: HashedFile | None = None
        self._buffer: list[npt.NDArray[Any]] = []
        self._buffered = self._written = 0  # tokens
        self._documents: list[tuple[int, int]] = []
        self._spans: list[tuple[int, int, int, bool]] = []
        self._samples: list[tuple[int, int, float, bool]] = []
        self._lines: list[bytes] = []
        self._fields: HashedFile | None = None
        self._field_ends: list[int] = []
        self.files: list[DataFile] = []
        self.chat_files: list[DataFile] = []
        self.tokens = self.documents = self.prompt_tokens = self.trained_tokens = 0

    def add(self, unit: Sequence[EncodedSample], *, conversation: int, weight: float, desirable: bool) -> None:
        """Add a sample, or the two of a pair."""
        self._make_room(sum(sample.length for sample in unit))
        for sample in unit:
            self._spans += sample.spans
            self._add(sample, prompt=next(start for start, _, _, trained in sample.spans if trained))
            self._samples.append((len(self._spans), conversation, weight, desirable))
            self.trained_tokens += sum(end - start for start, end, _, trained in sample.spans if trained)
        if self._buffered > _BUFFERED_TOKENS:
            self._flush()

    def add_prompt(self, sample: EncodedSample, line: str) -> None:
        """Add a prompt, and what is stored beside its tokens: a line of JSON."""
        self._make_room(sample.length)
        self._add(sample, prompt=sample.length)
        self._lines.append(line.encode() + b"\n")
        self._field_ends.append((self._field_ends[-1] if self._field_ends else 0) + len(self._lines[-1]))
        if self._buffered > _BUFFERED_TOKENS or len(self._lines) > _BUFFERED_LINES:
            self._flush()

    def _make_room(self, length: int) -> None:
        if self._documents and self._written + self._buffered + length > self._shard_tokens:
            self._close_shard()

    def _add(self, sample: EncodedSample, prompt: int) -> None:
        self._buffer += sample.ids
        self._buffered += sample.length
        self._documents.append((self._written + self._buffered, prompt))
        self.tokens += sample.length
        self.documents += 1
        self.prompt_tokens += prompt

    def close(self) -> None:
        """Finish the last shard."""
        self._close_shard()

    def abandon(self) -> None:
        """Close the open files without finishing them."""
        for file in (self._file, self._fields):
            if file is not None:
                file.abandon()

    def _flush(self) -> None:
        if self._file is None:
            self._file = HashedFile(self._folder / shard_name("tokens", len(self.files) // 2))
        if self._buffer:
            self._file.write(np.concatenate(self._buffer).astype(self._dtype).data)
        if self._lines:
            self._fields = self._fields or HashedFile(self._folder / shard_name("fields", len(self.files) // 2))
            self._fields.write(b"".join(self._lines))
        self._written += self._buffered
        self._buffer, self._buffered, self._lines = [], 0, []

    def _close_shard(self) -> None:
        if not self._documents:
            return
        self._flush()
        assert self._file is not None
        number = len(self.files) // 2
        counts = {"tokens": self._written, "documents": len(self._documents)}
        self.files.append(self._file.close(**counts))
        self.files.append(self._table("documents", number, np.array(self._documents, dtype="<u8"), counts))
        if self._fields is not None:
            self.chat_files.append(self._fields.close(**counts))
            self.chat_files.append(self._table("field-ends", number, np.array(self._field_ends, dtype="<u8"), counts))
        else:
            self.chat_files.append(self._table("spans", number, np.array(self._spans, dtype="<u4"), counts))
            self.chat_files.append(self._table("samples", number, np.array(self._samples, dtype=SAMPLE_TYPE), counts))
        self._file, self._fields, self._written = None, None, 0
        self._documents, self._spans, self._samples, self._field_ends = [], [], [], []

    def _table(self, kind: ShardFile, number: int, table: npt.NDArray[Any], counts: dict[str, int]) -> DataFile:
        file = HashedFile(self._folder / shard_name(kind, number))
        file.write(table.tobytes())
        return file.close(**counts)
