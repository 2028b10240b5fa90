"""Two checkpoints side by side, against brute force over whole arrays and torch's own idea of small floats."""

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway.errors import DamagedState
from headway.state import (
    CheckpointFacts,
    OpenCheckpoint,
    Piece,
    begin_checkpoint,
    commit,
    open_checkpoint,
    shard_name,
    sharded,
    write_shard,
)
from headway.state import checkpoint_diff as compare_module
from headway.state import read_checkpoint as read_module
from headway.state.box import Box, bands
from headway.state.checkpoint_diff import diff_checkpoints, distance, values

FACTS = CheckpointFacts(
    cursor=8, chain="c" * 32, data_version="v", recipe={"name": "x", "train": {"lr": 0.1, "steps": 3}}
)
FORMAT_1 = Path(__file__).parent / "format_1"
OLD = FORMAT_1 / "step-00000007"

Tensors = dict[str, tuple[str, np.ndarray]]


def save(
    folder: Path, tensors: Tensors, cuts: tuple[int, ...] = (), *, step: int = 5, facts: CheckpointFacts = FACTS
) -> OpenCheckpoint:
    """A checkpoint of bits, cut along the first dims into so many parts, a file a part."""
    files: dict[int, list[Piece]] = {rank: [] for rank in range(math.prod(cuts))}
    for name, (dtype, bits) in tensors.items():
        used = cuts[: bits.ndim]
        for part in sharded(bits.shape, used, [(axis, axis) for axis in range(len(used))]).parts:
            data = np.ascontiguousarray(bits[part.box.slices((0,) * bits.ndim)])
            if data.size or part.holder == 0:
                piece = Piece(name, dtype, bits.shape, part.box.start, part.box.shape, data)
                files[part.holder].append(piece)
    saving = begin_checkpoint(folder, step)
    shards = [write_shard(saving.partial, shard_name(rank), pieces) for rank, pieces in files.items() if pieces]
    return open_checkpoint(commit(saving, facts, shards, workers=len(files)))


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).view("<u4")


@pytest.mark.parametrize("shape", [(), (7,), (0,), (5, 3), (3, 4, 5), (1, 9), (2, 1, 3, 2), (4, 0, 2)], ids=str)
@pytest.mark.parametrize("limit", [1, 4, 12, 40, 60, 10_000])
def test_bands_follow_each_other(shape: tuple[int, ...], limit: int) -> None:
    order = np.arange(math.prod(shape)).reshape(shape)
    parts = [order[box.slices((0,) * len(shape))] for box in bands(Box((0,) * len(shape), shape), 4, limit)]
    assert [int(i) for band in parts for i in band.reshape(-1)] == list(range(order.size))
    assert all(band.nbytes / 2 <= limit or band.size == 1 for band in parts)


def test_bands_are_not_smaller_than_they_need_be() -> None:
    assert len(list(bands(Box((7, 0), (100, 10)), 4, 400))) == 10
    assert len(list(bands(Box((0, 5), (4, 1000)), 4, 400))) == 40


SMALL_FLOATS = ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"]


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_every_value_of_a_small_float_is_torchs(dtype: str) -> None:
    size = 1 if "8" in dtype else 2
    bits = np.arange(256**size, dtype=f"<u{size}")
    signed = torch.from_numpy(bits.view(f"<i{size}").copy())
    np.testing.assert_array_equal(values(bits, dtype), signed.view(getattr(torch, dtype)).double().numpy())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_floats_are_converted_exactly(dtype: str) -> None:
    truth = np.array([0.0, -0.0, 1.5, -3e38, 1e-45, np.inf, -np.inf, np.nan], dtype)
    np.testing.assert_array_equal(values(truth.view(f"<u{truth.itemsize}"), dtype), truth.astype(np.float64))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"])
