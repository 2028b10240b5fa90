"""Summarizes a model: parameters by part, bytes, FLOPs, training memory and KV cache."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headway.plan.architecture import cached_elements
from headway.plan.diffusion import flops_per_sample
from headway.plan.flops import active_parameters, flops_per_token, flops_per_token_full_attention
from headway.plan.optimizer import optimizer_state_bytes
from headway.recipe import Lora, Model, Train
from headway.recipe.lora import adapter_tensors
from headway.recipe.patterns import first_match

PARTS = (
    "embedding", "patches", "condition", "modulation", "attention", "cross-attention", "feed-forward", "experts",
    "shared experts", "router", "norms", "head",
)  # fmt: skip
"""In display order."""
PRECISIONS = {"float32": 4, "bfloat16": 2, "8 bit": 1}
"""Bytes per weight."""
CACHE_BYTES = 2
"""Per element of the KV cache: bfloat16."""
GRADIENT_BYTES = 4
"""Gradients are accumulated in float32, whatever the weights are."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes of training state, before sharding."""

    optimizer: str
    weights: int
    gradients: int
    states: int
    """Moments, master copies and averages."""

    @property
    def total(self) -> int:
        """Weights, gradients and optimizer states."""
        return self.weights + self.gradients + self.states


@dataclass(frozen=True)
class KvCacheBytes:
    """Bytes of the KV cache in bfloat16."""

    token: int
    """Per token, in all layers."""
    length: int
    """Sequence length, in tokens."""
    full: int
    """Bytes of such a sequence if all layers keep all tokens."""
    windowed: int
    """Bytes if sliding-window layers keep only their window."""


@dataclass(frozen=True)
class ModelSummary:
    """A model in numbers."""

    parts: Mapping[str, int]
    """Parameters by part."""
    parameters: int
    active: int
    """Parameters that a token uses."""
    weights: Mapping[str, int]
    """Bytes of all weights, by precision."""
    training: TrainingBytes
    seq: int
    flops_per_token: int
    flops_per_token_full_attention: int
    flops_per_sample: int | None
    """Of a diffusion transformer: per training sample of `seq` patches."""
    cache: KvCacheBytes | None
    """None for a diffusion transformer, which has none."""
    windows: Mapping[int, int]
    """Number of layers by sliding window."""


def describe(
    model: Model, seq: int, length: int | None = None, train: Train | None = None, lora: Lora | None = None
) -> ModelSummary:
    """Summarize a model at sequences of `seq`, with a KV cache of `length` (default `seq`).

    Training is by `train`, or by AdamW in float32; with `lora`, of adapters only.
    """
    arch, shapes = model.architecture(), model.tensors()
    parts = parts_of(shapes)
    count = sum(parts.values())
    return ModelSummary(
        parts=parts,
        parameters=count,
        active=active_parameters(arch),
        weights={name: count * width for name, width in PRECISIONS.items()},
        training=training_of(shapes, train or Train(), {} if lora is None else adapter_tensors(model, lora)),
        seq=seq,
        flops_per_token=flops_per_token(arch, seq),
        flops_per_token_full_attention=flops_per_token_full_attention(arch, seq),
        flops_per_sample=None if arch.diffusion is None else flops_per_sample(arch, seq),
        cache=cache_of(model, length or seq) if arch.diffusion is None else None,
        windows=windows_of(model),
    )


def part_of(name: str) -> str:
    """The part of a model that a tensor belongs to."""
    owner = name.rpartition(".")[0]
    if owner.endswith("norm"):
        return "norms"
    if "modulation" in name:
        return "modulation"
    if ".cross." in name:
        return "cross-attention"
    if name.startswith("patch."):
        return "patches"
    if name.startswith(("time.", "text.", "image.", "classes.")):
        return "condition"
    if not name.startswith("layers."):
        return "head" if name.startswith("head.") else "embedding"
    if ".attention." in name:
        return "attention"
    inside = {"experts": "experts", "shared": "shared experts", "router": "router", "balance": "router"}
    return next((part for word, part in inside.items() if f".mlp.{word}" in name), "feed-forward")


def parts_of(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Parameters by part, without empty parts."""
    counts = dict.fromkeys(PARTS, 0)
    for name, shape in shapes.items():
        counts[part_of(name)] += math.prod(shape)
    return {part: count for part, count in counts.items() if count}


def training_of(shapes: Mapping[str, Shape], train: Train, adapters: Mapping[str, Shape]) -> TrainingBytes:
    """Bytes of weights, gradients and optimizer states; frozen parameters, such as a base, have only weights."""
    width = 4 if train.weights == "float32" else 2
    if adapters:
        base, count = (sum(map(math.prod, tensors.values())) for tensors in (shapes, adapters))
        states = sum(optimizer_state_bytes(name, shape, train) for name, shape in adapters.items())
        return TrainingBytes(train.optimizer, base * width + count * 4, count * GRADIENT_BYTES, round(states))
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    trained = sum(size for name, size in sizes.items() if first_match([train.freeze], name) is None)
    states = sum(optimizer_state_bytes(name, shape, train) for name, shape in shapes.items())
    return TrainingBytes(train.optimizer, sum(sizes.values()) * width, trained * GRADIENT_BYTES, round(states))


def cache_of(model: Model, length: int) -> KvCacheBytes:
    """KV cache bytes per token and per sequence, with and without sliding windows."""
    layer_bytes = cached_elements(model.architecture()) * CACHE_BYTES
    cached_tokens = sum(min(length, model.window_of(layer) or length) for layer in range(model.layers))
    return KvCacheBytes(
        layer_bytes * model.layers, length, layer_bytes * model.layers * length, layer_bytes * cached_tokens
    )


def windows_of(model: Model) -> dict[int, int]:
    """Number of layers by sliding window, without full-attention layers."""
    windows = [window for layer in range(model.layers) if (window := model.window_of(layer)) is not None]
    return {window: windows.count(window) for window in sorted(set(windows))}
