"""A model section from a Hugging Face config.json of the Llama family, and back.

Llama, Mistral, Qwen2 and Qwen3 are one decoder with different switches. What the decoder cannot do exactly
(scaled rotary positions, sliding windows, experts) is refused: a model that loads is the same model.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headway.errors import ModelError
from headway.recipe.schema import Model

__all__ = ["config_from_model", "model_from_config", "read_model"]

Config = Mapping[str, Any]

# What a family's config means where it says nothing. A head's size is then dim / heads, but for Qwen3.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "head_dim": None},
    "mistral": {"num_key_value_heads": 8, "head_dim": None},
    "qwen2": {"num_key_value_heads": 32, "head_dim": None},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
NUMBERS = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "dim": "hidden_size",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
}


def read_model(folder: Path) -> Model:
    """The model section of a Hugging Face folder."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {error.strerror}",
            hint="a Hugging Face folder holds config.json and *.safetensors",
        ) from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds {type(config).__name__}, not an object")
    return model_from_config(config)


def model_from_config(config: Config) -> Model:
    """The same decoder as a recipe's model section; ModelError names what it cannot do."""
    family = _family(config)
    _refuse_what_differs(config, family)
    missing = [key for key in NUMBERS.values() if config.get(key) is None]
    if missing:
        raise ModelError(f"config.json has no {', '.join(missing)}")
    defaults = FAMILIES[family]
    attention_bias = bool(config.get("attention_bias", False)) and family in ("llama", "qwen3")
    try:
        return Model(
            **{ours: config[theirs] for ours, theirs in NUMBERS.items()},
            kv_heads=_given(config, "num_key_value_heads", defaults["num_key_value_heads"]),
            head_dim=_given(config, "head_dim", defaults["head_dim"]),
            rope_theta=_rope(config)["rope_theta"],
            norm_eps=_given(config, "rms_norm_eps", 1e-6),
            tie_embeddings=_given(config, "tie_word_embeddings", False),
            qk_norm=family == "qwen3",
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
            init_std=_given(config, "initializer_range", 0.02),
        )
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ModelError(f"config.json describes no decoder: {key or 'shape'}: {first['msg']}") from None


def config_from_model(model: Model, seq: int = 2048) -> dict[str, Any]:
    """A config.json that `transformers` reads as the same decoder; `seq` is the length it was trained at.

    Written for old and new readers: `rope_theta` was a key of its own before it moved into `rope_parameters`.
    """
    family, switches = _family_of(model)
    return {
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family] + "ForCausalLM"],
        "model_type": family,
        **{theirs: getattr(model, ours) for ours, theirs in NUMBERS.items()},
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": seq,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "bos_token_id": None,
        "eos_token_id": None,
        **switches,
    }


def _family_of(model: Model) -> tuple[str, dict[str, Any]]:
    """The family whose switches give this decoder, and its own keys."""
    biases = {name: getattr(model, name) for name in ("qkv_bias", "output_bias", "mlp_bias")}
    sliding = {"use_sliding_window": False, "sliding_window": None}
    match model.qk_norm, *biases.values():
        case True, qkv, output, False if qkv == output:
            return "qwen3", {"attention_bias": qkv, **sliding}
        case False, True, False, False:
            return "qwen2", sliding
        case False, qkv, output, mlp if qkv == output:
            return "llama", {"attention_bias": qkv, "mlp_bias": mlp}
    switches = ", ".join(name for name, on in {"qk_norm": model.qk_norm, **biases}.items() if on)
    raise ModelError(
        f"no family of `transformers` has a decoder with exactly {switches}",
        hint="llama: qkv_bias with output_bias, mlp_bias; qwen2: qkv_bias; qwen3: qk_norm, the former two",
    )


def _family(config: Config) -> str:
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        experts = " (a mixture of experts)" if "moe" in str(family) or family == "mixtral" else ""
        raise ModelError(
            f"config.json has model_type {family!r}{experts}, which is not of the Llama family",
            hint=f"known: {', '.join(FAMILIES)}",
        )
    return family


def _refuse_what_differs(config: Config, family: str) -> None:
    """Raise ModelError for whatever would make the decoder another function than the config's."""
    activation = _given(config, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json has hidden_act {activation!r}; the decoder has silu only")
    if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ModelError("config.json describes a mixture of experts; the decoder is dense")
    if config.get("quantization_config"):
        raise ModelError("config.json describes quantized weights", hint="use the folder with the original weights")
    rope = _rope(config)
    if rope["rope_type"] != "default":
        raise ModelError(
            f"config.json has rotary positions scaled by {rope['rope_type']!r}; only default ones are known"
        )
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ModelError(f"config.json rotates {rope['partial_rotary_factor']} of each head; the decoder rotates all")
    window = _sliding_window(config, family)
    if window is not None:
        raise ModelError(f"config.json has a sliding window of {window} tokens; the decoder attends to all of them")


def _rope(config: Config) -> dict[str, Any]:
    """Rotary settings in one shape, whichever of the three layouts of the years the config has."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ModelError(f"config.json has rotary settings {given!r}, which are no object")
    if any(isinstance(value, dict) for value in given.values()):
        raise ModelError(
            "config.json has rotary settings of its own for each kind of layer; the decoder has one for all"
        )
    partial = _given(config, "partial_rotary_factor", 1)
    defaults = {"rope_theta": _given(config, "rope_theta", 10_000.0), "partial_rotary_factor": partial}
    return defaults | dict(given) | {"rope_type": given.get("rope_type") or given.get("type") or "default"}


def _sliding_window(config: Config, family: str) -> int | None:
    """The window's size if any layer ever looks through it, else None."""
    window = config.get("sliding_window", 4096 if family == "mistral" else None)
    longest = config.get("max_position_embeddings")
    if window is None or family == "llama" or (longest is not None and window >= longest):
        return None
    if family == "mistral":
        return int(window)
    kinds = config.get("layer_types")
    if kinds is not None:
        return int(window) if "sliding_attention" in kinds else None
    used = config.get("use_sliding_window", False) and config.get("max_window_layers", 28) < config["num_hidden_layers"]
    return int(window) if used else None


def _given(config: Config, key: str, default: Any) -> Any:
    """The config's value, or the default where it has none or null."""
    value = config.get(key)
    return default if value is None else value
