"""Bytes of a step against sums done by hand, against the model's shapes, and against the timed collectives."""

from collections import defaultdict
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from headway.hardware import parse_on
from headway.plan.architecture import Architecture
from headway.plan.communication import communication_costs
from headway.plan.context import context_attention
from headway.plan.costs import make_cost_model
from headway.plan.estimate import estimate
from headway.plan.rank_share import block_parameters, rest_parameters, summed_parameters
from headway.plan.settings import Mesh, Settings
from headway.plan.traffic import traffic
from headway.plan.trainer import headway_software
from headway.recipe import Model

SMALL = Model(layers=6, dim=64, heads=4, kv_heads=2, head_dim=16, hidden=192, vocab_size=515)
ODD = Model(
    layers=4, dim=96, heads=8, kv_heads=2, head_dim=16, hidden=256, vocab_size=1000, tie_embeddings=False, qk_norm=True,
    qkv_bias=True, output_bias=True, mlp_bias=True,
)  # fmt: skip
BLOCK = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 192 + 2 * 64
"""Parameters of one block of SMALL: queries, keys, values, their output, three inner matrices, two norms."""


def make_settings(mesh: Mesh, *, precision: str = "float32", **changes: Any) -> Settings:
    """Eight sequences of 32 tokens per data rank, in microbatches of two."""
    software = headway_software(compiled=False, autocasts=precision == "bf16", older=True).on_mesh(mesh, passes=2)
    settings = Settings(mesh, 32, 2, 8 * mesh.data, 3 if mesh.owners > 1 else 0, precision=precision, software=software)
    return replace(settings, **changes)


def bytes_of(model: Model, settings: Settings, rank: int = 0) -> dict[tuple[str, str], float]:
    return traffic(model.architecture(), settings, rank)


# -- what a worker holds


@pytest.mark.parametrize("model", [SMALL, ODD])
def test_a_single_worker_holds_every_parameter(model: Model) -> None:
    arch = model.architecture()
    total = sum(prod(shape) for shape in model.tensors().values())
    assert model.layers * block_parameters(arch, 1) + rest_parameters(arch, make_settings(Mesh()), 0) == total


def whole_names(model: Model, tensor: int) -> set[str]:
    """Parameters of a block that the tensor axis replicates, by name."""
    names = {"attention_norm", "mlp_norm", "q_norm", "k_norm", "o.bias", "down.bias"}
    if model.kv_heads % tensor:
        names |= {"attention.k.", "attention.v."}
    return names


@pytest.mark.parametrize("model", [SMALL, ODD])
@pytest.mark.parametrize("tensor", [2, 4])
def test_tensor_axis_replicates_norms_row_biases_and_few_kv_heads(model: Model, tensor: int) -> None:
    shapes = {name: prod(s) for name, s in model.tensors().items() if name.startswith("layers.0.")}
    names = whole_names(model, tensor)
    whole = sum(count for name, count in shapes.items() if any(part in name for part in names))
    split = sum(shapes.values()) - whole
    arch = model.architecture()
    assert block_parameters(arch, tensor) == whole + split // tensor
    assert summed_parameters(arch, tensor) == whole


# -- by hand


def test_shards() -> None:
    """Four microbatches: each gathers blocks twice, table and final norm once; gradients are reduced once."""
    rest = 515 * 64 + 64
    weights = 4 * (2 * 6 * BLOCK + rest) * 4
    assert bytes_of(SMALL, make_settings(Mesh(shard=4))) == {
        ("all_gather", "shard"): weights,
        ("reduce_scatter", "shard"): (6 * BLOCK + rest) * 4,
    }
    kept = bytes_of(SMALL, make_settings(Mesh(shard=4), keeps_weights=True))
    assert kept["all_gather", "shard"] == 4 * (6 * BLOCK + rest) * 4
    narrow = bytes_of(SMALL, make_settings(Mesh(shard=4), precision="bf16"))
    assert narrow == {
        ("all_gather", "shard"): weights / 2,
        ("reduce_scatter", "shard"): (6 * BLOCK + rest) * 4,
    }


