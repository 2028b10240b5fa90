"""Low-rank adapters on the linear layers of a plain model: added on the meta device, before it is parallelized.

A layer keeps its name, weight and bias; its adapter is two more parameters. Its forward computes
W x + scale B (A x), so that splits of W by rows or columns apply to B and A (`parallel/tensor.py`).
"""

import hashlib
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from headway.errors import ModelError
from headway.kernels import batch_invariant
from headway.models.decoder import Decoder
from headway.models.diffusion import DiffusionTransformer
from headway.models.experts import BiasBalance
from headway.models.layers import Linear
from headway.models.nf4 import BLOCK, nf4_linear, quantize
from headway.recipe import Lora, Model
from headway.recipe.lora import A, B, adapted_layers
from headway.state.peft import read_adapter

CODES, SCALES = "weight_codes", "weight_scales"
"""Buffers of a quantized layer, in place of its weight."""


class Nf4Linear(Linear):
    """A frozen linear layer whose weight is in NF4."""

    weight_codes: Tensor
    weight_scales: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return nf4_linear(x, self.weight_codes, self.weight_scales, self.bias)


class LoraLinear(Linear):
    """A linear layer with a low-rank adapter; its weight may be in NF4."""

    lora_a: nn.Parameter
    """[r, in]."""
    lora_b: nn.Parameter
    """[out, r]."""
    weight_codes: Tensor | None
    weight_scales: Tensor
    scale: float
    dropout: float

    def forward(self, x: Tensor) -> Tensor:
        """Apply the base's weight and the adapter."""
        if self.weight_codes is None:
            y = super().forward(x)
        else:
            y = nf4_linear(x, self.weight_codes, self.weight_scales, self.bias)
        # adapters are float32, and products are in the precision of the base
        inputs = nn.functional.dropout(x, self.dropout, self.training) if self.dropout else x
        linear = batch_invariant.linear if self.exact else nn.functional.linear
        low = linear(inputs, self.lora_a.to(x.dtype))
        return y + linear(low * self.scale, self.lora_b.to(x.dtype))


def add_adapters(model: Decoder | DiffusionTransformer, lora: Lora) -> None:
    """Freeze a model on the meta device, quantize its layers if asked to, and add float32 adapters to the targets."""
    model.requires_grad_(False)
    modules = dict(model.named_modules())
    if lora.quantize is not None:
        for name in adapted_layers(model.model):
            _quantize(name, modules[name])
    for name in adapted_layers(model.model, lora.targets):
        layer = modules[name]
        assert type(layer) in (Linear, Nf4Linear), f"{name} is a {type(layer).__name__}"
        assert isinstance(layer, Linear)
        place = next(model.parameters()).device
        layer.lora_a = nn.Parameter(torch.empty(lora.rank, layer.in_features, device=place))
        layer.lora_b = nn.Parameter(torch.empty(layer.out_features, lora.rank, device=place))
        if lora.quantize is None:
            layer.register_buffer(CODES, None)
        layer.__class__ = LoraLinear
        assert isinstance(layer, LoraLinear)
        layer.scale, layer.dropout = lora.scale, lora.dropout
    for module in modules.values():
        if isinstance(module, BiasBalance):
            module.rate = 0.0  # part of the base


def _quantize(name: str, layer: nn.Module) -> None:
    """Give a linear layer empty NF4 buffers in place of its weight; FSDP leaves buffers on every worker."""
    assert type(layer) is Linear, f"{name} is a {type(layer).__name__}"
    outputs, inputs, place = layer.out_features, layer.in_features, layer.weight.device
    if inputs % BLOCK:
        wrong = f"lora.quantize: {name} has {inputs} inputs, which is no multiple of {BLOCK}"
        raise ModelError(wrong, hint="leave lora.quantize out")
    del layer.weight
    layer.register_buffer(CODES, torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=place))
    layer.register_buffer(SCALES, torch.empty(outputs, inputs // BLOCK, device=place))
    layer.__class__ = Nf4Linear


@torch.no_grad()
def fill_quantized(layer: nn.Module, weight: Tensor) -> None:
    """Quantize a weight into a layer's buffers, on the layer's device."""
    codes, scales = layer.get_buffer(CODES), layer.get_buffer(SCALES)
    for buffer, value in zip((codes, scales), quantize(weight.to(codes.device)), strict=True):
        buffer.copy_(value)


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's, by its name."""
    return name.rpartition(".")[2] in (A, B)


def base_names(model: nn.Module) -> frozenset[str]:
    """Return the tensors of a model with adapters that are the base's, and so no part of a run's state."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return frozenset(name for name, _ in tensors if not is_adapter(name))


def initial_adapter(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return an adapter's initial value, as PEFT's: A uniform within 1 / sqrt(inputs), B zero; pure."""
    weight = torch.zeros(shape)
    if name.endswith(f".{B}"):
        return weight
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return weight.uniform_(-bound, bound, generator=generator)


def read_adapters(folder: Path, model: Model) -> dict[str, Tensor]:
    """Return the adapters of a folder of PEFT's by parameter names."""
    return {name: torch.from_numpy(value) for name, value in read_adapter(folder, model).tensors().items()}
