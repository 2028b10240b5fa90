"""Read any box of any tensor of a checkpoint, verified, however the tensor was sharded when it was written.

Reads are rounded out to whole chunks, the unit of checksums. A chunk that is contiguous in the result is read directly
into it; others go through a buffer.
"""

import math
import threading
from collections.abc import Iterator
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

Bits = NDArray[np.unsignedinteger]

HERE = -1
"""The reader, as a holder of a layout; the pieces of a tensor are 0, 1, 2..."""

_BAND_BYTES = 32 << 20  # read through a buffer at a time
_ROW_BYTES = 1 << 16  # longer rows are read one by one when there are no chunks
_HINT = "headway checkpoint verify RUN lists all that are damaged; RUN@STEP names an older one"


@dataclass(frozen=True)
class OpenCheckpoint:
    """An open checkpoint: its source, its manifest, and the files whose headers were verified."""

    source: CheckpointSource
    manifest: CheckpointManifest
    _checked: set[str] = field(default_factory=set, repr=False)

    @property
    def location(self) -> str:
        """Its name in messages."""
        return self.source.location


@dataclass(frozen=True)
class VerifyResult:
    """What a full verification covered."""

    step: int
    digest: str
    tensors: int
    files: int
    bytes: int


def open_checkpoint(source: Path | CheckpointSource) -> OpenCheckpoint:
    """Read a checkpoint's manifest and check that its files have their full size; raise StateError if not."""
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
    """Return the layout of a tensor over the pieces of a checkpoint."""
    return Layout(tensor.shape, tuple(LayoutPart(i, piece.box) for i, piece in enumerate(tensor.pieces)))


def read_box(
    checkpoint: OpenCheckpoint, name: str, start: tuple[int, ...], shape: tuple[int, ...], out: Bits | None = None
) -> Bits:
    """Read a box of a tensor as unsigned integers of the dtype's size, into `out` if given."""
    tensor = checkpoint.manifest.tensors.get(name)
    if tensor is None:
        raise StateError(f"{checkpoint.location} has no tensor {name}", hint="it may belong to another model")
    want = Box(tuple(start), tuple(shape))
    assert want.inside(tensor.shape), f"{want} is outside {name} of shape {tensor.shape}"
    if out is None:
        out = np.empty(want.shape, bits_dtype(tensor.dtype))
    assert (out.shape, out.dtype) == (want.shape, bits_dtype(tensor.dtype)), f"{name}: wrong array"
    for move in moves(layout_of(tensor), Layout(tensor.shape, (LayoutPart(HERE, want),))):
        piece = tensor.pieces[move.source]
        _check_header(checkpoint, piece.file)
        index: tuple[Any, ...] = (*move.box.slices(want.start), ...)  # a view, even of an array without dimensions
        target: Bits = out[index]
        _read_part(checkpoint, name, piece, move.box, target)
    return out


def band_bytes(*checkpoints: OpenCheckpoint) -> int:
    """How much of a tensor to read at a time: all of it in format 1, where any part costs reading the whole piece."""
    old = any(checkpoint.manifest.digest_function == 1 for checkpoint in checkpoints)
    return 1 << 62 if old else _BAND_BYTES


def read_bands(checkpoint: OpenCheckpoint, name: str, limit: int) -> Iterator[Bits]:
    """Read a tensor in row-major bands of at most `limit` bytes; each is valid until the next one is read."""
    entry = checkpoint.manifest.tensors[name]
    box = Box((0,) * len(entry.shape), entry.shape)
    for band, bits in _band_views(box, bits_dtype(entry.dtype), limit):
        read_box(checkpoint, name, band.start, band.shape, out=bits)
        yield bits.reshape(-1)


def verify_checkpoint(source: Path | CheckpointSource) -> VerifyResult:
    """Read a whole checkpoint and check all checksums and digests; raise StateError at the first that is wrong."""
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
    """Read one file of a checkpoint and check its checksums; raise DamagedState at the first that is wrong."""
    _check_header(checkpoint, file)
    for name, tensor in checkpoint.manifest.tensors.items():
        for piece in tensor.pieces:
            if piece.file == file:
                _digest_piece(checkpoint, name, tensor, piece)


