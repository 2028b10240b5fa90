"""Phi-3 against `transformers`."""

import pytest
from family_cases import SIZES, Case

from headway.errors import ModelError
from headway.recipe.huggingface import model_from_config

SMALL = SIZES | {"head_dim": 8, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 4.0, 9.0]}  # fmt: skip
PARTIAL = LONG | {"partial_rotary_factor": 0.75, "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 3.0, 9.0]}

CASES = [
    Case("Phi-3", "Phi3Config", SMALL | {"sliding_window": 9}, "phi3", "fused matrices, sliding window"),
    Case("Phi-3, long", "Phi3Config", SMALL | {"rope_parameters": LONG}, "phi3", "scaled positions (longrope)"),
    Case("Phi-4-mini", "Phi3Config", SMALL | {"rope_parameters": PARTIAL, "tie_word_embeddings": True}, "phi3",
         "three quarters of a head rotated, longrope, tied"),
]  # fmt: skip


def test_the_original_length_outside_of_the_settings_counts() -> None:
    """As theirs: beside the rotary settings it outdoes what they say, and older names mean the same scaling."""
    old = {"type": "su", **{key: value for key, value in LONG.items() if key != "rope_type"}}
    config = SMALL | {"model_type": "phi3", "rope_scaling": old | {"original_max_position_embeddings": 128}}
    scaling = model_from_config(config).rope_scaling
    assert (scaling.kind, scaling.original, scaling.factor) == ("longrope", 64, 4096 / 64)


@pytest.mark.parametrize("key", ["resid_pdrop", "embd_pdrop", "attention_dropout"])
def test_dropout_is_refused(key: str) -> None:
    with pytest.raises(ModelError, match=key):
        model_from_config(SMALL | {"model_type": "phi3", key: 0.1})


def test_other_scalings_are_refused() -> None:
    with pytest.raises(ModelError, match="linear"):
        model_from_config(SMALL | {"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}})


def test_switches_that_phi3_lacks_are_not_written() -> None:
    model = model_from_config(SMALL | {"model_type": "phi3"}).model_copy(update={"qkv_bias": True})
    with pytest.raises(ModelError, match="qkv_bias"):
        model.to_config(2048)
