"""manifest.json: what a checkpoint holds, where each box of each tensor is, and the checksum of it all.

The file ends with a checksum of all its other bytes, so that no byte of it can change unseen.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headway.errors import StateError
from headway.state.box import Box
from headway.state.digest import state_digest
from headway.state.safetensors_file import DTYPES

__all__ = [
    "FORMAT",
    "Facts",
    "FileEntry",
    "Manifest",
    "PieceEntry",
    "TensorEntry",
    "dump_manifest",
    "read_manifest",
]

FORMAT = 1
Count = Annotated[int, Field(ge=0)]
Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
DtypeName = Annotated[str, Field(pattern=rf"^(?:{'|'.join(DTYPES)})$")]
FileName = Annotated[str, Field(pattern=r"^rank-[0-9]{5,}\.safetensors$")]

_MAX_BYTES = 1 << 30
_HINT = "remove that checkpoint's folder and the one before it is used; headway checkpoint ls lists them"


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Facts(_Entry):
    """What is saved beside the tensors: where the run is in its data, its history and its randomness."""

    cursor: Count
    """Place in the data order."""
    chain: str
    """Hash over all steps so far."""
    data_version: str
    """Version of the data set that the cursor counts in."""
    rng: dict[str, Any] = {}
    """State of the random generators, as JSON."""
    extra: dict[str, Any] = {}
    """Anything else the trainer wants back."""


class PieceEntry(_Entry):
    """One box of a tensor, and where it is."""

    file: FileName
    start: tuple[Count, ...]
    shape: tuple[Count, ...]
    xxh3: Hex64

    @property
    def box(self) -> Box:
        """The region of the tensor that it has."""
        return Box(self.start, self.shape)


class TensorEntry(_Entry):
    """One tensor: its dtype, its whole shape, its digest, and the pieces that tile it."""

    dtype: DtypeName
    shape: tuple[Count, ...]
    digest: Hex64
    pieces: tuple[PieceEntry, ...]


class FileEntry(_Entry):
    """One file: its size, and the checksum of its header (the pieces have their own)."""

    bytes: Count
    header_xxh3: Hex64


class Manifest(Facts):
    """A whole checkpoint but for the bytes of its tensors."""

    format: Literal[1] = 1
    """Version of this file's layout."""
    step: Count
    """Steps done when it was saved."""
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Digest of the whole state; equal states have equal digests on any mesh."""
    workers: Annotated[int, Field(ge=1)]
    """How many processes wrote it."""
    tensors: dict[str, TensorEntry]
    """Every tensor by name."""
    files: dict[FileName, FileEntry]
    """Every file by name."""

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(file.bytes for file in self.files.values())


def dump_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    fields = manifest.model_dump(mode="json")
    order = ["format", "step", "digest", *(key for key in fields if key not in ("format", "step", "digest"))]
    body = json.dumps({key: fields[key] for key in order}, separators=(",", ":")).encode()
    return body[:-1] + _seal(body)


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's manifest.json; StateError when it is missing, damaged or too new."""
    path = folder / "manifest.json"
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise StateError(f"{path} is damaged: it is too large", hint=_HINT)
        content = path.read_bytes()
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror or error}", hint=_HINT) from error
    body = content[: -len(_seal(b""))] + b"}"
    if content != body[:-1] + _seal(body):
        raise StateError(f"{path} is damaged: its checksum is wrong", hint=_HINT)
    return _parse(path, body)


def _parse(path: Path, body: bytes) -> Manifest:
    try:
        fields = json.loads(body)
        if isinstance(fields, dict) and isinstance(fields.get("format"), int) and fields["format"] > FORMAT:
            raise StateError(
                f"{path} has format {fields['format']}, and this version reads up to {FORMAT}",
                hint="upgrade headway",
            )
        manifest = Manifest.model_validate(fields)
    except (ValidationError, ValueError, RecursionError) as error:
        raise StateError(f"{path} is not a checkpoint's manifest", hint=_HINT) from error
    if manifest.digest != digest_of(manifest.tensors):
        raise StateError(f"{path} is damaged: its digest is not that of its tensors", hint=_HINT)
    return manifest


def digest_of(tensors: dict[str, TensorEntry]) -> str:
    """The digest of a state from its tensors' entries."""
    return state_digest((name, t.dtype, t.shape, int(t.digest, 16)) for name, t in tensors.items())


def _seal(body: bytes) -> bytes:
    """The end of the file: a last key with the checksum of everything before it."""
    return f',"checksum":"{xxhash.xxh3_64_hexdigest(body)}"}}\n'.encode()
