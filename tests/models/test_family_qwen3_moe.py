"""Qwen3-MoE against `transformers`, and what of a config.json is refused."""

import math
from typing import Any

import pytest
from family_cases import SIZES, Case

from headway.errors import ModelError
from headway.plan.flops import active_parameters
from headway.recipe import Model
from headway.recipe.huggingface import model_from_config
from lazy_imports import transformers

EXPERTS = SIZES | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_hidden_layers": 3}
CASES = [
    Case("Qwen3-MoE", "Qwen3MoeConfig", EXPERTS | {"norm_topk_prob": True}, "qwen3_moe", "3 of 6 narrow experts"),
    Case("Qwen3-MoE, dense layers", "Qwen3MoeConfig", EXPERTS | {"mlp_only_layers": [1], "attention_bias": True,
         "tie_word_embeddings": True}, "qwen3_moe", "a layer without experts, weights as they are, biases, tied"),
    Case("Qwen3-MoE, window", "Qwen3MoeConfig", EXPERTS | {"use_sliding_window": True, "sliding_window": 9,
         "decoder_sparse_step": 2}, "qwen3_moe", "experts in every other layer, sliding window"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_only_layers": [0, 1, 2]}, "no layer with experts"),
        ({"num_experts": 0}, "no layer with experts"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"num_experts_per_tok": 7}, "top_k"),
    ],
)
def test_refusals(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        model_from_config(EXPERTS | {"model_type": "qwen3_moe"} | settings)


def test_both_names_of_the_number_of_experts() -> None:
    """Folders of the hub say num_experts; newer versions of `transformers` write num_local_experts."""
    without = {key: value for key, value in EXPERTS.items() if key != "num_experts"} | {"model_type": "qwen3_moe"}
    assert model_from_config(without | {"num_experts": 6}) == model_from_config(without | {"num_local_experts": 6})
    assert transformers.Qwen3MoeConfig(**EXPERTS).to_dict()["num_local_experts"] == 6


def test_config_defaults_match_transformers() -> None:
    default = transformers.Qwen3MoeConfig()
    model = model_from_config({"model_type": "qwen3_moe", "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2,
                               "num_attention_heads": 8, "intermediate_size": 32})  # fmt: skip
    assert (model.experts, model.top_k, model.expert_hidden, model.normalize_weights, model.balance) == (
        default.num_experts, default.num_experts_per_tok, default.moe_intermediate_size, default.norm_topk_prob,
        default.router_aux_loss_coef,
    )  # fmt: skip
    assert (model.kv_heads, model.norm_eps, model.window) == (
        default.num_key_value_heads, default.rms_norm_eps, default.sliding_window,
    )  # fmt: skip
    assert (model.head_dim, model.dense_layers) == (8, ())


def test_the_numbers_of_qwen3_30b_a3b() -> None:
    """Its model card: 30.5 billion parameters, of which 3.3 are activated; 29.9 without embedding and head."""
    model = model_from_config(
        {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
         "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
         "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
         "rope_theta": 1e6, "sliding_window": None, "max_window_layers": 48, "decoder_sparse_step": 1}
    )  # fmt: skip
    total = sum(math.prod(shape) for shape in model.tensors().values())
    assert round(total / 1e9, 1) == 30.5
    assert round((total - 2 * 151936 * 2048) / 1e9, 1) == 29.9
    assert round(active_parameters(model.architecture()) / 1e9, 1) in (3.3, 3.4)  # 3.35


def test_a_recipe_of_its_own() -> None:
    model = Model(family="qwen3_moe", vocab_size=64, layers=3, dim=64, hidden=96, experts=4, top_k=2)
    assert model.expert_hidden == 48
    assert Model(family="qwen3_moe", dim=96, top_k=1).expert_hidden == 256  # 8/3 of 96, for which nobody says otherwise
    with pytest.raises(ValueError, match="dense_layers"):
        Model(family="qwen3_moe", layers=3, dense_layers=(3,))
    with pytest.raises(ValueError, match="dense_layers"):
        Model(family="qwen3_moe", layers=2, dense_layers=(0, 1))
    with pytest.raises(ModelError, match="biases"):
        Model(family="qwen3_moe", vocab_size=64, qkv_bias=True).to_config(2048)
