"""Build a dataset: find the source files, load or train a tokenizer, encode in parallel, write shards.

The same text, options and tokenizer give the same version, from any folder and with any number of threads.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
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
from headway.data.origins import ORIGINS, SOURCES, OriginWriter
from headway.data.shards import open_dataset
from headway.data.sources import ReadOptions, SourceFile, TextBlock, find_sources, read_blocks
from headway.data.tiktoken_encoder import EncodersDiffer, TiktokenEncoder, fast_encoder
from headway.data.tokenizer import TextTokenizer, cut_blocks, load_tokenizer, train_tokenizer
from headway.data.writer import ShardWriter, dtype_for, finish_dataset, install_folder, new_folder, write_file
from headway.errors import DamagedData, DataError

Engine = Literal["auto", "tokenizers", "tiktoken"]

TRAIN_BYTES = 256 << 20
"""A tokenizer is trained on about this much text, sampled evenly from all sources."""
PIECE_CHARS = 1 << 18
"""Long documents are encoded in pieces of about this size."""
LONGEST_PIECE_CHARS = 1 << 23
"""No piece is longer, even if a cut changes a token."""
BATCH_CHARS_PER_CPU = 1 << 20
"""Text per batch and processor: the encoder needs some 100 MB of memory for it."""
PROOF_BYTES_PER_TOKEN = 200
"""Encoding this much text takes as long as proving tiktoken equal, per token of the vocabulary."""


@dataclass(frozen=True)
class BuildOptions:
    """Everything besides the sources that determines a dataset's content."""

    exclude: tuple[str, ...] = ()
    """Globs of files to leave out."""
    reading: ReadOptions = field(default_factory=ReadOptions)
    """How files become documents."""
    tokenizer: str | None = None
    """A tokenizer.json, or a folder with one; by default one is trained on the sources."""
    end_of_text: str | None = None
    """A loaded tokenizer's end-of-text token, if it has an unusual name."""
    special_tokens: bool = False
    """Parse a loaded tokenizer's special tokens in the text instead of encoding them as plain text."""
    vocab_size: int = 4096
    """Vocabulary size of a trained tokenizer."""
    shard_tokens: int = 100_000_000
    """Tokens per shard; a longer document has a shard of its own."""

    def __post_init__(self) -> None:
        if self.shard_tokens < 1:
            raise DataError(f"shard_tokens is {self.shard_tokens}", hint="use at least 1")


class BuildProgress(NamedTuple):
    """Progress of a build, in bytes of the sources on disk."""

    stage: str
    """`tokenizer` or `encode`."""
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class BuildResult:
    """The dataset that a build created, or found up to date."""

    path: Path
    manifest: DatasetManifest
    changed: bool
    """False if the folder already held this version."""
    sources: int
    """Number of files read."""
    source_bytes: int
    skipped: int
    """Files, lines and rows that could not be read."""
    engine: str
    """The library that encoded, with its version."""


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
    """Build a dataset in the folder `out`, atomically.

    A folder that already holds this version is left as it is, one with another version is replaced only with `force`,
    and one that is not a dataset is never touched. `progress` gets the bytes done, `on_skip` what could not be read.
    `engine` chooses the library that encodes; both give the same tokens, and if they turn out not to, `on_note` is
    called and `tokenizers` encodes everything again. `remote_encoders` encode in other processes, with `tokenizers`.
    """
    options = options or BuildOptions()
    target = Path(out).resolve()
    refuse_foreign(target)
    files = find_sources(sources, exclude=options.exclude, format=options.reading.format)
    origin = _origin(files, options)
    existing = already_built(target, origin)
    note = on_note or (lambda _: None)
    if existing is not None and (target / ORIGINS).is_file():
        _check_vocabulary(existing.manifest.vocab_size, options, note)
        return existing

    reader = _Reader(files, options.reading, progress or (lambda _: None))
    tokenizer = _tokenizer(reader, options)
    _check_vocabulary(tokenizer.vocab_size, options, note)

    def encode_all(encoders: _OpenEncoders, library: str) -> BuildResult:
        """Encode everything into a new folder, and rename it into place."""
        skipped: list[str] = []

        def skip(message: str) -> None:
            skipped.append(message)
            if on_skip is not None:
                on_skip(message)

        def write(folder: Path) -> DatasetManifest:
            pieces = reader.encoded(tokenizer.separable, encoders, skip)
            return _write(folder, pieces, tokenizer, options.shard_tokens)

        encoded_by = f"{library} {installed_version(library)}"
        manifest, changed = write_new(target, write, origin, skipped, encoded_by, force=force)
        return BuildResult(target, manifest, changed, len(files), reader.total, len(skipped), encoded_by)

    if remote_encoders is not None:
        return encode_all(lambda: remote_encoders(tokenizer), "tokenizers")
    fast = tiktoken_encoder(tokenizer, engine, reader.total, note)
    if fast is not None:
        try:
            return encode_all(_local(fast.encode_batch), "tiktoken")
        except EncodersDiffer as error:
            note(f"{error}; encoding everything again with tokenizers")
    return encode_all(_local(tokenizer.encode_batch), "tokenizers")


