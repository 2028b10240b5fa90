"""What a model is made of and what it takes: parameters by part, bytes, operations, its cache. Pure arithmetic."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headway.plan.flops import active_parameters, flops_per_token, flops_per_token_full_attention
from headway.plan.optimizer import optimizer_state_bytes
from headway.recipe import Model, Train
from headway.recipe.patterns import first_match

__all__ = [
    "PARTS",
    "KvCacheBytes",
    "ModelSummary",
    "TrainingBytes",
    "cache_of",
    "describe",
    "part_of",
    "parts_of",
    "training_of",
    "windows_of",
]

PARTS = ("embedding", "attention", "feed-forward", "experts", "shared experts", "router", "norms", "head")
"""In the order that they are told in."""
PRECISIONS = {"float32": 4, "bfloat16": 2, "8 bit": 1}
"""Bytes of a weight."""
CACHE_BYTES = 2
"""Of a number in the cache: bfloat16."""
GRADIENT_BYTES = 4
"""Gradients are added up in float32, whatever weights are kept in."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes that training keeps of a model, before anything is shared out over devices."""

    optimizer: str
    weights: int
    gradients: int
    states: int
    """Moments, master copies and averages."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.states


@dataclass(frozen=True)
class KvCacheBytes:
    """Bytes of keys and values in bfloat16."""

    token: int
    """Of one token, in all layers."""
    length: int
    """Of a long sequence."""
    full: int
    """What that many tokens take if all layers keep all of them."""
    windowed: int
    """What they take if layers with a window keep what it shows."""


@dataclass(frozen=True)
class ModelSummary:
    """A model in numbers."""

    parts: Mapping[str, int]
    """Parameters by part."""
    parameters: int
    active: int
    """Those that one token's pass uses."""
    weights: Mapping[str, int]
    """Bytes of all weights, by precision."""
    training: TrainingBytes
    seq: int
    flops_per_token: int
    flops_per_token_full_attention: int
    cache: KvCacheBytes
    windows: Mapping[int, int]
    """How many layers see so many tokens only."""


def describe(model: Model, seq: int, length: int | None = None, train: Train | None = None) -> ModelSummary:
    """What a decoder whose vocabulary is settled comes to in sequences of `seq`; its cache, at `length` or there.

    Trained as a recipe says, or by AdamW in float32.
    """
    arch, shapes = model.architecture(), model.tensors()
    parts = parts_of(shapes)
    count = sum(parts.values())
    return ModelSummary(
        parts=parts,
        parameters=count,
        active=active_parameters(arch),
        weights={name: count * width for name, width in PRECISIONS.items()},
        training=training_of(shapes, train or Train()),
        seq=seq,
        flops_per_token=flops_per_token(arch, seq),
        flops_per_token_full_attention=flops_per_token_full_attention(arch, seq),
        cache=cache_of(model, length or seq),
        windows=windows_of(model),
    )


def part_of(name: str) -> str:
    """Which part of a decoder one of its tensors belongs to."""
    owner = name.rpartition(".")[0]
    if owner.endswith("norm"):
        return "norms"
    if not name.startswith("layers."):
        return "head" if name.startswith("head.") else "embedding"
    if ".attention." in name:
        return "attention"
    inside = {"experts": "experts", "shared": "shared experts", "router": "router", "balance": "router"}
    return next((part for word, part in inside.items() if f".mlp.{word}" in name), "feed-forward")


def parts_of(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Parameters by part; parts that a model does not have are left out."""
    counts = dict.fromkeys(PARTS, 0)
    for name, shape in shapes.items():
        counts[part_of(name)] += math.prod(shape)
    return {part: count for part, count in counts.items() if count}


def training_of(shapes: Mapping[str, Shape], train: Train) -> TrainingBytes:
    """What weights, gradients and the optimizer take: of frozen weights nothing but themselves."""
    width = 4 if train.weights == "float32" else 2
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    trained = sum(size for name, size in sizes.items() if first_match([train.freeze], name) is None)
    states = sum(optimizer_state_bytes(name, shape, train) for name, shape in shapes.items())
    return TrainingBytes(train.optimizer, sum(sizes.values()) * width, trained * GRADIENT_BYTES, round(states))


def cache_of(model: Model, length: int) -> KvCacheBytes:
    """What the cache takes of one token, and of a sequence; layers with a window need no more than it shows."""
    arch = model.architecture()
    numbers = 2 * arch.kv_heads * arch.head_dim
    if arch.latent is not None:  # one narrow vector for all heads, and the part that carries the position
        numbers = arch.latent.kv_rank + arch.latent.rope_dim
    layer_bytes = numbers * CACHE_BYTES
    cached_tokens = sum(min(length, model.window_of(layer) or length) for layer in range(model.layers))
    return KvCacheBytes(
        layer_bytes * model.layers, length, layer_bytes * model.layers * length, layer_bytes * cached_tokens
    )


def windows_of(model: Model) -> dict[int, int]:
    """How many layers look through which window; those that see all tokens are not among them."""
    windows = [window for layer in range(model.layers) if (window := model.window_of(layer)) is not None]
    return {window: windows.count(window) for window in sorted(set(windows))}