def _digest_piece(checkpoint: OpenCheckpoint, name: str, tensor: TensorEntry, piece: PieceEntry) -> int:
    """Return the digest of a piece, read and verified band by band."""
    digest = 0
    for band, bits in _band_views(piece.box, bits_dtype(tensor.dtype), _BAND_BYTES):
        _read_run(checkpoint, name, piece, band, bits)
        digest += digest_box(bits, tensor.shape, band)
    return digest


def _band_views(box: Box, dtype: np.dtype[np.unsignedinteger], limit: int) -> Iterator[tuple[Box, Bits]]:
    """Each band of a box with memory for it; all bands share the same memory."""
    buffer = np.empty(0, dtype)
    for band in bands(box, dtype.itemsize, limit):
        if buffer.size < band.volume:
            buffer = np.empty(band.volume, dtype)
        yield band, buffer[: band.volume].reshape(band.shape)


def _read_run(checkpoint: OpenCheckpoint, name: str, piece: PieceEntry, box: Box, out: Bits) -> None:
    """Read a box that is contiguous in the piece into contiguous memory."""
    if not out.size:
        return
    begin = _offset(box, piece) * out.itemsize
    _read_bytes(checkpoint, name, piece, begin, out.reshape(-1).view(np.uint8).data)


def _read_part(checkpoint: OpenCheckpoint, name: str, piece: PieceEntry, box: Box, out: Bits, dim: int = 0) -> None:
    """Read a box of a piece whose dimensions before `dim` all have size 1."""
    if out.flags.c_contiguous and _is_contiguous(box, piece):
        _read_run(checkpoint, name, piece, box, out)
        return
    row_bytes = math.prod(piece.shape[dim + 1 :]) * out.itemsize
    if row_bytes <= (checkpoint.manifest.chunk_bytes or _ROW_BYTES) or dim + 1 == len(box.shape):
        _read_rows(checkpoint, name, piece, box, out)
        return
    # Rows longer than a chunk: skip what lies between the parts of the box.
    for index in range(box.shape[dim]):
        row = Box(_with(box.start, dim, box.start[dim] + index), _with(box.shape, dim, 1))
        _read_part(checkpoint, name, piece, row, out[row.slices(box.start)], dim + 1)


