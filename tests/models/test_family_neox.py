"""GPT-NeoX and Pythia against `transformers`, their old folders, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import Case, load, make, tokens
from safetensors.torch import load_file, save_file

from headway.errors import ModelError
from headway.recipe import Model
from headway.recipe.huggingface import model_from_config, read_model

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500.0,
        "partial_rotary_factor": 0.5}  # fmt: skip
CASES = [
    Case("GPT-NeoX", "GPTNeoXConfig", SIZES, "gpt_neox", "a quarter of each head rotated, parallel residual"),
    Case("Pythia, one after the other", "GPTNeoXConfig", SIZES | {
        "use_parallel_residual": False, "hidden_act": "gelu_new", "tie_word_embeddings": True, "attention_bias": False,
        "rotary_pct": 1.0, "rotary_emb_base": 500, "layer_norm_eps": 1e-3,
    }, "gpt_neox", "no parallel residual, tied, no attention biases"),
    Case("GPT-NeoX, YaRN", "GPTNeoXConfig", SIZES | {"rope_parameters": YARN}, "gpt_neox", "scaled positions (yarn)"),
]  # fmt: skip


def test_either_name_of_the_head_and_masks_among_the_weights(tmp_path: Path) -> None:
    hf_model = make(CASES[0], tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    (head,) = {"embed_out.weight", "lm_head.weight"} & set(stored)
    for layer in range(4):
        stored[f"gpt_neox.layers.{layer}.attention.bias"] = torch.ones(1, 1, 8, 8).tril()
        stored[f"gpt_neox.layers.{layer}.attention.masked_bias"] = torch.tensor(-1e9)
        stored[f"gpt_neox.layers.{layer}.attention.rotary_emb.inv_freq"] = torch.ones(2)
    for name in ("embed_out.weight", "lm_head.weight"):
        stored[name] = stored.pop(head)
        head = name
        save_file(stored, file)
        with torch.no_grad():
            torch.testing.assert_close(load(tmp_path)(tokens()), hf_model(tokens()).logits, rtol=1e-4, atol=1e-4)


def test_settings_of_either_age() -> None:
    """rotary_pct and rotary_emb_base of old configs are what rope_parameters say now."""
    config = SIZES | {"model_type": "gpt_neox"}
    old = model_from_config(config | {"rotary_pct": 0.5, "rotary_emb_base": 5000})
    new = model_from_config(config | {"rope_parameters": {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}})
    assert old == new
    assert model_from_config(config).model_dump()["rotary_share"] == 0.25


def test_pythia_70m(tmp_path: Path) -> None:
    """The numbers of its config give the count of its model card: 70,426,624 parameters, 18,915,328 in blocks."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 512, "num_hidden_layers": 6,'
        ' "num_attention_heads": 8, "intermediate_size": 2048, "rotary_pct": 0.25, "max_position_embeddings": 2048}'
    )
    model = read_model(tmp_path)
    sizes = {name: torch.Size(shape).numel() for name, shape in model.tensors().items()}
    assert sum(sizes.values()) == 70_426_624
    assert sum(size for name, size in sizes.items() if name not in ("embed.weight", "head.weight")) == 18_915_328


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"num_attention_heads": 5}, "must equal dim"),
        ({"head_dim": 8}, "must equal dim"),
        ({"rotary_pct": 0.05}, "no pair"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_from_config(SIZES | {"model_type": "gpt_neox"} | change)


def test_heads_share_no_keys() -> None:
    with pytest.raises(ValueError, match="kv_heads"):
        Model(family="gpt_neox", dim=64, heads=4, kv_heads=2)
