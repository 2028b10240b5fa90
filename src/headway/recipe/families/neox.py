"""GPT-NeoX and Pythia: parallel attention and feed-forward, partial rotary positions, LayerNorm."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headway.recipe.architecture import Architecture
from headway.recipe.families.gpt2 import (
    Activation,
    activation_name,
    activation_of,
    fused,
    layer_norm,
    plain_mlp_tensors,
    refuse_quantized,
    refuse_uneven,
    with_more,
)
from headway.recipe.families.llama import NUMBERS, attention_tensors, checked, costs, sizes
from headway.recipe.model import Config, HfTensor, Model, Shapes
from headway.recipe.rope import RotaryModel, given, rope_settings, rotary_config, scaling_from


class NeoX(RotaryModel):
    """A decoder of the GPT-NeoX family."""

    NAMES: ClassVar[dict[str, str]] = {
        "attention_norm": "input_layernorm",
        "attention.qkv": "attention.query_key_value",
        "attention.o": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }
    OUTSIDE: ClassVar[dict[str, str]] = {
        "embed.weight": "gpt_neox.embed_in.weight",
        "norm.weight": "gpt_neox.final_layer_norm.weight",
        "norm.bias": "gpt_neox.final_layer_norm.bias",
        "head.weight": "embed_out.weight",
    }
    LAYERS: ClassVar[str] = "gpt_neox.layers"
    OLD_NAMES: ClassVar[dict[str, str]] = {r"^lm_head\.": "embed_out."}
    FOLLOWS: ClassVar[str] = r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"

    family: Literal["gpt_neox"] = "gpt_neox"
    tie_embeddings: bool = False
    rotary_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Fraction of each head that is rotated: its first dimensions."""
    parallel_residual: bool = True
    """Run attention and feed-forward in parallel on the layer's input; otherwise in sequence."""
    attention_bias: bool = True
    """Biases on all attention projections."""
    activation: Activation = "gelu"
    """Activation of the feed-forward."""

    @classmethod
    def _follow(cls, dim: int, heads: int) -> dict[str, int]:
        return super()._follow(dim, heads) | {"hidden": 4 * dim}

    @model_validator(mode="after")
    def _even(self) -> Self:
        refuse_uneven(self)
        if self.rotary_dim < 2:
            raise ValueError(
                f"rotary_share ({self.rotary_share}) of head_dim ({self.head_dim}) leaves no pair to rotate"
            )
        return self

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of a head, the first ones."""
        return int(self.head_dim * self.rotary_share)

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """That of a config.json of gpt_neox, whose rotary settings have names of their own."""
        refuse_quantized(config)
        share, theta = given(config, "rotary_pct", 0.25), given(config, "rotary_emb_base", 10_000.0)
        rope = rope_settings({**config, "partial_rotary_factor": share, "rope_theta": theta})
        return checked(cls, sizes(config) | {
            "head_dim": config.get("head_dim"),
            "rotary_share": rope["partial_rotary_factor"],
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaling_from(rope, config),
            "parallel_residual": given(config, "use_parallel_residual", True),
            "attention_bias": given(config, "attention_bias", True),
            "activation": activation_of(config, "hidden_act", "gelu"),
            "norm_eps": given(config, "layer_norm_eps", 1e-5),
            "tie_embeddings": given(config, "tie_word_embeddings", False),
            "init_std": given(config, "initializer_range", 0.02),
        })  # fmt: skip

    def to_config(self, seq: int) -> dict[str, Any]:
        """Write a config.json of gpt_neox, for old and new readers, without dropout."""
        rotary = rotary_config(self, seq)
        rotary["rope_parameters"]["partial_rotary_factor"] = self.rotary_share
        return {
            "architectures": ["GPTNeoXForCausalLM"],
            "model_type": "gpt_neox",
            **{key: getattr(self, field) for field, key in NUMBERS.items()},
            **rotary,
            "rotary_pct": self.rotary_share,
            "rotary_emb_base": self.rope_theta,
            "use_parallel_residual": self.parallel_residual,
            "attention_bias": self.attention_bias,
            "hidden_act": activation_name(self.activation),
            "layer_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "initializer_range": self.init_std,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def architecture(self) -> Architecture:
        """Ungated feed-forward, and biases."""
        return Architecture(
            **costs(self), gated=False, layer_norm=True, qkv_bias=self.attention_bias, output_bias=self.attention_bias,
            mlp_bias=True,
        )  # fmt: skip

    def block_tensors(self, layer: int) -> Shapes:
        """Two norms, attention, feed-forward."""
        return (
            layer_norm("attention_norm", self.dim)
            | attention_tensors(self, self.attention_bias, self.attention_bias)
            | layer_norm("mlp_norm", self.dim)
            | plain_mlp_tensors(self)
        )

    def tensors(self) -> Shapes:
        """Add the last norm's bias."""
        return with_more(super().tensors(), {"norm.weight": {"norm.bias": (self.dim,)}})

    def hf_tensors(self) -> Iterator[HfTensor]:
        """Queries, keys and values are fused, interleaved by head."""
        for names in fused(self.tensors()):
            if len(names) == 1:
                yield HfTensor(self.hf_name(names[0]), names)
            else:
                yield HfTensor(self.hf_name(names[0].replace(".q.", ".qkv.")), names, "heads", index=self.heads)
