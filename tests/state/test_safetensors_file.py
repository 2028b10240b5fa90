import json
import os
import re
import struct

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
from headway.state.safetensors_file import DTYPES, Block, bits_dtype, open_file, write_file


def random_tensor(dtype, shape, seed=0):
    size = DTYPES[dtype][1]
    count = int(np.prod(shape))
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, count * size, np.uint8)
    return Block(f"a.{dtype}", dtype, shape, raw.view(bits_dtype(dtype)).reshape(shape))


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4)])
def test_the_library_opens_what_we_write(tmp_path, shape):
    blocks = [random_tensor(dtype, shape, seed) for seed, dtype in enumerate(DTYPES)]
    written = write_file(tmp_path / "x.safetensors", blocks)
    assert written.bytes == (tmp_path / "x.safetensors").stat().st_size
    loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert set(loaded) == {block.name for block in blocks}
    for block in blocks:
        tensor = loaded[block.name]
        assert str(tensor.dtype) == f"torch.{block.dtype}"
        assert tuple(tensor.shape) == shape
        raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        assert raw == block.bits.tobytes()
        assert written.xxh3[block.name] == xxhash.xxh3_64_hexdigest(raw)


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
    file = open_file(tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        assert file.dtypes[name] == str(tensor.dtype).removeprefix("torch.")
        assert file.bits[name].shape == tuple(tensor.shape)
        assert file.bits[name].tobytes() == bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def test_no_tensor_and_no_ascii_name(tmp_path):
    write_file(tmp_path / "empty.safetensors", [])
    assert open_file(tmp_path / "empty.safetensors").bits == {}
    assert safetensors.torch.load_file(tmp_path / "empty.safetensors") == {}
    block = Block("größe/π", "uint8", (2,), np.array([1, 2], np.uint8))
    write_file(tmp_path / "name.safetensors", [block])
    assert list(safetensors.torch.load_file(tmp_path / "name.safetensors")) == ["größe/π"]
    assert open_file(tmp_path / "name.safetensors").bits["größe/π"].tolist() == [1, 2]


def test_large_blocks_and_strided_memory(tmp_path):
    bits = np.arange(3 << 20, dtype="<u4").reshape(1024, -1)
    written = write_file(tmp_path / "x.safetensors", [Block("t", "float32", bits.T.shape, bits.T)])
    file = open_file(tmp_path / "x.safetensors")
    assert np.array_equal(file.bits["t"], bits.T)
    assert written.xxh3["t"] == xxhash.xxh3_64_hexdigest(bits.T.tobytes())


def test_never_writes_over_a_file(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "x.safetensors", [])
    assert (tmp_path / "x.safetensors").read_bytes() == b"mine"


def test_is_synced_after_the_last_write(tmp_path, monkeypatch):
    calls = []
    real_write, real_fsync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda fd, data: calls.append("write") or real_write(fd, data))
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("fsync") or real_fsync(fd))
    write_file(tmp_path / "x.safetensors", [random_tensor("float32", (9,))])
    assert calls[-1] == "fsync"
    assert "write" in calls


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:7]))
    block = random_tensor("int16", (100,))
    write_file(tmp_path / "x.safetensors", [block])
    assert open_file(tmp_path / "x.safetensors").bits[block.name].tobytes() == block.bits.tobytes()


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
        open_file(path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(StateError, match=r"gone\.safetensors cannot be read"):
        open_file(tmp_path / "gone.safetensors")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_broken_headers_never_raise_anything_else(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    write_file(path, [random_tensor("float32", (2, 2)), random_tensor("uint8", (3,))])
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    try:
        file = open_file(path)
    except StateError as error:
        said = error.message
    else:
        said = f"x.safetensors holds {sum(bits.nbytes for bits in file.bits.values())}"
    assert re.search(r"x\.safetensors (is damaged|holds 19$)", said)
