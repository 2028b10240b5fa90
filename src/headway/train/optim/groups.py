"""Parameter groups: which parameters are trained, by which rule, rate and weight decay, from names and shapes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from headway.errors import ModelError
from headway.models import Decoder
from headway.parallel.layout import blocks_of, layout_of
from headway.recipe import ModelLayout, Train
from headway.recipe.patterns import first_match, matched
from headway.state.tensors import ModelShare, named_parameters

Rule = Literal["adamw", "adamw-8bit", "muon", "adafactor"]
LEAST_EIGHTBIT = 4096
"""Fewest elements of a parameter with 8-bit moments; smaller ones stay in float32, as usual."""


def freeze(model: nn.Module, train: Train) -> None:
    """Freeze parameters of a plain model as the recipe says; raise RecipeError for a pattern without a match."""
    named = dict(model.named_parameters())
    for name in matched("train.freeze", train.freeze, [*named]):
        named[name].requires_grad_(False)
    for i, group in enumerate(train.groups):
        matched(f"train.groups[{i}].match", group.match, [*named])


def lower(model: nn.Module, train: Train) -> None:
    """Convert the parameters of a plain model on the meta device to the recipe's precision; buffers stay."""
    for parameter in model.parameters() if train.weights != "float32" else ():
        parameter.data = parameter.data.to(getattr(torch, train.weights))


def widen_gradients(model: nn.Module) -> None:
    """Accumulate gradients of unsharded parameters in float32 over microbatches; FSDP does so by itself."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            parameter.grad_dtype = torch.float32


def groups_of(
    model: nn.Module, train: Train, held: ModelShare, layout: ModelLayout | None = None
) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups, with names and settings."""
    inside = {name for name, _ in _block_matrices(model, held, layout)} if train.optimizer != "adamw" else set()
    groups = dict[_UpdateSettings, dict[str, Any]]()
    for name, parameter in named_parameters(model, held):
        if parameter.requires_grad:
            factor = model.model.rate_factor(name) if isinstance(model, Decoder) else 1.0
            settings = _settings_of(train, name, parameter, name in inside, factor)
            group = groups.setdefault(settings, {"params": [], "names": [], **settings.options(train)})
            group["params"].append(parameter)
            group["names"].append(name)
    if not groups:
        raise ModelError(
            "this worker's part of the model has no trainable parameter",
            hint="each pipeline stage needs one: change train.freeze or parallel.stages",
        )
    return [
        groups[settings]
        for settings in sorted(groups, key=lambda settings: (settings.group, not settings.decays, -settings.factor))
    ]


def set_step(groups: list[dict[str, Any]], step: int, rate: float) -> None:
    """Set the step and learning rate of an optimizer's groups."""
    for group in groups:
        group["number"] = step
        group["lr"] = rate * group["rate"]


@dataclass(frozen=True)
class _UpdateSettings:
    """How a parameter is updated."""

    group: int
    """Index of the recipe's group; past the last for none."""
    rule: Rule
    decays: bool
    """Whether weight decay applies by default."""
    factor: float
    """muP factor of its learning rate."""

    def options(self, train: Train) -> Mapping[str, Any]:
        """Return the options of an optimizer's group."""
        group = train.groups[self.group] if self.group < len(train.groups) else None
        decay = train.weight_decay if self.decays else 0.0
        return {
            "rule": self.rule,
            "rate": self.factor * (1.0 if group is None else group.rate),
            "weight_decay": decay if group is None or group.weight_decay is None else group.weight_decay,
            "number": 1,
        }


def _settings_of(train: Train, name: str, parameter: nn.Parameter, inside: bool, factor: float) -> _UpdateSettings:
    matrix = parameter.ndim >= 2 and not name.endswith("bias")
    rule: Rule = "adafactor" if train.optimizer == "adafactor" else "adamw"
    if inside and train.optimizer == "muon":
        rule = "muon"
    elif inside and train.optimizer == "adamw-8bit" and parameter.numel() >= LEAST_EIGHTBIT:
        rule = "adamw-8bit"
    group = first_match([group.match for group in train.groups], name)
    return _UpdateSettings(len(train.groups) if group is None else group, rule, matrix, factor)


def _block_matrices(
    model: nn.Module, held: ModelShare, layout: ModelLayout | None
) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the names of matrices inside blocks, and of stacks of them: no embeddings, filters, biases or routers."""
    container, _ = blocks_of(model, layout_of(model, layout))
    if not container:
        raise ModelError(
            f"{type(model).__name__} has no list of blocks, and Muon updates only matrices inside blocks",
            hint='use train.optimizer = "adamw", or name the list in model.layout.blocks',
        )
    others = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.modules.conv._ConvNd)
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in named_parameters(model, held):
        stands = name.startswith(f"{container}.") and not name.endswith("bias") and ".router." not in name
        if stands and parameter.ndim in (2, 3) and id(parameter) not in others:
            yield name, parameter
