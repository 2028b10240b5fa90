"""A dataset's manifest.json, its version, and the stamp that records its last verification.

A dataset is a folder of `tokens-NNNNN.bin` (flat little-endian ids), `documents-NNNNN.bin` (little-endian uint64
pairs: the document's end in this shard, end of text included; how many of its first tokens are a prompt),
`tokenizer.json` and `manifest.json`. The version is a hash of the manifest, which holds a hash of everything else and
nothing about when, where or by whom it was built.

Format 2 is for chat: a document is a sample as the template writes it, without an end of text of its own. Beside each
shard are `spans-NNNNN.bin` (little-endian uint32: start, end, role and whether it is a turn of the model, per message)
and `samples-NNNNN.bin` (per document, see `SAMPLE_TYPE`), and in the folder the chat template with its settings.
Prompts for reinforcement learning have no turn to train on: beside each of their shards are `fields-NNNNN.jsonl` (a
line per document) and `field-ends-NNNNN.bin` (little-endian uint64: where each line ends).
"""

import difflib
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from headway.data.chat_template import SETTINGS_FILE, TEMPLATE_FILE
from headway.errors import DamagedData, DataError

FORMAT = 1
CHAT_FORMAT = 2
MEDIA_FORMAT = 3
"""Images and video: `headway.data.media.manifest`."""
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
STAMP = ".verified.json"

Stamp = dict[str, list[int]]
"""File name to [size, mtime in ns, inode] when its content was last verified."""


class StoredFile(Protocol):
    """What is checked of a file of a dataset, of whatever kind."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def bytes(self) -> int: ...  # noqa: D102
    @property
    def sha256(self) -> str: ...  # noqa: D102


@dataclass(frozen=True)
class DataFile:
    """One file of a dataset; counts are per shard, 0 for the tokenizer."""

    name: str
    bytes: int
    tokens: int
    documents: int
    sha256: str


SAMPLE_TYPE = [("spans_end", "<u8"), ("conversation", "<u8"), ("weight", "<f4"), ("desirable", "<u4")]
"""A document of format 2: where its spans end in the shard's list, the number of its conversation, and its columns."""


@dataclass(frozen=True)
class ChatFacts:
    """What format 2 adds to a dataset."""

    kind: str
    """`chat`, `pairs` (a chosen and a rejected document alternate), `labelled` (an answer and the same prompt with the
    answer of another row alternate) or `prompts`."""
    conversations: int
    trained_tokens: int
    """Tokens of the turns that can be trained on."""
    files: tuple[DataFile, ...]
    """Spans and samples of each shard, alternating; of prompts, fields and where they end."""
    template: DataFile
    settings: DataFile
    """The tokenizer_config.json that names the template's special tokens."""

    @property
    def width(self) -> int:
        """Documents of a sample, which are neighbours."""
        return 1 if self.kind in ("chat", "prompts") else 2

    def shards(self) -> list[tuple[DataFile, DataFile]]:
        """Return (spans file, samples file) of each shard, in order; of prompts, (fields file, file of their ends)."""
        return list(zip(self.files[::2], self.files[1::2], strict=True))


@dataclass(frozen=True)
class DatasetManifest:
    """The counts, hashes and number format of a dataset."""

    dtype: str
    """`uint16` or `uint32`, little-endian."""
    vocab_size: int
    end_of_text: int
    """Id of the token that ends every document."""
    tokens: int
    documents: int
    prompt_tokens: int
    """Tokens of prompts, which are not trained on."""
    files: tuple[DataFile, ...]
    tokenizer: DataFile
    format: int = FORMAT
    chat: ChatFacts | None = None
    """In format 2 only."""

    def canonical(self) -> bytes:
        """Serialize the manifest; equal content gives equal bytes."""
        content = {key: value for key, value in asdict(self).items() if value is not None}
        return json.dumps(content, sort_keys=True, indent=1, ensure_ascii=True).encode() + b"\n"

    @property
    def version(self) -> str:
        """The first 16 hex digits of the manifest's sha256."""
        return hashlib.sha256(self.canonical()).hexdigest()[:16]

    def all_files(self) -> tuple[DataFile, ...]:
        """Shard files, the tokenizer, and those of chat."""
        chat = () if self.chat is None else (*self.chat.files, self.chat.template, self.chat.settings)
        return (*self.files, self.tokenizer, *chat)

    def shards(self) -> list[tuple[DataFile, DataFile]]:
        """Return (tokens file, documents file) of each shard, in order."""
        return list(zip(self.files[::2], self.files[1::2], strict=True))


