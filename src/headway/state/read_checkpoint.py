"""Reading a checkpoint: any box of any tensor, checked, whatever boxes it was written in.

What is read is what is asked for, rounded out to the chunks that checksums were taken of. A chunk that lies in the
answer as it lies in the file is read there at once; the others go through a buffer.
"""

import math
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from headway.errors import DamagedState, StateError
from headway.state.box import Box, bands
from headway.state.digest import MASK, digest_box
from headway.state.layout import Layout, LayoutPart
from headway.state.manifest import CheckpointManifest, PieceEntry, TensorEntry, parse_manifest
from headway.state.move import moves
from headway.state.safetensors_file import bits_dtype, read_header
from headway.state.source import MANIFEST, CheckpointSource, FolderCheckpoint

__all__ = [
    "OpenCheckpoint",
    "VerifyResult",
    "check_file",
    "layout_of",
    "open_checkpoint",
    "read_box",
    "verify_checkpoint",
]

Bits = NDArray[np.unsignedinteger]

HERE = -1
"""Who asks, as a holder of a layout; the pieces of a tensor are 0, 1, 2..."""

_BAND_BYTES = 32 << 20  # read through a buffer at a time
_ROW_BYTES = 1 << 16  # rows of memory that are longer are taken one by one
_HINT = "headway resume takes the one before it by itself; headway checkpoint verify names all that are damaged"


@dataclass(frozen=True)
class OpenCheckpoint:
    """An open checkpoint: where it comes from, its manifest, and the files whose headers were found right."""

    source: CheckpointSource
    manifest: CheckpointManifest
    _checked: set[str] = field(default_factory=set, repr=False)

    @property
    def location(self) -> str:
        """How messages call it."""
        return self.source.location


@dataclass(frozen=True)
class VerifyResult:
    """What a full check went through."""

    step: int
    digest: str
    tensors: int
    files: int
    bytes: int


def open_checkpoint(source: Path | CheckpointSource) -> OpenCheckpoint:
    """Read a checkpoint's manifest and see that its files are there in full size; StateError when not."""
    source = FolderCheckpoint(source) if isinstance(source, Path) else source
    manifest = parse_manifest(source.manifest(), source.name(MANIFEST))
    if source.checked and not manifest.chunk_bytes:
        raise DamagedState(f"{source.name(MANIFEST)} has no checksums", hint=_HINT)
    for name, file in manifest.files.items():
        size = source.size(name)
        if size != file.bytes:
            raise DamagedState(f"{source.name(name)} is damaged: it has {size} of {file.bytes} bytes", hint=_HINT)
    if manifest.digest_function == 1:
        manifest = _locate(source, manifest)
    return OpenCheckpoint(source, manifest)


def layout_of(tensor: TensorEntry) -> Layout:
    """How a tensor lies on the pieces of a checkpoint."""
    return Layout(tensor.shape, tuple(LayoutPart(i, piece.box) for i, piece in enumerate(tensor.pieces)))


def read_box(
    checkpoint: OpenCheckpoint, name: str, start: tuple[int, ...], shape: tuple[int, ...], out: Bits | None = None
) -> Bits:
    """The bits of one box of a tensor, as unsigned integers of the dtype's size; into `out` if given."""
    tensor = checkpoint.manifest.tensors.get(name)
    if tensor is None:
        raise StateError(f"{checkpoint.location} has no tensor {name}", hint="it may be of another model")
    want = Box(tuple(start), tuple(shape))
    assert want.inside(tensor.shape), f"{want} is outside {name} of shape {tensor.shape}"
    if out is None:
        out = np.empty(want.shape, bits_dtype(tensor.dtype))
    assert (out.shape, out.dtype) == (want.shape, bits_dtype(tensor.dtype)), f"{name}: wrong array"
    for move in moves(layout_of(tensor), Layout(tensor.shape, (LayoutPart(HERE, want),))):
        piece = tensor.pieces[move.source]
        _check_header(checkpoint, piece.file)
        place: tuple[Any, ...] = (*move.box.slices(want.start), ...)  # a view, even of an array without dimensions
        target: Bits = out[place]
        _read_part(checkpoint, name, piece, move.box, target)
    return out


