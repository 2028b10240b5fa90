import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from counting import Counting
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import DamagedState, StateError
from headway.state import (
    Box,
    CheckpointFacts,
    Piece,
    begin_checkpoint,
    commit,
    dump_manifest,
    open_checkpoint,
    read_box,
    shard_name,
    verify_checkpoint,
    write_shard,
)
from headway.state import read_checkpoint as restore_module
from headway.state.manifest import digest_of, parse_manifest
from headway.state.source import CheckpointSource
from thinned import examples

FACTS = CheckpointFacts(cursor=8, chain="", data_version="v", rng={"0": "AA=="})


def whole(name, shape, itemsize=4):
    rng = np.random.default_rng(len(name))
    return np.frombuffer(rng.bytes(math.prod(shape) * itemsize), f"<u{itemsize}").reshape(shape)


def piece_of(name, array, box):
    dtype = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}[array.itemsize]
    data = np.ascontiguousarray(array[box.slices((0,) * array.ndim)]).reshape(box.shape)
    return Piece(name, dtype, array.shape, box.start, box.shape, data)


def save(folder, shards):
    begun = begin_checkpoint(folder, 1)
    written = [write_shard(begun.partial, shard_name(rank), pieces) for rank, pieces in enumerate(shards)]
    return commit(begun, FACTS, written, workers=len(shards))


def rechunk(path, chunk):
    """Take a checkpoint's checksums of smaller chunks: by the rule, from the bytes of its files."""
    manifest = parse_manifest((path / "manifest.json").read_bytes(), "")
    tensors = {}
    for name, tensor in manifest.tensors.items():
        size = {"uint8": 1, "bfloat16": 2, "float32": 4, "int64": 8}[tensor.dtype]
        pieces = []
        for piece in tensor.pieces:
            bytes_ = (path / piece.file).read_bytes()[piece.offset :][: math.prod(piece.shape) * size]
            sums = [xxhash.xxh3_64_hexdigest(bytes_[i : i + chunk]) for i in range(0, len(bytes_), chunk)]
            pieces.append(piece.model_copy(update={"xxh3": tuple(sums)}))
        tensors[name] = tensor.model_copy(update={"pieces": tuple(pieces)})
    changed = manifest.model_copy(update={"tensors": tensors, "chunk_bytes": chunk})
    (path / "manifest.json").write_bytes(dump_manifest(changed))


def cut(box, dim, at):
    left = tuple(at if d == dim else size for d, size in enumerate(box.shape))
    right = tuple(size - at if d == dim else size for d, size in enumerate(box.shape))
    return Box(box.start, left), Box(tuple(s + at * (d == dim) for d, s in enumerate(box.start)), right)


def chunks_needed(tensor, itemsize, chunk, want):
    """Every byte of every chunk that has a byte of the box, by going through its elements one by one."""
    needed = set()
    for index in np.ndindex(*want.shape):
        place = tuple(first + i for first, i in zip(want.start, index, strict=True))
        for piece in tensor.pieces:
            inside = [
                first <= at < first + size for at, first, size in zip(place, piece.start, piece.shape, strict=True)
            ]
            if all(inside):
                local = [at - first for at, first in zip(place, piece.start, strict=True)]
                number = int(np.ravel_multi_index(local, piece.shape)) if local else 0
                size = math.prod(piece.shape) * itemsize
                first, last = number * itemsize // chunk, (number * itemsize + itemsize - 1) // chunk
                begin, end = first * chunk, min((last + 1) * chunk, size)
                needed |= {(piece.file, piece.offset + at) for at in range(begin, end)}
    return needed


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_any_box_reads_from_any_boxes(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=4)))
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8]))
    array = whole("t", shape, itemsize)
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(data.draw(st.integers(0, 4)) if shape else 0):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        boxes += cut(box, dim, data.draw(st.integers(0, box.shape[dim])))
    path = save(tmp_path_factory.mktemp("c"), [[piece_of("t", array, box)] for box in boxes])
    chunk = data.draw(st.sampled_from([1, 3, 8, 16, 50, 4 << 20]))
    if chunk != 4 << 20:
        rechunk(path, chunk)
    verify_checkpoint(path)
    source = Counting(path)
    checkpoint = open_checkpoint(source)
    tensor = checkpoint.manifest.tensors["t"]
    for _ in range(3):
        start = tuple(data.draw(st.integers(0, size)) for size in shape)
        size = tuple(data.draw(st.integers(0, w - s)) for w, s in zip(shape, start, strict=True))
        want = array[Box(start, size).slices((0,) * len(shape))]
        assert np.array_equal(read_box(checkpoint, "t", start, size), want)
        source.reads.clear()
        out = np.zeros(size, array.dtype)
        assert read_box(checkpoint, "t", start, size, out=out) is out
        assert np.array_equal(out, want)
        read = {(file, at) for file, begin, end in source.reads for at in range(begin, end)}
        assert read == chunks_needed(tensor, itemsize, chunk, Box(start, size))


