"""Float8 mode: which of a model's layers are multiplied in float8, and the codes of their weights.

`make_fp8` marks layers, as a recipe's `[train.fp8]` says, before the model is parallelized. `Float8Model` is made of
what a worker then has: it casts held weights once per step, and returns what layers observed.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headway.errors import ModelError
from headway.kernels.dispatch import uses_triton
from headway.models.experts import Experts
from headway.models.fp8_linear import OBSERVED, Float8Options, Float8Weights, TensorScales
from headway.models.layers import FUSED, GatedFeedForward, Linear
from headway.models.llama import Attention
from headway.recipe import Model
from headway.recipe.fp8 import Fp8, fp8_layers

LEAST_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "experts": (9, 0)}
"""Compute capability that PyTorch's float8 products need: Ada has one scale per tensor."""
TOGETHER: tuple[tuple[type[nn.Module], tuple[str, ...]], ...] = (
    (Attention, ("q", "k", "v")),
    (GatedFeedForward, ("gate", "up")),
)
"""Layers that `project` applies to one input."""
STACKS = ("gate", "up", "down")
"""Matrices of experts."""


def make_fp8(model: nn.Module, section: Model, fp8: Fp8, device: torch.device, *, holds: bool) -> None:
    """Have a model's layers multiply in float8, in place; it may be on the meta device, but not be parallelized.

    `holds` says whether this process will have all of each weight: then layers that share an input are one product.
    Raise ModelError if the device has no such products.
    """
    modules, options = dict(model.named_modules()), Float8Options(fp8.scaling == "rowwise", fp8.gradients == "e5m2")
    chosen = {name: modules[name] for name in fp8_layers(section, fp8).chosen}
    has_experts = any(isinstance(module, Experts) for module in chosen.values())
    check_device(device, "experts" if has_experts else fp8.scaling)
    for module in chosen.values():
        assert isinstance(module, Linear | Experts), f"a {type(module).__name__} is no linear layer"
        # PyTorch's grouped product takes e4m3 with scales by rows
        module.fp8 = Float8Weights(Float8Options(True, False) if isinstance(module, Experts) else options)
    if holds:
        for module in modules.values():
            _join(module, options)


def check_device(device: torch.device, kind: str) -> None:
    """Raise ModelError if a GPU has no float8 products of a kind; CPUs emulate them."""
    if device.type != "cuda":
        return
    capability, least = torch.cuda.get_device_capability(device), LEAST_CAPABILITY[kind]
    if capability < least:
        name = torch.cuda.get_device_name(device)
        needed, has = (".".join(map(str, version)) for version in (least, capability))
        raise ModelError(
            f"train.fp8 ({kind}) needs compute capability {needed}, and {name} has {has}",
            hint="leave [train.fp8] out" if capability < (8, 9) else "--set train.fp8.scaling=tensorwise",
        )
    if kind == "experts" and not hasattr(torch, "_scaled_grouped_mm"):
        raise ModelError(
            f"train.fp8 of experts needs torch._scaled_grouped_mm, which PyTorch {torch.__version__} does not have",
            hint="--set train.fp8.skip='[\"**.experts\"]'",
        )


def _join(parent: nn.Module, options: Float8Options) -> None:
    """Make layers that share an input one product, if all are plain and in float8."""
    for kind, names in TOGETHER:
        layers = [getattr(parent, name) for name in names] if isinstance(parent, kind) else []
        if not layers or any(type(layer) is not Linear or layer.fp8 is None for layer in layers):
            continue
        layers[0].fp8_together = Float8Weights(options)
        for layer in layers:
            layer.fp8 = None
        if isinstance(parent, GatedFeedForward):
            down = parent.down
            plain = type(down) is Linear and down.fp8 is not None and down.bias is None and parent.up.bias is None
            parent.fp8_fused = plain and parent.activation in FUSED


class Float8Group(NamedTuple):
    """Layers that are one product."""

    name: str
    """layers.0.attention.q+k+v."""
    layers: tuple[nn.Module, ...]
    weights: Float8Weights


class HeldWeights(NamedTuple):
    """Weights whose codes are held, with one scale or one per row."""

    weights: Float8Weights
    layers: tuple[nn.Module, ...]
    name: str = "weight"

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """Return the layers' weights; stacks of experts one expert after the other."""
        return tuple(getattr(layer, self.name).detach().flatten(0, -2) for layer in self.layers)


def _held(groups: Iterable[Float8Group], device: torch.device) -> Iterator[HeldWeights]:
    """Yield what a process holds that has whole weights: all but experts whose pass is not one function."""
    for group in groups:
        experts = group.layers[0]
        if not isinstance(experts, Experts):
            yield HeldWeights(group.weights, group.layers)
        elif experts.is_plain and experts.grouped_on(device):
            group.weights.stacks = tuple(Float8Weights(Float8Options()) for _ in STACKS)
            for name, weights in zip(STACKS, group.weights.stacks, strict=True):
                yield HeldWeights(weights, (experts,), name)


def groups_of(model: nn.Module) -> Iterator[Float8Group]:
    """Yield the products of a model in float8, in module order."""
    for name, module in model.named_modules():
        if isinstance(module, Linear | Experts) and module.fp8 is not None:
            yield Float8Group(name, (module,), module.fp8)
        for kind, names in TOGETHER:
            first: Any = getattr(module, names[0]) if isinstance(module, kind) else None
            if first is not None and first.fp8_together is not None:
                layers = tuple(getattr(module, part) for part in names)
                yield Float8Group(f"{name}.{'+'.join(names)}", layers, first.fp8_together)


class Float8Model:
    """The float8 products of a worker's part of a model, whose memory is allocated."""

    def __init__(self, model: nn.Module, device: torch.device, *, holds: bool) -> None:
        self.groups = tuple(groups_of(model))
        held = list(_held(self.groups, device)) if holds else []
        for each in held:
            matrices = each.matrices
            each.weights.hold(sum(len(matrix) for matrix in matrices), matrices[0].shape[1], device)
        self._by_row = [each for each in held if each.weights.rowwise]
        self._by_tensor = [each for each in held if not each.weights.rowwise]
        self._scales: TensorScales | None = None
        if self._by_tensor:
            self._scales = TensorScales([len(each.layers) for each in self._by_tensor], device)
            for each, scale in zip(self._by_tensor, self._scales.scales.unbind(), strict=True):
                each.weights.scale = scale
        for group in self.groups:
            group.weights.observe(device)

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast held weights, which an optimizer or a load may have changed."""
        for each in self._by_row:
            each.weights.refresh(each.matrices)
        if self._scales is None:
            return
        matrices = [each.matrices for each in self._by_tensor]
        if uses_triton("fp8", matrices[0][0]):
            places = [each.weights.places_of(of) for each, of in zip(self._by_tensor, matrices, strict=True)]
            self._scales.cast(places)
            return
        for each, of, inverse in zip(self._by_tensor, matrices, self._scales.refresh(matrices), strict=True):
            each.weights.refresh(of, inverse)

    @property
    def leaves(self) -> list[Tensor]:
        """Return the leaves whose gradients are what layers observed."""
        return [group.weights.observed for group in self.groups if group.weights.observed is not None]

    def observed(self) -> Tensor:
        """Return what each group observed since `forget` [groups, OBSERVED], summed over passes."""
        rows = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in self.leaves]
        return torch.stack(rows).sum(dim=1) if rows else torch.zeros(0, len(OBSERVED))

    def forget(self) -> None:
        """Start to observe anew."""
        for leaf in self.leaves:
            leaf.grad = None
