"""Adapters (LoRA) that requests choose by name: several of them in one pass of the base.

All adapters of a layer are stacked: A [R, in] and B [out, R], where R is the sum of their ranks. A pass computes A x
for all of them, keeps for each token only the rows of its own adapter, and multiplies by B. No token waits for others,
and a CUDA graph can have it; the cost grows with the sum of ranks, which is small beside the width of a layer.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from headway.errors import ModelError
from headway.models import Decoder
from headway.models.layers import Linear
from headway.recipe.upgrade import upgrade_recipe
from headway.state import open_checkpoint
from headway.state.peft import Adapter, adapter_of_run, check_same_base, is_adapter_folder, read_adapter

NONE = 0
"""Number of no adapter; the first is 1."""


class AdapterSet:
    """The adapters of a model, and which of them the tokens of the present pass use."""

    def __init__(self, names: tuple[str, ...], owner_R: Tensor) -> None:
        self.names, self.owner_R = names, owner_R
        self.mask_TR: Tensor | None = None
        """Which rows of A x each token keeps; None if no token of the pass has an adapter."""

    def number(self, name: str | None) -> int:
        """Return the number of an adapter."""
        return NONE if name is None else self.names.index(name) + 1

    def select(self, adapters_T: Tensor | None) -> None:
        """Say by number which adapter each token of the next pass uses."""
        self.mask_TR = None if adapters_T is None else adapters_T.unsqueeze(1) == self.owner_R


class AdaptedLinear(Linear):
    """A linear layer with the adapters of all requests."""

    a_RI: Tensor
    b_OR: Tensor
    """With the adapters' scale."""
    adapters: AdapterSet

    def forward(self, x: Tensor) -> Tensor:
        """Apply the base's weight, and each token's adapter."""
        y, mask_TR = super().forward(x), self.adapters.mask_TR
        if mask_TR is None:
            return y
        low = nn.functional.linear(x, self.a_RI).masked_fill(~mask_TR, 0)
        return y + nn.functional.linear(low, self.b_OR)


def open_adapter(path: Path, decoder: Decoder) -> Adapter:
    """Return the adapters of a folder of PEFT's, or of a run's checkpoint, for a decoder."""
    if is_adapter_folder(path):
        return read_adapter(path, decoder.model)
    checkpoint = open_checkpoint(path)
    recipe = upgrade_recipe(checkpoint.manifest.recipe)
    if recipe.lora is None:
        raise ModelError(f"{path} has no adapters: its recipe has no [lora]")
    return adapter_of_run(checkpoint, recipe.model, recipe.lora)


def add_adapters(module: nn.Module, paths: Mapping[str, Path], base: str, digest: str | None) -> AdapterSet:
    """Add named adapters to a decoder; raise ModelError for one of another base, whose weights have another digest."""
    if not isinstance(module, Decoder):
        raise ModelError("adapters need one of Headway's decoders", hint="leave --lora out")
    adapters = {name: open_adapter(path, module) for name, path in paths.items()}
    for adapter in adapters.values():
        if digest is not None:
            check_same_base(adapter, digest, base)
    return stack(module, adapters)


def stack(decoder: Decoder, adapters: Mapping[str, Adapter]) -> AdapterSet:
    """Put named adapters into a decoder's layers."""
    weight = next(decoder.parameters())
    ranks = [max(layer.a.shape[0] for layer in adapter.layers.values()) for adapter in adapters.values()]
    owner = np.repeat(np.arange(1, len(ranks) + 1), ranks)
    chosen = AdapterSet(tuple(adapters), torch.from_numpy(owner).to(weight.device))
    firsts = np.concatenate(([0], np.cumsum(ranks)))
    modules = dict(decoder.named_modules())
    for name in dict.fromkeys(layer for adapter in adapters.values() for layer in adapter.layers):
        layer = modules.get(name)
        if type(layer) is not Linear:
            raise ModelError(f"{name} is not a linear layer of the model", hint="it is an adapter for another base")
        a = np.zeros((len(owner), layer.in_features), np.float32)
        b = np.zeros((layer.out_features, len(owner)), np.float32)
        for first, adapter in zip(firsts, adapters.values(), strict=False):
            if name in adapter.layers:
                own = adapter.layers[name]
                if (own.b.shape[0], own.a.shape[1]) != (layer.out_features, layer.in_features):
                    raise ModelError(f"{adapter.name} is an adapter for another base: {name} has another shape there")
                a[first : first + len(own.a)] = own.a
                b[:, first : first + len(own.a)] = own.scale * own.b
        layer.register_buffer("a_RI", torch.from_numpy(a).to(weight), persistent=False)
        layer.register_buffer("b_OR", torch.from_numpy(b).to(weight), persistent=False)
        layer.__class__ = AdaptedLinear
        assert isinstance(layer, AdaptedLinear)
        layer.adapters = chosen
    return chosen


@torch.no_grad()
def merge_into(decoder: Decoder, adapter: Adapter) -> None:
    """Add adapters to a decoder's weights, in place."""
    for name, layer in adapter.layers.items():
        decoder.get_parameter(f"{name}.weight").add_(torch.from_numpy(layer.delta))
