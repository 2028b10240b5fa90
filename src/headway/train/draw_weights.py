"""Initializes or loads this worker's part of a model's weights, one tensor at a time."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from headway.models import initial_weight, stored_weights
from headway.models.huggingface import read_weight
from headway.models.lora import CODES, fill_quantized, initial_adapter, is_adapter, read_adapters
from headway.recipe import Lora, Model, Recipe
from headway.recipe.model import SCORE
from headway.state.address import open_address
from headway.state.base_weights import base_weights, model_at
from headway.state.tensors import ModelShare, fill, load_base, load_weights
from headway.track import RunFolder
from headway.train.custom_init import initial_weights


def draw_weights(model: nn.Module, recipe: Recipe, held: ModelShare, run: RunFolder) -> None:
    """Initialize this worker's part of the weights, from the seed or from `model.init`, one tensor at a time."""
    init = recipe.model.init
    if recipe.lora is not None:
        draw_adapters(model, recipe, recipe.lora)
    if recipe.lora is not None and recipe.lora.quantize is not None:
        draw_quantized(model, recipe.model)
        return
    if recipe.lora is not None and init is not None and not (Path(init) / "config.json").exists():
        load_base(open_address(init), model, held)
        return
    if recipe.model.reward and init is not None:
        draw_reward_model(model, recipe, init)
        return
    if recipe.model.class_ is not None or (init is not None and not (Path(init) / "config.json").exists()):
        load_weights(open_address(init or str(initial_weights(run))), model, held)
        return
    if init is None:
        draw_all(dict(model.named_parameters()), recipe)
        return
    stored = stored_weights(Path(init), recipe.model)
    for name, parameter in model.named_parameters():
        if name in stored:
            fill(name, parameter, stored[name])
    for name, buffer in model.named_buffers():
        if name in stored:
            buffer.copy_(stored[name])


@torch.no_grad()
def draw_reward_model(model: nn.Module, recipe: Recipe, init: str) -> None:
    """Load this worker's part of a model, one tensor at a time; a head that `init` does not have is initialized."""
    stored = base_weights(init, model_at(init))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in stored:
            fill(name, tensor, read_weight(stored[name]))
        elif name == SCORE:
            fill(name, tensor, initial_weight(recipe.model, name, tuple(tensor.shape), recipe.seed))


@torch.no_grad()
def draw_adapters(model: nn.Module, recipe: Recipe, lora: Lora) -> None:
    """Initialize this worker's part of the adapters, from the seed or from `lora.init`."""
    stored = None if lora.init is None else read_adapters(Path(lora.init), recipe.model)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            drawn = stored[name] if stored else initial_adapter(name, tuple(parameter.shape), recipe.seed)
            fill(name, parameter, drawn)


def draw_quantized(model: nn.Module, description: Model) -> None:
    """Load the base of adapters, one tensor at a time, and quantize the layers that are to be."""
    assert description.init is not None, "adapters have a base"
    stored = base_weights(description.init, description)
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    for name, weight in stored.items():
        layer = name.removesuffix(".weight")
        if name in tensors:
            fill(name, tensors[name], read_weight(weight))
        elif f"{layer}.{CODES}" in tensors:
            fill_quantized(model.get_submodule(layer), read_weight(weight))


def draw_all(parameters: Mapping[str, nn.Parameter], recipe: Recipe) -> None:
    """Initialize this worker's part of every parameter, several at a time, with one thread per tensor.

    A sharded tensor, or one on another device, is first initialized whole: all of those in progress together take no
    more memory than the largest.
    """

    groups, room = list[list[str]](), 0
    for name in sorted(parameters, key=lambda name: (-parameters[name].numel(), name)):
        taken = parameters[name].numel() if _drawn_apart(parameters[name]) else 0
        if not groups or taken > room:
            groups, room = [*groups, []], max(parameter.numel() for parameter in parameters.values())
        groups[-1].append(name)
        room -= taken

    @torch.no_grad()
    def draw(name: str) -> None:
        parameter, shape = parameters[name], tuple(parameters[name].shape)
        if _drawn_apart(parameter):
            fill(name, parameter, initial_weight(recipe.model, name, shape, recipe.seed))
        else:
            initial_weight(recipe.model, name, shape, recipe.seed, into=parameter)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for group in groups:
            list(pool.map(draw, group))


def _drawn_apart(parameter: nn.Parameter) -> bool:
    """Whether it is initialized in a temporary tensor: it is sharded or not on the CPU."""
    return isinstance(parameter, DTensor) or parameter.device.type != "cpu" or parameter.dtype != torch.float32