def test_copies() -> None:
    total = 6 * BLOCK + 515 * 64 + 64
    assert bytes_of(SMALL, make_settings(Mesh(replicate=4))) == {("all_reduce", "replicate"): total * 4}
    mixed = bytes_of(SMALL, make_settings(Mesh(replicate=2, shard=2)))
    assert mixed["all_reduce", "replicate"] == total * 4 / 2
    assert mixed["reduce_scatter", "shard"] == total * 4


def test_tensor() -> None:
    """Two gathers and two scatters per layer and pass; the embedding a scatter and a gather, the head the reverse."""
    stream = 2 * 32 * 64 * 4
    sizes = bytes_of(SMALL, make_settings(Mesh(tensor=2)))
    assert sizes == {
        ("all_gather", "tensor"): 4 * (6 * 4 + 2) * stream,
        ("reduce_scatter", "tensor"): 4 * (6 * 4 + 2) * stream,
        # three numbers per token, and the gradients of thirteen norms
        ("all_reduce", "tensor"): 8 * 32 * 3 * 4 + 13 * 64 * 4,
    }
    # four workers, two key-value heads: those are replicated, and their gradients reduced
    more = bytes_of(SMALL, make_settings(Mesh(tensor=4)))
    assert more["all_reduce", "tensor"] == 8 * 32 * 3 * 4 + 13 * 64 * 4 + 6 * 2 * 32 * 64 * 4


def test_tensor_with_autocast_keeps_the_stream_in_float32() -> None:
    """Inputs and their gradients are sent in four bytes; outputs come from GEMMs, in two."""
    element = 2 * 32 * 64
    sizes = bytes_of(SMALL, make_settings(Mesh(tensor=2), precision="bf16"))
    assert sizes["all_gather", "tensor"] == 4 * (6 * 2 * (4 + 2) + 2 * 4) * element
    assert sizes["reduce_scatter", "tensor"] == 4 * (6 * 2 * (4 + 2) + 2 * 4) * element
    sharded = bytes_of(SMALL, make_settings(Mesh(shard=2, tensor=2), precision="bf16"))
    assert sharded["all_gather", "tensor"] == 4 * (6 * 4 + 2) * 2 * element


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_tensor_with_recomputation(kind: str) -> None:
    """Recomputation repeats both gathers and the first of the two scatters: the last one is not needed."""
    stream = 2 * 32 * 64 * 4
    plain, every, some = (
        bytes_of(SMALL, make_settings(Mesh(tensor=2), **changes))
        for changes in ({}, {"recompute": kind}, {"recompute": kind, "recompute_blocks": 2})
    )
    for sizes, blocks in ((every, 6), (some, 2)):
        assert sizes["all_gather", "tensor"] - plain["all_gather", "tensor"] == 4 * blocks * 2 * stream
        assert sizes["reduce_scatter", "tensor"] - plain["reduce_scatter", "tensor"] == 4 * blocks * stream


def test_pipeline() -> None:
    """The stream forward from all but the last stage, its gradient back from all but the first; and the tied table."""
    stream, table = 2 * 32 * 64 * 4, 515 * 64 * 4
    first, middle, last = (
        bytes_of(SMALL, make_settings(Mesh(pipeline=3), stages=(2, 2, 2)), rank) for rank in range(3)
    )
    assert first == {("send", "pipeline"): 4 * stream, ("all_reduce", "pipeline"): table}
    assert middle == {("send", "pipeline"): 4 * 2 * stream}
    assert last == {("send", "pipeline"): 4 * stream, ("all_reduce", "pipeline"): table}
    untied = bytes_of(
        SMALL.model_copy(update={"tie_embeddings": False}), make_settings(Mesh(pipeline=3), stages=(2, 2, 2))
    )
    assert ("all_reduce", "pipeline") not in untied


def test_interleaved_pipeline() -> None:
    """Two ranks of three stages each: five boundaries, crossed both ways in each of four microbatches."""
    stream = 2 * 32 * 64 * 4
    settings = make_settings(Mesh(pipeline=2), schedule="interleaved", chunks=3, stages=(1,) * 6)
    sent = [bytes_of(SMALL, settings, rank)["send", "pipeline"] for rank in range(2)]
    assert sum(sent) == 4 * 2 * 5 * stream
    assert sent[0] == sent[1]


