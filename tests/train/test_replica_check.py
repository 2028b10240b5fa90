"""Replicas held against each other: bits by hand, verdicts by table, and meshes of real processes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.models import empty_decoder
from headway.parallel import World, make_mesh, parallelize_model
from headway.parallel.local_part import to_local
from headway.recipe import Data, Model, Parallel, Recipe, Train
from headway.recipe.assignment import SuspectElement
from headway.track.replica_vote import odd_value, outvoted_replica
from headway.train.replica_check import Corrupted, ReplicaChecker, ReplicaDifference, views
from processes import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]


def total(tensor: torch.Tensor) -> int:
    return sum(int(bits.sum(dtype=torch.int64)) for bits in views(tensor))


def by_hand(raw: bytes, size: int) -> int:
    """Words of eight bytes and then elements, each as a signed number, added up modulo 2**64."""
    whole = len(raw) // 8 * 8
    parts = [raw[i : i + 8] for i in range(0, whole, 8)] + [raw[i : i + size] for i in range(whole, len(raw), size)]
    total = sum(int.from_bytes(part, "little", signed=True) for part in parts) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (3, 5), (0,), (4, 0), (2, 3, 4)])
def test_checksum_is_the_sum_of_words(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert total(tensor) == by_hand(raw, tensor.element_size())


@given(st.integers(1, 40), st.data())
@settings(deadline=None)
def test_single_flipped_bit_changes_the_checksum(size: int, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    parameter = torch.nn.Parameter(torch.arange(size).to(dtype))
    before = total(parameter)
    raw = parameter.detach().view(torch.uint8)
    place, bit = data.draw(st.integers(0, raw.numel() - 1)), data.draw(st.integers(0, 7))
    raw[place] ^= 1 << bit
    assert total(parameter) != before
    raw[place] ^= 1 << bit
    assert total(parameter) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda whole: whole.t(),
        lambda whole: whole[:, 1:4],
        lambda whole: whole.view(-1)[1:],
        lambda whole: whole[1:3],
        lambda whole: torch.view_as_complex(whole.view(-1, 2)),
    ],
    ids=["turned", "columns", "off the words", "rows", "complex"],
)
def test_views_follow_parameter_updates(make: Any) -> None:
    """Whatever its strides: what changes later is seen, and nothing was copied."""
    whole = torch.arange(24, dtype=torch.float32).view(4, 6)
    parameter = torch.nn.Parameter(make(whole))
    seen = views(parameter)
    assert all(bits.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for bits in seen)
    before = [int(bits.sum(dtype=torch.int64)) for bits in seen]
    with torch.no_grad():
        parameter[-1] += 1
    assert [int(bits.sum(dtype=torch.int64)) for bits in seen] != before
    assert sum(bits.numel() * bits.element_size() for bits in seen) == parameter.numel() * parameter.element_size()


@pytest.mark.parametrize(
    ("digests", "truth", "odd"),
    [
        (["a", "b"], None, None),
        (["a", "b"], "a", 1),
        (["a", "b"], "b", 0),
        (["a", "b"], "c", None),
        (["a", "a", "b"], None, 2),
        (["b", "a", "a"], None, 0),
        (["a", "a", "b"], "b", None),
        (["a", "b", "c"], None, None),
        (["a", "b", "c", "a"], None, None),
        (["a", "a", "b", "b"], None, None),
        (["a", "a", "a", "b", "c"], None, None),
        (["a", "b", "a", "a"], "a", 1),
        (["a", "a"], None, None),
        (["a", "a", "a"], "a", None),
    ],
)
def test_outvoted_replica(digests: list[str], truth: str | None, odd: int | None) -> None:
    assert outvoted_replica(digests, truth) == odd


@pytest.mark.parametrize(
    ("values", "truth", "odd"),
    [
        ([1.0, 1.5], 1.01, 1),
        ([1.5, 1.0], 1.01, 0),
        ([1.5, 1.0], 1.49, 1),
        ([-1.0, 1.0], 0.0, None),
        ([1.0, math.inf], 1e30, 1),
        ([math.nan, 1.0], -5.0, 0),
        ([math.nan, math.inf], 1.0, None),
        ([1.0, 1.25, 1.0], 1.0, 1),
    ],
)
def test_value_farthest_from_replay(values: list[float], truth: float, odd: int | None) -> None:
    assert odd_value(values, truth) == odd


def test_recorded_error_fields() -> None:
    error = Corrupted(40, 30, ["x", "y"], 1, ReplicaDifference(("a", "b", "c", "d"), 7, (0.5, 1.5)))
    assert error.message == "replicas differ after step 40 (a, b, c, ...); they were equal after step 30"
    assert error.facts == {
        "step": 40, "agreed": 30, "replica": 1, "digests": ("x", "y"), "tensors": ("a", "b", "c", "d"), "index": 7,
        "values": (0.5, 1.5),
    }  # fmt: skip
    assert "(parameters of other workers)" in Corrupted(40, 30, ["x", "y"], 0, ReplicaDifference()).message


# -- on meshes

RECIPE = Recipe(
    model=Model(layers=2, dim=32, heads=4, kv_heads=2, vocab_size=64),
    data=Data(path="d", seq=16),
    train=Train(batch=8),
)


def spread_out(
    rank: int, workers: int, mesh: dict[str, int], device: str = "cpu"
) -> tuple[World, dict[str, torch.Tensor]]:
    """A decoder on a mesh, whose like parts have like parameters."""
    recipe = RECIPE.model_copy(update={"parallel": Parallel(**mesh)})
    world = make_mesh(rank, workers, torch.device(device), recipe.parallel.sizes(workers))
    model = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, world).model
    parameters = dict(model.named_parameters())
    place = (world.axis("pipeline").rank, world.axis("shard").rank, world.axis("tensor").rank)
    generator = torch.Generator().manual_seed(sum(100**i * number for i, number in enumerate(place)))
    with torch.no_grad():
        for parameter in parameters.values():
            mine = to_local(parameter)
            mine.copy_(torch.randn(mine.shape, generator=generator))
    return world, parameters


def caught(replicas: ReplicaChecker, step: int) -> dict[str, Any]:
    """What a worker finds."""
    try:
        return {"digest": replicas.compare(step)}
    except Corrupted as error:
        return dict(error.facts)


def packed(value: Any) -> dict[str, torch.Tensor]:
    return {"value": torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)}


def unpacked(results: list[dict[str, torch.Tensor]]) -> list[Any]:
    return [json.loads(bytes(result["value"].tolist())) for result in results]


def flip_and_mend(
    rank: int, workers: int, mesh: dict[str, int], whose: int, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Equal; with one bit of the last parameter's last but one element flipped; and flipped back."""
    world, parameters = spread_out(rank, workers, mesh, device)
    name, mine = [(name, to_local(p.detach())) for name, p in parameters.items() if to_local(p).numel() > 1][-1]
    place = mine.numel() - 2
    replicas = ReplicaChecker(
        parameters, world, every=10, start=3, doubt=SuspectElement(step=7, rank=whose, tensor=name, index=place)
    )
    assert [step for step in range(1, 31) if replicas.due(step)] == [7, 10, 20, 30]
    assert replicas.agreed == 3
    verdicts = [caught(replicas, 4)]
    assert replicas.agreed == 4
    bits = mine.view(-1).view(torch.int32)
    before = mine.view(-1)[place].item()
    bits[place] ^= (1 << 20) * (rank == whose)
    flipped = mine.view(-1)[place].item()
    verdicts.append(caught(replicas, 5))
    assert replicas.agreed == 4
    bits[place] ^= (1 << 20) * (rank == whose)
    verdicts.append(caught(replicas, 6))
    assert replicas.agreed == 6
    doubted = [replicas.doubted(step) for step in (6, 7)]
    assert doubted == [None, before if rank == whose else None]
    own = {"name": name, "replica": world.axis("replicate").rank, "place": place, "before": before, "after": flipped}
    return packed([own, *verdicts])


