"""Generates images and video with a diffusion model: first noise, a sampler with guidance, pixels.

The first noise of a sample depends on the seed and its number alone, so that a sample is the same in any batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.errors import ModelError
from headway.inference.diffusion_samplers import SAMPLERS, Predict, SamplerName, guided, sample_path
from headway.models.diffusion import Conditioning, TextStates
from headway.models.diffusion.text_encoders import TextEncoder
from headway.models.noise import SAMPLING, STEP, draw
from headway.models.noising import noise_path
from headway.models.pixels import first_frame
from headway.recipe.diffusion import DiffusionObjective
from headway.recipe.families.diffusion import DiffusionModel

Model = Callable[[Tensor, Tensor, Conditioning], Tensor]
"""Noised samples, their times and conditions to predictions."""
STEPS = 1 << 20
"""More than a sampler has: noise of step i of sample n is number n * STEPS + i."""


@dataclass(frozen=True)
class SamplingSettings:
    """How samples are generated."""

    steps: int
    guidance: float
    seed: int = 0
    sampler: SamplerName | None = None
    """By default the first of the objective's."""


class Generator:
    """Generates samples of one model and objective."""

    def __init__(
        self,
        model: DiffusionModel,
        objective: DiffusionObjective,
        predict: Model,
        encoder: TextEncoder | None,
        device: torch.device,
    ) -> None:
        self.model, self.objective, self._predict = model, objective, predict
        self._encoder, self._device = encoder, device

    @torch.no_grad()
    def generate(
        self,
        conditions: Sequence[int] | Sequence[str],
        shape: tuple[int, int, int],
        settings: SamplingSettings,
        first: int = 0,
        mark: Callable[[], None] = lambda: None,
        images: Tensor | None = None,
    ) -> Tensor:
        """Return samples [N, C, T, Y, X] of classes or prompts, in a shape of frames, height and width.

        `first` is the number of the first of them; `mark` is called after every prediction. An image-to-video model
        continues `images`, which are samples whose first frame counts.
        """
        beside = self._beside(images)
        path = noise_path(self.objective, self.model.tokens(*shape))
        numbers = range(first, first + len(conditions))
        full = (self.model.in_channels, *shape)
        x = torch.from_numpy(draw(settings.seed, SAMPLING, numbers, full).noise).to(self._device)

        def noise(step: int) -> Tensor:
            places = [number * STEPS + step for number in numbers]
            return torch.from_numpy(draw(settings.seed, STEP, places, full).noise).to(self._device)

        def with_condition(conditioning: Conditioning) -> Predict:
            def predict(x: Tensor, time: float) -> Tensor:
                times_N = torch.full((len(x),), time, dtype=torch.float32, device=x.device)
                out = self._predict(x, times_N, conditioning).float()
                mark()
                return out

            return predict

        nothing, given = (
            with_condition(self.conditioning(each)._replace(latents_BCTYX=beside))
            for each in ([None] * len(conditions), conditions)
        )
        predict = guided(given, nothing, settings.guidance)
        sampler = settings.sampler or SAMPLERS[self.objective.kind][0]
        return sample_path(path, predict, x, settings.steps, sampler, noise=noise, clip=1.0)

    def _beside(self, images: Tensor | None) -> Tensor | None:
        """Return what the model takes beside a sample; raise ModelError if images are missing or too many."""
        channels = self.model.beside_channels
        if (images is None) == (channels > 0):
            wants = "continues an image, and there is none" if channels else "takes no image"
            raise ModelError(
                f"this {self.model.family} {wants}", hint=f"--image FILE{'' if channels else ': leave it out'}"
            )
        return None if images is None else first_frame(images.to(self._device), channels)

    def conditioning(self, conditions: Sequence[int | str | None]) -> Conditioning:
        """Return the conditioning of classes or prompts; None is no condition."""
        if self.model.conditioning == "class":
            classes = self.model.num_classes
            assert classes is not None
            for condition in conditions:
                if condition is not None and not (isinstance(condition, int) and 0 <= condition < classes):
                    raise ModelError(f"there is no class {condition!r}", hint=f"classes are 0 to {classes - 1}")
            labels = [classes if condition is None else int(condition) for condition in conditions]
            return Conditioning(labels_B=torch.tensor(labels, device=self._device))
        assert self._encoder is not None, "a model of texts has an encoder"
        states: TextStates = self._encoder.encode(["" if text is None else str(text) for text in conditions])
        return Conditioning(text=states)
