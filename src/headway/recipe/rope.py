"""Rotary position embeddings (RoPE) in a recipe: base and scaling to longer sequences."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headway.errors import ModelError
from headway.recipe.model import Config, Model
from headway.recipe.section import Positive, Section

AboveZero = Annotated[float, Field(gt=0)]
KINDS = ("linear", "llama3", "yarn", "longrope")


class RopeScaling(Section):
    """RoPE scaling."""

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    """linear: all frequencies alike. llama3, yarn: low frequencies, with a ramp to high ones, which stay. longrope: a
    factor per frequency."""
    factor: AboveZero = 1.0
    """Factor by which sequences get longer."""
    original: Positive | None = None
    """Sequence length of the original training; required except for linear."""
    low: AboveZero = 1.0
    """llama3: rotations over the original length below which a frequency is fully scaled."""
    high: AboveZero = 4.0
    """llama3: rotations above which it is unscaled."""
    fast: AboveZero = 32.0
    """yarn: rotations over the original length above which a frequency is unscaled (beta_fast)."""
    slow: AboveZero = 1.0
    """yarn: rotations below which it is fully scaled (beta_slow)."""
    whole_dims: bool = True
    """yarn: round the ends of the ramp to whole dimensions."""
    attention: AboveZero | None = None
    """yarn, longrope: factor of queries and keys; by default as in the method's paper."""
    mscale: float = 0.0
    """yarn: DeepSeek's mscale; `attention` is its ratio to `mscale_all`."""
    mscale_all: float = 0.0
    """yarn: DeepSeek's mscale_all_dim, which also scales attention scores."""
    short_factors: tuple[AboveZero, ...] = ()
    """longrope: factor of each frequency up to the original length."""
    long_factors: tuple[AboveZero, ...] = ()
    """longrope: factor of each frequency beyond it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind != "linear" and self.original is None:
            raise ValueError(f"{self.kind} needs `original`, the original training length")
        if self.kind == "longrope" and len(self.short_factors) != len(self.long_factors):
            raise ValueError("longrope needs as many short_factors as long_factors")
        return self


class RotaryModel(Model):
    """Base of families with rotary positions."""

    rope_theta: AboveZero = 10_000.0
    """Base of the rotary position embedding."""
    rope_scaling: RopeScaling | None = None
    """RoPE scaling to sequences longer than those trained on."""

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of a head, the first ones."""
        return self.head_dim

    @property
    def switch_length(self) -> int | None:
        """Length beyond which a sequence has other frequencies (longrope), also for its first tokens."""
        scaling = self.rope_scaling
        return scaling.original if scaling is not None and scaling.kind == "longrope" else None

    @model_validator(mode="after")
    def _rotates(self) -> Self:
        if self.rotary_dim % 2:
            raise ValueError(
                f"head_dim ({self.head_dim}): the number of rotated dimensions must be even, not {self.rotary_dim}"
            )
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "longrope" and len(scaling.long_factors) != self.rotary_dim // 2:
            raise ValueError(f"rope_scaling.long_factors needs {self.rotary_dim // 2} numbers, one per frequency")
        return self


# -- rotary settings of a config.json


def given(config: Config, key: str, default: Any) -> Any:
    """Return the config's value, or the default if it is missing or null."""
    value = config.get(key)
    return default if value is None else value


def rope_settings(config: Config, theta: float = 10_000.0) -> dict[str, Any]:
    """Return rotary settings in one form, from any of the three layouts that configs have had."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"config.json: expected rotary settings as an object, got {rope!r}")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError("config.json has rotary settings per kind of layer; this family supports one")
    partial = given(config, "partial_rotary_factor", 1)
    defaults = {"rope_theta": given(config, "rope_theta", theta), "partial_rotary_factor": partial}
    return defaults | dict(rope) | {"rope_type": rope.get("rope_type") or rope.get("type") or "default"}


def scaling_from(rope: Config, config: Config) -> dict[str, Any] | None:
    """Return a recipe's `rope_scaling` for a config's rotary settings; None for no scaling."""
    kind = rope["rope_type"]
    if kind == "default":
        return None
    if kind not in KINDS:
        raise ModelError(
            f"config.json has unknown rotary scaling {kind!r}",
            hint=f"known: {', '.join(KINDS)}",
        )
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    longest = config.get("max_position_embeddings")
    original = original or (None if kind == "linear" else longest)
    factor = rope.get("factor") or (longest / original if longest and original else 1.0)
    names = {
        "low": "low_freq_factor", "high": "high_freq_factor", "fast": "beta_fast", "slow": "beta_slow",
        "whole_dims": "truncate", "attention": "attention_factor", "mscale": "mscale", "mscale_all": "mscale_all_dim",
        "short_factors": "short_factor", "long_factors": "long_factor",
    }  # fmt: skip
    settings = {field: rope[key] for field, key in names.items() if rope.get(key) is not None}
    return {"kind": kind, "factor": factor, "original": original, **settings}


def rotary_config(model: RotaryModel, seq: int) -> dict[str, Any]:
    """Return the rotary keys of a config.json, for old and new readers: `rope_theta` has moved."""
    scaling = model.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if scaling is None:
        return {"rope_theta": model.rope_theta, "rope_parameters": rope, "max_position_embeddings": seq}
    rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    rope |= {"original_max_position_embeddings": scaling.original} if scaling.original else {}
    rope |= {"attention_factor": scaling.attention} if scaling.attention is not None else {}
    match scaling.kind:
        case "llama3":
            rope |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
        case "yarn":
            rope |= {"beta_fast": scaling.fast, "beta_slow": scaling.slow, "truncate": scaling.whole_dims}
            if scaling.mscale or scaling.mscale_all:
                rope |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all}
        case "longrope":
            rope |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    longest = round(scaling.original * scaling.factor) if scaling.original else seq
    return {
        "rope_theta": model.rope_theta,
        "rope_parameters": rope,
        "rope_scaling": {key: value for key, value in rope.items() if key != "rope_theta"},
        "max_position_embeddings": max(seq, longest),
    }
