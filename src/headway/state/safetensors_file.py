"""The safetensors format: a length, a JSON header, the tensors' bytes. Written from memory, read by mmap.

The `safetensors` library can neither write bfloat16 without torch nor fsync, and copies before writing; files
from here open with it, and the other way round. Tensors here are raw little-endian bits and a dtype's name.
"""

import json
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from headway.errors import StateError

__all__ = ["DTYPES", "Block", "ShardFile", "Written", "bits_dtype", "open_file", "write_file"]

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
"""Our name of each dtype, its name in the format, and its size in bytes."""

_NAMES = {code: name for name, (code, _) in DTYPES.items()}
_MAX_HEADER = 100_000_000  # the limit of the format's own library
_WRITE_BYTES = 4 << 20  # hashed, then written, while it is still in the cache


@dataclass(frozen=True)
class Block:
    """One tensor to write: its name, dtype, shape, and its bits in row-major order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bits: Bits


@dataclass(frozen=True)
class Written:
    """What a file came to: its size, the checksum of its header, and one for each tensor."""

    bytes: int
    header_xxh3: str
    xxh3: dict[str, str]


@dataclass(frozen=True)
class ShardFile:
    """An open file: its header's checksum, each tensor's dtype, and its bits, left on disk until touched."""

    path: Path
    header_xxh3: str
    dtypes: dict[str, str]
    bits: dict[str, Bits]


def bits_dtype(dtype: str) -> np.dtype[np.unsignedinteger]:
    """The unsigned integer that has the size of this dtype's elements."""
    return np.dtype(f"<u{DTYPES[dtype][1]}")


def write_file(path: Path, blocks: Sequence[Block]) -> Written:
    """Write tensors to a new file and make it durable; nothing is copied, checksums come from memory."""
    ordered = sorted(blocks, key=lambda block: (-DTYPES[block.dtype][1], block.name))  # keeps every tensor aligned
    header = _header(ordered)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write_all(descriptor, memoryview(header))
        checksums = {block.name: _write_block(descriptor, block) for block in ordered}
        os.fsync(descriptor)
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    return Written(size, xxhash.xxh3_64_hexdigest(header), checksums)


def open_file(path: Path) -> ShardFile:
    """Map a file; StateError when it is not a whole, well-formed safetensors file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise _damaged(path, f"it has only {size} bytes")
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, _MAX_HEADER):
                raise _damaged(path, f"its header says it has {length} bytes, and the file has {size}")
            header = file.read(length)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror or error}") from error
    checksum = xxhash.xxh3_64_hexdigest(length.to_bytes(8, "little") + header)
    data = np.frombuffer(mapped, np.uint8)[8 + length :]
    dtypes: dict[str, str] = {}
    bits: dict[str, Bits] = {}
    for name, dtype, shape, begin, end in _entries(path, header, data.size):
        dtypes[name] = dtype
        bits[name] = data[begin:end].view(bits_dtype(dtype)).reshape(shape)
    return ShardFile(path, checksum, dtypes, bits)


def _header(blocks: Sequence[Block]) -> bytes:
    """The length and the JSON header, padded so that the data after it is aligned."""
    entries: dict[str, Any] = {}
    end = 0
    for block in blocks:
        code, itemsize = DTYPES[block.dtype]
        assert block.name not in entries, f"{block.name} is in the file twice"
        assert block.bits.nbytes == math.prod(block.shape) * itemsize, f"{block.name} has too few or many bytes"
        begin, end = end, end + block.bits.nbytes
        entries[block.name] = {"dtype": code, "shape": list(block.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_block(descriptor: int, block: Block) -> str:
    view = np.ascontiguousarray(block.bits).reshape(-1).view(np.uint8).data
    checksum = xxhash.xxh3_64()
    for begin in range(0, len(view), _WRITE_BYTES):
        part = view[begin : begin + _WRITE_BYTES]
        checksum.update(part)
        _write_all(descriptor, part)
    return checksum.hexdigest()


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def _entries(path: Path, header: bytes, size: int) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """Each tensor's name, dtype, shape and place; together they must fill the data exactly."""
    try:
        entries = json.loads(header.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "its header is not JSON") from error
    if not isinstance(entries, dict):
        raise _damaged(path, "its header is not a table")
    entries.pop("__metadata__", None)
    found = [(name, *_entry(path, name, entry)) for name, entry in entries.items()]
    place = 0
    for name, _, _, begin, end in sorted(found, key=lambda entry: entry[3:]):
        if begin != place:
            raise _damaged(path, f"tensor {name} begins at byte {begin} of the data, not {place}")
        place = end
    if place != size:
        raise _damaged(path, f"its tensors have {place} bytes, and the file has {size}")
    yield from found


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """One tensor's dtype, shape and place, from its line of the header."""
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [begin, end]} if len(entry) == 3:
            numbers = [*shape, begin, end]
            if code not in _NAMES:
                raise _damaged(path, f"tensor {name} has the unknown dtype {code[:20]!r}")
            if any(type(number) is not int or number < 0 for number in numbers) or len(shape) > 32:
                raise _damaged(path, f"tensor {name} has a malformed shape or place")
            if end - begin != math.prod(shape) * DTYPES[_NAMES[code]][1]:
                raise _damaged(path, f"tensor {name} has {end - begin} bytes, which its shape does not need")
            return _NAMES[code], tuple(shape), begin, end
    raise _damaged(path, f"the entry of tensor {name} is malformed")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice")
    return table


def _damaged(path: Path, why: str) -> StateError:
    return StateError(f"{path} is damaged: {why}", hint="use an older checkpoint, or copy the file again")
