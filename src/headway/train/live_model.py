"""The model that is being trained, as the inference engine takes it: whole on every worker, with the weights of now."""

import torch

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
    plain = empty_model(recipe.model)
    lower(plain, recipe.train)
    if recipe.lora is not None:
        add_adapters(plain, recipe.lora)
    dtype = torch.bfloat16 if world.device.type == "cuda" and recipe.train.dtype == "bfloat16" else torch.float32
    fill_whole(plain, spread, world, dtype)
    return live_run(plain.eval(), recipe, run, world.device)
