"""Gemma 1, 2 and 3 against `transformers`."""

from typing import Any

import pytest
import torch
from family_cases import SIZES, Case

from headway.errors import ModelError
from headway.models import empty_decoder, init_weights
from headway.models.gemma import Norm
from headway.recipe import Model
from headway.recipe.huggingface import model_from_config
from lazy_imports import transformers

SMALL = SIZES | {"sliding_window": 9}
"""Small enough a window for every comparison to leave it."""
GLOBAL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0}
LOCAL = {"rope_type": "default", "rope_theta": 300.0}
KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]

CASES = [
    Case("Gemma", "GemmaConfig", SIZES, "gemma", "norms by 1 + w, scaled embedding, gated GELU"),
    Case("Gemma, untied", "GemmaConfig", SIZES | {"tie_word_embeddings": False, "attention_bias": True}, "gemma",
         "untied head, biases"),
    Case("Gemma 2", "Gemma2Config", SMALL | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 3.0}, "gemma2", "soft caps, alternating windows, four norms"),
    Case("Gemma 2, no caps", "Gemma2Config", SMALL | {"attn_logit_softcapping": None, "final_logit_softcapping": None,
         "layer_types": ["full_attention"] * 4, "attention_bias": True}, "gemma2", "without caps or windows, biases"),
    Case("Gemma 3", "Gemma3TextConfig", SMALL | {"layer_types": KINDS, "query_pre_attn_scalar": 24,
         "rope_parameters": {"full_attention": GLOBAL, "sliding_attention": LOCAL}}, "gemma3",
         "windows by layer, positions of their own, norms of queries and keys"),
    Case("Gemma 3, capped", "Gemma3TextConfig", SMALL | {"final_logit_softcapping": 3.0, "num_hidden_layers": 7},
         "gemma3", "cap of logits, five windows to one"),
]  # fmt: skip


# -- by hand


def test_a_norm_multiplies_by_one_more_than_its_weight() -> None:
    norm = Norm(2, eps=1e-12)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.0, 0.5]))
    # The mean square of (3, 4) is 12.5.
    expected = torch.tensor([3.0, 4.0 * 1.5]) / 12.5**0.5
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), expected)


def test_bfloat16_norm_equals_transformers_bit_for_bit() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    hf_norm, norm = Gemma3RMSNorm(48, 1e-6).bfloat16(), Norm(48, 1e-6).bfloat16()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        hf_norm.weight.normal_(0, 0.3, generator=generator)
        norm.weight.copy_(hf_norm.weight)
    x = torch.randn(50, 48, generator=generator).bfloat16()
    assert torch.equal(norm(x), hf_norm(x))


def test_fresh_norms_change_nothing() -> None:
    decoder = empty_decoder(Model(family="gemma2", vocab_size=64, layers=2, dim=32, heads=2))
    init_weights(decoder, seed=0)
    norms = [p for name, p in decoder.named_parameters() if name.endswith("norm.weight")]
    assert len(norms) == 2 * 4 + 1
    assert all(not p.any() for p in norms)


def test_the_embedding_is_scaled_as_bfloat16_rounds_it() -> None:
    """sqrt(3072) is 55.43, of which bfloat16 keeps 55.5."""
    decoder = empty_decoder(Model(family="gemma", vocab_size=4, layers=1, dim=3072, heads=1, hidden=8, head_dim=8))
    decoder.embed.bfloat16()
    torch.nn.init.ones_(decoder.embed.weight)
    assert decoder.embed(torch.tensor([[1]])).unique().tolist() == [55.5]


# -- configs


def config(case: str, **changes: Any) -> dict[str, Any]:
    chosen = next(candidate for candidate in CASES if candidate.name == case)
    return {**getattr(transformers, chosen.config)(**chosen.settings).to_dict(), **changes}


def test_every_sixth_layer_of_gemma_3_sees_all() -> None:
    model = model_from_config(config("Gemma 3, capped"))
    assert [model.window_of(layer) for layer in range(7)] == [9, 9, 9, 9, 9, None, 9]


def test_positions_of_an_old_gemma_3() -> None:
    """What the first configs said in three keys."""
    new = config("Gemma 3")
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": 5000.0, "rope_local_base_freq": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert model_from_config(old) == model_from_config(new)


def test_a_distance_longer_than_the_model_comes_back() -> None:
    model = Model(family="gemma3", vocab_size=64, layers=4, dim=32, heads=2, query_scalar=16)
    assert model_from_config(model.to_config(2048)) == model


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("Gemma", {"hidden_act": "silu"}, "hidden_act"),
        ("Gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma 2", {"hidden_activation": "gelu"}, "gelu"),
        ("Gemma 2", {"sliding_window": None}, "sliding_window"),
        ("Gemma 2", {"layer_types": ["full_attention", "full_attention", *KINDS[:2]]}, "irregular"),
        ("Gemma 2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("Gemma 3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("Gemma 3", {"rope_parameters": LOCAL}, "full_attention"),
        ("Gemma 3", {"rope_parameters": {"sliding_attention": GLOBAL}}, "windowed"),
        ("Gemma 3", {"model_type": "gemma3"}, "multimodal"),
    ],
)  # fmt: skip
def test_unsupported_config_is_refused(case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_from_config(config(case, **changes))
