"""Build a dataset of chats: rows to conversations, samples by the model's chat template, token ids with spans, shards.

Rendering and encoding overlap: while one batch of rows is encoded in the background, the next one is rendered.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version as installed_version
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headway.data.build import (
    SOURCES,
    BuildProgress,
    BuildResult,
    Engine,
    already_built,
    install,
    listed_files,
    refuse_foreign,
    tiktoken_encoder,
)
from headway.data.chat_rows import ROW_KEYS, BadRow, ChatRow, parse_row, with_other_answers
from headway.data.chat_template import (
    SETTINGS_FILE,
    TEMPLATE_FILE,
    ChatTemplate,
    read_chat_template,
    special_token_names,
)
from headway.data.chat_tokens import Encode, EncodedSample, SampleEncoder, end_pattern
from headway.data.chat_writer import ChatWriter
from headway.data.manifest import CHAT_FORMAT, MANIFEST, TOKENIZER, ChatFacts, DatasetManifest, stamp_of, write_stamp
from headway.data.sources import BadRecordError, ReadOptions, SourceFile, find_sources, read_objects
from headway.data.template_layout import LayoutMismatch, Refused, SampleMaker, make_samples
from headway.data.tiktoken_encoder import EncodersDiffer
from headway.data.tokenizer import TextTokenizer, load_tokenizer
from headway.data.writer import dtype_for, new_folder, write_file
from headway.errors import DamagedData, DataError

BATCH_ROWS = 2048


@dataclass(frozen=True)
class ChatOptions:
    """Everything besides the sources that determines a chat dataset's content."""

    model: str
    """Folder with tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    template: str | None = None
    """A template file to use instead of the folder's."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the template, such as enable_thinking."""
    exclude: tuple[str, ...] = ()
    """Globs of files to leave out."""
    reading: ReadOptions = field(default_factory=ReadOptions)
    shard_tokens: int = 100_000_000


class _Model(NamedTuple):
    """What a build needs of a model's folder."""

    template: ChatTemplate
    tokenizer: TextTokenizer
    tokenizer_file: bytes
    settings_file: bytes


