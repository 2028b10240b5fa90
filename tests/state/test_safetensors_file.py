import errno
import fcntl
import json
import mmap
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import StateError
from headway.state.safetensors_file import DTYPES, bits_dtype, plan_file, read_header, write_file, write_memory
from thinned import examples


@dataclass(frozen=True)
class Block:
    name: str
    dtype: str
    shape: tuple[int, ...]
    bits: np.ndarray


def random_tensor(dtype, shape, seed=0):
    size = DTYPES[dtype][1]
    count = int(np.prod(shape))
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, count * size, np.uint8)
    return Block(f"a.{dtype}", dtype, shape, raw.view(bits_dtype(dtype)).reshape(shape))


def write(path, blocks):
    """Plan a file and write it, tensor by tensor."""
    layout = plan_file((block.name, block.dtype, block.shape) for block in blocks)
    views = {block.name: np.ascontiguousarray(block.bits).reshape(-1).view(np.uint8).data for block in blocks}
    write_file(path, layout.header, [views[name] for name in layout.spans])
    return layout


def read(path):
    """Every tensor's dtype, shape and bytes, by where the header says that it lies."""
    content = path.read_bytes()
    places = read_header(path).spans
    return {name: (place.dtype, place.shape, content[place.begin : place.end]) for name, place in places.items()}


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4)])
def test_the_library_opens_what_we_write(tmp_path, shape):
    blocks = [random_tensor(dtype, shape, seed) for seed, dtype in enumerate(DTYPES)]
    layout = write(tmp_path / "x.safetensors", blocks)
    assert layout.bytes == (tmp_path / "x.safetensors").stat().st_size
    assert layout == read_header(tmp_path / "x.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert set(loaded) == {block.name for block in blocks}
    for block in blocks:
        tensor = loaded[block.name]
        assert str(tensor.dtype) == f"torch.{block.dtype}"
        assert tuple(tensor.shape) == shape
        raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        assert raw == block.bits.tobytes()


def test_tensors_are_aligned_to_pages_and_elements():
    blocks = [random_tensor(dtype, (3,)) for dtype in DTYPES]
    layout = plan_file((block.name, block.dtype, block.shape) for block in blocks)
    assert len(layout.header) % 4096 == 0
    assert layout.header_xxh3 == xxhash.xxh3_64_hexdigest(layout.header)
    assert layout.bytes == len(layout.header) + 3 * sum(size for _, size in DTYPES.values())
    end = len(layout.header)
    for place in layout.spans.values():
        assert (place.begin, place.begin % DTYPES[place.dtype][1]) == (end, 0)
        end = place.end
    shuffled = plan_file((block.name, block.dtype, block.shape) for block in reversed(blocks))
    assert shuffled == layout


def test_we_open_what_the_library_writes(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "bf16": torch.randn(3, 4).to(torch.bfloat16),
        "f32": torch.randn(7),
        "i64": torch.arange(5),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
    }
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    assert read(tmp_path / "x.safetensors") == {
        name: (
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            bytes(tensor.reshape(-1).view(torch.uint8).numpy()),
        )
        for name, tensor in tensors.items()
    }


def test_no_tensor_and_no_ascii_name(tmp_path):
    write(tmp_path / "empty.safetensors", [])
    assert read(tmp_path / "empty.safetensors") == {}
    assert safetensors.torch.load_file(tmp_path / "empty.safetensors") == {}
    block = Block("größe/π", "uint8", (2,), np.array([1, 2], np.uint8))
    write(tmp_path / "name.safetensors", [block])
    assert list(safetensors.torch.load_file(tmp_path / "name.safetensors")) == ["größe/π"]
    assert read(tmp_path / "name.safetensors") == {"größe/π": ("uint8", (2,), b"\1\2")}


def test_large_blocks_and_strided_memory(tmp_path):
    bits = np.arange(3 << 20, dtype="<u4").reshape(1024, -1)
    write(tmp_path / "x.safetensors", [Block("t", "float32", bits.T.shape, bits.T)])
    assert read(tmp_path / "x.safetensors") == {"t": ("float32", bits.T.shape, bits.T.tobytes())}


@pytest.mark.parametrize("how", ["blocks", "memory"])
def test_never_writes_over_a_file(tmp_path, how):
    (tmp_path / "x.safetensors").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        put(tmp_path / "x.safetensors", b"yours", how)
    assert (tmp_path / "x.safetensors").read_bytes() == b"mine"


def put(path, content, how):
    """Write a file in one of the two ways: from blocks, or from memory that goes on to the end of its last page."""
    if how == "blocks":
        third = len(content) // 3
        write_file(path, content[:third], [memoryview(content)[third : 2 * third], memoryview(content)[2 * third :]])
        return
    memory = mmap.mmap(-1, -(-len(content) // 4096) * 4096)
    memory.write(content)
    memory[len(content) :] = b"\xee" * (len(memory) - len(content))  # what must not get into the file
    write_memory(path, memoryview(memory), len(content))


def no_direct(path, flags, *mode, real=os.open):
    """A file system without direct I/O: the file is made before the flag is refused, as Linux does."""
    if flags & os.O_DIRECT:
        os.close(real(path, flags & ~os.O_DIRECT, *mode))
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return real(path, flags, *mode)


def short_write(descriptor, data, real=os.write):
    """A disk that takes a thousand bytes at a time, even of what goes past the page cache."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    written = real(descriptor, data[:1000])
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return written


@pytest.mark.parametrize("how", ["blocks", "memory"])
@pytest.mark.parametrize("disk", ["ordinary", "no direct", "short", "short, no direct"])
@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 10_000_001])
def test_the_file_has_the_bytes(tmp_path, monkeypatch, size, disk, how):
    content = np.random.default_rng(size).bytes(size)
    with monkeypatch.context() as patch:
        if "no direct" in disk:
            patch.setattr(os, "open", no_direct)
        if "short" in disk:
            patch.setattr(os, "write", short_write)
        put(tmp_path / "x", content, how)
    assert (tmp_path / "x").read_bytes() == content


@pytest.mark.parametrize("how", ["blocks", "memory"])
def test_is_synced_after_the_last_change(tmp_path, monkeypatch, how):
    calls = []

    def note(name, real):
        monkeypatch.setattr(os, name, lambda *args: calls.append(name) or real(*args))

    for name in ("write", "ftruncate", "fsync"):
        note(name, getattr(os, name))
    put(tmp_path / "x.safetensors", bytes(5000), how)
    assert calls[-1] == "fsync"
    assert calls.count("fsync") == 1
    assert "write" in calls


@pytest.mark.parametrize("how", ["blocks", "memory"])
def test_rejected_direct_writes_fall_back_and_nothing_stays_open(tmp_path, monkeypatch, how):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        put(tmp_path / "x.safetensors", bytes(5000), how)
    opened = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink() and link.exists()]
    assert tmp_path / "x.safetensors" not in opened


def file_with(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


BAD = {
    "nothing": b"",
    "half a length": b"\x08\0\0",
    "a header longer than the file": file_with({}, length=1000),
    "a huge header": file_with({}, length=2**63),
    "no JSON": file_with(b"{nope"),
    "no UTF-8": file_with(b'{"\xff\xfe": 1}'),
    "a deep nest": file_with(b"[" * 200_000),
    "a long number": file_with(b'{"t":' + b"9" * 10_000 + b"}"),
    "a list": file_with([]),
    "an entry that is no table": file_with({"t": 3}),
    "a key too many": file_with({"t": entry(extra=1)}, bytes(4)),
    "a key twice": file_with(b'{"t":{},"t":{}}'),
    "an unknown dtype": file_with({"t": entry("F33")}, bytes(4)),
    "a negative size": file_with({"t": entry(shape=(-1, -1))}, bytes(4)),
    "a size that is no number": file_with({"t": entry(shape=(True,))}, bytes(4)),
    "a fraction": file_with({"t": entry(shape=(1.0,))}, bytes(4)),
    "a huge shape": file_with({"t": entry(shape=(2**62, 2**62))}, bytes(4)),
    "huge offsets": file_with({"t": entry(shape=(2**61,), offsets=(0, 2**63))}, bytes(4)),
    "offsets turned round": file_with({"t": entry(shape=(0,), offsets=(4, 0))}, bytes(4)),
    "a hole": file_with({"t": entry(offsets=(4, 8))}, bytes(8)),
    "an overlap": file_with({"t": entry(), "u": entry()}, bytes(4)),
    "bytes left over": file_with({"t": entry()}, bytes(5)),
    "bytes missing": file_with({"t": entry()}, bytes(3)),
    "many dimensions": file_with({"t": entry(shape=(1,) * 100)}, bytes(4)),
}


@pytest.mark.parametrize("what", BAD)
def test_malformed_files_are_refused_by_name(tmp_path, what):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(BAD[what])
    with pytest.raises(StateError, match=r"bad\.safetensors"):
        read_header(path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(StateError, match=r"gone\.safetensors cannot be read"):
        read_header(tmp_path / "gone.safetensors")


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    write(path, [random_tensor("float32", (2, 2)), random_tensor("uint8", (3,))])
    return path


@settings(max_examples=examples(80), deadline=None)
@given(st.data())
def test_broken_headers_never_raise_anything_else(whole_file, data):
    good = whole_file.read_bytes()
    content, path = bytearray(good), whole_file.with_name("y-x.safetensors")
    text = len(good[:-19].rstrip())  # behind it come the spaces up to the page, and the data
    places = st.one_of(st.integers(0, text - 1), st.integers(0, len(content) - 1))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(places)] = data.draw(st.integers(0, 255))
    kept = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    path.write_bytes(bytes(content[:kept]))
    try:
        places = read_header(path).spans.values()
    except StateError as error:
        message = error.message
    else:
        message = f"x.safetensors holds {sum(place.end - place.begin for place in places)}"
    assert re.search(r"x\.safetensors (is damaged|holds 19$)", message)