def test_pipeline_with_shards_gathers_weights_once_per_step() -> None:
    settings = make_settings(Mesh(shard=2, pipeline=2), stages=(4, 2))
    first, last = (bytes_of(SMALL, settings, rank) for rank in range(2))
    table = 515 * 64
    assert first["all_gather", "shard"] == (4 * BLOCK + table) * 4
    assert last["all_gather", "shard"] == (2 * BLOCK + table + 64) * 4
    assert last["reduce_scatter", "shard"] == (2 * BLOCK + table + 64) * 4
    assert first["all_reduce", "pipeline"] == table * 4 / 2


# -- the same as the exchanges that the step's time is made of


LLAMA = Architecture(24, 1024, 16, 4, 64, 4096, 50304, tied=True)
MESHES = [
    Mesh(shard=16), Mesh(replicate=4, shard=4), Mesh(replicate=16), Mesh(shard=8, tensor=2), Mesh(shard=2, tensor=8),
    Mesh(tensor=16), Mesh(shard=2, tensor=2, pipeline=4), Mesh(replicate=2, shard=2, tensor=2, pipeline=2),
    Mesh(replicate=8, pipeline=2), Mesh(tensor=4, pipeline=4), Mesh(shard=8, context=2), Mesh(context=16),
    Mesh(replicate=2, tensor=2, context=4), Mesh(shard=2, context=4, pipeline=2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "kv_heads", "context", "tensor", "expected"),
    [
        (32, 8, 2, 1, "all-gather"),  # receives 8 + 8 heads of the other half, or (32 + 8 + 8 + 32) / 2 of it
        (32, 8, 8, 1, "all-to-all"),  # 7 x 16 heads of an eighth, or 7/8 x 80
        (32, 8, 16, 1, "all-gather"),  # 8 heads do not divide over 16
        (16, 16, 2, 1, "all-gather"),  # 32, or 64 / 2: no fewer
        (16, 16, 4, 1, "all-to-all"),  # 3 x 32, or 3/4 x 64
        (16, 16, 4, 8, "all-gather"),  # 2 heads are left of each tensor rank
    ],
)
def test_attention_is_the_way_that_receives_fewer_bytes(heads, kv_heads, context, tensor, expected) -> None:
    arch = Architecture(4, heads * 64, heads, kv_heads, 64, 1024, 1000)
    settings = replace(make_settings(Mesh(context=context, tensor=tensor)), seq=4096)
    assert context_attention(arch, settings) == expected
    assert context_attention(arch, replace(settings, context_attention="ring")) == "ring"


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize("mesh", MESHES, ids=Mesh.describe)
def test_timed_collectives_match_the_traffic(mesh: Mesh, precision: str, recompute: Any) -> None:
    """On average over pipeline ranks; per-step transfers are timed for the rank with most parameters."""
    costs = make_cost_model(parse_on("h100x8x2"))
    settings = replace(make_settings(mesh, precision=precision), seq=2048, batch=64 * mesh.data, recompute=recompute)
    estimated = estimate(LLAMA, settings, costs)
    timed: dict[tuple[str, str], float] = defaultdict(float)
    for cost in communication_costs(estimated, costs):
        timed[cost.operation, cost.axis] += cost.bytes * cost.times
    ranks = [traffic(LLAMA, estimated.settings, rank) for rank in range(mesh.pipeline)]
    assert set(timed) == {kind for timed in ranks for kind in timed}
    for kind, size in timed.items():
        mean = sum(timed.get(kind, 0.0) for timed in ranks) / mesh.pipeline
        most = max(timed.get(kind, 0.0) for timed in ranks)
        if kind[0] == "all_reduce" and kind[1] != "replicate":
            assert 0.98 * mean <= size <= 2 * most, kind
        else:
            once = mesh.pipeline > 1 and kind[1] in ("shard", "replicate")
            assert size == pytest.approx(most if once else mean), kind