def build_chat_dataset(
    out: str | Path,
    sources: Sequence[str | Path],
    options: ChatOptions,
    *,
    force: bool = False,
    engine: Engine = "auto",
    progress: Callable[[BuildProgress], None] | None = None,
    on_skip: Callable[[str], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> BuildResult:
    """Build a dataset of chats or preferences in the folder `out`; see `build_dataset` for the rest."""
    target = Path(out).resolve()
    refuse_foreign(target)
    files = find_sources(sources, exclude=options.exclude, format=options.reading.format)
    model = _read_model(options)
    origin = _origin(files, options, model)
    existing = already_built(target, origin)
    if existing is not None:
        return existing
    note = on_note or (lambda _: None)
    total = sum(file.bytes for file in files)

    def build(encode: Encode, library: str, traced: bool) -> BuildResult:
        skipped: list[str] = []

        def skip(message: str) -> None:
            skipped.append(message)
            if on_skip is not None:
                on_skip(message)

        rows = _rows(files, options.reading, skip, progress or (lambda _: None))
        maker = SampleMaker(model.template, end_pattern(model.tokenizer), traced)
        work = _Build(maker, SampleEncoder(model.tokenizer, encode), options.reading, skip)
        encoded_by = f"{library} {installed_version(library)}"
        with new_folder(target) as folder:
            try:
                manifest = _write(folder, work.units(rows), model, options.shard_tokens)
                record = {**origin, "skipped": len(skipped), "engine": encoded_by}
                write_file(folder / SOURCES, json.dumps(record, indent=1).encode() + b"\n")
                changed = install(folder, target, manifest, force)
            except OSError as error:
                reason = error.strerror or error
                raise DamagedData(f"cannot write {target}: {reason}", hint="is the disk full?") from error
        return BuildResult(target, manifest, changed, len(files), total, len(skipped), encoded_by)

    fast = tiktoken_encoder(model.tokenizer, engine, total, note)
    traced = True
    while True:
        try:
            if fast is not None:
                return build(fast.encode_batch, "tiktoken", traced)
            return build(model.tokenizer.encode_batch, "tokenizers", traced)
        except EncodersDiffer as error:
            note(f"{error}; encoding everything again with tokenizers")
            fast = None
        except LayoutMismatch as error:
            note(f"{error}; rendering every row")
            traced = False


def _read_model(options: ChatOptions) -> _Model:
    folder = Path(options.model)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder", hint="--chat names a folder with tokenizer.json")
    try:
        settings_file = (folder / SETTINGS_FILE).read_bytes()
    except FileNotFoundError:
        settings_file = b"{}\n"
    try:
        settings = json.loads(settings_file)
    except ValueError as error:
        raise DataError(f"{folder / SETTINGS_FILE} is not JSON: {error}") from None
    try:
        text = Path(options.template).read_text() if options.template else read_chat_template(folder, settings)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the chat template: {error}", hint="--template names a jinja file") from None
    if text is None:
        raise DataError(f"{folder} has no chat template", hint="name one with --template FILE.jinja")
    end = special_token_names(settings).get("eos_token")
    try:
        tokenizer = load_tokenizer(folder, end_of_text=end, special_tokens=True)
    except DataError:
        if not (folder / TOKENIZER).is_file():
            raise
        tokenizer = load_tokenizer(folder, end_of_text=0, special_tokens=True)  # the template writes the end of a turn
    template = ChatTemplate(text, special_token_names(settings), dict(options.arguments))
    return _Model(template, tokenizer, (folder / TOKENIZER).read_bytes(), settings_file)


def _origin(files: Sequence[SourceFile], options: ChatOptions, model: _Model) -> dict[str, Any]:
    """Where a dataset came from: stored beside it, not part of its version."""
    hashes = {
        "tokenizer_sha256": hashlib.sha256(model.tokenizer_file).hexdigest(),
        "settings_sha256": hashlib.sha256(model.settings_file).hexdigest(),
        "template_sha256": hashlib.sha256(model.template.text.encode()).hexdigest(),
    }
    settings = (
        asdict(options) | {"model": str(Path(options.model).resolve()), "exclude": list(options.exclude)} | hashes
    )
    return {
        "format": CHAT_FORMAT,
        "options": settings,
        "tokenizers": installed_version("tokenizers"),
        "files": listed_files(files),
    }


class _Row(NamedTuple):
    """A row that has conversations, and where it is."""

    where: str
    row: ChatRow


_Unit = tuple[list[EncodedSample], ChatRow, int]
"""Samples that belong together, their row, and the number of their conversation."""


def _rows(
    files: Sequence[SourceFile],
    reading: ReadOptions,
    skip: Callable[[str], None],
    progress: Callable[[BuildProgress], None],
) -> Iterator[_Row]:
    """Yield the rows of all sources; skip or refuse those without a conversation."""
    total = sum(file.bytes for file in files)
    kind: tuple[str, str] | None = None  # of the first row, and where that is
    starts = accumulate((file.bytes for file in files), initial=0)
    for source, start in zip(files, starts, strict=False):
        for number, (where, record, position) in enumerate(read_objects(source, reading, ROW_KEYS)):
            where = f"{source.path} {where}"
            if number % BATCH_ROWS == 0:
                progress(BuildProgress("encode", start + position, total))
            try:
                if isinstance(record, BadRecordError):
                    raise BadRow(str(record))
                row = parse_row(record)
                if kind is not None and row.kind != kind[0]:
                    raise BadRow(f"{_KINDS[row.kind]}, but {kind[1]} is {_KINDS[kind[0]]}")
            except BadRow as bad:
                _refuse(where, str(bad), reading, skip)
                continue
            kind = kind or (row.kind, where)
            yield _Row(where, row)
    progress(BuildProgress("encode", total, total))


_KINDS = {"chat": "a conversation", "pairs": "a pair of answers", "labelled": "a labelled answer"}


def _refuse(where: str, reason: str, reading: ReadOptions, skip: Callable[[str], None]) -> None:
    if reading.errors != "skip":
        raise DataError(f"{where}: {reason}", hint="correct it, or leave such rows out: --errors skip")
    skip(f"{where}: {reason}")


@dataclass
class _Build:
    """Rows to encoded samples, in order."""

    maker: SampleMaker
    encoder: SampleEncoder
    reading: ReadOptions
    skip: Callable[[str], None]
    conversations: int = 0

    def units(self, rows: Iterator[_Row]) -> Iterator[_Unit]:
        """Yield the samples of all rows."""
        with ThreadPoolExecutor(1) as pool:
            pending = deque[Future[list[tuple[_Row, list[list[EncodedSample]]]]]]()
            before: ChatRow | None = None
            while batch := list(islice(rows, BATCH_ROWS)):
                if batch[0].row.kind == "labelled":
                    answered = with_other_answers([entry.row for entry in batch], before)
                    before = batch[-1].row
                    batch = [entry._replace(row=row) for entry, row in zip(batch, answered, strict=True)]
                rendered = list(self._render(batch))
                pending.append(pool.submit(self._encode, rendered))
                if len(pending) > 1:
                    yield from self._finish(pending.popleft().result())
            while pending:
                yield from self._finish(pending.popleft().result())

    def _render(self, batch: list[_Row]) -> Iterator[tuple[_Row, list[Any]]]:
        """Yield rows with the samples of each of their conversations."""
        results = iter(make_samples(self.maker, [c for _, row in batch for c in row.conversations]))
        for entry in batch:
            samples = list(islice(results, len(entry.row.conversations)))
            refused = next((result for result in samples if isinstance(result, Refused)), None)
            if refused is None:
                yield entry, samples
            else:
                _refuse(entry.where, refused.reason, self.reading, self.skip)

    def _encode(self, rendered: list[tuple[_Row, list[Any]]]) -> list[tuple[_Row, list[list[EncodedSample]]]]:
        """Encode a batch in one call; return rows with the encoded samples of each of their conversations."""
        flat = [sample for _, conversations in rendered for samples in conversations for sample in samples]
        encoded = iter(self.encoder.encode_all(flat))
        return [
            (entry, [[part for _ in samples for part in next(encoded)] for samples in conversations])
            for entry, conversations in rendered
        ]

    def _finish(self, batch: list[tuple[_Row, list[list[EncodedSample]]]]) -> Iterator[_Unit]:
        for entry, conversations in batch:
            reason = _why_unusable(conversations, entry.row.kind)
            if reason is not None:
                _refuse(entry.where, reason, self.reading, self.skip)
                continue
            if len(conversations) == 2:
                yield [conversations[0][0], conversations[1][0]], entry.row, self.conversations
            else:
                for sample in conversations[0]:
                    yield [sample], entry.row, self.conversations
            self.conversations += 1


def _why_unusable(conversations: list[list[EncodedSample]], kind: str) -> str | None:
    """Return why encoded conversations cannot be trained on."""
    for samples in conversations:
        for sample in samples:
            if not any(trained for _, _, _, trained in sample.spans):
                return "an assistant turn has no tokens"
    if len(conversations) == 2:
        if any(len(samples) != 1 for samples in conversations):
            return "the answers have several turns, which this template does not write as one text"
        chosen, rejected = (np.concatenate(samples[0].ids) for samples in conversations)
        if kind == "pairs" and np.array_equal(chosen, rejected):
            return "chosen and rejected have equal tokens"
    return None


def _write(folder: Path, units: Iterator[_Unit], model: _Model, shard_tokens: int) -> DatasetManifest:
    dtype = dtype_for(model.tokenizer.vocab_size)
    writer = ChatWriter(folder, dtype=dtype, shard_tokens=shard_tokens)
    added = set(model.tokenizer.raw.get_added_tokens_decoder())
    end_of_turn: int | None = None
    kind, conversations = "chat", 0
    try:
        for samples, row, conversation in units:
            writer.add(samples, conversation=conversation, weight=row.weight, desirable=row.desirable)
            kind, conversations = row.kind, conversation + 1
            if end_of_turn is None:
                last = _last_trained(samples[0])
                end_of_turn = last if last in added else None
        if not writer.documents:
            raise DataError("the sources hold no conversation", hint="check the files, and what was skipped")
        writer.close()
    finally:
        writer.abandon()
    template = write_file(folder / TEMPLATE_FILE, model.template.text.encode())
    settings = write_file(folder / SETTINGS_FILE, model.settings_file)
    manifest = DatasetManifest(
        dtype=dtype,
        vocab_size=model.tokenizer.vocab_size,
        end_of_text=model.tokenizer.end_of_text if end_of_turn is None else end_of_turn,
        tokens=writer.tokens,
        documents=writer.documents,
        prompt_tokens=writer.prompt_tokens,
        files=tuple(writer.files),
        tokenizer=write_file(folder / TOKENIZER, model.tokenizer_file),
        format=CHAT_FORMAT,
        chat=ChatFacts(kind, conversations, writer.trained_tokens, tuple(writer.chat_files), template, settings),
    )
    write_file(folder / MANIFEST, manifest.canonical())
    write_stamp(folder, manifest.version, {file.name: stamp_of(folder / file.name) for file in manifest.all_files()})
    return manifest


def _last_trained(sample: EncodedSample) -> int:
    end = max(end for _, end, _, trained in sample.spans if trained)
    return int(np.concatenate(sample.ids)[end - 1])
