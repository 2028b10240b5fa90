"""From sources to a data set: find the files, get a tokenizer, encode in parallel, write shards.

The same text, options and tokenizer give the same version, from any folder and with any number of threads.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version as installed_version
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from headway.data.encoders import Encode, Encoders, on_threads
from headway.data.manifest import MANIFEST, TOKENIZER, DatasetManifest, read_manifest
from headway.data.merges import NotProven
from headway.data.shards import open_dataset
from headway.data.sources import ReadOptions, SourceFile, TextBlock, find_sources, read_blocks
from headway.data.tiktoken_encoder import EncodersDiffer, TiktokenEncoder, fast_encoder
from headway.data.tokenizer import TextTokenizer, cut_blocks, load_tokenizer, train_tokenizer
from headway.data.writer import ShardWriter, dtype_for, finish_dataset, install_folder, new_folder, write_file
from headway.errors import DataError

__all__ = ["BuildOptions", "BuildProgress", "BuildResult", "Engine", "RemoteEncoders", "build_dataset"]

Engine = Literal["auto", "tokenizers", "tiktoken"]

SOURCES = "sources.json"
TRAIN_BYTES = 256 << 20
"""A tokenizer is trained on about this much of the sources, taken evenly from all of them."""
PIECE_CHARS = 1 << 18
"""Long documents are encoded in pieces of about this size."""
LONGEST_PIECE_CHARS = 1 << 23
"""No piece is longer, even where a cut changes a token."""
BATCH_CHARS_PER_CPU = 1 << 20
"""Text given to the encoder at once: some 100 MB of its memory for each processor."""
PROOF_BYTES_PER_TOKEN = 200
"""Encoding so much of a source takes as long as it takes to prove tiktoken equal, for each token of the vocabulary."""


@dataclass(frozen=True)
class BuildOptions:
    """Everything that decides what is in a data set, beside the sources."""

    exclude: tuple[str, ...] = ()
    """Globs of files to leave out."""
    reading: ReadOptions = field(default_factory=ReadOptions)
    """How files become documents."""
    tokenizer: str | None = None
    """A tokenizer.json, or a folder holding one; by default one is trained on the sources."""
    end_of_text: str | None = None
    """Name of a loaded tokenizer's end-of-text token, where it is not a usual one."""
    special_tokens: bool = False
    """Read a loaded tokenizer's special tokens from the text instead of as plain letters."""
    vocab_size: int = 4096
    """Size of a trained tokenizer."""
    shard_tokens: int = 100_000_000
    """Tokens in one shard; a longer document has a shard of its own."""

    def __post_init__(self) -> None:
        if self.shard_tokens < 1:
            raise DataError(f"shard_tokens is {self.shard_tokens}", hint="use at least 1")


class BuildProgress(NamedTuple):
    """How far a build is, in bytes of the sources on disk."""

    stage: str
    """`tokenizer` or `encode`."""
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class BuildResult:
    """What a build made, or found already made."""

    path: Path
    manifest: DatasetManifest
    changed: bool
    """False when the folder already held this version."""
    sources: int
    """Number of files read."""
    source_bytes: int
    skipped: int
    """Files, lines and rows left out because they could not be read."""
    engine: str
    """The library that encoded, and its version."""


