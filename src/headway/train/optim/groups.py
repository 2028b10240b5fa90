"""Which parameters are trained, by what rule, at which rate and with which decay: by their names and shapes."""

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

__all__ = ["Rule", "freeze", "groups_of", "lower", "set_step", "widen_gradients"]

Rule = Literal["adamw", "adamw-8bit", "muon", "adafactor"]
LEAST_EIGHTBIT = 4096
"""Elements of a parameter whose moments are worth eight bits; smaller ones stay in float32, as is usual."""


def freeze(model: nn.Module, train: Train) -> None:
    """Have a plain model, whole, train only what the recipe says; RecipeError for a name that nothing has."""
    named = dict(model.named_parameters())
    for name in matched("train.freeze", train.freeze, [*named]):
        named[name].requires_grad_(False)
    for i, group in enumerate(train.groups):
        matched(f"train.groups[{i}].match", group.match, [*named])


def lower(model: nn.Module, train: Train) -> None:
    """Have a plain model on the meta device keep its parameters in the recipe's precision; buffers stay as they are."""
    for parameter in model.parameters() if train.weights != "float32" else ():
        parameter.data = parameter.data.to(getattr(torch, train.weights))


def widen_gradients(model: nn.Module) -> None:
    """Have gradients of parameters that nobody shards add up in float32 over microbatches; FSDP does so by itself."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            parameter.grad_dtype = torch.float32


def groups_of(
    model: nn.Module, train: Train, held: ModelShare, layout: ModelLayout | None = None
) -> list[dict[str, Any]]:
    """What an optimizer takes: parameters that are treated alike, with their names and how."""
    inside = {name for name, _ in _block_matrices(model, held, layout)} if train.optimizer != "adamw" else set()
    found = dict[_Way, dict[str, Any]]()
    for name, parameter in named_parameters(model, held):
        if parameter.requires_grad:
            factor = model.model.rate_factor(name) if isinstance(model, Decoder) else 1.0
            way = _way(train, name, parameter, name in inside, factor)
            group = found.setdefault(way, {"params": [], "names": [], **way.options(train)})
            group["params"].append(parameter)
            group["names"].append(name)
    if not found:
        raise ModelError(
            "no parameter of this worker's part of the model is trained",
            hint="in a pipeline each stage needs one that is: parallel.stages says which blocks it has",
        )
    return [found[way] for way in sorted(found, key=lambda way: (way.group, not way.decays, -way.factor))]


def set_step(groups: list[dict[str, Any]], step: int, rate: float) -> None:
    """Tell an optimizer's groups which update comes next, and its learning rate."""
    for group in groups:
        group["number"] = step
        group["lr"] = rate * group["rate"]


@dataclass(frozen=True)
class _Way:
    """How a parameter is updated."""

    group: int
    """Of the recipe's; after the last for those of none."""
    rule: Rule
    decays: bool
    """Whether it decays where its group does not say."""
    factor: float
    """What its learning rate is multiplied by, by muP."""

    def options(self, train: Train) -> Mapping[str, Any]:
        """As an optimizer's group has them."""
        own = train.groups[self.group] if self.group < len(train.groups) else None
        decay = train.weight_decay if self.decays else 0.0
        return {
            "rule": self.rule,
            "rate": self.factor * (1.0 if own is None else own.rate),
            "weight_decay": decay if own is None or own.weight_decay is None else own.weight_decay,
            "number": 1,
        }


def _way(train: Train, name: str, parameter: nn.Parameter, inside: bool, factor: float) -> _Way:
    matrix = parameter.ndim >= 2 and not name.endswith("bias")
    rule: Rule = "adafactor" if train.optimizer == "adafactor" else "adamw"
    if inside and train.optimizer == "muon":
        rule = "muon"
    elif inside and train.optimizer == "adamw-8bit" and parameter.numel() >= LEAST_EIGHTBIT:
        rule = "adamw-8bit"
    group = first_match([one.match for one in train.groups], name)
    return _Way(len(train.groups) if group is None else group, rule, matrix, factor)


def _block_matrices(
    model: nn.Module, held: ModelShare, layout: ModelLayout | None
) -> Iterator[tuple[str, nn.Parameter]]:
    """Matrices inside blocks, and stacks of them: no tables, filters, biases or routers."""
    container, _ = blocks_of(model, layout_of(model, layout))
    if not container:
        raise ModelError(
            f"{type(model).__name__} has no list of blocks, and only matrices inside of blocks are taken for matrices",
            hint='train.optimizer = "adamw" asks for none; model.layout.blocks names the list',
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
