"""Configurations of published models, with the parameters that their cards state."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from headway.errors import UsageError
from headway.plan.flops import active_parameters, parameters
from headway.plan.hf_config import read_architecture
from headway.recipe.huggingface import model_from_config

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
    "num_hidden_layers": 61, "intermediate_size": 18432, "vocab_size": 129280, "tie_word_embeddings": False,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 32000, "tie_word_embeddings": False,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN25_7B: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
    "num_hidden_layers": 28, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


def write(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [(DEEPSEEK_V3, 671e9, 37e9), (MIXTRAL, 46.7e9, 12.9e9), (QWEN25_7B, 7_615_616_512, 7_615_616_512)],
    ids=["deepseek-v3", "mixtral-8x7b", "qwen2.5-7b"],
)
def test_published_models(tmp_path: Path, config: dict[str, Any], total: float, active: float) -> None:
    arch = read_architecture(write(tmp_path, config))
    assert parameters(arch) == pytest.approx(total, rel=0.002)
    assert active_parameters(arch) == pytest.approx(active, rel=0.02)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_architecture(tmp_path / "none.json")
    with pytest.raises(UsageError, match="missing key hidden_size"):
        read_architecture(write(tmp_path, {"vocab_size": 3}))
    with pytest.raises(UsageError, match="vocab_size: expected an integer of at least 1, got 'many'"):
        read_architecture(write(tmp_path, {**MIXTRAL, "vocab_size": "many"}))
    with pytest.raises(UsageError, match="not a model"):
        read_architecture(write(tmp_path, [1]))
    with pytest.raises(UsageError, match="non-attention layers"):
        read_architecture(write(tmp_path, {**MIXTRAL, "mamba_num_heads": 8}))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match="invalid JSON"):
        read_architecture(tmp_path)


def test_invalid_sizes_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="num_experts_per_tok 20 exceeds 8 experts"):
        read_architecture(write(tmp_path, {**MIXTRAL, "num_experts_per_tok": 20}))
    with pytest.raises(UsageError, match="not divisible by 33 heads"):
        read_architecture(write(tmp_path, {**MIXTRAL, "num_attention_heads": 33}))


def test_parameters_of_a_known_family_match_its_tensors(tmp_path: Path) -> None:
    """Gemma 2 has four norms per layer and windows in every other one, which the config's keys do not state."""
    config = {
        "model_type": "gemma2", "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
        "num_hidden_layers": 4, "intermediate_size": 80, "vocab_size": 211, "sliding_window": 9,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = read_architecture(tmp_path)
    assert parameters(arch) == sum(math.prod(shape) for shape in model_from_config(config).tensors().values())
    assert (arch.norms, arch.window, arch.windowed_layers) == (4, 9, 2)
