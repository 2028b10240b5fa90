"""Gemma 1, 2 and 3 (text): norms with 1 + w, scaled embeddings, gated GELU; later windows, soft caps and QK norms."""

import math
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

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
from headway.recipe.section import NotNegative, Positive

GELU = "gelu_pytorch_tanh"
Cap = Annotated[float, Field(ge=0)]


class GemmaLike(RotaryModel):
    """Base of all Gemmas."""

    NAMES: ClassVar[dict[str, str]] = LlamaLike.NAMES

    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    attention_bias: bool = False
    """Biases on all attention projections."""

    @classmethod
    def _settings(cls, config: Config, kv_heads: int, rope: Config) -> dict[str, Any]:
        """Return the settings that all configs share; `rope` is that of full-attention layers."""
        refuse_experts(config)
        if config.get("use_bidirectional_attention"):
            raise ModelError("config.json has use_bidirectional_attention; only causal attention is supported")
        if rope["partial_rotary_factor"] != 1:
            raise ModelError(f"config.json rotates {rope['partial_rotary_factor']} of each head; Gemma rotates all")
        return sizes(config) | {
            "kv_heads": given(config, "num_key_value_heads", kv_heads),
            "head_dim": given(config, "head_dim", 256),
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaling_from(rope, config),
            "norm_eps": given(config, "rms_norm_eps", 1e-6),
            "tie_embeddings": given(config, "tie_word_embeddings", True),
            "attention_bias": bool(config.get("attention_bias", False)),
            "init_std": given(config, "initializer_range", 0.02),
        }

    @property
    def embedding_scale(self) -> float:
        """Factor of the embedding."""
        return math.sqrt(self.dim)

    @property
    def score_scale(self) -> float:
        """Factor of attention scores."""
        return 1 / math.sqrt(self.head_dim)

    def architecture(self) -> Architecture:
        """Grouped-query attention and a gated feed-forward."""
        return Architecture(**costs(self), qkv_bias=self.attention_bias, output_bias=self.attention_bias)

    def block_tensors(self, layer: int) -> Shapes:
        """Two norms, attention, feed-forward."""
        return {
            "attention_norm.weight": (self.dim,),
            **attention_tensors(self, self.attention_bias, self.attention_bias),
            "mlp_norm.weight": (self.dim,),
            **mlp_tensors(self),
        }

    def initial(self, name: str) -> tuple[float, float]:
        """Norms multiply by 1 + w, so their weights start at 0."""
        return (0.0, 0.0) if name.endswith("norm.weight") else super().initial(name)


class Gemma(GemmaLike):
    """Gemma 1."""

    family: Literal["gemma"] = "gemma"

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """Read a config.json of gemma; early ones say gelu for its tanh approximation."""
        refuse_what_differs(config, (GELU, "gelu"))
        return checked(cls, cls._settings(config, 16, rope_settings(config)))

    def to_config(self, seq: int) -> dict[str, Any]:
        """Write a config.json of gemma."""
        return common_config(self, "gemma", seq) | {
            "hidden_act": GELU,
            "attention_bias": self.attention_bias,
            "pad_token_id": None,
        }


class GemmaWindowed(GemmaLike):
    """Base of Gemma 2 and 3: sliding windows in most layers, and norms before and after each part."""

    NAMES: ClassVar[dict[str, str]] = GemmaLike.NAMES | {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }

    window: Positive = 4096
    """Sliding window of windowed layers, in tokens including the current one."""
    full_every: NotNegative = 2
    """Every N-th layer has full attention; 0: none."""
    query_scalar: NotNegative = 0
    """Attention scores are divided by its square root; 0: by that of head_dim."""
    logit_cap: Cap = 0.0
    """Soft cap of logits; 0: none."""

    @classmethod
    def _settings(cls, config: Config, kv_heads: int, rope: Config) -> dict[str, Any]:
        refuse_what_differs({**config, "hidden_act": config.get("hidden_activation")}, (GELU,))
        window = config.get("sliding_window", 4096)
        if window is None:
            raise ModelError("config.json has sliding_window null; this family needs one", hint="set its length")
        return super()._settings(config, kv_heads, rope) | {
            "window": window,
            "full_every": _full_every(config, cls.model_fields["full_every"].default),
            "query_scalar": given(config, "query_pre_attn_scalar", 256),
        }

    def to_config(self, seq: int) -> dict[str, Any]:
        """Return the keys that both config.json share."""
        kind = "gemma2" if self.family == "gemma2" else "gemma3_text"
        kinds = ["full_attention" if self.window_of(i) is None else "sliding_attention" for i in range(self.layers)]
        return common_config(self, kind, seq) | {
            "hidden_act": GELU,
            "hidden_activation": GELU,
            "attention_bias": self.attention_bias,
            "query_pre_attn_scalar": self.query_scalar or self.head_dim,
            "sliding_window": self.window,
            "layer_types": kinds,
            "final_logit_softcapping": self.logit_cap or None,
            "pad_token_id": None,
        }

    @property
    def score_scale(self) -> float:
        """Factor of attention scores, from `query_scalar`."""
        return 1 / math.sqrt(self.query_scalar or self.head_dim)

    def window_of(self, layer: int) -> int | None:
        """None in every `full_every`-th layer."""
        return None if self.full_every and (layer + 1) % self.full_every == 0 else self.window

    def architecture(self) -> Architecture:
        """Four norms, and windows."""
        windowed = sum(self.window_of(layer) is not None for layer in range(self.layers))
        return replace(super().architecture(), norms=4, window=self.window, windowed_layers=windowed)

    def block_tensors(self, layer: int) -> Shapes:
        """Norms before and after attention and feed-forward."""
        return {
            "attention_norm.weight": (self.dim,),
            **attention_tensors(self, self.attention_bias, self.attention_bias),
            "attention_out_norm.weight": (self.dim,),
            "mlp_norm.weight": (self.dim,),
            **mlp_tensors(self),
            "mlp_out_norm.weight": (self.dim,),
        }


