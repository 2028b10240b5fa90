"""The safetensors format (a length, a JSON header, the tensors' bytes), planned before any bytes exist.

A SafetensorsLayout states where each tensor of a file goes. Workers copy their tensors into memory with that layout,
and the agent writes the memory as it is: the memory is the file. The `safetensors` library can neither write bfloat16
without torch nor fsync, and copies before writing; each can open the other's files.
"""

import errno
import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from headway.errors import DamagedState

Bits = NDArray[np.unsignedinteger]

DTYPES = {
    "bfloat16": ("BF16", 2),
    "bool": ("BOOL", 1),
    "float16": ("F16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int16": ("I16", 2),
    "int32": ("I32", 4),
    "int64": ("I64", 8),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "uint32": ("U32", 4),
    "uint64": ("U64", 8),
    "uint8": ("U8", 1),
}
"""Each dtype's name in the format and its size in bytes."""

_NAMES = {code: name for name, (code, _) in DTYPES.items()}
_MAX_HEADER = 100_000_000  # the limit of the format's own library
_PAGE = 4096  # direct I/O needs offsets, lengths and memory addresses that are multiples of this
_WRITE_BYTES = 8 << 20


@dataclass(frozen=True)
class TensorSpan:
    """A tensor in a file: its dtype and shape, its first byte and the one after its last."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class SafetensorsLayout:
    """A whole file except for the bytes of its tensors."""

    header: bytes
    spans: Mapping[str, TensorSpan]

    @property
    def bytes(self) -> int:
        """The file's size."""
        return max((span.end for span in self.spans.values()), default=len(self.header))

    @property
    def header_xxh3(self) -> str:
        """Checksum of the header."""
        return xxhash.xxh3_64_hexdigest(self.header)


def bits_dtype(dtype: str) -> np.dtype[np.unsignedinteger]:
    """Return the unsigned integer type of the same size as a dtype's elements."""
    return np.dtype(f"<u{DTYPES[dtype][1]}")


def plan_file(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> SafetensorsLayout:
    """Plan a file of tensors (name, dtype, shape); their bytes start on a page boundary."""
    entries: dict[str, Any] = {}
    end = 0
    # The widest dtype first: every tensor is then aligned to its elements.
    for name, dtype, shape in sorted(tensors, key=lambda tensor: (-DTYPES[tensor[1]][1], tensor[0])):
        assert name not in entries, f"{name} is in the file twice"
        begin, end = end, end + math.prod(shape) * DTYPES[dtype][1]
        entries[name] = {"dtype": DTYPES[dtype][0], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % _PAGE)
    header = len(text).to_bytes(8, "little") + text
    return SafetensorsLayout(header, {name: _span(entry, len(header)) for name, entry in entries.items()})


def write_file(path: Path, header: bytes, blocks: Iterable[memoryview]) -> None:
    """Write a new file durably from a header and consecutive blocks; nothing is copied."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for block in (memoryview(header), *blocks):
            _write_all(descriptor, block)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_memory(path: Path, memory: memoryview, size: int) -> None:
    """Write the first `size` bytes of memory to a new file durably, with direct I/O if the file system supports it.

    The memory must start on a page boundary and extend to the end of its last page. Direct I/O leaves the processor
    free while the disk works, and the page cache to the training data.
    """
    assert len(memory) >= -(-size // _PAGE) * _PAGE, "the memory ends before the file's last page"
    descriptor = _open_direct(path)
    try:
        for begin in range(0, size, _WRITE_BYTES):
            end = min(begin + _WRITE_BYTES, -(-size // _PAGE) * _PAGE)
            _write_all(descriptor, memory[begin:end])
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_header(path: Path) -> SafetensorsLayout:
    """Read a file's header; raise DamagedState if it is not a complete, well-formed safetensors file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise _damaged(path, f"it has only {size} bytes")
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, _MAX_HEADER):
                raise _damaged(path, f"its header should have {length} bytes, but the file has {size}")
            header = file.read(length)
    except OSError as error:
        raise DamagedState(f"{path} cannot be read: {error.strerror or error}") from error
    spans = dict(_entries(path, header, size - 8 - length))
    return SafetensorsLayout(length.to_bytes(8, "little") + header, spans)


def _span(entry: Mapping[str, Any], origin: int) -> TensorSpan:
    begin, end = entry["data_offsets"]
    return TensorSpan(_NAMES[entry["dtype"]], tuple(entry["shape"]), origin + begin, origin + end)


def _open_direct(path: Path) -> int:
    """Create a file, for direct I/O if its file system supports it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # the file is created before the flag is rejected
        return os.open(path, flags, 0o666)


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        try:
            written = os.write(descriptor, view)
        except OSError as error:
            if error.errno != errno.EINVAL or not _stop_direct(descriptor):
                raise
            continue
        view = view[written:]
        if view and written % _PAGE:
            _stop_direct(descriptor)  # after a short write (a full disk) the rest is not page-aligned


def _stop_direct(descriptor: int) -> bool:
    """Switch a file to buffered writes; return False if it was already."""
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~direct)
    return bool(flags & direct)


def _entries(path: Path, header: bytes, size: int) -> Iterator[tuple[str, TensorSpan]]:
    """Each tensor's span; together they must fill the data exactly."""
    try:
        entries = json.loads(header.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "its header is not JSON") from error
    if not isinstance(entries, dict):
        raise _damaged(path, "its header is not a JSON object")
    entries.pop("__metadata__", None)
    tensors = [(name, *_entry(path, name, entry)) for name, entry in entries.items()]
    position = 0
    for name, _, _, begin, end in sorted(tensors, key=lambda entry: entry[3:]):
        if begin != position:
            raise _damaged(path, f"tensor {name} begins at byte {begin} of the data, not {position}")
        position = end
    if position != size:
        raise _damaged(path, f"its tensors have {position} bytes, but the file has {size}")
    origin = 8 + len(header)
    for name, dtype, shape, begin, end in tensors:
        yield name, TensorSpan(dtype, shape, origin + begin, origin + end)


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Parse a tensor's dtype, shape and data offsets from its entry in the header."""
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [begin, end]} if len(entry) == 3:
            numbers = [*shape, begin, end]
            if code not in _NAMES:
                raise _damaged(path, f"tensor {name} has the unknown dtype {code[:20]!r}")
            if any(type(number) is not int or number < 0 for number in numbers) or len(shape) > 32:
                raise _damaged(path, f"tensor {name} has a malformed shape or offset")
            if end - begin != math.prod(shape) * DTYPES[_NAMES[code]][1]:
                raise _damaged(path, f"tensor {name} has {end - begin} bytes, which does not match its shape")
            return _NAMES[code], tuple(shape), begin, end
    raise _damaged(path, f"the entry of tensor {name} is malformed")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice")
    return table


def _damaged(path: Path, why: str) -> DamagedState:
    return DamagedState(f"{path} is damaged: {why}", hint="use an older checkpoint, or copy the file again")