@pytest.mark.parametrize(
    ("mesh", "whose", "alike"),
    [
        ({"replicate": 2, "shard": 2}, 3, [1, 3]),
        pytest.param({"pipeline": 2, "replicate": 2, "shard": 1}, 2, [2, 3], marks=pytest.mark.slow),
        ({"replicate": 2, "shard": 1, "tensor": 2}, 0, [0, 2]),
    ],
    ids=str,
)
def test_flipped_bit_is_detected_by_all_and_named(
    tmp_path: Path, mesh: dict[str, int], whose: int, alike: list[int]
) -> None:
    """`alike` hold the same part of the model as the worker that was struck: they can say which element it is."""
    check_verdicts(unpacked(run_ranks(tmp_path, 4, flip_and_mend, mesh, whose)), whose, alike)


@pytest.mark.gpu
def test_flipped_bit_is_detected_on_a_gpu(tmp_path: Path) -> None:
    """Two workers share it, over gloo."""
    results = run_ranks(tmp_path, 2, flip_and_mend, {"replicate": 2, "shard": 1}, 1, "cuda:0")
    check_verdicts(unpacked(results), 1, [0, 1])


def check_verdicts(results: list[Any], whose: int, alike: list[int]) -> None:
    struck = results[whose][0]
    truth = results[0][1]["digest"]
    assert [result[1] for result in results] == [result[3] for result in results] == [{"digest": truth}] * len(results)
    values = [struck["after"] if replica == struck["replica"] else struck["before"] for replica in range(2)]
    assert len(set(values)) == 2
    for rank, (own, _, verdict, _) in enumerate(results):
        assert (verdict["step"], verdict["agreed"], verdict["replica"]) == (5, 4, own["replica"])
        assert outvoted_replica(verdict["digests"], truth) == struck["replica"]
        assert len(verdict["digests"]) == 2
        seen = (verdict["tensors"], verdict["index"], verdict["values"])
        assert seen == (([struck["name"]], struck["place"], values) if rank in alike else ([], None, []))
        assert rank not in alike or odd_value(verdict["values"], struck["before"]) == struck["replica"]