def verify_checkpoint(source: Path | CheckpointSource) -> VerifyResult:
    """Read a whole checkpoint and check every checksum and digest; StateError names the first thing wrong."""
    checkpoint = open_checkpoint(source)
    manifest = checkpoint.manifest
    for name in manifest.files:
        _check_header(checkpoint, name)
    for name, tensor in manifest.tensors.items():
        digest = sum(_digest_piece(checkpoint, name, tensor, piece) for piece in tensor.pieces)
        if manifest.digest_function == 2 and digest & MASK != int(tensor.digest, 16):
            raise DamagedState(f"{checkpoint.location} is damaged: the digest of tensor {name} is wrong", hint=_HINT)
    return VerifyResult(manifest.step, manifest.digest, len(manifest.tensors), len(manifest.files), manifest.bytes)


def check_file(checkpoint: OpenCheckpoint, file: str) -> None:
    """Read one file of a checkpoint and check every checksum in it; DamagedState names the first that is wrong."""
    _check_header(checkpoint, file)
    for name, tensor in checkpoint.manifest.tensors.items():
        for piece in tensor.pieces:
            if piece.file == file:
                _digest_piece(checkpoint, name, tensor, piece)


def _digest_piece(checkpoint: OpenCheckpoint, name: str, tensor: TensorEntry, piece: PieceEntry) -> int:
    """The digest of a piece, read and checked some rows at a time."""
    digest = 0
    buffer = np.empty(0, bits_dtype(tensor.dtype))
    for rows in bands(piece.box, buffer.itemsize, _BAND_BYTES):
        if buffer.size < rows.volume:
            buffer = np.empty(rows.volume, buffer.dtype)
        bits = buffer[: rows.volume].reshape(rows.shape)
        _read_run(checkpoint, name, piece, rows, bits)
        digest += digest_box(bits, tensor.shape, rows)
    return digest


def _read_run(checkpoint: OpenCheckpoint, name: str, piece: PieceEntry, box: Box, out: Bits) -> None:
    """Read a box whose elements follow each other in the piece into contiguous memory."""
    if not out.size:
        return
    begin = _offset(box, piece) * out.itemsize
    _read_bytes(checkpoint, name, piece, begin, out.reshape(-1).view(np.uint8).data)


def _read_part(checkpoint: OpenCheckpoint, name: str, piece: PieceEntry, box: Box, out: Bits, dim: int = 0) -> None:
    """Read a box of a piece, all of whose dimensions before `dim` have one index."""
    if out.flags.c_contiguous and _follow_each_other(box, piece):
        _read_run(checkpoint, name, piece, box, out)
        return
    row_bytes = math.prod(piece.shape[dim + 1 :]) * out.itemsize
    if row_bytes <= (checkpoint.manifest.chunk_bytes or _ROW_BYTES) or dim + 1 == len(box.shape):
        _read_rows(checkpoint, name, piece, box, out)
        return
    # Rows longer than a chunk: what lies between their wanted parts need not be read.
    for index in range(box.shape[dim]):
        row = Box(_with(box.start, dim, box.start[dim] + index), _with(box.shape, dim, 1))
        _read_part(checkpoint, name, piece, row, out[row.slices(box.start)], dim + 1)


