"""Llama 2 and 3, SmolLM2, Qwen2, Qwen2.5 and Qwen3 (dense), and Mistral without a sliding window."""

from typing import Any, ClassVar, Literal

from headway.errors import ModelError, what_is_wrong
from headway.recipe.architecture import Architecture
from headway.recipe.model import Config, Model, Shapes, linear
from headway.recipe.rope import RotaryModel, given, rope_settings, rotary_config, scaling_from

NUMBERS = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "dim": "hidden_size",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
}
"""Size fields and their usual keys in a config.json."""
# head_dim None means dim / heads.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "head_dim": None},
    "mistral": {"num_key_value_heads": 8, "head_dim": None},
    "qwen2": {"num_key_value_heads": 32, "head_dim": None},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4, "head_dim": None},
}
"""Defaults of a config.json, by model_type."""


class LlamaLike(RotaryModel):
    """RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    NAMES: ClassVar[dict[str, str]] = {
        "attention_norm": "input_layernorm",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.o": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }

    qk_norm: bool = False
    """Normalize each head's queries and keys before the rotary embedding."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    output_bias: bool = False
    """Bias on the attention's output projection."""
    mlp_bias: bool = False
    """Biases on the feed-forward's projections."""

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """Read a config.json of llama, mistral, qwen2 or qwen3."""
        return checked(cls, cls._settings(config, str(config["model_type"])))

    @classmethod
    def _settings(cls, config: Config, kind: str) -> dict[str, Any]:
        refuse_what_differs(config)
        refuse_experts(config)
        _refuse_windows(config, kind)
        rope = rope_settings(config)
        if rope["partial_rotary_factor"] != 1:
            raise ModelError(f"config.json rotates {rope['partial_rotary_factor']} of each head; {kind} rotates all")
        bias = bool(config.get("attention_bias", False)) and kind in ("llama", "qwen3", "smollm3")
        return sizes(config) | {
            "kv_heads": given(config, "num_key_value_heads", DEFAULTS[kind]["num_key_value_heads"]),
            "head_dim": given(config, "head_dim", DEFAULTS[kind]["head_dim"]),
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaling_from(rope, config),
            "norm_eps": given(config, "rms_norm_eps", 1e-6),
            "tie_embeddings": given(config, "tie_word_embeddings", kind == "smollm3"),
            "qk_norm": kind == "qwen3",
            "qkv_bias": kind == "qwen2" or bias,
            "output_bias": bias,
            "mlp_bias": bool(config.get("mlp_bias", False)) and kind in ("llama", "smollm3"),
            "init_std": given(config, "initializer_range", 0.02),
        }

    def to_config(self, seq: int) -> dict[str, Any]:
        """Write a config.json of the model_type with these settings."""
        kind, switches = self._kind()
        return common_config(self, kind, seq) | switches

    def _kind(self) -> tuple[str, dict[str, Any]]:
        """Return the model_type in `transformers`, and its specific keys."""
        biases = {name: getattr(self, name) for name in ("qkv_bias", "output_bias", "mlp_bias")}
        sliding = {"use_sliding_window": False, "sliding_window": None}
        match self.qk_norm, *biases.values():
            case True, qkv, output, False if qkv == output:
                return "qwen3", {"attention_bias": qkv, **sliding}
            case False, True, False, False:
                return "qwen2", sliding
            case False, qkv, output, mlp if qkv == output:
                return "llama", {"attention_bias": qkv, "mlp_bias": mlp}
        switches = ", ".join(name for name, on in {"qk_norm": self.qk_norm, **biases}.items() if on)
        raise ModelError(
            f"no model_type of `transformers` has exactly {switches}",
            hint="llama: qkv_bias with output_bias, mlp_bias; qwen2: qkv_bias; qwen3: qk_norm, the former two",
        )

    def architecture(self) -> Architecture:
        """Grouped-query attention and a gated feed-forward."""
        return Architecture(
            **costs(self), qk_norm=self.qk_norm, qkv_bias=self.qkv_bias, output_bias=self.output_bias,
            mlp_bias=self.mlp_bias,
        )  # fmt: skip

    def block_tensors(self, layer: int) -> Shapes:
        """Two norms, attention, feed-forward."""
        shapes: Shapes = {"attention_norm.weight": (self.dim,)}
        shapes |= attention_tensors(self, self.qkv_bias, self.output_bias)
        if self.qk_norm:
            shapes |= {"attention.q_norm.weight": (self.head_dim,), "attention.k_norm.weight": (self.head_dim,)}
        shapes["mlp_norm.weight"] = (self.dim,)
        return shapes | self._mlp_tensors(layer)

    def _mlp_tensors(self, layer: int) -> Shapes:
        return mlp_tensors(self, self.mlp_bias)