def _read_rows(checkpoint: OpenCheckpoint, name: str, piece: PieceEntry, box: Box, out: Bits) -> None:
    """Read everything from the first to the last element of a scattered box, and copy the box out of that."""
    for band in bands(box, out.itemsize, _BAND_BYTES * math.prod(box.shape) // max(1, _span(box, piece))):
        first, count = _offset(band, piece), _span(band, piece)
        memory = _scratch("rows", count * out.itemsize)
        _read_bytes(checkpoint, name, piece, first * out.itemsize, memory)
        stretch = np.frombuffer(memory, out.dtype)
        strides = [math.prod(piece.shape[dim + 1 :]) * out.itemsize for dim in range(len(piece.shape))]
        out[band.slices(box.start)] = np.lib.stride_tricks.as_strided(stretch, band.shape, strides, writeable=False)


def _span(box: Box, piece: PieceEntry) -> int:
    """Return how many elements of the piece lie between the box's first and last, both included."""
    last = Box(tuple(stop - 1 for stop in box.stop), (1,) * len(box.shape))
    return _offset(last, piece) - _offset(box, piece) + 1


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _read_bytes(checkpoint: OpenCheckpoint, name: str, piece: PieceEntry, begin: int, out: memoryview) -> None:
    """Fill `out` with a piece's bytes from `begin` on, verifying every chunk that they touch."""
    chunk, source = checkpoint.manifest.chunk_bytes, checkpoint.source
    if not chunk:
        source.read(piece.file, piece.offset + begin, out)
        return
    tensor = checkpoint.manifest.tensors[name]
    size = piece.box.volume * bits_dtype(tensor.dtype).itemsize
    end, index = begin + len(out), begin // chunk
    while index * chunk < end:
        first, last = index * chunk, min((index + 1) * chunk, size)
        wanted = first >= begin and last <= end  # all of the chunk
        if wanted:
            count = max(1, source.request_bytes // chunk)
            last = min((index + count) * chunk, size if end == size else end // chunk * chunk)
        view = out[first - begin : last - begin] if wanted else _scratch("edge", last - first)
        _read_checked(checkpoint, name, piece, index, view)
        if not wanted:
            low, high = max(first, begin), min(last, end)
            out[low - begin : high - begin] = view[low - first : high - first]
        index += -(-len(view) // chunk)


def _read_checked(checkpoint: OpenCheckpoint, name: str, piece: PieceEntry, index: int, out: memoryview) -> None:
    """Fill `out` with whole chunks of a piece from number `index` on, and verify them."""
    chunk, source = checkpoint.manifest.chunk_bytes, checkpoint.source
    source.read(piece.file, piece.offset + index * chunk, out)
    for number, begin in enumerate(range(0, len(out), chunk), index):
        if xxhash.xxh3_64_hexdigest(out[begin : begin + chunk]) != piece.xxh3[number]:
            file = source.name(piece.file)
            raise DamagedState(f"{file} is damaged: the checksum of tensor {name} is wrong", hint=_HINT)


_buffers = threading.local()


def _scratch(use: str, size: int) -> memoryview:
    """Reusable memory of this thread, per use: touching new memory costs more than reading into old."""
    buffer: bytearray | None = getattr(_buffers, use, None)
    if buffer is None or len(buffer) < size:
        buffer = bytearray(size)
        setattr(_buffers, use, buffer)
    return memoryview(buffer)[:size]


def _check_header(checkpoint: OpenCheckpoint, file: str) -> None:
    """Verify a file's header, once: other tools rely on it."""
    if file in checkpoint._checked:
        return
    entry, source = checkpoint.manifest.files[file], checkpoint.source
    header = bytearray(entry.header_bytes)
    source.read(file, 0, memoryview(header))
    if xxhash.xxh3_64_hexdigest(header) != entry.header_xxh3:
        raise _bad_header(source, file)
    checkpoint._checked.add(file)


def _bad_header(source: CheckpointSource, file: str) -> DamagedState:
    return DamagedState(f"{source.name(file)} is damaged: the checksum of its header is wrong", hint=_HINT)


def _is_contiguous(box: Box, piece: PieceEntry) -> bool:
    """Whether a box is contiguous in the piece: only its leading dimensions may be smaller."""
    inner = False
    for size, piece_size in zip(box.shape, piece.shape, strict=True):
        if inner and size != piece_size:
            return False
        inner = inner or size > 1
    return True


def _offset(box: Box, piece: PieceEntry) -> int:
    """Return the index in the piece of a box's first element."""
    offset = 0
    for start, zero, size in zip(box.start, piece.start, piece.shape, strict=True):
        offset = offset * size + start - zero
    return offset


def _locate(source: CheckpointSource, manifest: CheckpointManifest) -> CheckpointManifest:
    """Complete a manifest of format 1 with the offsets in its files' headers."""
    layouts = {name: read_header(Path(source.name(name))) for name in manifest.files}
    for name, layout in layouts.items():
        if layout.header_xxh3 != manifest.files[name].header_xxh3:
            raise _bad_header(source, name)
    tensors = {}
    for name, tensor in manifest.tensors.items():
        spans = [(piece, layouts[piece.file].spans.get(name)) for piece in tensor.pieces]
        if any(span is None or (span.dtype, span.shape) != (tensor.dtype, piece.shape) for piece, span in spans):
            raise DamagedState(f"{source.location}: tensor {name} does not match the manifest", hint=_HINT)
        pieces = tuple(piece.model_copy(update={"offset": span.begin}) for piece, span in spans if span)
        tensors[name] = tensor.model_copy(update={"pieces": pieces})
    files = {
        name: file.model_copy(update={"header_bytes": len(layouts[name].header)})
        for name, file in manifest.files.items()
    }
    return manifest.model_copy(update={"tensors": tensors, "files": files})
