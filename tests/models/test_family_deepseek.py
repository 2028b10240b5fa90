"""DeepSeek-V3 against `transformers`, its cache of narrow vectors, and its choice of experts by hand."""

from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import SIZES, Case, load, make, tokens
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.errors import ModelError
from headway.inference.kv_cache import bytes_per_token
from headway.models import empty_decoder, init_weights
from headway.models.deepseek import choose_experts
from headway.plan.flops import active_parameters, parameters
from headway.recipe import Model
from headway.recipe.families.deepseek import DeepSeekV3
from headway.recipe.huggingface import model_from_config
from lazy_imports import transformers

SHAPE = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim")} | {
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 9, "moe_intermediate_size": 12, "n_routed_experts": 8,
    "n_shared_experts": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500.0,
        "mscale": 0.8, "mscale_all_dim": 1.1}  # fmt: skip

CASES = [
    Case("DeepSeek-V3", "DeepseekV3Config", SHAPE, "deepseek_v3", "latent attention, groups of experts, biases"),
    Case("DeepSeek-V3, YaRN", "DeepseekV3Config", SHAPE | {"rope_parameters": YARN, "rms_norm_eps": 1e-3},
         "deepseek_v3", "scaled positions (yarn, mscale)"),
    Case("DeepSeek-V3, plain", "DeepseekV3Config",
         SHAPE | {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "n_group": 1, "topk_group": 1,
                  "attention_bias": True, "tie_word_embeddings": True, "v_head_dim": 20, "routed_scaling_factor": 1.3},
         "deepseek_v3", "queries at once, one group, biases in attention, tied"),
]  # fmt: skip


# -- the cache


def test_cache_stores_one_latent_vector_and_rotated_key_per_token() -> None:
    model = Model(family="deepseek_v3", vocab_size=64, layers=2, heads=8, kv_rank=24, head_dim=20, rope_dim=8)
    assert bytes_per_token(2, empty_decoder(model).cache_widths(), torch.float32) == 2 * (24 + 8) * 4


# -- the choice of experts


def by_hand(logits: list[float], bias: list[float], model: DeepSeekV3) -> dict[int, float]:
    """Weights by expert of one token, of the definition: the best set of groups, then the best experts of these."""
    scores = [float(torch.tensor(x, dtype=torch.float64).sigmoid()) for x in logits]
    wanted = [s + b for s, b in zip(scores, bias, strict=True)]
    size = model.experts // model.groups
    of_group = [sum(sorted(wanted[g * size : (g + 1) * size])[-2:]) for g in range(model.groups)]
    groups = max(combinations(range(model.groups), model.top_groups), key=lambda some: sum(of_group[g] for g in some))
    allowed = [e for e in range(model.experts) if e // size in groups]
    chosen = max(combinations(allowed, model.top_k), key=lambda some: sum(wanted[e] for e in some))
    total = sum(scores[e] for e in chosen) if model.normalize_weights else 1.0
    return {e: scores[e] / total * model.routed_scale for e in chosen}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("experts", "groups", "top_groups", "top_k"), [(8, 4, 2, 3), (6, 1, 1, 2), (12, 3, 1, 4)])
def test_experts_are_chosen_by_biased_scores_and_weighed_without(
    experts: int, groups: int, top_groups: int, top_k: int, normalize: bool
) -> None:
    model = DeepSeekV3(experts=experts, groups=groups, top_groups=top_groups, top_k=top_k, normalize_weights=normalize)
    generator = torch.Generator().manual_seed(3)
    logits, bias = torch.randn(40, experts, generator=generator), torch.randn(experts, generator=generator) / 4
    weights, chosen = choose_experts(logits, bias, model)
    for row in range(40):
        expected = by_hand(logits[row].tolist(), bias.tolist(), model)
        actual = dict(zip(chosen[row].tolist(), weights[row].tolist(), strict=True))
        assert actual == pytest.approx(expected, rel=1e-5)


