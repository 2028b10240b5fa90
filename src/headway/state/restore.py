"""Reading a checkpoint: any box of any tensor, checked, whatever boxes it was written in."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from headway.errors import StateError
from headway.state.box import Box, overlap
from headway.state.digest import MASK, digest_box
from headway.state.manifest import Manifest, PieceEntry, TensorEntry, read_manifest
from headway.state.safetensors_file import ShardFile, bits_dtype, open_file

__all__ = ["Checkpoint", "Verified", "open_checkpoint", "read_box", "verify"]

Bits = NDArray[np.unsignedinteger]

_HINT = "remove that checkpoint's folder and the one before it is used; headway checkpoint ls lists them"


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: its manifest, and the files and pieces that have been looked at and found right."""

    path: Path
    manifest: Manifest
    _files: dict[str, ShardFile] = field(default_factory=dict, repr=False)
    _checked: set[tuple[str, str]] = field(default_factory=set, repr=False)


@dataclass(frozen=True)
class Verified:
    """What a full check went through."""

    step: int
    digest: str
    tensors: int
    files: int
    bytes: int


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest and see that its files are there in full size; StateError when not."""
    manifest = read_manifest(path)
    for name, file in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise StateError(f"{path / name} cannot be read: {error.strerror or error}", hint=_HINT) from error
        if size != file.bytes:
            raise StateError(f"{path / name} is damaged: it has {size} of {file.bytes} bytes", hint=_HINT)
    return Checkpoint(path, manifest)


def read_box(
    checkpoint: Checkpoint, name: str, start: tuple[int, ...], shape: tuple[int, ...], out: Bits | None = None
) -> Bits:
    """The bits of one box of a tensor, as unsigned integers of the dtype's size; into `out` if given.

    Reads only the pieces that overlap it, and checks each the first time it is touched.
    """
    tensor = _tensor(checkpoint, name)
    want = Box(tuple(start), tuple(shape))
    assert want.inside(tensor.shape), f"{want} is outside {name} of shape {tensor.shape}"
    if out is None:
        out = np.empty(want.shape, bits_dtype(tensor.dtype))
    assert (out.shape, out.dtype) == (want.shape, bits_dtype(tensor.dtype)), f"{name}: wrong array"
    filled = 0
    for piece in tensor.pieces:
        if common := overlap(want, piece.box):
            bits = _piece_bits(checkpoint, name, tensor, piece)
            out[common.slices(want.start)] = bits[common.slices(piece.start)]
            filled += common.volume
    if filled != want.volume:
        raise StateError(f"{checkpoint.path} has {filled} of {want.volume} elements of {name}", hint=_HINT)
    return out


def verify(path: Path) -> Verified:
    """Read a whole checkpoint and check every checksum and digest; StateError names the first thing wrong."""
    checkpoint = open_checkpoint(path)
    manifest = checkpoint.manifest
    for name in manifest.files:
        _file(checkpoint, name)
    for name, tensor in manifest.tensors.items():
        digest = 0
        for piece in tensor.pieces:
            digest += digest_box(_piece_bits(checkpoint, name, tensor, piece), tensor.shape, piece.box)
        if digest & MASK != int(tensor.digest, 16):
            raise StateError(f"{path} is damaged: the digest of tensor {name} is wrong", hint=_HINT)
    return Verified(manifest.step, manifest.digest, len(manifest.tensors), len(manifest.files), manifest.bytes)


def _tensor(checkpoint: Checkpoint, name: str) -> TensorEntry:
    tensor = checkpoint.manifest.tensors.get(name)
    if tensor is None:
        raise StateError(f"{checkpoint.path} has no tensor {name}", hint="it may be of another model")
    return tensor


def _file(checkpoint: Checkpoint, name: str) -> ShardFile:
    """A file of the checkpoint, opened once, with the header that was written."""
    if name not in checkpoint._files:
        file = open_file(checkpoint.path / name)
        if file.header_xxh3 != checkpoint.manifest.files[name].header_xxh3:
            raise StateError(f"{file.path} is damaged: the checksum of its header is wrong", hint=_HINT)
        checkpoint._files[name] = file
    return checkpoint._files[name]


def _piece_bits(checkpoint: Checkpoint, name: str, tensor: TensorEntry, piece: PieceEntry) -> Bits:
    """A piece's bits, straight from its file, checked once."""
    file = _file(checkpoint, piece.file)
    bits = file.bits.get(name)
    if bits is None or bits.shape != piece.shape or file.dtypes[name] != tensor.dtype:
        raise StateError(f"{file.path} does not hold what the manifest says of tensor {name}", hint=_HINT)
    if (piece.file, name) not in checkpoint._checked:
        if xxhash.xxh3_64_hexdigest(bits.reshape(-1).view(np.uint8).data) != piece.xxh3:
            raise StateError(f"{file.path} is damaged: the checksum of tensor {name} is wrong", hint=_HINT)
        checkpoint._checked.add((piece.file, name))
    return bits
