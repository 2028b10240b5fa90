"""Low-rank adapters on the linear layers of a plain decoder: added on the meta device, before it is parallelized.

A layer keeps its name, weight and bias; its adapter is two more parameters. Its forward computes
W x + scale B (A x), so that splits of W by rows or columns apply to B and A (`parallel/tensor.py`).
"""

import hashlib
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from headway.models.decoder import Decoder
from headway.models.experts import BiasBalance
from headway.models.layers import Linear
from headway.recipe import Lora, Model
from headway.recipe.lora import A, B, adapted_layers
from headway.state.peft import read_adapter


class LoraLinear(Linear):
    """A linear layer with a low-rank adapter."""

    lora_a: nn.Parameter
    """[r, in]."""
    lora_b: nn.Parameter
    """[out, r]."""
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        """Apply the base's weight and the adapter."""
        y = super().forward(x)
        # adapters are float32, and products are in the precision of the base
        low = nn.functional.linear(x, self.lora_a.to(x.dtype))
        return y + nn.functional.linear(low * self.scale, self.lora_b.to(x.dtype))


def add_adapters(model: Decoder, lora: Lora) -> None:
    """Freeze a decoder, and add float32 adapters to its target layers."""
    model.requires_grad_(False)
    modules = dict(model.named_modules())
    for name in adapted_layers(model.model, lora.targets):
        layer = modules[name]
        assert type(layer) is Linear, f"{name} is a {type(layer).__name__}"
        place = layer.weight.device
        layer.lora_a = nn.Parameter(torch.empty(lora.rank, layer.in_features, device=place))
        layer.lora_b = nn.Parameter(torch.empty(layer.out_features, lora.rank, device=place))
        layer.__class__ = LoraLinear
        assert isinstance(layer, LoraLinear)
        layer.scale = lora.scale
    for module in modules.values():
        if isinstance(module, BiasBalance):
            module.rate = 0.0  # part of the base


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
