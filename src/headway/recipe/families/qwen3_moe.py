"""Qwen3-MoE: Mixtral with QK norms, narrow experts, and optional dense layers."""

from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from headway.errors import ModelError
from headway.recipe.families.llama import LlamaLike, checked, refuse_what_differs
from headway.recipe.families.mixtral import MixtureLike
from headway.recipe.model import Config, Model
from headway.recipe.rope import given
from headway.recipe.section import DERIVED, NotNegative, Positive


class Qwen3Moe(MixtureLike):
    """Qwen3 with many narrow experts in most layers."""

    NAMES: ClassVar[dict[str, str]] = LlamaLike.NAMES | {"mlp.router": "mlp.gate"}
    EXPERTS: ClassVar[dict[str, str]] = {
        "mlp.experts.gate": "mlp.experts.{}.gate_proj.weight",
        "mlp.experts.up": "mlp.experts.{}.up_proj.weight",
        "mlp.experts.down": "mlp.experts.{}.down_proj.weight",
    }

    family: Literal["qwen3_moe"] = "qwen3_moe"
    qk_norm: Literal[True] = True
    """Normalize each head's queries and keys before the rotary embedding."""
    expert_hidden: Positive = DERIVED
    """Inner width of an expert; by default about hidden / top_k."""
    normalize_weights: bool = True
    """Normalize a token's expert weights to sum to 1."""
    dense_layers: tuple[NotNegative, ...] = ()
    """Layers, by number, with a dense feed-forward of width `hidden` instead of experts."""

    @model_validator(mode="before")
    @classmethod
    def _expert_width(cls, values: Any) -> Any:
        """Derive an expert's width; this runs before `hidden` is derived."""
        if not isinstance(values, dict) or values.get("expert_hidden") is not None:
            return values
        dim = values.get("dim", cls.model_fields["dim"].default)
        hidden = values.get("hidden") or (cls._follow(dim, 1)["hidden"] if isinstance(dim, int) and dim > 0 else None)
        top_k = values.get("top_k", cls.model_fields["top_k"].default)
        if not isinstance(hidden, int) or not isinstance(top_k, int) or top_k < 1:
            return values
        return {**values, "expert_hidden": max(8, hidden // top_k // 8 * 8)}

    @model_validator(mode="after")
    def _some_layers(self) -> Self:
        if len({*self.dense_layers}) != len(self.dense_layers) or max(self.dense_layers, default=0) >= self.layers:
            raise ValueError(f"dense_layers must be different numbers of the {self.layers} layers, from 0 on")
        if len(self.dense_layers) == self.layers:
            raise ValueError("dense_layers leaves no layer with experts")
        return self

    @property
    def expert_width(self) -> int:
        """Inner width of one expert."""
        return self.expert_hidden

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer not in self.dense_layers

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """Read a config.json of qwen3_moe; dense layers are listed, or all but every N-th."""
        refuse_what_differs(config)
        experts = config.get("num_experts")
        experts = given(config, "num_local_experts", 128) if experts is None else experts
        layers, step = given(config, "num_hidden_layers", 24), given(config, "decoder_sparse_step", 1)
        named = given(config, "mlp_only_layers", [])
        dense = tuple(i for i in range(layers) if i in named or experts == 0 or (i + 1) % step)
        if len(dense) == layers:
            raise ModelError("config.json has no layer with experts", hint="model_type qwen3 is the same without")
        bias = bool(config.get("attention_bias", False))
        used = config.get("use_sliding_window", False)
        return checked(
            cls,
            cls._described(config, theta=1e4, kv_heads=4, eps=1e-6)
            | {
                "qkv_bias": bias,
                "output_bias": bias,
                "experts": experts,
                "top_k": given(config, "num_experts_per_tok", 8),
                "expert_hidden": given(config, "moe_intermediate_size", 768),
                "normalize_weights": given(config, "norm_topk_prob", False),
                "dense_layers": dense,
                "window": given(config, "sliding_window", 4096) if used else None,
            },
        )

    def to_config(self, seq: int) -> dict[str, Any]:
        """Write a config.json of qwen3_moe, which has one switch for all attention biases."""
        if self.qkv_bias != self.output_bias:
            raise ModelError("qwen3_moe has biases on all of attention or none", hint="qkv_bias with output_bias")
        return self._common("qwen3_moe", seq) | {
            "attention_bias": self.qkv_bias,
            "num_experts": self.experts,
            "moe_intermediate_size": self.expert_hidden,
            "norm_topk_prob": self.normalize_weights,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(self.dense_layers),
            "use_sliding_window": self.window is not None,
            "sliding_window": self.window,
        }
