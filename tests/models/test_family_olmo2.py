"""OLMo 2 against `transformers`."""

import pytest
from family_cases import SIZES, Case

from headway.errors import ModelError
from headway.recipe.huggingface import model_from_config

LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}

CASES = [
    Case("OLMo 2", "Olmo2Config", SIZES, "olmo2", "norms after each part, norms over all heads"),
    Case("OLMo 2, tied", "Olmo2Config", SIZES | {"tie_word_embeddings": True, "attention_bias": True,
         "rope_parameters": LINEAR}, "olmo2", "scaled positions (linear), tied, biases"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "gelu"), ("partial_rotary_factor", 0.5), ("num_experts", 4)])
def test_unsupported_config_is_refused(key: str, value: object) -> None:
    with pytest.raises(ModelError):
        model_from_config(SIZES | {"model_type": "olmo2", key: value})