@pytest.mark.parametrize(
    ("shape", "start", "size", "chunk"),
    [
        ((3, 8, 16), (0, 2, 0), (3, 2, 16), 64),  # experts, each cut along its rows: a stretch of each
        ((6, 64), (1, 16), (4, 16), 64),  # columns of rows that are longer than a chunk
        ((4, 64), (0, 60), (4, 4), 100),
        ((5, 4, 64), (1, 1, 3), (2, 2, 5), 16),
        ((5, 3), (0, 1), (5, 1), 1),
    ],
)
def test_a_scattered_box_reads_no_more_than_its_chunks(tmp_path, shape, start, size, chunk):
    array = whole("t", shape)
    path = save(tmp_path, [[piece_of("t", array, Box((0,) * len(shape), shape))]])
    rechunk(path, chunk)
    source = Counting(path)
    checkpoint = open_checkpoint(source)
    read_box(checkpoint, "t", (0,) * len(shape), (0,) * len(shape))
    bits = read_box(checkpoint, "t", start, size)
    assert np.array_equal(bits, array[Box(start, size).slices((0,) * len(shape))])
    header = checkpoint.manifest.files["rank-00000.safetensors"].header_bytes
    read = {(file, at) for file, begin, end in source.reads if begin >= header for at in range(begin, end)}
    assert read == chunks_needed(checkpoint.manifest.tensors["t"], 4, chunk, Box(start, size))


@pytest.mark.parametrize("budget", [1, 30, 100, 10_000])
def test_rows_read_through_a_buffer_are_complete(tmp_path, monkeypatch, budget):
    monkeypatch.setattr(restore_module, "_BAND_BYTES", budget)
    array = whole("t", (9, 5, 3), 2)
    path = save(tmp_path, [[piece_of("t", array, Box((0, 0, 0), (9, 5, 3)))]])
    rechunk(path, 16)
    verify_checkpoint(path)
    checkpoint = open_checkpoint(path)
    for index in np.ndindex(3, 2, 2):
        start, size = (index[0], index[1], index[2]), (6, 2, 1)
        want = array[start[0] : start[0] + 6, start[1] : start[1] + 2, start[2] : start[2] + 1]
        assert np.array_equal(read_box(checkpoint, "t", start, size), want)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_an_array_without_dimensions_is_filled(tmp_path, itemsize):
    array = whole("scalar", (), itemsize)
    path = save(tmp_path, [[piece_of("t", array, Box((), ()))]])
    checkpoint = open_checkpoint(path)
    out = np.zeros((), array.dtype)
    assert read_box(checkpoint, "t", (), (), out=out) is out
    assert out == array != 0


def test_into_memory_that_is_not_contiguous(tmp_path):
    array = whole("t", (6, 4))
    path = save(tmp_path, [[piece_of("t", array, half)] for half in cut(Box((0, 0), (6, 4)), 1, 3)])
    memory = np.zeros((6, 8), array.dtype)
    read_box(open_checkpoint(path), "t", (0, 0), (6, 4), out=memory[:, ::2])
    assert np.array_equal(memory[:, ::2], array)
    assert not memory[:, 1::2].any()


