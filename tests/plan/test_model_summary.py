"""Model summaries of every family: the parts cover all parameters."""

import math

import pytest

from headway.plan import parameters
from headway.plan.model_summary import describe, part_of
from headway.recipe import Lora, Model, Train
from headway.recipe.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_sum_to_the_planned_parameters(family: str) -> None:
    model = Model(family=family, vocab_size=512)
    summary = describe(model, 128)
    assert summary.parameters == sum(summary.parts.values()) == parameters(model.architecture())
    assert summary.active <= summary.parameters
    assert (summary.active == summary.parameters) == ("experts" not in summary.parts)
    assert ("head" in summary.parts) == (not model.tie_embeddings)
    assert summary.cache.windowed <= summary.cache.full == summary.cache.token * 128


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("embed.weight", "embedding"),
        ("embed.positions.weight", "embedding"),
        ("layers.3.attention_norm.bias", "norms"),
        ("layers.3.attention.q_norm.weight", "norms"),
        ("norm.weight", "norms"),
        ("layers.0.attention.kv_down.weight", "attention"),
        ("layers.0.attention.sinks", "attention"),
        ("layers.11.mlp.gate.weight", "feed-forward"),
        ("layers.11.mlp.experts.gate", "experts"),
        ("layers.11.mlp.shared.up.weight", "shared experts"),
        ("layers.11.mlp.router.weight", "router"),
        ("head.weight", "head"),
    ],
)
def test_part_of_a_tensor(name: str, part: str) -> None:
    assert part_of(name) == part


def test_latent_attention_caches_one_latent_vector() -> None:
    """DeepSeek-V3: 512 + 64 numbers of two bytes in 61 layers, where 128 full heads would be 40,960 in each."""
    model = Model(family="deepseek_v3", vocab_size=129_280, layers=61, dim=7168, heads=128, kv_rank=512, rope_dim=64)
    assert describe(model, 4096).cache.token == (512 + 64) * 2 * 61


def test_adapters_are_all_that_is_trained_on_a_frozen_base() -> None:
    model = Model(layers=1, dim=8, heads=2, kv_heads=1, hidden=16, vocab_size=10)
    lora = Lora(rank=2, targets=("layers.*.attention.q", "layers.*.mlp.down"))
    count = 2 * (8 + 8) + 2 * (16 + 8)  # rank times inputs and outputs of both layers
    training = describe(model, 16, train=Train(dtype="bfloat16", weights="bfloat16"), lora=lora).training
    weights = sum(math.prod(shape) for shape in model.tensors().values())
    assert (training.weights, training.gradients, training.states) == (2 * weights + 4 * count, 4 * count, 8 * count)