def write_new(
    target: Path,
    write: Callable[[Path], DatasetManifest],
    origin: Mapping[str, Any],
    skipped: Sequence[str],
    encoded_by: str,
    *,
    force: bool,
) -> tuple[DatasetManifest, bool]:
    """Write a dataset and its origin into a new folder, and rename it into place.

    Return its manifest, and whether the folder did not hold this version before.
    """
    with new_folder(target) as folder:
        try:
            manifest = write(folder)
            record = {**origin, "skipped": len(skipped), "engine": encoded_by}
            write_file(folder / SOURCES, json.dumps(record, indent=1).encode() + b"\n")
            return manifest, install(folder, target, manifest, force)
        except OSError as error:
            reason = error.strerror or error
            raise DamagedData(f"cannot write {target}: {reason}", hint="is the disk full?") from error


def _local(encode: Encode) -> "_OpenEncoders":
    return lambda: on_threads(encode, BATCH_CHARS_PER_CPU * (os.cpu_count() or 1))


def tiktoken_encoder(
    tokenizer: TextTokenizer, engine: Engine, source_bytes: int, note: Callable[[str], None]
) -> TiktokenEncoder | None:
    """The tokenizer through tiktoken, if it is proven to give the same tokens and the sources are worth the proof."""
    if engine == "tokenizers" or (engine == "auto" and source_bytes < PROOF_BYTES_PER_TOKEN * tokenizer.vocab_size):
        return None
    try:
        return fast_encoder(tokenizer)
    except (NotProven, EncodersDiffer) as error:
        if engine == "tiktoken":
            raise DataError(
                f"tiktoken is not known to give the tokens of this tokenizer: {error}",
                hint="use --tokenizer-engine auto or tokenizers",
            ) from None
        if isinstance(error, EncodersDiffer):
            note(f"{error}; encoding with tokenizers")
        return None


def refuse_foreign(target: Path) -> None:
    """Raise DataError rather than ever replace something that Headway did not create."""
    if target.is_dir():
        if (target / MANIFEST).is_file() or not any(target.iterdir()):
            return
        raise DataError(f"{target} exists and holds no dataset", hint="choose another folder")
    if target.exists():
        raise DataError(f"{target} is a file", hint="choose another folder")


def _origin(files: Sequence[SourceFile], options: BuildOptions) -> dict[str, Any]:
    """Where a dataset came from: stored beside it, not part of its version."""
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
        "files": listed_files(files),
    }


def listed_files(files: Sequence[SourceFile]) -> list[dict[str, Any]]:
    """Return what changes when a source does."""
    return [{"path": str(file.path), "bytes": file.bytes, "mtime_ns": file.path.stat().st_mtime_ns} for file in files]


def already_built(target: Path, origin: dict[str, Any]) -> BuildResult | None:
    """Return the dataset in `target` if it is intact and was built from exactly these files and options."""
    try:
        recorded = json.loads((target / SOURCES).read_bytes())
        skipped = int(recorded.pop("skipped"))
        engine = str(recorded.pop("engine", f"tokenizers {recorded['tokenizers']}"))
        if recorded != origin:
            return None
        manifest = open_dataset(target).manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DataError):
        return None
    total = sum(file["bytes"] for file in origin["files"])
    return BuildResult(target, manifest, False, len(origin["files"]), total, skipped, engine)


def _tokenizer(reader: "_Reader", options: BuildOptions) -> TextTokenizer:
    if options.tokenizer is None:
        return train_tokenizer(reader.sample(TRAIN_BYTES), options.vocab_size)
    return load_tokenizer(options.tokenizer, end_of_text=options.end_of_text, special_tokens=options.special_tokens)


def _check_vocabulary(size: int, options: BuildOptions, note: Callable[[str], None]) -> None:
    """Say so if the text has fewer different pieces than were asked for."""
    if options.tokenizer is None and size < options.vocab_size:
        note(f"the text gives a vocabulary of {size:,}, not the {options.vocab_size:,} of --vocab-size: it has no more")


