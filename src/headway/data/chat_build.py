"""Build a dataset of chats: rows to conversations, samples by the model's chat template, token ids with spans, shards.

Rendering holds Python's lock, so large sources are rendered and encoded in several processes; this one writes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headway.data.build import (
    BuildProgress,
    BuildResult,
    Engine,
    already_built,
    listed_files,
    refuse_foreign,
    tiktoken_encoder,
    write_new,
)
from headway.data.chat_batches import EncodedBatch, Refusal
from headway.data.chat_processes import ChatJob, encoded_batches, in_processes
from headway.data.chat_rows import Conversation
from headway.data.chat_template import (
    SETTINGS_FILE,
    TEMPLATE_FILE,
    ChatTemplate,
    check_template,
    read_chat_template,
    special_token_names,
)
from headway.data.chat_tokens import EncodedSample, SampleEncoder, end_pattern
from headway.data.chat_writer import ChatWriter
from headway.data.manifest import CHAT_FORMAT, MANIFEST, TOKENIZER, ChatFacts, DatasetManifest, stamp_of, write_stamp
from headway.data.sources import ReadOptions, SourceFile, find_sources
from headway.data.template_layout import LayoutMismatch, Refused, SampleMaker, make_samples
from headway.data.tiktoken_encoder import EncodersDiffer
from headway.data.tokenizer import TextTokenizer, load_tokenizer
from headway.data.writer import dtype_for, write_file
from headway.errors import DataError

PROCESS_BYTES = 16 << 20
"""Smaller sources are not worth starting processes."""


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
    prompts: bool = False
    """The rows are prompts for reinforcement learning; see `headway.data.prompt_rows`."""


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
    processes: int | None = None,
    progress: Callable[[BuildProgress], None] | None = None,
    on_skip: Callable[[str], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> BuildResult:
    """Build a dataset of chats, preferences or prompts in the folder `out`; see `build_dataset` for the rest.

    Large sources are rendered and encoded in as many processes as there are cores, or in `processes`.
    """
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

    def build(batches: AbstractContextManager[Iterator[EncodedBatch]], library: str) -> BuildResult:
        skipped: list[str] = []

        def refuse(refusal: Refusal) -> None:
            message = f"{refusal.where}: {refusal.reason}"
            if options.reading.errors != "skip":
                raise DataError(message, hint="correct it, or leave such rows out: --errors skip")
            skipped.append(message)
            if on_skip is not None:
                on_skip(message)

        def used(entries: Iterator[EncodedBatch]) -> Iterator[EncodedBatch]:
            for batch in entries:
                for refusal in batch.refused:
                    refuse(refusal)
                if progress is not None:
                    progress(BuildProgress("encode", batch.position, total))
                yield batch

        encoded_by = f"{library} {installed_version(library)}"
        with batches as entries:
            rows = used(entries)
            manifest, changed = write_new(
                target,
                lambda folder: _write(folder, rows, model, options, note),
                origin,
                skipped,
                encoded_by,
                force=force,
            )
        return BuildResult(target, manifest, changed, len(files), total, len(skipped), encoded_by)

    fast = tiktoken_encoder(model.tokenizer, engine, total, note)
    job = ChatJob(
        options.model, model.template, tuple(files), options.reading, fast is not None, prompts=options.prompts
    )
    while True:
        encode = model.tokenizer.encode_batch if fast is None else fast.encode_batch
        library = "tokenizers" if fast is None else "tiktoken"
        try:
            if total < PROCESS_BYTES or processes == 1:
                return build(nullcontext(encoded_batches(job, model.tokenizer, encode)), library)
            return build(in_processes(job, processes or os.cpu_count() or 1), library)
        except EncodersDiffer as error:
            note(f"{error}; encoding everything again with tokenizers")
            fast, job = None, replace(job, fast=False)
        except LayoutMismatch as error:
            note(f"{error}; rendering every row")
            job = replace(job, traced=False)


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
    own = folder / TEMPLATE_FILE
    check_template(template, Path(options.template or (own if own.is_file() else folder / SETTINGS_FILE)))
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
    if not options.prompts:
        del settings["prompts"]  # which older datasets do not record
    return {
        "format": CHAT_FORMAT,
        "options": settings,
        "tokenizers": installed_version("tokenizers"),
        "files": listed_files(files),
    }


def _write(
    folder: Path,
    batches: Iterator[EncodedBatch],
    model: _Model,
    options: ChatOptions,
    note: Callable[[str], None],
) -> DatasetManifest:
    dtype = dtype_for(model.tokenizer.vocab_size)
    writer = ChatWriter(folder, dtype=dtype, shard_tokens=options.shard_tokens)
    try:
        kind, conversations, end_of_turn = (_add_prompts if options.prompts else _add_chats)(
            writer, batches, model, note
        )
        if not writer.documents:
            what = "prompt" if options.prompts else "conversation"
            raise DataError(f"the sources hold no {what}", hint="check the files, and what was skipped")
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


class _Added(NamedTuple):
    """What was written."""

    kind: str
    conversations: int
    end_of_turn: int | None


def _add_chats(writer: ChatWriter, batches: Iterator[EncodedBatch], model: _Model, _: object) -> _Added:
    """Write the samples of all conversations."""
    added = set(model.tokenizer.raw.get_added_tokens_decoder())
    end_of_turn: int | None = None
    kind, conversations = "chat", 0
    for batch in batches:
        for unit in batch.units:
            conversations += unit.first
            writer.add(unit.samples, conversation=conversations - 1, weight=unit.weight, desirable=unit.desirable)
            if end_of_turn is None:
                last = _last_trained(unit.samples[0])
                end_of_turn = last if last in added else None
        if batch.units:
            kind = batch.kind
    return _Added(kind, conversations, end_of_turn)


def _add_prompts(
    writer: ChatWriter, batches: Iterator[EncodedBatch], model: _Model, note: Callable[[str], None]
) -> _Added:
    """Write all prompts; say how many repeat another."""
    known: set[bytes] = set()
    for batch in batches:
        for unit in batch.units:
            (sample,) = unit.samples
            writer.add_prompt(sample, unit.line)
            ids = np.concatenate(sample.ids).astype("<u4")
            known.add(hashlib.blake2b(ids.tobytes(), digest_size=12).digest())
    repeated = writer.documents - len(known)
    if repeated:
        note(f"prompts that repeat an earlier one: {repeated:,} of {writer.documents:,}")
    return _Added("prompts", writer.documents, _end_of_turn(model))


def _end_of_turn(model: _Model) -> int | None:
    """Return the token that ends a turn of the model, from a conversation of one; None if the template writes none."""
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
    maker = SampleMaker(model.template, end_pattern(model.tokenizer), traced=False)
    (samples,) = make_samples(maker, [Conversation(turns)])
    if isinstance(samples, Refused):
        return None
    encoder = SampleEncoder(model.tokenizer, model.tokenizer.encode_batch)
    last = _last_trained(encoder.encode_all(samples)[-1][-1])
    return last if last in model.tokenizer.raw.get_added_tokens_decoder() else None


def _last_trained(sample: EncodedSample) -> int:
    end = max(end for _, end, _, trained in sample.spans if trained)
    return int(np.concatenate(sample.ids)[end - 1])