def _read_rows(checkpoint: OpenCheckpoint, name: str, piece: PieceEntry, box: Box, out: Bits) -> None:
    """Read a box that lies scattered, from its first element to its last and all between, and take what is wanted."""
    for band in bands(box, out.itemsize, _BAND_BYTES * math.prod(box.shape) // max(1, _span(box, piece))):
        first, count = _offset(band, piece), _span(band, piece)
        memory = _scratch("rows", count * out.itemsize)
        _read_bytes(checkpoint, name, piece, first * out.itemsize, memory)
        stretch = np.frombuffer(memory, out.dtype)
        strides = [math.prod(piece.shape[dim + 1 :]) * out.itemsize for dim in range(len(piece.shape))]
        out[band.slices(box.start)] = np.lib.stride_tricks.as_strided(stretch, band.shape, strides, writeable=False)


def _span(box: Box, piece: PieceEntry) -> int:
    """How many elements of the piece lie from a box's first to its last."""
    last = Box(tuple(stop - 1 for stop in box.stop), (1,) * len(box.shape))
    return _offset(last, piece) - _offset(box, piece) + 1


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _read_bytes(checkpoint: OpenCheckpoint, name: str, piece: PieceEntry, begin: int, out: memoryview) -> None:
    """Fill `out` with a piece's bytes from `begin` on, and check every chunk that any of them is in."""
    chunk, source = checkpoint.manifest.chunk_bytes, checkpoint.source
    if not chunk:
        source.read(piece.file, piece.offset + begin, out)
        return
    tensor = checkpoint.manifest.tensors[name]
    size = piece.box.volume * bits_dtype(tensor.dtype).itemsize
    end, index = begin + len(out), begin // chunk
    while index * chunk < end:
        first, last = index * chunk, min((index + 1) * chunk, size)
        whole = first >= begin and last <= end
        if whole:
            together = max(1, source.request_bytes // chunk)
            last = min((index + together) * chunk, size if end == size else end // chunk * chunk)
        view = out[first - begin : last - begin] if whole else _scratch("edge", last - first)
        _read_checked(checkpoint, name, piece, index, view)
        if not whole:
            low, high = max(first, begin), min(last, end)
            out[low - begin : high - begin] = view[low - first : high - first]
        index += -(-len(view) // chunk)


def _read_checked(checkpoint: OpenCheckpoint, name: str, piece: PieceEntry, index: int, out: memoryview) -> None:
    """Fill `out` with whole chunks of a piece, from number `index` on."""
    chunk, source = checkpoint.manifest.chunk_bytes, checkpoint.source
    source.read(piece.file, piece.offset + index * chunk, out)
    for number, begin in enumerate(range(0, len(out), chunk), index):
        if xxhash.xxh3_64_hexdigest(out[begin : begin + chunk]) != piece.xxh3[number]:
            where = source.name(piece.file)
            raise DamagedState(f"{where} is damaged: the checksum of tensor {name} is wrong", hint=_HINT)


_kept = threading.local()


def _scratch(use: str, size: int) -> memoryview:
    """Memory of this thread for one use at a time; touching new memory costs more than reading into old."""
    held: bytearray | None = getattr(_kept, use, None)
    if held is None or len(held) < size:
        held = bytearray(size)
        setattr(_kept, use, held)
    return memoryview(held)[:size]


def _check_header(checkpoint: OpenCheckpoint, file: str) -> None:
    """See, once, that a file has the header that was written: other tools go by it."""
    if file in checkpoint._checked:
        return
    entry, source = checkpoint.manifest.files[file], checkpoint.source
    header = bytearray(entry.header_bytes)
    source.read(file, 0, memoryview(header))
    if xxhash.xxh3_64_hexdigest(header) != entry.header_xxh3:
        raise DamagedState(f"{source.name(file)} is damaged: the checksum of its header is wrong", hint=_HINT)
    checkpoint._checked.add(file)


def _follow_each_other(box: Box, piece: PieceEntry) -> bool:
    """Whether a box's elements lie in one stretch of the piece: all dimensions but the leading ones are whole."""
    inner = False
    for size, whole in zip(box.shape, piece.shape, strict=True):
        if inner and size != whole:
            return False
        inner = inner or size > 1
    return True


def _offset(box: Box, piece: PieceEntry) -> int:
    """Which element of the piece a box begins with."""
    offset = 0
    for start, zero, size in zip(box.start, piece.start, piece.shape, strict=True):
        offset = offset * size + start - zero
    return offset


def _locate(source: CheckpointSource, manifest: CheckpointManifest) -> CheckpointManifest:
    """A manifest of format 1 with the places that its files' headers tell."""
    layouts = {name: read_header(Path(source.name(name))) for name in manifest.files}
    for name, layout in layouts.items():
        if layout.header_xxh3 != manifest.files[name].header_xxh3:
            raise DamagedState(f"{source.name(name)} is damaged: the checksum of its header is wrong", hint=_HINT)
    tensors = {}
    for name, tensor in manifest.tensors.items():
        places = [(piece, layouts[piece.file].spans.get(name)) for piece in tensor.pieces]
        if any(place is None or (place.dtype, place.shape) != (tensor.dtype, piece.shape) for piece, place in places):
            raise DamagedState(f"{source.location} does not hold what its manifest says of tensor {name}", hint=_HINT)
        pieces = tuple(piece.model_copy(update={"offset": place.begin}) for piece, place in places if place)
        tensors[name] = tensor.model_copy(update={"pieces": pieces})
    files = {
        name: file.model_copy(update={"header_bytes": len(layouts[name].header)})
        for name, file in manifest.files.items()
    }
    return manifest.model_copy(update={"tensors": tensors, "files": files})