@pytest.fixture
def saved(tmp_path):
    a, b = whole("a", (4, 3)), whole("bb", (5,), 2)
    left, right = cut(Box((0, 0), (4, 3)), 0, 2)
    first = [piece_of("a", a, left), piece_of("bb", b, Box((0,), (5,)))]
    return save(tmp_path / "checkpoints", [first, [piece_of("a", a, right)]])


def read_all(path):
    checkpoint = open_checkpoint(path)
    for name, tensor in checkpoint.manifest.tensors.items():
        read_box(checkpoint, name, (0,) * len(tensor.shape), tensor.shape)


class Spoiled(CheckpointSource):
    """A checkpoint in memory with one byte that can be changed; reading it costs no disk."""

    def __init__(self, path):
        self.location = str(path)
        self.files = {file.name: bytearray(file.read_bytes()) for file in path.iterdir()}

    def manifest(self):
        return bytes(self.files["manifest.json"])

    def size(self, file):
        return len(self.files[file])

    def read(self, file, begin, out):
        out[:] = self.files[file][begin : begin + len(out)]


@pytest.mark.parametrize(
    ("check", "stride"), [(verify_checkpoint, 1), (read_all, 3), pytest.param(read_all, 1, marks=pytest.mark.slow)]
)
def test_every_flipped_byte_is_refused_and_its_file_named(saved, check, stride):
    """Header, padding, every tensor, manifest; and where it is a tensor's, the tensor is named."""
    source = Spoiled(saved)
    check(source)
    tensors = json.loads(source.manifest())["tensors"]
    owner = {}
    for tensor, size in (("a", 4), ("bb", 2)):
        for piece in tensors[tensor]["pieces"]:
            for at in range(math.prod(piece["shape"]) * size):
                owner[piece["file"], piece["offset"] + at] = tensor
    assert len(owner) == 12 * 4 + 5 * 2
    assert len(source.files) == 3
    for file, content in source.files.items():
        for place in range(0, len(content), stride):
            content[place] ^= 1 << (place % 8)
            with pytest.raises(DamagedState) as refused:
                check(source)
            content[place] ^= 1 << (place % 8)
            assert f"{saved}/{file} " in refused.value.message
            assert (file, place) not in owner or f"tensor {owner[file, place]} " in refused.value.message
            assert refused.value.hint
    check(source)


def test_flipped_bytes_on_disk(saved):
    """What memory stood for above, in real files: first, last and a byte in the middle of each."""
    for path in sorted(saved.iterdir()):
        good = path.read_bytes()
        for place in (0, 9, len(good) // 2, len(good) - 1):
            bad = bytearray(good)
            bad[place] ^= 16
            path.write_bytes(bad)
            for check in (verify_checkpoint, read_all):
                with pytest.raises(DamagedState, match=path.name.replace(".", r"\.")):
                    check(saved)
        path.write_bytes(good)
    verify_checkpoint(saved)


def test_a_wrong_tensor_is_named(saved):
    path = saved / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 128
    path.write_bytes(content)
    with pytest.raises(StateError, match=r"rank-00001\.safetensors is damaged: the checksum of tensor a is wrong"):
        read_all(saved)
    assert read_box(open_checkpoint(saved), "a", (0, 0), (2, 3)).shape == (2, 3)  # the other half is whole


def test_damage_hurts_those_who_need_its_chunk_only(tmp_path):
    array = whole("t", (8, 4))
    path = save(tmp_path, [[piece_of("t", array, Box((0, 0), (8, 4)))]])
    rechunk(path, 32)  # two rows
    file = path / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3 * 16] ^= 1  # row 5
    file.write_bytes(content)
    checkpoint = open_checkpoint(path)
    for row in range(8):
        if row in (4, 5):
            with pytest.raises(DamagedState, match=r"rank-00000\.safetensors is damaged: the checksum of tensor t"):
                read_box(checkpoint, "t", (row, 1), (1, 2))
        else:
            assert np.array_equal(read_box(checkpoint, "t", (row, 1), (1, 2)), array[row : row + 1, 1:3])
    with pytest.raises(DamagedState, match="tensor t"):
        verify_checkpoint(path)


