"""The [eval.samples] section of a recipe: images or video that are generated during training."""

from typing import Annotated, Literal

from pydantic import Field

from headway.recipe.section import NotNegative, Positive, Section


class SampleGrid(Section):
    """Samples at a fixed seed, generated at every evaluation and stored in the run's folder `samples`."""

    count: Annotated[int, Field(ge=1, le=256, strict=True)] = 16
    """Number of samples; classes or prompts are repeated in turn."""
    every_steps: NotNegative = 0
    """Generate every N steps and after the last; 0: at every evaluation."""
    prompts: tuple[str, ...] = ()
    """Captions of the samples of a text-conditional model; without any, no text."""
    steps: Positive = 20
    """Steps of the sampler."""
    guidance: Annotated[float, Field(ge=0, le=100)] = 2.0
    """Scale of classifier-free guidance; 1 is none."""
    sampler: Literal["euler", "heun", "ddim", "ancestral"] | None = None
    """euler or heun for flow matching, ddim or ancestral for DDPM; by default the first."""
    seed: NotNegative = 0
    """Seed of the first noise."""
    fps: Positive = 8
    """Frames per second of video files."""
