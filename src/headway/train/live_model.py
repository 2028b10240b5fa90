"""The model that is being trained, as the inference engine takes it: whole on every worker, with the weights of now."""

import torch
from torch import nn

from headway.inference.load import LoadedModel, live_run
from headway.models.custom import empty_model
from headway.models.lora import add_adapters
from headway.parallel import ParallelModel, World
from headway.parallel.whole import fill_whole
from headway.recipe import Recipe
from headway.track import RunFolder
from headway.train.optim import lower


def live_model(recipe: Recipe, run: RunFolder, spread: ParallelModel, world: World) -> LoadedModel:
    """Return the model as it is at this step, as `headway eval` would load it; all workers together.

    Tensors that this worker holds whole, in the precision of products, are shared with the trainer: they follow it.
    """
    plain = plain_model(recipe)
    fill_whole(plain, spread, world, compute_dtype(recipe, world.device))
    return live_run(plain.eval(), recipe, run, world.device)


def plain_model(recipe: Recipe) -> nn.Module:
    """Return a recipe's model on the meta device, with its adapters."""
    plain = empty_model(recipe.model)
    lower(plain, recipe.train)
    if recipe.lora is not None:
        add_adapters(plain, recipe.lora)
    return plain


def compute_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """Return the precision of the sampler's products."""
    return torch.bfloat16 if device.type == "cuda" and recipe.train.dtype == "bfloat16" else torch.float32