def _write(
    folder: Path,
    pieces: Iterable[tuple[TextBlock, npt.NDArray[np.uint32]]],
    tokenizer: TextTokenizer,
    shard_tokens: int,
) -> DatasetManifest:
    dtype = dtype_for(tokenizer.vocab_size)
    writer = ShardWriter(folder, dtype=dtype, end_of_text=tokenizer.end_of_text, shard_tokens=shard_tokens)
    origins = OriginWriter(folder)
    try:
        for block, ids in pieces:
            writer.add(ids, prompt=block.prompt)
            if block.last:
                writer.end_document()
                origins.add(block.file, block.record, block.offset)
        origins.close()
        if not writer.documents:
            raise DataError("the sources hold no text", hint="check the globs, the fields and what was skipped")
        return finish_dataset(folder, writer, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.to_bytes())
    finally:
        writer.abandon()
        origins.abandon()


def install(folder: Path, target: Path, manifest: DatasetManifest, force: bool) -> bool:
    """Rename the new dataset into place; return False if the old one is the same and intact."""
    if (target / MANIFEST).is_file() and not force:
        existing = read_manifest(target).version
        if existing != manifest.version:
            raise DataError(
                f"{target} holds version {existing}, this build makes {manifest.version}",
                hint="replace it with --force, or choose another folder",
            )
        with suppress(DataError):
            open_dataset(target, verify="full")
            _add_origins(folder, target)
            return False
    install_folder(folder, target)
    return True


def _add_origins(folder: Path, target: Path) -> None:
    """Give an older dataset of the same version the index of its sources."""
    if (folder / ORIGINS).is_file() and not (target / ORIGINS).is_file():
        (folder / SOURCES).replace(target / SOURCES)
        (folder / ORIGINS).replace(target / ORIGINS)


_OpenEncoders = Callable[[], AbstractContextManager[Encoders]]
RemoteEncoders = Callable[[TextTokenizer], AbstractContextManager[Encoders]]
"""Opens encoders for a tokenizer on other machines."""


class _Reader:
    """All sources in order, as text for training a tokenizer and as encoded pieces."""

    def __init__(
        self, files: Sequence[SourceFile], reading: ReadOptions, progress: Callable[[BuildProgress], None]
    ) -> None:
        self._files = files
        self.total = sum(file.bytes for file in files)
        self._reading = reading
        self._progress = progress

    def sample(self, limit: int) -> Iterator[str]:
        """About `limit` bytes of text, sampled evenly from the blocks of all sources."""
        share = min(1.0, limit / max(self.total, 1))
        due = 1.0 - share
        for block in self._blocks(None):
            due += share
            if due >= 1.0:
                due -= 1.0
                yield block.text
            self._progress(BuildProgress("tokenizer", block.position, self.total))

    def encoded(
        self, separable: Callable[[str, str], bool], encoders: _OpenEncoders, on_skip: Callable[[str], None]
    ) -> Iterator[tuple[TextBlock, npt.NDArray[np.uint32]]]:
        """Every piece of every document with its tokens, in order."""
        pieces = cut_blocks(self._blocks(on_skip), separable, size=PIECE_CHARS, limit=LONGEST_PIECE_CHARS)
        # Batches are encoded while the ones before them are written.
        with encoders() as pool:
            pending = deque[tuple[list[TextBlock], Callable[[], list[npt.NDArray[np.uint32]]]]]()
            for batch in _batches(pieces, pool.batch_chars):
                pending.append((batch, pool.submit([block.text for block in batch])))
                if len(pending) > pool.ahead:
                    yield from self._finish(*pending.popleft())
            while pending:
                yield from self._finish(*pending.popleft())

    def _finish(
        self, batch: list[TextBlock], result: Callable[[], list[npt.NDArray[np.uint32]]]
    ) -> Iterator[tuple[TextBlock, npt.NDArray[np.uint32]]]:
        yield from zip(batch, result(), strict=True)
        self._progress(BuildProgress("encode", batch[-1].position, self.total))

    def _blocks(self, on_skip: Callable[[str], None] | None) -> Iterator[TextBlock]:
        """Blocks of all sources; their positions count from the start of the first source."""
        starts = accumulate((file.bytes for file in self._files), initial=0)
        for number, (source, start) in enumerate(zip(self._files, starts, strict=False)):
            for block in read_blocks(source, self._reading, on_skip):
                yield block._replace(position=start + block.position, file=number)


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
