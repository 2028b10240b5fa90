"""SmolLM3: Llama without rotary positions in every N-th layer (NoPE)."""

from typing import Any, Literal

from headway.errors import ModelError
from headway.recipe.families.llama import LlamaLike, checked, common_config
from headway.recipe.model import Config, Model
from headway.recipe.rope import given
from headway.recipe.section import NotNegative


class SmolLM3(LlamaLike):
    """Llama without rotary positions in some layers."""

    family: Literal["smollm3"] = "smollm3"
    no_rope_every: NotNegative = 4
    """Every N-th layer has no rotary positions; 0: all have them."""

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """Read a config.json of smollm3; layers without positions must be evenly spaced."""
        every = given(config, "no_rope_layer_interval", 4)
        layers = given(config, "num_hidden_layers", 36)
        rotated = config.get("no_rope_layers")  # ones and zeros: a zero has none
        if rotated is not None:
            first = next((i + 1 for i, on in enumerate(rotated) if not on), 0)
            if [int(on) for on in rotated] != [int(not first or (i + 1) % first != 0) for i in range(layers)]:
                raise ModelError("config.json has no_rope_layers at unequal distances", hint="every N-th is known")
            every = first
        if config.get("use_sliding_window"):
            raise ModelError("config.json has sliding windows; this family attends to all tokens")
        return checked(cls, cls._settings(config, "smollm3") | {"no_rope_every": every})

    def to_config(self, seq: int) -> dict[str, Any]:
        """Write a config.json of smollm3, which has one switch for all attention biases."""
        if self.qk_norm or self.qkv_bias != self.output_bias:
            raise ModelError("smollm3 has no qk_norm, and biases on all of attention or none")
        rotated = [int(self.rotates(layer)) for layer in range(self.layers)]
        return common_config(self, "smollm3", seq) | {
            "attention_bias": self.qkv_bias,
            "mlp_bias": self.mlp_bias,
            "no_rope_layer_interval": self.no_rope_every or self.layers + 1,
            "no_rope_layers": rotated,
            "use_sliding_window": False,
            "sliding_window": None,
            "pad_token_id": None,
        }

    def rotates(self, layer: int) -> bool:
        """Whether a layer has rotary positions."""
        return self.no_rope_every == 0 or (layer + 1) % self.no_rope_every != 0