def test_only_the_files_needed_are_read_and_each_header_is_checked_once(saved):
    source = Counting(saved)
    checkpoint = open_checkpoint(source)
    assert source.reads == []
    for _ in range(3):
        read_box(checkpoint, "a", (3, 0), (1, 3))
    assert {file for file, _, _ in source.reads} == {"rank-00001.safetensors"}
    size = (saved / "rank-00001.safetensors").stat().st_size
    assert source.reads[0] == ("rank-00001.safetensors", 0, size - 24)
    assert source.reads[1:] == [("rank-00001.safetensors", size - 24, size)] * 3


@pytest.mark.parametrize("change", ["truncate", "extend", "remove", "empty", "folder"])
@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"])
def test_torn_and_missing_files_are_refused_by_name(saved, change, name):
    path = saved / name
    content = path.read_bytes()
    path.unlink()
    if change == "folder":
        path.mkdir()
    elif change != "remove":
        path.write_bytes({"truncate": content[:-1], "extend": content + b"\0", "empty": b""}[change])
    with pytest.raises(StateError, match=name.replace(".", r"\.")) as refused:
        open_checkpoint(saved)
    # A shard that is gone is damage to a checkpoint; without a manifest there is none.
    assert isinstance(refused.value, DamagedState) == ((name, change) != ("manifest.json", "remove"))


@pytest.mark.parametrize("change", ["truncate", "remove"])
def test_files_that_change_after_they_were_looked_at(saved, change):
    checkpoint = open_checkpoint(saved)
    path = saved / "rank-00001.safetensors"
    if change == "remove":
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
    with pytest.raises(DamagedState, match=r"rank-00001\.safetensors"):
        read_box(checkpoint, "a", (2, 0), (2, 3))


def test_files_of_another_checkpoint_are_refused(saved, tmp_path):
    other = save(tmp_path / "other", [[piece_of("a", whole("zzz", (4, 3)), Box((0, 0), (4, 3)))]])
    shutil.copy(saved / "manifest.json", other / "manifest.json")
    with pytest.raises(DamagedState, match="rank-00000"):
        open_checkpoint(other)
    swapped = (saved / "rank-00000.safetensors").read_bytes()
    (saved / "rank-00001.safetensors").write_bytes(swapped)
    with pytest.raises(DamagedState, match="rank-00001"):
        open_checkpoint(saved)


def test_a_file_of_the_same_size_from_another_step_is_refused(saved, tmp_path):
    a = whole("other", (4, 3))
    other = save(tmp_path / "other", [[piece_of("a", a, half)] for half in cut(Box((0, 0), (4, 3)), 0, 2)])
    shutil.copy(other / "rank-00001.safetensors", saved / "rank-00001.safetensors")
    open_checkpoint(saved)
    for check in (verify_checkpoint, read_all):
        with pytest.raises(DamagedState, match=r"rank-00001\.safetensors is damaged: the checksum of tensor a"):
            check(saved)


def test_a_digest_that_is_not_that_of_the_bytes_is_found(saved):
    manifest = parse_manifest((saved / "manifest.json").read_bytes(), "")
    wrong = dict(manifest.tensors) | {"a": manifest.tensors["a"].model_copy(update={"digest": "0" * 16})}
    changed = manifest.model_copy(update={"tensors": wrong, "digest": digest_of(wrong)})
    (saved / "manifest.json").write_bytes(dump_manifest(changed))
    read_all(saved)
    with pytest.raises(DamagedState, match="the digest of tensor a is wrong"):
        verify_checkpoint(saved)


def test_an_unknown_tensor_is_named(saved):
    with pytest.raises(StateError, match="has no tensor nope"):
        read_box(open_checkpoint(saved), "nope", (0,), (1,))


def test_an_open_checkpoint_says_where_it_is(saved):
    checkpoint = open_checkpoint(saved)
    assert checkpoint.location == str(saved) == replace(checkpoint).location
