"""GPT-2 against `transformers`, its old folders, its positions, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import Case, load, make, tokens
from safetensors.torch import load_file, save_file

from headway.errors import ModelError
from headway.models import Decoder, empty_decoder, init_weights
from headway.recipe import Model
from headway.recipe.huggingface import model_from_config

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "n_embd": 48,
    "n_layer": 4,
    "n_head": 6,
    "n_positions": 320,
    "bos_token_id": None,
    "eos_token_id": None,
}
CASES = [
    Case("GPT-2", "GPT2Config", SIZES, "gpt2", "learned positions, tied"),
    Case("GPT-2, scores by layer", "GPT2Config", SIZES | {
        "n_inner": 80, "activation_function": "gelu", "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3,
        "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True,
    }, "gpt2", "scores divided by the layer's number, untied head"),
]  # fmt: skip


def test_old_folders_have_shorter_names_and_masks(tmp_path: Path) -> None:
    """Those of the first years: no `transformer.` in front, and the causal mask among the weights."""
    hf_model = make(CASES[0], tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    assert any(name.startswith("h.0.") for name in stored)
    for layer in range(4):
        stored[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 320, 320).tril()
        stored[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(stored, file)
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path)(tokens()), hf_model(tokens()).logits, rtol=1e-4, atol=1e-4)


def small(**settings: Any) -> Decoder:
    sizes = {"family": "gpt2", "vocab_size": 64, "layers": 2, "dim": 16, "heads": 2, "positions": 12}
    decoder = empty_decoder(Model(**(sizes | settings)))
    init_weights(decoder, seed=3)
    return decoder


def test_positions_begin_again_in_every_document() -> None:
    """Looked up by hand: row 0 of the table for the first token of each document, whatever its number is."""
    embed: Any = small().embed
    ids = torch.arange(8).view(1, 8)
    documents = torch.tensor([[5, 5, 5, 2, 2, 9, 5, 5]])
    with torch.no_grad():
        added = embed(ids, documents) - embed.weight[ids]
        wanted = embed.positions.weight[torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1]])]
    torch.testing.assert_close(added, wanted)


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    decoder = small()
    assert decoder.model.longest == 12
    decoder(torch.zeros(1, 12, dtype=torch.long))
    with pytest.raises(ModelError, match="13 tokens, but the model has positions for 12"):
        decoder(torch.zeros(1, 13, dtype=torch.long))


def test_fresh_weights() -> None:
    """The paper's: 0.02, what is added to the stream smaller by the root of the additions, no biases, norms of one."""
    decoder = small(dim=128, positions=200, init_std=0.02)
    weights = dict(decoder.named_parameters())
    assert weights["embed.positions.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["layers.1.mlp.down.weight"].std().item() == pytest.approx(0.01, rel=0.05)
    assert weights["layers.0.attention.q.bias"].abs().max() == 0
    assert weights["norm.bias"].abs().max() == 0
    assert (weights["norm.weight"] == 1).all()


CONFIG = SIZES | {"model_type": "gpt2"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"activation_function": "relu"}, "activation_function 'relu'"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"n_layer": None}, "lacks n_layer"),
        ({"hidden_size": 64}, "n_embd 48 and hidden_size 64"),
        ({"n_head": 5}, "must equal dim"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_from_config(CONFIG | change)


def test_sizes_under_their_other_names() -> None:
    other = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "max_position_embeddings": 320}
    config = {key: value for key, value in CONFIG.items() if not key.startswith("n_")} | other
    assert model_from_config(config) == model_from_config(CONFIG)


def test_heads_share_neither_keys_nor_leave_width_over() -> None:
    with pytest.raises(ValueError, match="kv_heads"):
        Model(family="gpt2", dim=16, heads=4, kv_heads=2)