class Llama(LlamaLike):
    """Llama, and families that differ by a switch."""

    family: Literal["llama"] = "llama"


# -- shared with other families


def sizes(config: Config) -> dict[str, Any]:
    """Return the sizes that every config.json must have."""
    missing = [key for key in NUMBERS.values() if config.get(key) is None]
    if missing:
        raise ModelError(f"config.json lacks {', '.join(missing)}")
    return {field: config[key] for field, key in NUMBERS.items()}


def checked(family: type[Model], settings: dict[str, Any]) -> Model:
    """Return a model section for the settings of a config.json; raise ModelError if they are invalid."""
    from pydantic import ValidationError

    try:
        return family(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        label = f"{key} (config.json: {NUMBERS[key]})" if key in NUMBERS else key or "shape"
        raise ModelError(f"config.json is invalid: {label}: {what_is_wrong(first)}") from None


def refuse_what_differs(config: Config, activations: tuple[str, ...] = ("silu", "swish")) -> None:
    """Raise ModelError for settings that this family cannot reproduce."""
    activation = given(config, "hidden_act", activations[0])
    if activation not in activations:
        raise ModelError(f"config.json has hidden_act {activation!r}; this family supports only {activations[0]}")
    if config.get("quantization_config"):
        raise ModelError("config.json has quantized weights", hint="use the folder with the original weights")


def refuse_experts(config: Config) -> None:
    """Raise ModelError if a config of a dense family has experts."""
    if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ModelError("config.json has experts; this family is dense")


def _refuse_windows(config: Config, kind: str) -> None:
    """Raise ModelError for Qwen's sliding window, which no released model enables."""
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    if not kind.startswith("qwen") or window is None or (longest is not None and window >= longest):
        return
    kinds = config.get("layer_types")
    layers = given(config, "num_hidden_layers", 0)
    used = config.get("use_sliding_window", False) and config.get("max_window_layers", 28) < layers
    if used if kinds is None else "sliding_attention" in kinds:
        raise ModelError(f"config.json has a sliding window of {window} tokens; {kind} supports full attention only")


def common_config(model: RotaryModel, kind: str, seq: int) -> dict[str, Any]:
    """Return the keys of a config.json that most families share."""
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **{key: getattr(model, field) for field, key in NUMBERS.items()},
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        **rotary_config(model, seq),
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "bos_token_id": None,
        "eos_token_id": None,
    }


ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def costs(model: Model) -> dict[str, Any]:
    """Return the fields of `Architecture` that all decoders share."""
    return {
        "layers": model.layers, "dim": model.dim, "heads": model.heads, "kv_heads": model.kv_heads,
        "head_dim": model.head_dim, "hidden": model.hidden, "vocab": model.vocabulary, "tied": model.tie_embeddings,
    }  # fmt: skip


def attention_tensors(model: Model, qkv_bias: bool = False, output_bias: bool = False) -> Shapes:
    """Return the shapes of grouped-query attention."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return (
        linear("attention.q", model.dim, queries, qkv_bias)
        | linear("attention.k", model.dim, keys, qkv_bias)
        | linear("attention.v", model.dim, keys, qkv_bias)
        | linear("attention.o", queries, model.dim, output_bias)
    )


def mlp_tensors(model: Model, bias: bool = False) -> Shapes:
    """Return the shapes of a gated feed-forward."""
    return (
        linear("mlp.gate", model.dim, model.hidden, bias)
        | linear("mlp.up", model.dim, model.hidden, bias)
        | linear("mlp.down", model.hidden, model.dim, bias)
    )
