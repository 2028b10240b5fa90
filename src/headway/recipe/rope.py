"""Rotary positions in a recipe: their base, and how they are stretched to sequences longer than those trained on."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headway.errors import ModelError
from headway.recipe.model import Config, Model
from headway.recipe.section import Positive, Section

__all__ = ["RopeScaling", "RotaryModel", "given", "rope_settings", "rotary_config", "scaling_from"]

AboveZero = Annotated[float, Field(gt=0)]
KINDS = ("linear", "llama3", "yarn", "longrope")


class RopeScaling(Section):
    """How rotary positions are stretched."""

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    """linear: all frequencies alike. llama3, yarn: low ones, with a ramp to the high ones, which stay. longrope: each
    by a factor of its own."""
    factor: AboveZero = 1.0
    """By how much sequences grow."""
    original: Positive | None = None
    """Length of sequences that the frequencies were first trained at; all kinds but linear need it."""
    low: AboveZero = 1.0
    """llama3: turns over the original length below which a frequency is stretched all the way."""
    high: AboveZero = 4.0
    """llama3: turns above which it stays."""
    fast: AboveZero = 32.0
    """yarn: turns over the original length above which a frequency stays."""
    slow: AboveZero = 1.0
    """yarn: turns below which it is stretched all the way."""
    whole_dims: bool = True
    """yarn: the ramp begins and ends at whole dims."""
    attention: AboveZero | None = None
    """yarn, longrope: what queries and keys are multiplied by; by default what the method's paper says."""
    mscale: float = 0.0
    """yarn: DeepSeek's own factors of the same, of which `attention` is the ratio."""
    mscale_all: float = 0.0
    """yarn: the second of them, which also scales attention itself."""
    short_factors: tuple[AboveZero, ...] = ()
    """longrope: factor of each frequency up to the original length."""
    long_factors: tuple[AboveZero, ...] = ()
    """longrope: factor of each frequency beyond it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind != "linear" and self.original is None:
            raise ValueError(f"{self.kind} needs `original`, the length that was first trained at")
        if self.kind == "longrope" and len(self.short_factors) != len(self.long_factors):
            raise ValueError("longrope has as many short_factors as long_factors")
        return self


class RotaryModel(Model):
    """What families with rotary positions share."""

    rope_theta: AboveZero = 10_000.0
    """Base of the rotary position embedding."""
    rope_scaling: RopeScaling | None = None
    """How positions are stretched to sequences longer than those trained on."""

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated: the first ones."""
        return self.head_dim

    @model_validator(mode="after")
    def _rotates(self) -> Self:
        if self.rotary_dim % 2:
            raise ValueError(
                f"head_dim ({self.head_dim}): {self.rotary_dim} of it are rotated, which must be an even number"
            )
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "longrope" and len(scaling.long_factors) != self.rotary_dim // 2:
            raise ValueError(f"rope_scaling.long_factors must be {self.rotary_dim // 2}, one for each frequency")
        return self


# -- rotary settings of a config.json


def given(config: Config, key: str, default: Any) -> Any:
    """The config's value, or the default where it has none or null."""
    value = config.get(key)
    return default if value is None else value


def rope_settings(config: Config, theta: float = 10_000.0) -> dict[str, Any]:
    """Rotary settings in one shape, whichever of the three layouts of the years the config has."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise ModelError(f"config.json has rotary settings {found!r}, which are no object")
    if any(isinstance(value, dict) for value in found.values()):
        raise ModelError("config.json has rotary settings of its own for each kind of layer; this family has one")
    partial = given(config, "partial_rotary_factor", 1)
    defaults = {"rope_theta": given(config, "rope_theta", theta), "partial_rotary_factor": partial}
    return defaults | dict(found) | {"rope_type": found.get("rope_type") or found.get("type") or "default"}


def scaling_from(rope: Config, config: Config) -> dict[str, Any] | None:
    """A recipe's `rope_scaling` of a config's rotary settings; None where positions are plain."""
    kind = rope["rope_type"]
    if kind == "default":
        return None
    if kind not in KINDS:
        raise ModelError(
            f"config.json has rotary positions scaled by {kind!r}, which is not known",
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
    said = {ours: rope[theirs] for ours, theirs in names.items() if rope.get(theirs) is not None}
    return {"kind": kind, "factor": factor, "original": original, **said}


def rotary_config(model: RotaryModel, seq: int) -> dict[str, Any]:
    """The keys of a config.json that say the same; for old and new readers, since `rope_theta` has moved."""
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
