"""Configurations of published models by hand, both layouts of every year, and what must be refused."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ModelError
from headway.recipe import Model
from headway.recipe.huggingface import model_from_config, read_model

LLAMA2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MISTRAL_V03 = LLAMA2 | {
    "model_type": "mistral",
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32768,
}
QWEN25 = {
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = QWEN25 | {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "sliding_window": None,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama_2() -> None:
    assert model_from_config(LLAMA2) == Model(
        vocab_size=32000,
        layers=32,
        dim=4096,
        heads=32,
        kv_heads=32,
        head_dim=128,
        hidden=11008,
        rope_theta=10000.0,
        norm_eps=1e-5,
        tie_embeddings=False,
    )


def test_mistral() -> None:
    model = model_from_config(MISTRAL_V03)
    assert (model.kv_heads, model.rope_theta, model.qkv_bias) == (8, 1e6, False)


def test_qwen2_has_biases_on_queries_keys_and_values() -> None:
    model = model_from_config(QWEN25)
    assert (model.qkv_bias, model.output_bias, model.mlp_bias, model.qk_norm) == (True, False, False, False)
    assert (model.tie_embeddings, model.head_dim) == (True, 64)


def test_qwen3_normalizes_queries_and_keys() -> None:
    model = model_from_config(QWEN3)
    assert (model.qk_norm, model.qkv_bias, model.head_dim) == (True, False, 128)
    unsaid = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert model_from_config(unsaid).head_dim == 128


@pytest.mark.parametrize(
    "layout",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4},
        {"rope_scaling": {"type": "default"}, "rope_theta": 5e5},
    ],
)
def test_all_layouts_of_rotary_settings_are_read(layout: dict[str, Any]) -> None:
    assert model_from_config(LLAMA2 | layout).rope_theta == 5e5


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (LLAMA2 | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (LLAMA2 | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per kind of layer"),
        (LLAMA2 | {"rope_scaling": "yarn"}, "yarn"),
        (LLAMA2 | {"partial_rotary_factor": 0.5}, "0.5"),
        (LLAMA2 | {"hidden_act": "gelu"}, "gelu"),
        (LLAMA2 | {"model_type": "mamba"}, "mamba"),
        (LLAMA2 | {"num_local_experts": 8}, "experts"),
        (LLAMA2 | {"model_type": ["llama"]}, "model_type"),
        ({}, "model_type"),
        (LLAMA2 | {"quantization_config": {"bits": 4}}, "quantized"),
        (QWEN25 | {"use_sliding_window": True, "max_window_layers": 12, "sliding_window": 999}, "999"),
        (QWEN3 | {"sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"] * 14}, "512"),
        (LLAMA2 | {"hidden_size": None}, "hidden_size"),
        (LLAMA2 | {"num_hidden_layers": -1}, "layers"),
        (LLAMA2 | {"num_attention_heads": "many"}, "heads"),
        (LLAMA2 | {"num_key_value_heads": 5}, "multiple"),
    ],
)
def test_unsupported_config_settings_are_named(config: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError) as caught:
        model_from_config(config)
    assert word in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "config",
    [
        MISTRAL_V03 | {"sliding_window": 32768},
        QWEN25 | {"use_sliding_window": True, "max_window_layers": 24, "sliding_window": 4096},
        QWEN25 | {"sliding_window": 4096},
        QWEN3 | {"sliding_window": 512, "layer_types": ["full_attention"] * 28},
    ],
)
def test_unused_sliding_windows_are_accepted(config: dict[str, Any]) -> None:
    assert model_from_config(config).family == "llama"


@pytest.mark.parametrize("settings", [{"sliding_window": 4096}, {}])
def test_sliding_window_gives_mistral_config(settings: dict[str, Any]) -> None:
    """Which means 4096 where it says nothing."""
    config = {key: value for key, value in MISTRAL_V03.items() if key != "sliding_window"} | settings
    model = model_from_config(config)
    assert (model.family, model.window_of(3)) == ("mistral", 4096)


def test_unknown_family_is_refused_with_closest_and_its_differences() -> None:
    config = LLAMA2 | {"model_type": "cohere", "logit_scale": 0.0625, "use_qk_norm": True, "use_cache": True}
    with pytest.raises(ModelError, match="'cohere'") as caught:
        model_from_config(config)
    assert caught.value.hint is not None
    assert "known: llama, mistral, qwen2, qwen3" in caught.value.hint
    assert "the closest is llama, which has no logit_scale, use_qk_norm" in caught.value.hint


# qk_norm, qkv_bias, output_bias, mlp_bias
HAVE_A_FAMILY = {
    (False, False, False, False),  # llama
    (False, False, False, True),
    (False, True, True, False),
    (False, True, True, True),
    (False, True, False, False),  # qwen2
    (True, False, False, False),  # qwen3
    (True, True, True, False),
}


def test_config_round_trips_for_every_combination() -> None:
    for qk_norm, qkv, output, mlp, tied in product((False, True), repeat=5):
        switches = {"qk_norm": qk_norm, "qkv_bias": qkv, "output_bias": output, "mlp_bias": mlp}
        shape = {"vocab_size": 320, "heads": 6, "kv_heads": 3, "head_dim": 24, "rope_theta": 777.0}
        model = Model(**shape, tie_embeddings=tied, **switches)
        if (qk_norm, qkv, output, mlp) in HAVE_A_FAMILY:
            config = model.to_config(99)
            assert model_from_config(json.loads(json.dumps(config))) == model
            assert config["max_position_embeddings"] == 99
            assert config["architectures"][0].lower().startswith(config["model_type"])
        else:
            with pytest.raises(ModelError) as caught:
                model.to_config(2048)
            assert all((name in caught.value.message) == on for name, on in switches.items())


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", None])
def test_unreadable_files_are_named(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_model(tmp_path)