def read_manifest(folder: Path) -> DatasetManifest:
    """Read and check a folder's manifest.json."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        near = nearby_datasets(folder)
        hint = f"did you mean {' or '.join(near)}?" if near else f"build one: headway data build {folder} 'text/*.txt'"
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):  # which `data build` would refuse
            hint = "name a folder made by headway data build"
        raise DataError(f"{folder} holds no dataset: {MANIFEST} is missing", hint=hint) from None
    except OSError as error:
        raise DamagedData(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    version = content.get("format") if isinstance(content, dict) else None
    if version == MEDIA_FORMAT:
        kind = content.get("kind")
        hint = f'recipes say data.kind = "{kind}"; `headway data show` draws samples'
        raise DataError(f"{folder} holds data of kind {kind}, not text", hint=hint)
    if version not in (FORMAT, CHAT_FORMAT):
        hint = "use the version of Headway that built it"
        raise DataError(
            f"{path} has format {version}; this version of Headway reads {FORMAT} to {MEDIA_FORMAT}", hint=hint
        )
    try:
        manifest = _parse(content)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None
    _check_consistent(manifest, path)
    return manifest


def nearby_datasets(folder: Path) -> list[str]:
    """Return datasets beside a folder whose names are similar."""
    try:
        others = [path.name for path in folder.parent.iterdir() if (path / MANIFEST).is_file()]
    except OSError:
        return []
    return [str(folder.with_name(name)) for name in difflib.get_close_matches(folder.name, others, n=2)]


def _parse(content: dict[str, Any]) -> DatasetManifest:
    values = dict(content)
    values["files"] = tuple(DataFile(**file) for file in values["files"])
    values["tokenizer"] = DataFile(**values["tokenizer"])
    if values["format"] == CHAT_FORMAT:
        chat = dict(values["chat"])
        chat["files"] = tuple(DataFile(**file) for file in chat["files"])
        values["chat"] = ChatFacts(
            **{**chat, "template": DataFile(**chat["template"]), "settings": DataFile(**chat["settings"])}
        )
    return DatasetManifest(**values)


def _check_consistent(manifest: DatasetManifest, path: Path) -> None:
    """Raise DataError if the counts disagree, before any of them is used to map memory."""
    if manifest.dtype not in ("uint16", "uint32") or len(manifest.files) % 2 or not manifest.files:
        raise _damaged(path, "its dtype or list of files is invalid")
    item = 2 if manifest.dtype == "uint16" else 4
    for number, (tokens, documents) in enumerate(manifest.shards()):
        names = (shard_name("tokens", number), shard_name("documents", number))
        if (tokens.name, documents.name) != names or tokens.bytes != tokens.tokens * item:
            raise _damaged(path, f"its entries for shard {number} disagree")
        if documents.bytes != documents.documents * 16 or tokens.tokens < 1:
            raise _damaged(path, f"its entries for shard {number} disagree")
    if manifest.tokenizer.name != TOKENIZER or manifest.tokens != sum(t.tokens for t, _ in manifest.shards()):
        raise _damaged(path, "its totals disagree")
    if manifest.chat is not None:
        _check_chat(manifest, manifest.chat, path)


def _check_chat(manifest: DatasetManifest, chat: ChatFacts, path: Path) -> None:
    if chat.kind not in ("chat", "pairs", "labelled", "prompts") or len(chat.files) != len(manifest.files):
        raise _damaged(path, "its kind or list of chat files is invalid")
    for number, ((spans, samples), (_, documents)) in enumerate(zip(chat.shards(), manifest.shards(), strict=True)):
        if chat.kind == "prompts":
            names = (shard_name("fields", number), shard_name("field-ends", number))
            sizes_agree = samples.bytes == documents.documents * 8 and spans.bytes >= documents.documents
        else:
            names = (shard_name("spans", number), shard_name("samples", number))
            sizes_agree = samples.bytes == documents.documents * 24 and spans.bytes % 16 == 0
        if (spans.name, samples.name) != names or not sizes_agree:
            raise _damaged(path, f"its chat entries for shard {number} disagree")
    if (chat.template.name, chat.settings.name) != (TEMPLATE_FILE, SETTINGS_FILE):
        raise _damaged(path, "its chat template has another name")


def _damaged(path: Path, why: str) -> DamagedData:
    return DamagedData(f"{path} is damaged: {why}", hint="copy the dataset again, or rebuild it with --force")


ShardFile = Literal["tokens", "documents", "spans", "samples", "fields", "field-ends"]


def shard_name(kind: ShardFile, number: int) -> str:
    """Return the name of a file of a shard."""
    return f"{kind}-{number:05d}.{'jsonl' if kind == 'fields' else 'bin'}"


def stamp_of(path: Path) -> list[int]:
    """Return what changes when a file is rewritten: size, modification time, inode."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def read_stamp(folder: Path, version: str) -> Stamp:
    """Return the stamps of files verified before; empty if unknown."""
    try:
        content = json.loads((folder / STAMP).read_bytes())
        return dict(content["files"]) if content["version"] == version else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_stamp(folder: Path, version: str, files: Stamp) -> None:
    """Record what was verified; a read-only folder is simply verified again next time."""
    temporary = folder / f"{STAMP}.{os.getpid()}"
    with suppress(OSError):
        try:
            temporary.write_text(json.dumps({"version": version, "files": files}, indent=1) + "\n")
            temporary.replace(folder / STAMP)
        finally:
            temporary.unlink(missing_ok=True)
