"""The torch module of each diffusion family."""

import torch

from headway.models.diffusion.dit import DiffusionDiT
from headway.models.diffusion.transformer import DiffusionTransformer
from headway.models.diffusion.wan import WanTransformer
from headway.recipe.families.diffusion import DiffusionModel

TRANSFORMERS: dict[str, type[DiffusionTransformer]] = {"dit": DiffusionDiT, "wan": WanTransformer}
"""By `model.family` of a recipe."""


def empty_transformer(model: DiffusionModel, device: torch.device | str = "cpu") -> DiffusionTransformer:
    """Return a diffusion transformer with uninitialized weights on a device."""
    with torch.device(device):
        return TRANSFORMERS[model.family](model)
