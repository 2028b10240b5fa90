"""Diffusion models to sample from: those of a run's checkpoint."""

from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from headway.errors import ModelError, UsageError
from headway.inference.diffusion import Generator, SamplingSettings
from headway.inference.diffusion_samplers import SAMPLERS, SamplerName
from headway.models.diffusion import empty_transformer, open_text_encoder
from headway.recipe import Recipe
from headway.recipe.diffusion import DiffusionObjective
from headway.recipe.families.diffusion import DiffusionModel
from headway.state import OpenCheckpoint, open_checkpoint
from headway.state.tensors import load_weights, read_tensors
from headway.track import RunFolder, read_recipe


class DiffusionRequest(BaseModel):
    """A checkpoint and sampling options, which requests of processes have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Path
    checkpoint: Path
    steps: int = 20
    guidance: float = 2.0
    seed: int = 0
    sampler: SamplerName | None = None
    ema: bool = True
    """Whether to use the run's EMA weights, if it has any."""

    @property
    def sampling(self) -> SamplingSettings:
        """How to sample."""
        return SamplingSettings(self.steps, self.guidance, self.seed, self.sampler)

    def load(self) -> tuple[Recipe, Generator]:
        """Return the recipe of the run and a generator of its model; raise UsageError for another objective's
        sampler."""
        recipe = read_recipe(RunFolder(self.run))
        model, objective = recipe.model, recipe.objective
        assert isinstance(model, DiffusionModel)
        assert isinstance(objective, DiffusionObjective)
        if self.sampler not in (None, *SAMPLERS[objective.kind]):
            raise UsageError(
                f"sampler {self.sampler} does not fit objective {objective.kind}",
                hint=f"use {' or '.join(SAMPLERS[objective.kind])}",
            )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        module = load_diffusion(recipe, open_checkpoint(self.checkpoint), device, ema=self.ema)
        encoder = open_text_encoder(model, device) if model.conditioning == "text" else None
        return recipe, Generator(model, objective, module, encoder, device)


def load_diffusion(recipe: Recipe, source: OpenCheckpoint, device: torch.device, *, ema: bool) -> nn.Module:
    """Return the model of a checkpoint, with its EMA weights if there are any."""
    assert isinstance(recipe.model, DiffusionModel)
    if recipe.lora is not None:
        raise ModelError(
            "this run has adapters only, which cannot be sampled from yet",
            hint="headway checkpoint merge RUN FOLDER makes a model of them",
        )
    module = empty_transformer(recipe.model, device)
    load_weights(source, module)
    if ema:
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, tensor in read_tensors(source, "ema/").items():
                parameters[name].copy_(tensor)
    return module.eval()