def test_a_bias_moves_tokens_and_no_gradient_meets_it() -> None:
    model = DeepSeekV3(experts=4, top_k=1, routed_scale=1.0, normalize_weights=False)
    logits = torch.zeros(5, 4, requires_grad=True)
    bias = torch.tensor([0.0, 0.0, 0.1, 0.0], requires_grad=True)
    weights, chosen = choose_experts(logits, bias, model)
    assert chosen.flatten().tolist() == [2] * 5
    assert weights.flatten().tolist() == [0.5] * 5
    weights.sum().backward()
    assert bias.grad is None


# -- folders


def test_prediction_layers_of_a_folder_are_passed_over(tmp_path: Path) -> None:
    make(CASES[0], tmp_path)
    before = load(tmp_path)
    file = tmp_path / "model.safetensors"
    more = {"eh_proj.weight": torch.ones(2, 2), "embed_tokens.weight": torch.ones(3), "mlp.gate.weight": torch.ones(1)}
    save_file(load_file(file) | {f"model.layers.3.{name}": tensor for name, tensor in more.items()}, file)
    after = load(tmp_path)
    assert all(torch.equal(tensor, after.state_dict()[name]) for name, tensor in before.state_dict().items())


def test_biases_come_in_and_out_of_a_folder(tmp_path: Path) -> None:
    hf_model = make(CASES[0], tmp_path)
    bias = load(tmp_path).state_dict()["layers.1.mlp.balance.bias"]
    assert bias.dtype == torch.float32
    assert torch.equal(bias, hf_model.model.layers[1].mlp.gate.e_score_correction_bias)
    assert bias.abs().max() > 0.05


def test_fresh_biases_are_zero() -> None:
    decoder = empty_decoder(Model(family="deepseek_v3", vocab_size=64, layers=2))
    init_weights(decoder, seed=0)
    assert decoder.state_dict()["layers.1.mlp.balance.bias"].tolist() == [0.0] * 8
    assert decoder.model.initial("layers.1.mlp.balance.bias") == (0.0, 0.0)


@cache
def config() -> dict[str, Any]:
    values: dict[str, Any] = transformers.DeepseekV3Config(**SHAPE).to_dict()
    return values


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"kv_lora_rank": None, "n_routed_experts": None}, "lacks kv_lora_rank, n_routed_experts"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 2}, "kv_heads"),
        ({"n_shared_experts": 0}, "shared_experts"),
        ({"n_group": 3}, "groups"),
        ({"num_experts_per_tok": 5}, "top_k"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": None}, "rotates 0.5"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}}, "mscale_all"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_unsupported_config_is_refused(change: dict[str, Any], says: str) -> None:
    assert model_from_config(config()).family == "deepseek_v3"
    with pytest.raises(ModelError, match=says):
        model_from_config(config() | change)


def test_deepseek_v2_is_refused_and_closest_family_named() -> None:
    config = transformers.DeepseekV2Config(**SHAPE).to_dict()
    with pytest.raises(ModelError, match="deepseek_v2") as refused:
        model_from_config(config)
    assert "the closest is deepseek_v3: config.json has topk_method 'greedy'" in str(refused.value.hint)


def test_the_published_shape_has_its_published_size() -> None:
    model = model_from_config(transformers.DeepseekV3Config().to_dict())
    architecture = model.architecture()
    assert round(parameters(architecture) / 1e9) == 671  # of the technical report, arXiv 2412.19437
    assert active_parameters(architecture) / 1e9 == pytest.approx(37, abs=1)


def test_shapes_are_known_without_memory() -> None:
    decoder = empty_decoder(Model(family="deepseek_v3", vocab_size=64, layers=2), "meta")
    assert decoder(torch.empty((2, 5), dtype=torch.int64, device="meta")).shape == (2, 5, 64)


def test_sizes_that_follow_fit_together() -> None:
    for dim, heads in ((128, 4), (256, 8), (96, 12), (64, 16)):
        model = DeepSeekV3(dim=dim, heads=heads, vocab_size=64)
        assert model.rope_dim % 2 == 0
        assert model.rope_dim < model.head_dim
        decoder = empty_decoder(model)
        init_weights(decoder, seed=1)
        out: Tensor = decoder(tokens(rows=1, length=4) % 64)
        assert out.isfinite().all()
