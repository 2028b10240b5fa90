import json
import shutil

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import StateError
from headway.state import (
    Box,
    Facts,
    Piece,
    begin,
    commit,
    open_checkpoint,
    read_box,
    restore,
    verify,
    write_shard,
)

FACTS = Facts(cursor=8, chain="", data_version="v", rng={"0": "AA=="})


def whole(name, shape, itemsize=4):
    rng = np.random.default_rng(len(name))
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * itemsize), f"<u{itemsize}").reshape(shape)


def piece_of(name, array, box):
    dtype = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}[array.itemsize]
    data = np.ascontiguousarray(array[box.slices((0,) * array.ndim)]).reshape(box.shape)
    return Piece(name, dtype, array.shape, box.start, box.shape, data)


def save(folder, shards):
    partial = begin(folder, 1)
    for rank, pieces in enumerate(shards):
        write_shard(partial, rank, pieces)
    return commit(folder, 1, FACTS, workers=len(shards))


def cut(box, dim, at):
    left = tuple(at if d == dim else size for d, size in enumerate(box.shape))
    right = tuple(size - at if d == dim else size for d, size in enumerate(box.shape))
    return Box(box.start, left), Box(tuple(s + at * (d == dim) for d, s in enumerate(box.start)), right)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_box_reads_from_any_boxes(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    array = whole("t", shape, data.draw(st.sampled_from([1, 2, 4, 8])))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(data.draw(st.integers(0, 4))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        boxes += cut(box, dim, data.draw(st.integers(0, box.shape[dim])))
    path = save(tmp_path_factory.mktemp("c"), [[piece_of("t", array, box)] for box in boxes])
    verify(path)
    checkpoint = open_checkpoint(path)
    for _ in range(3):
        start = tuple(data.draw(st.integers(0, size)) for size in shape)
        size = tuple(data.draw(st.integers(0, w - s)) for w, s in zip(shape, start, strict=True))
        want = array[Box(start, size).slices((0,) * len(shape))]
        assert np.array_equal(read_box(checkpoint, "t", start, size), want)
        out = np.zeros(size, array.dtype)
        assert read_box(checkpoint, "t", start, size, out=out) is out
        assert np.array_equal(out, want)


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


@pytest.mark.parametrize("check", [verify, read_all])
def test_every_flipped_byte_is_refused_and_its_file_named(saved, check):
    check(saved)
    files = sorted(saved.iterdir())
    assert len(files) == 3
    for path in files:
        good = path.read_bytes()
        for place in range(len(good)):
            bad = bytearray(good)
            bad[place] ^= 1 << (place % 8)
            path.write_bytes(bad)
            with pytest.raises(StateError, match=path.name.replace(".", r"\.")):
                check(saved)
        path.write_bytes(good)
    check(saved)


def test_a_wrong_tensor_is_named(saved):
    path = saved / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 128
    path.write_bytes(content)
    with pytest.raises(StateError, match=r"rank-00001\.safetensors is damaged: the checksum of tensor a is wrong"):
        read_all(saved)
    assert read_box(open_checkpoint(saved), "a", (0, 0), (2, 3)).shape == (2, 3)  # the other half is whole


def test_only_the_pieces_needed_are_opened_and_each_is_checked_once(saved, monkeypatch):
    checkpoint = open_checkpoint(saved)
    hashed = []
    real = xxhash.xxh3_64_hexdigest
    monkeypatch.setattr(restore.xxhash, "xxh3_64_hexdigest", lambda data: hashed.append(len(data)) or real(data))
    for _ in range(3):
        read_box(checkpoint, "a", (3, 0), (1, 3))
    assert list(checkpoint._files) == ["rank-00001.safetensors"]
    assert hashed.count(24) == 1


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
    with pytest.raises(StateError, match=name.replace(".", r"\.")):
        open_checkpoint(saved)


def test_files_of_another_checkpoint_are_refused(saved, tmp_path):
    other = save(tmp_path / "other", [[piece_of("a", whole("zzz", (4, 3)), Box((0, 0), (4, 3)))]])
    shutil.copy(saved / "manifest.json", other / "manifest.json")
    with pytest.raises(StateError, match="rank-00000"):
        open_checkpoint(other)
    swapped = (saved / "rank-00000.safetensors").read_bytes()
    (saved / "rank-00001.safetensors").write_bytes(swapped)
    with pytest.raises(StateError, match="rank-00001"):
        open_checkpoint(saved)


def sealed(fields):
    """A manifest with a right checksum, by the rule and not by the code."""
    body = json.dumps(fields, separators=(",", ":")).encode()
    return body[:-1] + b',"checksum":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'


def rewrite(path, change):
    fields = json.loads((path / "manifest.json").read_bytes())
    del fields["checksum"]
    change(fields)
    (path / "manifest.json").write_bytes(sealed(fields))


def test_a_newer_format_is_told_from_damage(saved):
    rewrite(saved, lambda fields: fields.update(format=2))
    with pytest.raises(StateError, match="format 2") as error:
        open_checkpoint(saved)
    assert error.value.hint == "upgrade headway"


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f["tensors"]["a"]["pieces"][0].update(file="../../secret"),
        lambda f: f["tensors"]["a"].update(dtype="object"),
        lambda f: f.update(step=-1),
        lambda f: f.pop("cursor"),
        lambda f: f.update(surprise=1),
        lambda f: f["tensors"]["a"].update(digest="0" * 16),
        lambda f: f["tensors"].pop("a"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(saved, change):
    rewrite(saved, change)
    with pytest.raises(StateError, match=r"manifest\.json"):
        open_checkpoint(saved)


def test_a_manifest_that_belies_the_files_is_refused(saved):
    def lie(fields):
        fields["tensors"]["a"]["pieces"].pop()

    rewrite(saved, lie)
    with pytest.raises(StateError, match="6 of 12 elements of a"):
        read_all(saved)
    with pytest.raises(StateError, match="digest of tensor a is wrong"):
        verify(saved)


def test_an_unknown_tensor_is_named(saved):
    with pytest.raises(StateError, match="has no tensor nope"):
        read_box(open_checkpoint(saved), "nope", (0,), (1,))
