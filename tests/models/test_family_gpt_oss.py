"""gpt-oss against `transformers`, and what of a config.json is refused."""

from typing import Any

import pytest
import torch
from family_cases import SIZES, Case

from headway.errors import ModelError
from headway.models.gpt_oss import clamped_swiglu
from headway.plan.flops import active_parameters, parameters
from headway.recipe import Model
from headway.recipe.huggingface import model_from_config
from lazy_imports import transformers

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 500.0,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}  # fmt: skip
EXPERTS = SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9, "rope_parameters": YARN,
                   "num_hidden_layers": 3}  # fmt: skip
CASES = [
    Case("gpt-oss", "GptOssConfig", EXPERTS | {"swiglu_limit": 0.4}, "gpt_oss",
         "sinks, windows in turn, 2 of 5 experts with biases, clamped SwiGLU, YaRN"),
    Case("gpt-oss, plain positions", "GptOssConfig", EXPERTS | {"rope_parameters": {"rope_type": "default",
         "rope_theta": 100.0}, "layer_types": ["full_attention"] * 3, "swiglu_alpha": 1.0, "attention_bias": False,
         "tie_word_embeddings": True}, "gpt_oss", "no windows, no biases in attention, tied"),
]  # fmt: skip


def test_clamped_by_hand() -> None:
    """Above the limit a gate is the limit; far below zero it stays, and lets nothing through."""
    gate, up = torch.tensor([9.0, -50.0, 2.0]), torch.tensor([-9.0, 3.0, 0.5])
    got = clamped_swiglu(gate, up, alpha=1.0, limit=4.0)
    assert got[0].item() == pytest.approx(4 / (1 + 2.718281828**-4) * (-4 + 1))
    assert got[1].item() == pytest.approx(0, abs=1e-12)
    assert got[2].item() == pytest.approx(2 / (1 + 2.718281828**-2) * 1.5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ({"sliding_window": None}, "no sliding_window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_experts_per_tok": 6}, "top_k"),
    ],
)
def test_refusals(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        model_from_config(EXPERTS | {"model_type": "gpt_oss"} | settings)


def test_four_bits_say_what_to_do() -> None:
    with pytest.raises(ModelError) as caught:
        model_from_config(EXPERTS | {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}})
    assert "dequantize" in str(caught.value.hint)


def test_config_defaults_match_transformers() -> None:
    default = transformers.GptOssConfig()
    model = model_from_config({"model_type": "gpt_oss", "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4,
                               "num_attention_heads": 8, "intermediate_size": 32})  # fmt: skip
    assert (model.experts, model.top_k, model.swiglu_alpha, model.swiglu_limit, model.balance) == (
        default.num_local_experts, default.num_experts_per_tok, default.swiglu_alpha, default.swiglu_limit,
        default.router_aux_loss_coef,
    )  # fmt: skip
    assert (model.kv_heads, model.head_dim, model.norm_eps, model.window, model.qkv_bias) == (
        default.num_key_value_heads, default.head_dim, default.rms_norm_eps, default.sliding_window,
        default.attention_bias,
    )  # fmt: skip
    rope, scaling = default.rope_parameters, model.rope_scaling
    assert model.rope_theta == rope["rope_theta"]
    assert (scaling.kind, scaling.factor, scaling.original, scaling.whole_dims) == (
        rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"], rope["truncate"],
    )  # fmt: skip
    windowed = [kind == "sliding_attention" for kind in default.layer_types[:4]]
    assert [model.window_of(i) is not None for i in range(4)] == windowed


def test_the_numbers_of_gpt_oss_20b() -> None:
    """Its model card (arXiv 2508.10925, table 1): 20.91 billion parameters, 3.61 of them active."""
    config = {"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 24,
              "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
              "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "attention_bias": True,
              "sliding_window": 128, "rope_theta": 150000, "initial_context_length": 4096,
              "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                               "original_max_position_embeddings": 4096, "truncate": False},
              "router_aux_loss_coef": 0.9, "swiglu_limit": 7.0}  # fmt: skip
    model = model_from_config(config)
    arch = model.architecture()
    assert round(parameters(arch) / 1e9, 2) == 20.91
    # The card leaves the input embedding out of those that are active.
    assert round((active_parameters(arch) - 201088 * 2880) / 1e9, 2) == 3.61
    assert model.balance == 0.9
    assert not model.rope_scaling.whole_dims


def test_biases_go_together() -> None:
    with pytest.raises(ModelError, match="qkv_bias"):
        Model(family="gpt_oss", vocab_size=64, output_bias=False).to_config(2048)
