"""Samplers of diffusion models: from noise to data along a path, with a model that predicts where it goes.

A sampler takes `predict(x, time)`, the model's prediction of samples x [N, ...] at one time, and returns data. Flow
matching is an ordinary differential equation, dx/dt = velocity, integrated from 1 to 0 with Euler's or Heun's method.
DDPM's schedule is sampled with DDIM; with eta = 1 it adds noise at every step, as ancestral sampling does.
"""

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headway.models.noising import DdpmPath, Floats, FlowPath, NoisePath, shifted

Predict = Callable[[Tensor, float], Tensor]
Noise = Callable[[int], Tensor]
"""Standard normal noise of a sampling step, of the samples' shape."""
SamplerName = Literal["euler", "heun", "ddim", "ancestral"]
SAMPLERS: dict[str, tuple[SamplerName, ...]] = {"flow": ("euler", "heun"), "ddpm": ("ddim", "ancestral")}
"""By `objective.kind`; the first is the default."""


def flow_times(steps: int, shift: float = 1.0) -> Floats:
    """Return the times of a sampler's steps, from 1 to 0, with the shift of training."""
    return shifted(np.linspace(1, 0, steps + 1), shift)


def euler(predict: Predict, x: Tensor, times: Floats) -> Tensor:
    """Integrate the velocity with Euler's method: one prediction per step."""
    for now, then in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
        x = x + (then - now) * predict(x, now)
    return x


def heun(predict: Predict, x: Tensor, times: Floats) -> Tensor:
    """Integrate the velocity with Heun's method: two predictions per step, and an error of its square."""
    for now, then in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
        velocity = predict(x, now)
        following = predict(x + (then - now) * velocity, then)
        x = x + (then - now) / 2 * (velocity + following)
    return x


def ddim_indices(schedule_steps: int, steps: int) -> list[int]:
    """Return the schedule's steps that a sampler visits, evenly spaced and from the last."""
    return [int(index) - 1 for index in np.round(np.arange(schedule_steps, 0, -schedule_steps / steps))]


def ddim(
    predict: Predict, x: Tensor, path: DdpmPath, steps: int, *, eta: float = 0.0, noise: Noise | None = None,
    clip: float | None = None,
) -> Tensor:  # fmt: skip
    """Sample with DDIM; `eta` from 0 (deterministic) to 1 (ancestral); the estimated data is clipped to +-`clip`."""
    assert noise is not None or eta == 0, "only a deterministic sampler needs no noise"
    indices = ddim_indices(path.recipe.steps, steps)
    for place, index in enumerate(indices):
        now = float(path.alphas[index])
        then = float(path.alphas[indices[place + 1]]) if place + 1 < len(indices) else 1.0
        predicted = predict(x, index / path.recipe.steps)
        if path.kind == "v":
            data = math.sqrt(now) * x - math.sqrt(1 - now) * predicted
            epsilon = math.sqrt(now) * predicted + math.sqrt(1 - now) * x
        else:
            data, epsilon = (x - math.sqrt(1 - now) * predicted) / math.sqrt(now), predicted
        if clip is not None:
            data = data.clamp(-clip, clip)
            epsilon = (x - math.sqrt(now) * data) / math.sqrt(1 - now)
        deviation = eta * math.sqrt((1 - then) / (1 - now) * (1 - now / then))
        x = math.sqrt(then) * data + math.sqrt(1 - then - deviation**2) * epsilon
        if deviation and noise is not None:
            x = x + deviation * noise(place)
    return x


def sample_path(
    path: NoisePath, predict: Predict, x: Tensor, steps: int, sampler: SamplerName, *, noise: Noise, clip: float | None
) -> Tensor:
    """Return data from noise, with one of the samplers of a path."""
    if isinstance(path, FlowPath):
        method = heun if sampler == "heun" else euler
        return method(predict, x, flow_times(steps, path.shift))
    assert isinstance(path, DdpmPath)
    return ddim(predict, x, path, steps, eta=float(sampler == "ancestral"), noise=noise, clip=clip)


def guided(conditional: Predict, unconditional: Predict, scale: float) -> Predict:
    """Return classifier-free guidance: away from the prediction without the condition, by a scale; 1 is none."""
    if scale == 1:
        return conditional

    def predict(x: Tensor, time: float) -> Tensor:
        without = unconditional(x, time)
        return torch.lerp(without.float(), conditional(x, time).float(), scale)

    return predict
