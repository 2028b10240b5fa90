"""What a data set says about itself: manifest.json, its version, and the stamp that says it was checked.

A data set is a folder of `tokens-NNNNN.bin` (flat little-endian ids), `documents-NNNNN.bin` (little-endian
uint64 pairs: the document's end in this shard, end of text included; how many of its first tokens are a
prompt), `tokenizer.json` and `manifest.json`. The version is a hash of the manifest, which holds a hash of
everything else and nothing about when, where or by whom it was made.
"""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from headway.errors import DataError

__all__ = ["FORMAT", "DataFile", "DatasetManifest", "read_manifest", "read_stamp", "stamp_of", "write_stamp"]

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
STAMP = ".verified.json"

Kind = Literal["tokens", "documents", "tokenizer"]
Stamp = dict[str, list[int]]
"""File name to [size, mtime in ns, inode] when its content was last known to be right."""


@dataclass(frozen=True)
class DataFile:
    """One file of a data set; counts are those of its shard, 0 for the tokenizer."""

    name: str
    bytes: int
    tokens: int
    documents: int
    sha256: str

    @property
    def kind(self) -> str:
        """`tokens`, `documents` or `tokenizer`."""
        return self.name.split("-")[0].split(".")[0]


@dataclass(frozen=True)
class DatasetManifest:
    """The counts, hashes and number format of a data set."""

    dtype: str
    """`uint16` or `uint32`, little-endian."""
    vocab_size: int
    end_of_text: int
    """The id that follows every document."""
    tokens: int
    documents: int
    prompt_tokens: int
    """Tokens not trained on; 0 when no document has a prompt."""
    files: tuple[DataFile, ...]
    tokenizer: DataFile
    format: int = FORMAT

    def canonical(self) -> bytes:
        """The manifest as bytes, the same for the same content."""
        return json.dumps(asdict(self), sort_keys=True, indent=1, ensure_ascii=True).encode() + b"\n"

    @property
    def version(self) -> str:
        """The first 16 hex digits of the manifest's sha256."""
        return hashlib.sha256(self.canonical()).hexdigest()[:16]

    def all_files(self) -> tuple[DataFile, ...]:
        """Shard files and the tokenizer."""
        return (*self.files, self.tokenizer)

    def shards(self) -> list[tuple[DataFile, DataFile]]:
        """(tokens file, documents file) of each shard, in order."""
        return list(zip(self.files[::2], self.files[1::2], strict=True))


def read_manifest(folder: Path) -> DatasetManifest:
    """Read and check a folder's manifest.json."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{folder} holds no data set: there is no {MANIFEST}",
            hint=f"make one: headway data build {folder} SOURCES...",
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise DataError(f"{path} is of format {found}, this Headway reads {FORMAT}", hint="use a matching Headway")
    try:
        manifest = _parse(content)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None
    _check_consistent(manifest, path)
    return manifest


def _parse(content: dict[str, Any]) -> DatasetManifest:
    values = dict(content)
    values["files"] = tuple(DataFile(**one) for one in values["files"])
    values["tokenizer"] = DataFile(**values["tokenizer"])
    return DatasetManifest(**values)


def _check_consistent(manifest: DatasetManifest, path: Path) -> None:
    """The counts must agree with each other before any of them is used to read memory."""
    if manifest.dtype not in ("uint16", "uint32") or len(manifest.files) % 2 or not manifest.files:
        raise _damaged(path, "its dtype or list of files is not valid")
    item = 2 if manifest.dtype == "uint16" else 4
    for number, (tokens, documents) in enumerate(manifest.shards()):
        names = (shard_name("tokens", number), shard_name("documents", number))
        if (tokens.name, documents.name) != names or tokens.bytes != tokens.tokens * item:
            raise _damaged(path, f"its entries for shard {number} do not agree")
        if documents.bytes != documents.documents * 16 or tokens.tokens < 1:
            raise _damaged(path, f"its entries for shard {number} do not agree")
    if manifest.tokenizer.name != TOKENIZER or manifest.tokens != sum(t.tokens for t, _ in manifest.shards()):
        raise _damaged(path, "its totals do not agree")


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path} is damaged: {why}", hint="copy the data set again, or rebuild it with --force")


def shard_name(kind: Literal["tokens", "documents"], number: int) -> str:
    """The file name of one half of a shard."""
    return f"{kind}-{number:05d}.bin"


def stamp_of(path: Path) -> list[int]:
    """What changes when a file is written again: size, time of change, inode."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def read_stamp(folder: Path, version: str) -> Stamp:
    """The files of this version that were checked before; empty when unknown."""
    try:
        content = json.loads((folder / STAMP).read_bytes())
        return dict(content["files"]) if content["version"] == version else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_stamp(folder: Path, version: str, files: Stamp) -> None:
    """Remember what was checked; a folder that cannot be written is simply checked again next time."""
    beside = folder / f"{STAMP}.{os.getpid()}"
    with suppress(OSError):
        try:
            beside.write_text(json.dumps({"version": version, "files": files}, indent=1) + "\n")
            beside.replace(folder / STAMP)
        finally:
            beside.unlink(missing_ok=True)
