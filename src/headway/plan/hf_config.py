"""Reads the architecture from a Hugging Face config.json, also of models that the trainer does not support.

For unknown families it reads the common keys and ignores the rest; no code is executed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.errors import ModelError, UsageError
from headway.plan.architecture import Architecture, ExpertShape, LatentAttention
from headway.recipe.families import MODEL_TYPES
from headway.recipe.huggingface import model_from_config

NON_ATTENTION = ("mamba", "ssm", "linear_num_value_heads", "layers_block_type", "hybrid_override_pattern")
"""Parts of keys that only models with non-attention layers have."""


def read_architecture(file: Path) -> Architecture:
    """Read the architecture from a config.json, or from the folder that contains it."""
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{file}: cannot be read: {error.strerror or error}", hint="pass a model's config.json or its folder"
        ) from None
    except ValueError as error:
        raise UsageError(f"{file}: invalid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{file}: not a model's config.json")
    config = config.get("text_config") or config
    odd = next((key for key in config if any(word in key for word in NON_ATTENTION)), None)
    if odd is not None:
        raise UsageError(f"{file}: {odd}: non-attention layers are not supported")
    if config.get("model_type") in MODEL_TYPES:
        try:
            return model_from_config(config).architecture()
        except ModelError:
            pass  # quantized or otherwise not trainable here; the cost is about the same
    return _architecture(config, file)


def _architecture(config: Mapping[str, Any], file: Path) -> Architecture:
    dim, heads = _size(config, file, "hidden_size"), _size(config, file, "num_attention_heads")
    latent = _latent(config, file)
    if dim % heads and not config.get("head_dim") and latent is None:
        raise UsageError(f"{file}: hidden_size {dim} is not divisible by {heads} heads", hint="set head_dim")
    head_dim = _size(config, file, "head_dim", default=dim // heads)
    if latent is not None:
        head_dim = _size(config, file, "qk_nope_head_dim") + latent.rope_dim
    qwen2 = config.get("model_type") in ("qwen2", "qwen2_moe")
    return Architecture(
        layers=_size(config, file, "num_hidden_layers"),
        dim=dim,
        heads=heads,
        kv_heads=heads if latent else _size(config, file, "num_key_value_heads", default=heads),
        head_dim=head_dim,
        hidden=_size(config, file, "intermediate_size"),
        vocab=_size(config, file, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=str(config.get("model_type", "")).startswith("qwen3"),
        qkv_bias=bool(config.get("attention_bias", qwen2)),
        experts=_experts(config, file),
        latent=latent,
    )


def _experts(config: Mapping[str, Any], file: Path) -> ExpertShape | None:
    name = next((key for key in ("n_routed_experts", "num_experts", "num_local_experts") if config.get(key)), None)
    if name is None or config[name] == 1:
        return None
    dense = _size(config, file, "first_k_dense_replace", default=0, least=0)
    if _size(config, file, "num_experts_per_tok") > _size(config, file, name):
        raise UsageError(f"{file}: num_experts_per_tok {config['num_experts_per_tok']} exceeds {config[name]} experts")
    return ExpertShape(
        count=_size(config, file, name),
        top_k=_size(config, file, "num_experts_per_tok"),
        hidden=_size(config, file, "moe_intermediate_size", default=_size(config, file, "intermediate_size")),
        shared=_size(config, file, "n_shared_experts", default=0, least=0),
        dense_layers=dense,
    )


def _latent(config: Mapping[str, Any], file: Path) -> LatentAttention | None:
    if not config.get("kv_lora_rank"):
        return None
    return LatentAttention(
        q_rank=_size(config, file, "q_lora_rank", default=0, least=0),
        kv_rank=_size(config, file, "kv_lora_rank"),
        rope_dim=_size(config, file, "qk_rope_head_dim"),
        value_dim=_size(config, file, "v_head_dim"),
    )


def _size(config: Mapping[str, Any], file: Path, key: str, *, default: int | None = None, least: int = 1) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise UsageError(f"{file}: missing key {key}", hint="is it the config.json of a decoder?")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{file}: {key}: expected an integer of at least {least}, got {value!r}")
    return value