def three(rank: int, workers: int) -> dict[str, torch.Tensor]:
    """All three differ at first; then one does."""
    world, parameters = spread_out(rank, workers, {"replicate": 3, "shard": 1})
    replicas = ReplicaChecker(parameters, world, every=1, start=0)
    bits = to_local(next(iter(parameters.values()))).view(-1).view(torch.int32)
    bits[0] ^= rank
    verdicts = [caught(replicas, 1)]
    bits[0] ^= rank if rank < 2 else 0
    return packed([*verdicts, caught(replicas, 2)])


def test_majority_of_three_names_the_corrupted_replica(tmp_path: Path) -> None:
    results = unpacked(run_ranks(tmp_path, 3, three))
    for all_differ, one_differs in results:
        assert len(set(all_differ["digests"])) == 3
        assert outvoted_replica(all_differ["digests"]) is None
        assert outvoted_replica(one_differs["digests"]) == 2
        assert one_differs["index"] == 0


def anywhere(rank: int, workers: int, places: dict[int, list[int]]) -> dict[str, torch.Tensor]:
    """The first index that differs, of parameters of some sizes, wherever it is."""
    world = make_mesh(rank, workers, torch.device("cpu"), {"replicate": 2, "shard": 1})
    indices = []
    for size, some in places.items():
        parameter = torch.zeros(size)
        replicas = ReplicaChecker({"p": parameter}, world, every=1, start=0)
        for place in some:
            parameter[place:] = rank + 1.0
            indices.append(caught(replicas, 1)["index"])
            parameter[:] = 0
    return packed(indices)


def test_first_differing_element_is_found_at_any_position(tmp_path: Path) -> None:
    sizes = (1, 2, 64, 65, 10_001)
    places = {size: sorted({0, size // 3, size // 2, max(size - 2, 0), size - 1}) for size in sizes}
    want = [place for some in places.values() for place in some]
    assert unpacked(run_ranks(tmp_path, 2, anywhere, places)) == [want, want]