def test_integer_distances_are_exact(dtype: str) -> None:
    kind = np.dtype(dtype)
    if dtype == "bool":
        numbers = [0, 1]
    else:
        limits = np.iinfo(kind)
        numbers = sorted({limits.min, limits.min + 1, 0, 1, 3, limits.max // 2, limits.max - 1, limits.max})
    pairs = list(itertools.product(numbers, numbers))
    a, b = (np.array([pair[i] for pair in pairs], kind).view(f"<u{kind.itemsize}") for i in (0, 1))
    absolute, relative = distance(a, b, dtype)
    for (x, y), far, share in zip(pairs, absolute, relative, strict=True):
        assert far == float(abs(x - y)), (x, y)
        assert share == pytest.approx(0 if x == y else abs(x - y) / max(abs(x), abs(y)), rel=1e-12)


def test_distances_of_floats_by_hand() -> None:
    inf, nan = math.inf, math.nan
    table = [
        (1.0, 1.5, 0.5, 1 / 3),
        (-1.0, 1.0, 2.0, 2.0),
        (0.0, 4.0, 4.0, 1.0),
        (0.0, -0.0, 0.0, 0.0),
        (nan, 1.0, inf, inf),
        (inf, 1.0, inf, inf),
        (inf, -inf, inf, inf),
        (inf, inf, 0.0, 0.0),
        (nan, nan, 0.0, 0.0),
    ]
    a, b = (np.array([row[i] for row in table], np.float32).view("<u4") for i in (0, 1))
    absolute, relative = distance(a, b, "float32")
    assert list(absolute) == [row[2] for row in table]
    assert list(relative) == pytest.approx([row[3] for row in table])


def test_the_same_state_on_another_mesh_is_equal_by_digest(tmp_path: Path) -> None:
    tensors: Tensors = {
        "model/w": ("float32", floats(6, 10)),
        "model/b": ("float32", floats(10)),
        "n": ("int64", np.array(3, "<u8")),
    }
    a, b = save(tmp_path / "a", tensors, (2, 3)), save(tmp_path / "b", tensors, (4,))
    for file in Path(b.location).glob("*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))  # nobody reads them
    diff = diff_checkpoints(a, b)
    assert (diff.equal, diff.by, diff.tensors) == (True, "digest", 3)
    assert diff.facts == {"workers": (6, 4)}
    assert (diff.recipe, diff.differing, diff.unlike) == ({}, (), {})


@pytest.mark.parametrize("limit", [40, 1 << 20])
def test_differences_are_those_of_brute_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(read_module, "_BAND_BYTES", limit)
    monkeypatch.setattr(compare_module, "_BLOCK", 7)
    first, second = floats(9, 14), floats(9, 14)
    rng = np.random.default_rng(1)
    for row, column in zip(rng.integers(9, size=20), rng.integers(14, size=20), strict=True):
        second[row, column] ^= np.uint32(1 << int(rng.integers(25)))
    same = ("float32", floats(5, seed=2))
    halves = np.arange(12, dtype="<u2")
    a = save(tmp_path / "a", {"w": ("float32", first), "same": same, "h": ("float16", halves)}, (3,))
    b = save(tmp_path / "b", {"w": ("float32", second), "same": same, "h": ("float16", halves + np.uint16(1))}, (2, 2))
    done: list[tuple[int, int]] = []
    diff = diff_checkpoints(a, b, lambda so_far, total: done.append((so_far, total)))
    assert (diff.equal, diff.by, diff.tensors) == (False, "contents", 3)
    assert [tensor.name for tensor in diff.differing] == ["w", "h"]
    x, y = (bits.view(np.float32).astype(np.float64) for bits in (first, second))
    tensor = diff.differing[0]
    assert (tensor.elements, tensor.differing) == (126, int((first != second).sum()))
    assert tensor.absolute == np.abs(x - y).max()
    assert tensor.relative == (np.abs(x - y) / np.maximum(np.abs(x), np.abs(y))).max()
    assert diff.differing[1].differing == 12
    assert done[-1] == (126 * 4 + 12 * 2,) * 2


def test_missing_tensors_and_differing_kinds_are_listed(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"x": ("float32", floats(3)), "s": ("float32", floats(2, 3)), "t": ("float32", floats(4))})
    b = save(tmp_path / "b", {"y": ("float32", floats(3)), "s": ("float32", floats(3, 2)), "t": ("int32", floats(4))})
    diff = diff_checkpoints(a, b)
    assert not diff.equal
    assert (diff.only_first, diff.only_second, diff.tensors) == (("x",), ("y",), 2)
    assert diff.unlike == {"s": ("float32 2x3", "float32 3x2"), "t": ("float32 4", "int32 4")}
    assert diff.differing == ()


def test_differing_facts_are_listed_for_equal_states(tmp_path: Path) -> None:
    other = FACTS.model_copy(
        update={
            "cursor": 9,
            "chain": "d" * 32,
            "rng": {"0": [1]},
            "recipe": {"name": "x", "train": {"lr": 0.2, "steps": 3}, "seed": 4},
        }
    )
    tensors: Tensors = {"w": ("float32", floats(3))}
    diff = diff_checkpoints(save(tmp_path / "a", tensors), save(tmp_path / "b", tensors, step=6, facts=other))
    assert diff.equal
    assert diff.facts == {"step": (5, 6), "cursor": (8, 9), "chain": ("c" * 32, "d" * 32)}
    assert diff.recipe == {"train.lr": (0.1, 0.2), "seed": (None, 4)}
    assert diff.same_rng is False


def old_tensors() -> Tensors:
    """What the checkpoint of format 1 holds, put together from its files by the format's own library."""
    from safetensors import safe_open

    manifest = json.loads((OLD / "manifest.json").read_bytes())
    tensors: Tensors = {}
    for name, entry in manifest["tensors"].items():
        whole = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for piece in entry["pieces"]:
            with safe_open(OLD / piece["file"], framework="pt") as file:
                place = tuple(slice(a, a + n) for a, n in zip(piece["start"], piece["shape"], strict=True))
                whole[place] = file.get_tensor(name)
        size = whole.element_size()
        bits = np.frombuffer(bytes(whole.contiguous().view(-1).view(torch.uint8).numpy()), f"<u{size}")
        tensors[name] = (entry["dtype"], bits.reshape(entry["shape"]))
    return tensors


def test_digests_of_two_functions_are_not_compared(tmp_path: Path) -> None:
    tensors = old_tensors()
    old, new = open_checkpoint(OLD), save(tmp_path / "a", tensors)
    assert (old.manifest.digest_function, new.manifest.digest_function) == (1, 2)
    diff = diff_checkpoints(old, new)
    assert (diff.equal, diff.by) == (True, "contents")
    assert diff_checkpoints(old, old).by == "digest"
    name = next(name for name, (_, bits) in tensors.items() if bits.size > 1)
    dtype, bits = tensors[name]
    changed = bits.copy()
    changed.reshape(-1)[-1] ^= 1
    diff = diff_checkpoints(old, save(tmp_path / "b", tensors | {name: (dtype, changed)}))
    assert [(tensor.name, tensor.differing) for tensor in diff.differing] == [(name, 1)]


def test_damage_is_not_a_difference(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"w": ("float32", floats(50))})
    b = save(tmp_path / "b", {"w": ("float32", floats(50, seed=1))})
    file = Path(b.location) / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedState, match=r"rank-00000.safetensors is damaged: the checksum of tensor w"):
        diff_checkpoints(a, b)


def test_a_copied_folder_is_equal(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"w": ("float32", floats(50))})
    shutil.copytree(a.location, tmp_path / "copy")
    everything: Any = diff_checkpoints(a, open_checkpoint(tmp_path / "copy"))
    assert everything.equal
    assert everything.facts == {}
