"""Which runs are exact if their recipe does not say: reinforcement learning that exact mode takes and costs little."""

from typing import Any

import pytest
import torch

from headway.kernels import exact_products, rms_norm
from headway.models import empty_decoder
from headway.models.exact import EXACT_DECODERS, HEADS, make_exact
from headway.models.families import DECODERS
from headway.recipe import Recipe, exactness
from headway.recipe.exactness import with_exactness
from headway.recipe.load import parse_recipe

MODEL: dict[str, Any] = {"layers": 2, "dim": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab_size": 512}
RL: dict[str, Any] = {
    "model": MODEL,
    "objective": {"kind": "grpo"},
    "data": {"path": "data/prompts", "seq": 512},
    "rl": {"samples": 4, "max_tokens": 64, "rewards": ["math"]},
    "train": {"dtype": "bfloat16"},
}


def recipe(**sections: dict[str, Any]) -> Recipe:
    merged = {key: RL.get(key, {}) | sections.get(key, {}) for key in RL | sections}
    return parse_recipe(merged, {}, "test")


def test_policies_in_bfloat16_on_a_gpu_are_exactness_and_nothing_else() -> None:
    assert with_exactness(recipe(), "cuda").inference.exact is True
    assert with_exactness(recipe(), "cpu").inference.exact is False
    supervised = {key: value for key, value in RL.items() if key not in ("rl", "objective")}
    assert with_exactness(parse_recipe(supervised, {}, "test"), "cuda").inference.exact is False


@pytest.mark.parametrize("exact", [True, False])
def test_what_a_recipe_says_stays(exact: bool) -> None:
    stated = recipe(inference={"exact": exact})
    assert with_exactness(stated, "cuda") == stated


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"dtype": "float32"}},
        {"train": {"compile": True}},
        {"parallel": {"tensor": 2}},
        {"parallel": {"pipeline": 2}},
        {"model": {"head_dim": 32}},
        {"model": {"hidden": 1000}},
        {"model": {"family": "gemma2"}},
        {"model": {"family": "qwen3_moe"}},
        {"model": {"init": "models/some"}, "lora": {"quantize": "nf4", "rank": 16}},
        {"model": {"init": "models/some"}, "lora": {"rank": 8}},
    ],
    ids=str,
)
def test_what_exact_mode_excludes_or_costs_much_is_not_exact(sections: dict[str, dict[str, Any]]) -> None:
    assert with_exactness(recipe(**sections), "cuda").inference.exact is False


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"parallel": {"replicate": 2}},
        {"train": {"compile": False}},
        {"model": {"init": "models/some"}, "lora": {"rank": 16}},
    ],
    ids=str,
)
def test_what_it_takes_is_exact(sections: dict[str, dict[str, Any]]) -> None:
    assert with_exactness(recipe(**sections), "cuda").inference.exact is True


def test_limits_are_those_of_the_kernels() -> None:
    assert exactness.HEADS == HEADS
    assert exactness.MULTIPLE == exact_products.MULTIPLE
    assert exactness.WIDEST == rms_norm.MAX_WIDTH
    taken = {family for family, decoder in DECODERS.items() if issubclass(decoder, EXACT_DECODERS)}
    assert taken == set(exactness.EXACT_FAMILIES)
    for family in exactness.FAMILIES:
        chosen = with_exactness(recipe(model={"family": family}), "cuda")
        assert chosen.inference.exact
        make_exact(empty_decoder(chosen.model, "meta"), torch.device("cuda"), torch.bfloat16)
