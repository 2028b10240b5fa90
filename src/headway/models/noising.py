"""Paths from data to noise: what a diffusion model is given at a time, and what it learns to predict.

At time t, from 0 (data) to 1 (noise), a sample is x_t = alpha(t) data + sigma(t) noise.

    flow   alpha = 1 - t, sigma = t; the target is the velocity, noise - data
    ddpm   t = k / steps, alpha^2 = the product of 1 - beta up to k; the target is the noise, or v

Everything here is in float64 and without torch: a few numbers per sample.
"""

import math
from statistics import NormalDist
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headway.recipe.diffusion import Ddpm, DiffusionObjective, Flow

Floats = npt.NDArray[np.float64]


class NoisePath(Protocol):
    """A path from data to noise."""

    kind: str
    """What the model predicts: velocity, epsilon or v."""

    def times(self, uniform_N: Floats) -> Floats:
        """Return the times of training samples from uniform numbers in (0, 1)."""
        ...

    def scales(self, times_N: Floats) -> tuple[Floats, Floats]:
        """Return alpha and sigma."""
        ...

    def target(self, times_N: Floats) -> tuple[Floats, Floats]:
        """Return the factors of data and noise in what the model learns to predict."""
        ...

    def weights(self, times_N: Floats) -> Floats:
        """Return the weights of losses."""
        ...


class FlowPath:
    """The path of flow matching (rectified flow)."""

    kind = "velocity"

    def __init__(self, recipe: Flow, tokens: int) -> None:
        self.recipe = recipe
        self.shift = shift_for(recipe, tokens)
        """The shift of samples of so many tokens."""

    def times(self, uniform_N: Floats) -> Floats:
        """See NoisePath."""
        times_N = uniform_N
        if self.recipe.times == "logit-normal":
            normal = NormalDist(self.recipe.mean, self.recipe.std)
            times_N = 1 / (1 + np.exp(-np.array([normal.inv_cdf(u) for u in uniform_N])))
        return shifted(times_N, self.shift)

    def scales(self, times_N: Floats) -> tuple[Floats, Floats]:
        """See NoisePath."""
        return 1 - times_N, times_N

    def target(self, times_N: Floats) -> tuple[Floats, Floats]:
        """See NoisePath."""
        return -np.ones_like(times_N), np.ones_like(times_N)

    def weights(self, times_N: Floats) -> Floats:
        """See NoisePath."""
        return np.ones_like(times_N)


class DdpmPath:
    """The path of DDPM's variance-preserving schedule."""

    def __init__(self, recipe: Ddpm) -> None:
        self.recipe = recipe
        self.kind: str = recipe.predict
        self.alphas = alphas_cumprod(recipe.betas, recipe.steps)
        """alpha^2 of each step."""

    def times(self, uniform_N: Floats) -> Floats:
        """See NoisePath."""
        return np.minimum(np.floor(uniform_N * self.recipe.steps), self.recipe.steps - 1) / self.recipe.steps

    def scales(self, times_N: Floats) -> tuple[Floats, Floats]:
        """See NoisePath."""
        alphas_N = self.alphas[np.rint(times_N * self.recipe.steps).astype(np.int64)]
        return np.sqrt(alphas_N), np.sqrt(1 - alphas_N)

    def target(self, times_N: Floats) -> tuple[Floats, Floats]:
        """See NoisePath."""
        if self.kind == "epsilon":
            return np.zeros_like(times_N), np.ones_like(times_N)
        alpha_N, sigma_N = self.scales(times_N)
        return -sigma_N, alpha_N

    def weights(self, times_N: Floats) -> Floats:
        """See NoisePath."""
        if self.recipe.min_snr is None:
            return np.ones_like(times_N)
        alpha_N, sigma_N = self.scales(times_N)
        snr_N = (alpha_N / sigma_N) ** 2
        return np.minimum(snr_N, self.recipe.min_snr) / (snr_N + (self.kind == "v"))


def noise_path(recipe: DiffusionObjective, tokens: int) -> NoisePath:
    """Return the path of an objective for samples of so many tokens."""
    if isinstance(recipe, Flow):
        return FlowPath(recipe, tokens)
    assert isinstance(recipe, Ddpm)
    return DdpmPath(recipe)


def shift_for(recipe: Flow, tokens: int) -> float:
    """Return the shift of samples of so many tokens: at more of them, the same noise hides less."""
    base = recipe.shift_tokens
    return recipe.shift if base is None else recipe.shift * math.sqrt(tokens / base)


def shifted(times: Floats, shift: float) -> Floats:
    """Return times moved towards noise by a shift above 1; 0 and 1 stay."""
    return shift * times / (1 + (shift - 1) * times)


def alphas_cumprod(betas: str, steps: int) -> Floats:
    """Return the products of 1 - beta up to each step of a schedule."""
    if betas == "linear":
        each = np.linspace(1e-4, 0.02, steps)
    elif betas == "scaled-linear":
        each = np.linspace(math.sqrt(0.00085), math.sqrt(0.012), steps) ** 2
    else:
        bar = np.cos((np.arange(steps + 1) / steps + 0.008) / 1.008 * math.pi / 2) ** 2
        each = np.minimum(1 - bar[1:] / bar[:-1], 0.999)
    return np.cumprod(1 - each)
