"""manifest.json: the tensors of a checkpoint, where each of their pieces is stored, and all checksums.

The file ends with a checksum of its other bytes, so that no change to it goes unnoticed. Pieces have a checksum per
chunk: reading a part of one takes only the chunks that hold it.
"""

import json
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headway.errors import DamagedState, StateError
from headway.state.box import Box, tiling_fault
from headway.state.digest import state_digest
from headway.state.safetensors_file import DTYPES, SafetensorsLayout

FORMAT = 2
CHUNK_BYTES = 4 << 20
"""Bytes per checksum; checkpoints are read in such chunks."""

Count = Annotated[int, Field(ge=0, le=2**62)]
Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
DtypeName = Annotated[str, Field(pattern=rf"^(?:{'|'.join(DTYPES)})$")]
FileName = Annotated[str, Field(pattern=r"^rank-[0-9]{5,}(-still)?\.safetensors$")]
Key = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$", max_length=512)]

_MAX_CHUNK = 1 << 62  # format 1 had one checksum per piece
_HINT = "remove that checkpoint's folder to use the one before it; headway checkpoint ls RUN lists them"


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CheckpointFacts(_Entry):
    """What is saved beside the tensors: the run's position in its data, its history and its random state."""

    cursor: Count
    """Samples consumed so far."""
    chain: str
    """Hash over all steps so far."""
    data_version: str
    """Version of the dataset that the cursor refers to."""
    rng: dict[str, Any] = {}
    """State of the random generators, as JSON."""
    recipe: dict[str, Any] = {}
    """The resolved recipe of the run."""
    mesh: dict[str, int] = {}
    """Sizes of the mesh axes, outermost first."""
    extra: dict[str, Any] = {}
    """Anything else the trainer wants back."""


class PieceEntry(_Entry):
    """One box of a tensor, and where it is stored."""

    file: FileName
    offset: Count
    """Its first byte in the file."""
    start: tuple[Count, ...]
    shape: tuple[Count, ...]
    xxh3: tuple[Hex64, ...]
    """Checksums of its chunks."""

    @property
    def box(self) -> Box:
        """The region of the tensor that it holds."""
        return Box(self.start, self.shape)


class TensorEntry(_Entry):
    """One tensor: its dtype, full shape and digest, and the pieces that tile it."""

    dtype: DtypeName
    shape: tuple[Count, ...]
    digest: Hex64
    pieces: tuple[PieceEntry, ...]


class FileEntry(_Entry):
    """One file: its size, and the checksum of its header (pieces have their own)."""

    bytes: Count
    header_bytes: Count
    header_xxh3: Hex64
    key: Key | None = None
    """Its key in an object store; if None, it lies beside the manifest."""


class CheckpointManifest(CheckpointFacts):
    """A whole checkpoint except for the bytes of its tensors."""

    format: Literal[2] = 2
    """Version of this file's layout."""
    step: Count
    """Steps completed when it was saved."""
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Digest of the whole state; equal states have equal digests on any mesh."""
    digest_function: Literal[1, 2] = 2
    """Version of the digest function; 1 is that of checkpoint format 1, and no longer checked."""
    chunk_bytes: Count = CHUNK_BYTES
    """Bytes of a tensor per checksum; 0 if there are none, which is so in memory only."""
    workers: Annotated[int, Field(ge=1)]
    """How many processes held the state."""
    tensors: dict[str, TensorEntry]
    """Every tensor by name."""
    files: dict[FileName, FileEntry]
    """Every file by name."""

    @property
    def bytes(self) -> int:
        """Total size of all files."""
        return sum(file.bytes for file in self.files.values())


def file_entry(layout: SafetensorsLayout) -> FileEntry:
    """Return the entry of a file with this layout."""
    return FileEntry(bytes=layout.bytes, header_bytes=len(layout.header), header_xxh3=layout.header_xxh3)


def dump_manifest(manifest: CheckpointManifest) -> bytes:
    """Serialize a manifest to the bytes of manifest.json."""
    fields = manifest.model_dump(mode="json")
    order = ["format", "step", "digest", *(key for key in fields if key not in ("format", "step", "digest"))]
    body = json.dumps({key: fields[key] for key in order}, separators=(",", ":")).encode()
    return body[:-1] + _seal(body)


def parse_manifest(content: bytes, location: str) -> CheckpointManifest:
    """Parse and check the bytes of a manifest.json; raise StateError if it is damaged or too new."""
    body = content[: -len(_seal(b""))] + b"}"
    if content != body[:-1] + _seal(body):
        raise DamagedState(f"{location} is damaged: its checksum is wrong", hint=_HINT)
    try:
        fields = json.loads(body)
        if isinstance(fields, dict) and isinstance(fields.get("format"), int) and fields["format"] > FORMAT:
            raise StateError(
                f"{location} has format {fields['format']}; this version of Headway reads up to {FORMAT}",
                hint="upgrade headway",
            )
        manifest = CheckpointManifest.model_validate(_upgrade(fields))
        "".join(manifest.tensors).encode()  # names that are not valid text would fail later
    except (ValidationError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedState(f"{location} is not a checkpoint manifest", hint=_HINT) from error
    for name, tensor in manifest.tensors.items():
        if fault := _fault(manifest, tensor):
            raise DamagedState(f"{location} is not a valid manifest: tensor {name} {fault}", hint=_HINT)
    for name, file in manifest.files.items():
        if file.header_bytes > file.bytes:
            raise DamagedState(f"{location} is not a valid manifest: the header of {name} is too long", hint=_HINT)
    if manifest.digest != digest_of(manifest.tensors):
        raise DamagedState(f"{location} is damaged: its digest does not match its tensors", hint=_HINT)
    return manifest


def chunk_checksums(view: memoryview, chunk_bytes: int = CHUNK_BYTES) -> tuple[str, ...]:
    """Return the checksums of a piece's bytes, one per chunk."""
    return tuple(
        xxhash.xxh3_64_hexdigest(view[begin : begin + chunk_bytes]) for begin in range(0, len(view), chunk_bytes)
    )


def _fault(manifest: CheckpointManifest, tensor: TensorEntry) -> str | None:
    """Return what is wrong with a tensor's entry, or None."""
    if any(len(piece.start) != len(tensor.shape) or len(piece.shape) != len(tensor.shape) for piece in tensor.pieces):
        return "has a piece with the wrong number of dimensions"
    if tiling_fault(tensor.shape, (piece.box for piece in tensor.pieces)):
        return "is not tiled by its pieces"
    for piece in tensor.pieces:
        size = piece.box.volume * DTYPES[tensor.dtype][1]
        if piece.file not in manifest.files or piece.offset + size > manifest.files[piece.file].bytes:
            return "has a piece outside its file"
        if size and manifest.chunk_bytes and len(piece.xxh3) != -(-size // manifest.chunk_bytes):
            return "has the wrong number of checksums"
    return None


def _upgrade(fields: Any) -> Any:
    """Convert format 1 to 2: it has one checksum per piece, and only the files' headers have the offsets."""
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
    """Return the digest of a state from its tensors' entries."""
    return state_digest((name, t.dtype, t.shape, int(t.digest, 16)) for name, t in tensors.items())


def _seal(body: bytes) -> bytes:
    """The end of the file: a last key with the checksum of all bytes before it."""
    return f',"checksum":"{xxhash.xxh3_64_hexdigest(body)}"}}\n'.encode()
