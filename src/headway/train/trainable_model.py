"""The model that a recipe trains, before it is parallelized: precision, adapters, what is frozen, exact inference."""

import logging

import torch
from torch import nn

from headway.errors import ModelError
from headway.models.custom import empty_model
from headway.models.exact import make_exact
from headway.models.lora import add_adapters, base_names
from headway.parallel import World
from headway.parallel.layout import blocks_of, layout_of
from headway.recipe import Model, ModelLayout, Recipe
from headway.recipe.fp8 import Fp8, fp8_layers
from headway.track import Recorder, RunFolder
from headway.train.custom_init import load_buffers
from headway.train.optim import freeze, lower


def trainable_model(recipe: Recipe, world: World) -> tuple[nn.Module, frozenset[str]]:
    """Return the plain model on the meta device, with adapters if the recipe has any, and the names of their base."""
    model, base = empty_model(recipe.model), frozenset[str]()
    lower(model, recipe.train)
    if recipe.lora is not None:
        add_adapters(model, recipe.lora)
        base = base_names(model)
    freeze(model, recipe.train)
    if recipe.inference.exact:
        check_exact_mesh(world)
        make_exact(model, world.device, getattr(torch, recipe.train.dtype))
    if world.size > 1:
        check_ties(model, recipe.model.layout)
    return model, base


def check_exact_mesh(world: World) -> None:
    """Raise ModelError if the plan's mesh excludes exact inference."""
    split = [axis for axis in ("pipeline", "context", "tensor", "expert") if world.axis(axis).size > 1]
    if split:
        raise ModelError(
            f"inference.exact needs a mesh of replicate and shard axes only, and this one has {', '.join(split)}",
            hint=f"--set parallel.{split[0]}=1",
        )


def check_ties(model: nn.Module, layout: ModelLayout | None) -> None:
    """Raise ModelError if a block shares a parameter with anything outside: workers handle blocks one at a time."""
    blocks_name, blocks = blocks_of(model, layout_of(model, layout))
    prefix = f"{blocks_name}." if blocks_name else ""
    seen = dict[int, tuple[str, str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False) if blocks else ():
        block = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
        other, its_block = seen.setdefault(id(parameter), (name, block))
        if block != its_block:
            raise ModelError(
                f"{other} and {name} are tied across blocks of {blocks_name}, which several workers cannot share",
                hint="use one worker; only tensors outside of blocks, such as head and embedding, may be tied",
            )


def record_fp8_layers(model: Model, section: Fp8, recorder: Recorder) -> None:
    """Record which layers multiply in float8; warn of those that cannot."""
    layers = fp8_layers(model, section)
    recorder.event("log", message=layers.describe())
    if layers.skipped:
        logging.getLogger(__name__).warning(layers.describe())


def set_buffers(model: nn.Module, recipe: Recipe, run: RunFolder) -> None:
    """Fill buffers, which were uninitialized memory: those of a class of the user's own are beside the run."""
    if recipe.model.class_ is not None:
        load_buffers(run, model)
        return
    for buffer in model.buffers():
        buffer.zero_()
