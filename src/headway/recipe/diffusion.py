"""Objectives of diffusion models, as sections of a recipe: flow matching and DDPM."""

from typing import Annotated, Literal

from pydantic import Field

from headway.recipe.section import Positive, Section

Bins = Annotated[int, Field(ge=1, le=32, strict=True)]
Dropout = Annotated[float, Field(ge=0, lt=1)]


class DiffusionObjective(Section):
    """What all diffusion objectives have. Noise, times and dropped conditions depend on the seed and the sample's
    number alone."""

    kind: str
    """Which objective it is."""
    drop_condition: Dropout = 0.1
    """Share of samples trained without their label or caption, for classifier-free guidance."""
    bins: Bins = 4
    """Ranges of time whose losses are recorded one by one; 1 records none."""


class Flow(DiffusionObjective):
    """Flow matching: predict the velocity from data to noise, on straight paths between both."""

    kind: Literal["flow"]
    """Which objective it is."""
    times: Literal["logit-normal", "uniform"] = "logit-normal"
    """Distribution of times, before the shift."""
    mean: Annotated[float, Field(ge=-10, le=10)] = 0.0
    """Mean of the logit of times (logit-normal only); above 0 is more noise."""
    std: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Standard deviation of the logit of times (logit-normal only)."""
    shift: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Moves times towards noise, in training and sampling: t becomes shift t / (1 + (shift - 1) t)."""
    shift_tokens: Positive | None = None
    """Tokens of a sample for which `shift` is meant: with more, it grows with the square root of their number. By
    default it is the same for all."""


class Ddpm(DiffusionObjective):
    """Denoising diffusion: predict the noise of a discrete schedule, or v."""

    kind: Literal["ddpm"]
    """Which objective it is."""
    predict: Literal["epsilon", "v"] = "epsilon"
    """What the model predicts: the noise, or v = alpha noise - sigma data."""
    betas: Literal["linear", "scaled-linear", "cosine"] = "linear"
    """Schedule of the variances: linear from 1e-4 to 0.02, the square of a linear one (latent diffusion), or cosine."""
    steps: Annotated[int, Field(ge=2, le=100_000, strict=True)] = 1000
    """Steps of the schedule."""
    min_snr: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Weight losses by min(SNR, min_snr) / SNR (for v, / (SNR + 1)); 5 is usual, by default all weights are 1."""
