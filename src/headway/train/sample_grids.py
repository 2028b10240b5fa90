"""Generates a run's sample grid: the same noise and conditions every time, so that grids of steps compare."""

from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor

from headway.data.media.corpus import MediaCorpus
from headway.data.media.pictures import PICTURE, VIDEO, write_samples
from headway.inference.diffusion import Generator, SamplingSettings
from headway.models.diffusion import Conditioning
from headway.models.pixels import to_pixels, to_samples
from headway.parallel.objective import IMAGE, LABEL, TEXT, TEXT_MASK, TIME
from headway.recipe import Recipe
from headway.recipe.diffusion import DiffusionObjective
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.media import Media
from headway.train.build import Parts

MOST_COLUMNS = 20


def grid_is_due(recipe: Recipe, step: int) -> bool:
    """Whether a grid is generated after a step at which the run evaluates."""
    samples = recipe.eval.samples
    if samples is None:
        return False
    return not samples.every_steps or step % samples.every_steps == 0 or step == recipe.train.steps


def write_grid(parts: Parts, step: int) -> None:
    """Generate samples and write them into the run's folder; all workers compute the same, the first one writes."""
    recipe, settings = parts.recipe, parts.recipe.eval.samples
    assert settings is not None, "a grid is due only with settings"
    assert isinstance(recipe.model, DiffusionModel)
    assert isinstance(recipe.objective, DiffusionObjective)
    assert recipe.data.media is not None
    width, height, frames = recipe.data.media.shapes[0]

    def predict(x: Tensor, times_N: Tensor, conditioning: Conditioning) -> Tensor:
        out: Tensor = parts.spread.model(x, None, **columns_of(times_N, conditioning))
        return out

    generator = Generator(recipe.model, recipe.objective, predict, parts.encoder, parts.world.device)
    sampling = SamplingSettings(settings.steps, settings.guidance, settings.seed, settings.sampler)
    with parts.recorder.span("evaluation"), torch.no_grad():
        parts.spread.refresh()  # float8 codes of the weights of now
        parts.spread.model.eval()
        conditions = grid_conditions(recipe)
        images = grid_images(parts, len(conditions)) if recipe.model.beside_channels else None
        samples = generator.generate(conditions, (frames, height, width), sampling, mark=parts.beat.mark, images=images)
        parts.spread.rest()
        parts.spread.model.train()
        if parts.world.first:
            pixels, folder = to_pixels(samples).cpu().numpy(), parts.run.samples
            folder.mkdir(exist_ok=True)
            files = [folder / f"step-{step:08d}{suffix}" for suffix in ([PICTURE, VIDEO] if frames > 1 else [PICTURE])]
            for file in files:
                write_samples(file, pixels, columns=grid_columns(recipe), fps=settings.fps)
            parts.recorder.event("samples", step=step, files=[relative(file, parts.run.path) for file in files])


def grid_conditions(recipe: Recipe) -> list[int] | list[str]:
    """Return the conditions of a grid's samples: classes in turn, or the recipe's prompts in turn."""
    settings, model = recipe.eval.samples, recipe.model
    assert settings is not None
    assert isinstance(model, DiffusionModel)
    if model.conditioning == "class":
        assert model.num_classes is not None
        return list(islice(cycle(range(model.num_classes)), settings.count))
    return list(islice(cycle(settings.prompts or ("",)), settings.count))


def grid_images(parts: Parts, count: int) -> Tensor:
    """Return samples whose first frames an image-to-video model continues.

    They are held-out ones of the first bucket in turn, or the first that were trained on.
    """
    assert isinstance(parts.corpus, MediaCorpus)
    assert isinstance(parts.recipe.model, DiffusionModel)
    order, media_section = parts.corpus.order, parts.recipe.data.media
    assert media_section is not None
    bucket, cursor = first_bucket(media_section), 0
    specs = [spec for batch in order.held_out(count, count) for spec in batch if (spec.size, spec.frames) == bucket]
    while not specs:  # nothing of it is held out
        trained = order.specs(order.numbers(cursor))
        specs, cursor = [spec for spec in trained if (spec.size, spec.frames) == bucket], cursor + order.batch
    media = parts.corpus.reader.read_specs(specs[:count])
    samples = to_samples(torch.from_numpy(media.pixels), parts.recipe.model.in_channels)
    return samples[torch.arange(count) % len(samples)]


def first_bucket(media: Media) -> tuple[tuple[int, int], int]:
    """Return the size and frames of the first bucket."""
    width, height, frames = media.shapes[0]
    return (width, height), frames


def grid_columns(recipe: Recipe) -> int | None:
    """Return the columns of a grid: one per class if they are few, else as many as rows."""
    settings, model = recipe.eval.samples, recipe.model
    assert settings is not None
    assert isinstance(model, DiffusionModel)
    classes = model.num_classes or 0
    return classes if 1 < classes <= min(settings.count, MOST_COLUMNS) else None


def columns_of(times_N: Tensor, conditioning: Conditioning) -> dict[str, Tensor]:
    """Return times and conditions as the columns that a model in training takes."""
    columns = {TIME: times_N}
    if conditioning.labels_B is not None:
        columns[LABEL] = conditioning.labels_B
    if conditioning.text is not None:
        columns |= {TEXT: conditioning.text.states_BSE, TEXT_MASK: conditioning.text.mask_BS}
    if conditioning.latents_BCTYX is not None:
        columns[IMAGE] = conditioning.latents_BCTYX
    return columns


def relative(file: Path, folder: Path) -> str:
    """Return a file's path below a folder."""
    return str(file.relative_to(folder))