def build_dataset(
    out: str | Path,
    sources: Sequence[str | Path],
    options: BuildOptions | None = None,
    *,
    force: bool = False,
    engine: Engine = "auto",
    remote_encoders: "RemoteEncoders | None" = None,
    progress: Callable[[BuildProgress], None] | None = None,
    on_skip: Callable[[str], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> BuildResult:
    """Build the folder `out`: all of it or nothing.

    A folder that already holds this very version is left as it is, one with another version is only
    replaced with `force`, and one that is no data set is never touched. `progress` is told of bytes done,
    `on_skip` of what could not be read. `engine` chooses the library that encodes; they give the same tokens, and
    where they turn out not to, `on_note` is told and `tokenizers` does it all again. `elsewhere` opens encoders that
    are not in this process; they use `tokenizers`.
    """
    options = options or BuildOptions()
    target = Path(out).resolve()
    _refuse_foreign(target)
    files = find_sources(sources, exclude=options.exclude, format=options.reading.format)
    origin = _origin(files, options)
    made = _already_built(target, origin)
    if made is not None:
        return made

    reader = _Reader(files, options.reading, progress or (lambda _: None))
    encoder = _tokenizer(reader, options)
    task = _Task(target, reader, encoder, options, origin, force, on_skip or (lambda _: None))
    note = on_note or (lambda _: None)
    slow = f"tokenizers {installed_version('tokenizers')}"
    if remote_encoders is not None:
        return _make(task, lambda: remote_encoders(encoder), slow)
    fast = _fast(encoder, engine, reader.total, note)
    if fast is None:
        return _make(task, _here(encoder.encode_batch), slow)
    try:
        return _make(task, _here(fast.encode_batch), f"tiktoken {installed_version('tiktoken')}")
    except EncodersDiffer as error:
        note(f"{error}; tokenizers encodes all of it again")
        return _make(task, _here(encoder.encode_batch), slow)


def _here(encode: Encode) -> "_Open":
    return lambda: on_threads(encode, BATCH_CHARS_PER_CPU * (os.cpu_count() or 1))


def _fast(
    encoder: TextTokenizer, engine: Engine, source_bytes: int, note: Callable[[str], None]
) -> TiktokenEncoder | None:
    """The encoder's tokens through tiktoken, where they are known to be the same and it is worth to find out."""
    if engine == "tokenizers" or (engine == "auto" and source_bytes < PROOF_BYTES_PER_TOKEN * encoder.vocab_size):
        return None
    try:
        return fast_encoder(encoder)
    except (NotProven, EncodersDiffer) as error:
        if engine == "tiktoken":
            raise DataError(
                f"tiktoken is not known to give the tokens of this tokenizer: {error}",
                hint="--tokenizer-engine auto or tokenizers encodes it",
            ) from None
        if isinstance(error, EncodersDiffer):
            note(f"{error}; tokenizers encodes")
        return None


class _Task(NamedTuple):
    """What is to be made, whichever library encodes."""

    target: Path
    reader: "_Reader"
    encoder: TextTokenizer
    options: BuildOptions
    origin: dict[str, Any]
    force: bool
    on_skip: Callable[[str], None]


def _make(task: _Task, encoders: "_Open", engine: str) -> BuildResult:
    """Encode everything into a new folder, and put it in place."""
    target, reader, skipped = task.target, task.reader, list[str]()

    def note(sentence: str) -> None:
        skipped.append(sentence)
        task.on_skip(sentence)

    with new_folder(target) as folder:
        try:
            pieces = reader.encoded(task.encoder.separable, encoders, note)
            manifest = _write(folder, pieces, task.encoder, task.options.shard_tokens)
            origin = {**task.origin, "skipped": len(skipped), "engine": engine}
            write_file(folder / SOURCES, json.dumps(origin, indent=1).encode() + b"\n")
            changed = _settle(folder, target, manifest, task.force)
        except OSError as error:
            raise DataError(f"cannot write {target}: {error.strerror or error}", hint="is the disk full?") from error
    return BuildResult(target, manifest, changed, len(reader.files), reader.total, len(skipped), engine)


def _refuse_foreign(target: Path) -> None:
    """Whatever is asked, never replace something that Headway did not make."""
    if target.is_dir():
        if (target / MANIFEST).is_file() or not any(target.iterdir()):
            return
        raise DataError(f"{target} exists and holds no data set", hint="choose another folder")
    if target.exists():
        raise DataError(f"{target} is a file", hint="choose another folder")


def _origin(files: Sequence[SourceFile], options: BuildOptions) -> dict[str, Any]:
    """Where a data set came from: kept beside it, no part of its version."""
    settings = asdict(options)
    if options.tokenizer is not None:
        path = Path(options.tokenizer)
        path = path / TOKENIZER if path.is_dir() else path
        settings["tokenizer"] = str(path.resolve())
        settings["tokenizer_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    settings["exclude"] = list(options.exclude)
    return {
        "format": 1,
        "options": settings,
        "tokenizers": installed_version("tokenizers"),
        "files": [
            {"path": str(one.path), "bytes": one.bytes, "mtime_ns": one.path.stat().st_mtime_ns} for one in files
        ],
    }


def _already_built(target: Path, origin: dict[str, Any]) -> BuildResult | None:
    """The data set in `target`, if it is sound and was made from exactly these files and options."""
    try:
        recorded = json.loads((target / SOURCES).read_bytes())
        skipped = int(recorded.pop("skipped"))
        engine = str(recorded.pop("engine", f"tokenizers {recorded['tokenizers']}"))
        if recorded != origin:
            return None
        manifest = open_dataset(target).manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DataError):
        return None
    total = sum(one["bytes"] for one in origin["files"])
    return BuildResult(target, manifest, False, len(origin["files"]), total, skipped, engine)


def _tokenizer(reader: "_Reader", options: BuildOptions) -> TextTokenizer:
    if options.tokenizer is None:
        return train_tokenizer(reader.sample(TRAIN_BYTES), options.vocab_size)
    return load_tokenizer(options.tokenizer, end_of_text=options.end_of_text, special_tokens=options.special_tokens)


def _write(
    folder: Path,
    pieces: Iterable[tuple[TextBlock, npt.NDArray[np.uint32]]],
    encoder: TextTokenizer,
    shard_tokens: int,
) -> DatasetManifest:
    dtype = dtype_for(encoder.vocab_size)
    writer = ShardWriter(folder, dtype=dtype, end_of_text=encoder.end_of_text, shard_tokens=shard_tokens)
    try:
        for block, ids in pieces:
            writer.add(ids, prompt=block.prompt)
            if block.last:
                writer.end_document()
        if not writer.documents:
            raise DataError("the sources hold no text", hint="check the globs, the fields and what was skipped")
        return finish_dataset(folder, writer, vocab_size=encoder.vocab_size, tokenizer=encoder.to_bytes())
    finally:
        writer.abandon()


def _settle(folder: Path, target: Path, manifest: DatasetManifest, force: bool) -> bool:
    """Put the new data set in place; False when the old one is the same and sound."""
    if (target / MANIFEST).is_file() and not force:
        found = read_manifest(target).version
        if found != manifest.version:
            raise DataError(
                f"{target} holds version {found}, this build makes {manifest.version}",
                hint="--force replaces it; or choose another folder",
            )
        if _is_sound(target):
            return False
    install_folder(folder, target)
    return True


def _is_sound(target: Path) -> bool:
    try:
        open_dataset(target, verify="full")
    except DataError:
        return False
    return True


_Open = Callable[[], AbstractContextManager[Encoders]]
RemoteEncoders = Callable[[TextTokenizer], AbstractContextManager[Encoders]]
"""Opens encoders for a tokenizer, on other machines."""


class _Reader:
    """All sources in order, as text for training a tokenizer and as encoded pieces."""

    def __init__(
        self, files: Sequence[SourceFile], reading: ReadOptions, progress: Callable[[BuildProgress], None]
    ) -> None:
        self.files = files
        self.total = sum(one.bytes for one in files)
        self._reading = reading
        self._progress = progress

    def sample(self, limit: int) -> Iterator[str]:
        """Text of about `limit` bytes in all, spread evenly over the blocks of all sources."""
        share = min(1.0, limit / max(self.total, 1))
        due = 1.0 - share
        for block in self._blocks(None):
            due += share
            if due >= 1.0:
                due -= 1.0
                yield block.text
            self._progress(BuildProgress("tokenizer", block.position, self.total))

    def encoded(
        self, separable: Callable[[str, str], bool], encoders: _Open, on_skip: Callable[[str], None]
    ) -> Iterator[tuple[TextBlock, npt.NDArray[np.uint32]]]:
        """Every piece of every document with its tokens, in order."""
        pieces = cut_blocks(self._blocks(on_skip), separable, size=PIECE_CHARS, limit=LONGEST_PIECE_CHARS)
        # Some batches are encoded while the one before them is written here.
        with encoders() as pool:
            waiting = deque[tuple[list[TextBlock], Callable[[], list[npt.NDArray[np.uint32]]]]]()
            for batch in _batches(pieces, pool.batch_chars):
                waiting.append((batch, pool.submit([block.text for block in batch])))
                if len(waiting) > pool.ahead:
                    yield from self._finish(*waiting.popleft())
            while waiting:
                yield from self._finish(*waiting.popleft())

    def _finish(
        self, batch: list[TextBlock], result: Callable[[], list[npt.NDArray[np.uint32]]]
    ) -> Iterator[tuple[TextBlock, npt.NDArray[np.uint32]]]:
        yield from zip(batch, result(), strict=True)
        self._progress(BuildProgress("encode", batch[-1].position, self.total))

    def _blocks(self, on_skip: Callable[[str], None] | None) -> Iterator[TextBlock]:
        """Blocks of all sources; their position counts from the first source's start."""
        starts = accumulate((one.bytes for one in self.files), initial=0)
        for source, start in zip(self.files, starts, strict=False):
            for block in read_blocks(source, self._reading, on_skip):
                yield block._replace(position=start + block.position)


def _batches(blocks: Iterable[TextBlock], chars: int) -> Iterator[list[TextBlock]]:
    batch: list[TextBlock] = []
    size = 0
    for block in blocks:
        batch.append(block)
        size += len(block.text)
        if size >= chars:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
