"""manifest.json: what a checkpoint holds, where each box of each tensor is, and the checksum of it all.

The file ends with a checksum of all its other bytes, so that no byte of it can change unseen. A box is checked in
chunks: who needs a part of it reads the chunks that hold that part, and no more.
"""

import json
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headway.errors import DamagedState, StateError
from headway.state.box import Box, tiling_fault
from headway.state.digest import state_digest
from headway.state.safetensors_file import DTYPES

__all__ = [
    "CHUNK_BYTES",
    "FORMAT",
    "CheckpointFacts",
    "CheckpointManifest",
    "FileEntry",
    "PieceEntry",
    "TensorEntry",
    "chunk_checksums",
    "dump_manifest",
    "parse_manifest",
]

FORMAT = 2
CHUNK_BYTES = 4 << 20
"""What a checksum is taken of; a part of a checkpoint is read in such chunks."""

Count = Annotated[int, Field(ge=0, le=2**62)]
Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
DtypeName = Annotated[str, Field(pattern=rf"^(?:{'|'.join(DTYPES)})$")]
FileName = Annotated[str, Field(pattern=r"^rank-[0-9]{5,}(-still)?\.safetensors$")]
Key = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$", max_length=512)]

_MAX_CHUNK = 1 << 62  # format 1 had one checksum for a whole piece
_HINT = "remove that checkpoint's folder and the one before it is used; headway checkpoint ls lists them"


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CheckpointFacts(_Entry):
    """What is saved beside the tensors: where the run is in its data, its history and its randomness."""

    cursor: Count
    """Place in the data order."""
    chain: str
    """Hash over all steps so far."""
    data_version: str
    """Version of the data set that the cursor counts in."""
    rng: dict[str, Any] = {}
    """State of the random generators, as JSON."""
    recipe: dict[str, Any] = {}
    """The recipe of the run, resolved."""
    mesh: dict[str, int] = {}
    """How the workers were laid out: sizes of the axes, from the outermost."""
    extra: dict[str, Any] = {}
    """Anything else the trainer wants back."""


class PieceEntry(_Entry):
    """One box of a tensor, and where it is."""

    file: FileName
    offset: Count
    """Its first byte in the file."""
    start: tuple[Count, ...]
    shape: tuple[Count, ...]
    xxh3: tuple[Hex64, ...]
    """Checksums of its chunks."""

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
    header_bytes: Count
    header_xxh3: Hex64
    key: Key | None = None
    """Where it lies in an object store; without this, beside the manifest."""


class CheckpointManifest(CheckpointFacts):
    """A whole checkpoint but for the bytes of its tensors."""

    format: Literal[2] = 2
    """Version of this file's layout."""
    step: Count
    """Steps done when it was saved."""
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Digest of the whole state; equal states have equal digests on any mesh."""
    digest_function: Literal[1, 2] = 2
    """How the digests of the tensors were taken; those of 1 are of checkpoints of format 1, and no longer checked."""
    chunk_bytes: Count = CHUNK_BYTES
    """What of a tensor one checksum is taken of; 0 where none were taken, which is so in memory only."""
    workers: Annotated[int, Field(ge=1)]
    """How many processes held the state."""
    tensors: dict[str, TensorEntry]
    """Every tensor by name."""
    files: dict[FileName, FileEntry]
    """Every file by name."""

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(file.bytes for file in self.files.values())


def dump_manifest(manifest: CheckpointManifest) -> bytes:
    """The bytes of manifest.json."""
    fields = manifest.model_dump(mode="json")
    order = ["format", "step", "digest", *(key for key in fields if key not in ("format", "step", "digest"))]
    body = json.dumps({key: fields[key] for key in order}, separators=(",", ":")).encode()
    return body[:-1] + _seal(body)


def parse_manifest(content: bytes, place: str) -> CheckpointManifest:
    """Read and check the bytes of a manifest.json; StateError when it is damaged or too new."""
    body = content[: -len(_seal(b""))] + b"}"
    if content != body[:-1] + _seal(body):
        raise DamagedState(f"{place} is damaged: its checksum is wrong", hint=_HINT)
    try:
        fields = json.loads(body)
        if isinstance(fields, dict) and isinstance(fields.get("format"), int) and fields["format"] > FORMAT:
            raise StateError(
                f"{place} has format {fields['format']}, and this version reads up to {FORMAT}",
                hint="upgrade headway",
            )
        manifest = CheckpointManifest.model_validate(_upgrade(fields))
        "".join(manifest.tensors).encode()  # names that are no text would fail later
    except (ValidationError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedState(f"{place} is not a checkpoint's manifest", hint=_HINT) from error
    for name, tensor in manifest.tensors.items():
        if fault := _fault(manifest, tensor):
            raise DamagedState(f"{place} is no manifest of a checkpoint: {fault} of tensor {name}", hint=_HINT)
    for name, file in manifest.files.items():
        if file.header_bytes > file.bytes:
            raise DamagedState(f"{place} is no manifest of a checkpoint: the header of {name} is too long", hint=_HINT)
    if manifest.digest != digest_of(manifest.tensors):
        raise DamagedState(f"{place} is damaged: its digest is not that of its tensors", hint=_HINT)
    return manifest


def chunk_checksums(view: memoryview, chunk_bytes: int = CHUNK_BYTES) -> tuple[str, ...]:
    """The checksums of a box's bytes, chunk by chunk."""
    return tuple(
        xxhash.xxh3_64_hexdigest(view[begin : begin + chunk_bytes]) for begin in range(0, len(view), chunk_bytes)
    )


def _fault(manifest: CheckpointManifest, tensor: TensorEntry) -> str | None:
    """What a reader would trip over."""
    if any(len(piece.start) != len(tensor.shape) or len(piece.shape) != len(tensor.shape) for piece in tensor.pieces):
        return "a piece has too few or many dimensions"
    if tiling_fault(tensor.shape, (piece.box for piece in tensor.pieces)):
        return "the pieces do not make a whole"
    for piece in tensor.pieces:
        size = piece.box.volume * DTYPES[tensor.dtype][1]
        if piece.file not in manifest.files or piece.offset + size > manifest.files[piece.file].bytes:
            return "a piece lies outside of the files"
        if size and manifest.chunk_bytes and len(piece.xxh3) != -(-size // manifest.chunk_bytes):
            return "there are too few or many checksums"
    return None


def _upgrade(fields: Any) -> Any:
    """A manifest of format 1 as one of format 2: one checksum a piece, and places that only the files' headers tell."""
    if fields.get("format") != 1:
        return fields
    tensors = {
        name: tensor | {"pieces": [piece | {"offset": 0, "xxh3": [piece["xxh3"]]} for piece in tensor["pieces"]]}
        for name, tensor in fields["tensors"].items()
    }
    files = {name: file | {"header_bytes": 0} for name, file in fields["files"].items()}
    old = {"format": 2, "digest_function": 1, "chunk_bytes": _MAX_CHUNK, "tensors": tensors, "files": files}
    return fields | old


def digest_of(tensors: dict[str, TensorEntry]) -> str:
    """The digest of a state from its tensors' entries."""
    return state_digest((name, t.dtype, t.shape, int(t.digest, 16)) for name, t in tensors.items())


def _seal(body: bytes) -> bytes:
    """The end of the file: a last key with the checksum of everything before it."""
    return f',"checksum":"{xxhash.xxh3_64_hexdigest(body)}"}}\n'.encode()
