"""OLMo 2: norms after attention and feed-forward instead of before, and QK norms over all heads."""

from typing import Any, ClassVar, Literal

from headway.errors import ModelError
from headway.recipe.architecture import Architecture
from headway.recipe.families.llama import (
    LlamaLike,
    attention_tensors,
    checked,
    common_config,
    costs,
    mlp_tensors,
    refuse_experts,
    refuse_what_differs,
    sizes,
)
from headway.recipe.model import Config, Model, Shapes
from headway.recipe.rope import RotaryModel, given, rope_settings, scaling_from


class OLMo2(RotaryModel):
    """A decoder of the OLMo 2 family."""

    UNCUT: ClassVar[str] = "its norms of queries and keys go over all heads"

    NAMES: ClassVar[dict[str, str]] = LlamaLike.NAMES | {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }

    family: Literal["olmo2"] = "olmo2"
    attention_bias: bool = False
    """Biases on all attention projections."""

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """Read a config.json of olmo2."""
        refuse_what_differs(config)
        refuse_experts(config)
        rope = rope_settings(config)
        if rope["partial_rotary_factor"] != 1:
            raise ModelError(f"config.json rotates {rope['partial_rotary_factor']} of each head; olmo2 rotates all")
        settings = sizes(config) | {
            "kv_heads": config.get("num_key_value_heads"),
            "head_dim": config.get("head_dim"),
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaling_from(rope, config),
            "norm_eps": given(config, "rms_norm_eps", 1e-5),
            "tie_embeddings": given(config, "tie_word_embeddings", False),
            "attention_bias": bool(config.get("attention_bias", False)),
            "init_std": given(config, "initializer_range", 0.02),
        }
        return checked(cls, settings)

    def to_config(self, seq: int) -> dict[str, Any]:
        """Write a config.json of olmo2."""
        return common_config(self, "olmo2", seq) | {"attention_bias": self.attention_bias, "pad_token_id": None}

    def architecture(self) -> Architecture:
        """Grouped-query attention, gated feed-forward, norms over all heads."""
        return Architecture(
            **costs(self), qk_norm=True, qk_norm_whole=True, qkv_bias=self.attention_bias,
            output_bias=self.attention_bias,
        )  # fmt: skip

    def block_tensors(self, layer: int) -> Shapes:
        """Attention and feed-forward, each with a norm after it."""
        return {
            **attention_tensors(self, self.attention_bias, self.attention_bias),
            "attention.q_norm.weight": (self.heads * self.head_dim,),
            "attention.k_norm.weight": (self.kv_heads * self.head_dim,),
            "attention_out_norm.weight": (self.dim,),
            **mlp_tensors(self),
            "mlp_out_norm.weight": (self.dim,),
        }
