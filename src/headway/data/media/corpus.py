"""The open data of a recipe that trains on images or video: what `data.corpus` is for text."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np

from headway.data.media.dataset import MediaDataset
from headway.data.media.order import MediaOrder
from headway.data.media.reader import MediaReader, open_reader
from headway.data.media.specs import SampleSpec
from headway.data.order import Ids
from headway.data.steps import first_sample
from headway.errors import DataError, plural
from headway.recipe import Data, Recipe, Train
from headway.recipe.families.diffusion import DiffusionModel


@dataclass(frozen=True)
class MediaCorpus:
    """One open dataset of images or video, and the order of a run's samples."""

    reader: MediaReader
    recipe: Recipe

    vocab_size = 0
    weighted = False

    @property
    def order(self) -> MediaOrder:
        """The order of a run's samples."""
        return self.reader.order

    @property
    def names(self) -> tuple[str, ...]:
        """The dataset's name, after its folder."""
        return (PurePath(str(self.recipe.data.path)).name or "data",)

    @property
    def version(self) -> str:
        """The dataset's version."""
        return self.reader.dataset.version

    def pinned(self) -> Data:
        """Return the recipe's data section with an absolute path and the version: no other data is ever used."""
        data = self.recipe.data
        return data.model_copy(update={"path": str(Path(str(data.path)).resolve()), "version": self.version})

    def train(self) -> Train:
        """Return the recipe's train section with the steps that its epochs are."""
        train = self.recipe.train
        if train.epochs is None:
            return train
        return train.with_steps(math.ceil(train.epochs * self.order.rows_per_epoch / train.batch))

    def notes(self) -> list[str]:
        """Return what the samples are, and what became of clips that are too short."""
        order, what = self.order, "image" if self.recipe.data.kind == "image" else "clip"
        sizes = [f"{b.shape.width}x{b.shape.height}" + f"x{b.shape.frames}" * (what == "clip") for b in order.buckets]
        held_out = len(order.held_out_clips)
        sentences = [f"{self.names[0]}: {plural(len(order.index), what)} as {', '.join(sizes)}, {held_out:,} held out"]
        if order.too_short:
            sentences.append(f"{self.names[0]}: {plural(order.too_short, what)} too short for a sample: left out")
        return sentences

    def held_out(self, limit: int) -> Ids:
        """Return the numbers of at most so many held-out samples, in their own count."""
        return np.arange(min(limit, len(self.order.held_out_clips)), dtype=np.int64)

    def held_out_batches(self, ids: Ids, rows: int) -> Iterator[list[SampleSpec]]:
        """Yield held-out samples in batches of one shape and at most `rows` samples."""
        yield from self.order.held_out(len(ids), rows)

    def by_dataset(self, ids: Ids) -> list[Ids]:
        """There is one dataset."""
        return [ids]

    def epochs(self, cursor: int) -> list[float]:
        """Return the epochs after `cursor` rows."""
        return [cursor / self.order.rows_per_epoch]

    def cursor_before(self, step: int) -> int:
        """Return the cursor at which a step begins."""
        train = self.recipe.train
        return first_sample(step, ((1, train.batch), *train.batch_ramp), self.recipe.data.skip)


def open_media_corpus(recipe: Recipe) -> MediaCorpus:
    """Open and check the images or video of a recipe; raise DataError naming what is wrong."""
    reader = open_reader(recipe.data, recipe.seed, max(recipe.train.batches))
    if reader.order.aligned:
        batch = recipe.train.batch
        if recipe.train.batch_ramp:
            raise DataError(
                "train.batch_ramp needs samples of one size that share no window",
                hint="leave it out, or set one data.media.sizes, one frames and samples = 1",
            )
        for edge in (edge for interval in recipe.data.skip for edge in interval):
            if edge % batch:
                raise DataError(f"data.skip has {edge}, which is not a multiple of train.batch ({batch})")
    _check_conditions(reader.dataset, recipe)
    return MediaCorpus(reader, recipe)


def _check_conditions(dataset: MediaDataset, recipe: Recipe) -> None:
    """Raise DataError if clips lack the class or the caption that the model is conditioned on."""
    model, what = recipe.model, "image" if dataset.kind == "image" else "clip"
    if not isinstance(model, DiffusionModel):
        return
    if model.conditioning == "text":
        assert recipe.data.media is not None
        if recipe.data.media.captions != "none" and not dataset.index.captions.any():
            raise DataError(
                f"no {what} has a caption, and the model is conditioned on texts",
                hint='build the dataset with --captions, or set data.media.captions = "none"',
            )
        return
    labels = dataset.labels()
    without = np.flatnonzero(labels < 0)
    if len(without):
        first = dataset.clip(int(without[0])).name
        raise DataError(
            f"{plural(len(without), what)} of {len(labels):,} have no label, the first is {first}, and the model is "
            "conditioned on classes",
            hint="give every file a label with --captions"
            + (', or set model.conditioning = "text" and no model.num_classes' if dataset.index.captions.all() else ""),
        )
    assert model.num_classes is not None
    if labels.max() >= model.num_classes:
        place = int(labels.argmax())
        raise DataError(
            f"{dataset.clip(place).name} has label {labels[place]}; the model has classes 0 to {model.num_classes - 1}",
            hint=f"--set model.num_classes={labels.max() + 1}",
        )
