"""`python -m headway.inference.sample_media`: the process behind `headway sample` of a diffusion run.

Reads one request, a JSON object, from stdin, generates samples and writes them as one file. Streams JSON lines to
stdout: {"samples", "of"} as it goes on, {"file", ...} at the end, or {"error", "hint"} and the error's exit status.
"""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from headway.data.media.pictures import write_samples
from headway.errors import HeadwayError, ModelError, UsageError
from headway.inference.diffusion import Generator, SamplingSettings
from headway.inference.diffusion_samplers import SAMPLERS, SamplerName
from headway.models.diffusion import empty_transformer, open_text_encoder
from headway.models.pixels import to_pixels
from headway.recipe import Recipe
from headway.recipe.diffusion import DiffusionObjective
from headway.recipe.families.diffusion import DiffusionModel
from headway.state import OpenCheckpoint, open_checkpoint
from headway.state.parent_process import end_with_parent
from headway.state.tensors import load_weights, read_tensors
from headway.track import RunFolder, read_recipe

BATCH = 64
"""Samples that are generated at once."""


class MediaSampleRequest(BaseModel):
    """A checkpoint, conditions and sampling options."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Path
    checkpoint: Path
    conditions: list[int] | list[str]
    """Classes or prompts, one per sample."""
    out: Path
    size: tuple[int, int, int] | None = None
    """Width, height and frames; by default those of the data's first bucket."""
    steps: int = 20
    guidance: float = 2.0
    seed: int = 0
    sampler: SamplerName | None = None
    ema: bool = True
    """Whether to use the run's EMA weights, if it has any."""
    fps: int = 8


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


def generate(request: MediaSampleRequest) -> Iterator[dict[str, Any]]:
    """Generate samples and write them; yield what to report."""
    recipe = read_recipe(RunFolder(request.run))
    model, objective = recipe.model, recipe.objective
    assert isinstance(model, DiffusionModel)
    assert isinstance(objective, DiffusionObjective)
    assert recipe.data.media is not None
    if request.sampler not in (None, *SAMPLERS[objective.kind]):
        raise UsageError(
            f"sampler {request.sampler} does not fit objective {objective.kind}",
            hint=f"use {' or '.join(SAMPLERS[objective.kind])}",
        )
    width, height, frames = request.size or recipe.data.media.shapes[0]
    model.grid(frames, height, width)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = load_diffusion(recipe, open_checkpoint(request.checkpoint), device, ema=request.ema)
    encoder = open_text_encoder(model, device) if model.conditioning == "text" else None
    generator = Generator(model, objective, module, encoder, device)
    settings = SamplingSettings(request.steps, request.guidance, request.seed, request.sampler)
    parts, total = list[torch.Tensor](), len(request.conditions)
    for first in range(0, total, BATCH):
        conditions = request.conditions[first : first + BATCH]
        samples = generator.generate(conditions, (frames, height, width), settings, first)
        parts.append(to_pixels(samples).cpu())
        yield {"samples": first + len(conditions), "of": total}
    write_samples(request.out, torch.cat(parts).numpy(), fps=request.fps)
    yield {"file": str(request.out), "width": width, "height": height, "frames": frames}


def main() -> int:
    """Answer the request on stdin; return the exit status."""
    try:
        request = MediaSampleRequest.model_validate_json(sys.stdin.buffer.read())
        for message in generate(request):
            print(json.dumps(message), flush=True)
    except HeadwayError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}), flush=True)
        return error.exit_status
    return 0


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM, *map(int, sys.argv[1:]))
    sys.exit(main())