class Gemma2(GemmaWindowed):
    """Gemma 2: a sliding window in every other layer; capped scores and logits."""

    family: Literal["gemma2"] = "gemma2"
    attention_cap: Cap = 50.0
    """Soft cap of attention scores; 0: none."""
    logit_cap: Cap = 30.0

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """Read a config.json of gemma2; null means no cap."""
        return checked(
            cls,
            cls._settings(config, 4, rope_settings(config))
            | {"attention_cap": config.get("attn_logit_softcapping", 50.0) or 0.0}
            | {"logit_cap": config.get("final_logit_softcapping", 30.0) or 0.0},
        )

    def to_config(self, seq: int) -> dict[str, Any]:
        """Write a config.json of gemma2."""
        return super().to_config(seq) | {"attn_logit_softcapping": self.attention_cap or None}


class Gemma3(GemmaWindowed):
    """Gemma 3: five of six layers have a sliding window and their own RoPE base; QK norms."""

    family: Literal["gemma3"] = "gemma3"
    full_every: NotNegative = 6
    rope_theta: Annotated[float, Field(gt=0)] = 1_000_000.0
    """RoPE base of full-attention layers; scaling applies to them alone."""
    local_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """RoPE base of windowed layers."""

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """Read a config.json of gemma3_text; multimodal models are refused."""
        if config.get("model_type") == "gemma3" or config.get("vision_config"):
            raise ModelError(
                "config.json is of a multimodal Gemma 3; only its text model (gemma3_text) is supported",
                hint="load its model.language_model into Gemma3ForCausalLM(config.text_config) and save that",
            )
        if config.get("attn_logit_softcapping"):
            raise ModelError("config.json has attn_logit_softcapping; gemma3 does not cap attention scores")
        rope, local = _rotary(config)
        return checked(
            cls,
            cls._settings(config, 4, rope)
            | {"logit_cap": config.get("final_logit_softcapping") or 0.0, "local_theta": local},
        )

    def to_config(self, seq: int) -> dict[str, Any]:
        """Write a config.json of gemma3_text, for old and new readers: rotary settings have moved."""
        config = super().to_config(seq)
        local = {"rope_type": "default", "rope_theta": self.local_theta}
        return config | {
            "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
            "rope_local_base_freq": self.local_theta,
            "sliding_window_pattern": self.full_every or self.layers + 1,
            "attn_logit_softcapping": None,
        }

    def architecture(self) -> Architecture:
        """With QK norms."""
        return replace(super().architecture(), qk_norm=True)

    def block_tensors(self, layer: int) -> Shapes:
        """With QK norms after the projections."""
        shapes: Shapes = {}
        for name, shape in super().block_tensors(layer).items():
            if name == "attention_out_norm.weight":
                shapes |= {f"attention.{which}_norm.weight": (self.head_dim,) for which in ("q", "k")}
            shapes[name] = shape
        return shapes


def _full_every(config: Config, usual: int) -> int:
    """Return the distance of full-attention layers; raise ModelError if it varies."""
    every = given(config, "sliding_window_pattern", usual)
    kinds = config.get("layer_types")
    if kinds is None:
        return int(every)
    first = next((i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"), 0)
    for known in (every, first):
        expected = [
            "full_attention" if known and (i + 1) % known == 0 else "sliding_attention" for i in range(len(kinds))
        ]
        if list(kinds) == expected:
            return int(known)
    raise ModelError("config.json has irregular layer_types", hint="only every N-th layer may be full_attention")


def _rotary(config: Config) -> tuple[dict[str, Any], float]:
    """Return the rotary settings of full-attention layers and the base of the others, from old or new configs."""
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or (rope and not rope.keys() & {"full_attention", "sliding_attention"}):
        raise ModelError("config.json has rope_parameters without full_attention and sliding_attention")
    full = (rope.get("full_attention") or {}) | (config.get("rope_scaling") or {})
    local = rope.get("sliding_attention") or {}
    if (local.get("rope_type") or local.get("type") or "default") != "default":
        raise ModelError("config.json scales RoPE in windowed layers; gemma3 does not support that")
    plain = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    theta = local.get("rope_theta") or given(config, "rope_local_base_freq", 10_000.0)
    return rope_settings({**plain, "rope_parameters": full}, 1_000_000.0), float(theta)
