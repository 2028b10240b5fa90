"""Feeds the loop with noised samples of images or video.

What a step sees is a function of the seed and of sample numbers: the pixels (`data/media/order.py`), the time on the
path from data to noise, the noise, and whether the condition is dropped (`models/noise.py`). So resuming is exact, and
no split over workers changes a sample. The next step's samples are read by a thread while the device computes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.data.loader import Batch
from headway.data.media.corpus import MediaCorpus
from headway.data.media.pool import PooledReader
from headway.data.media.reader import MediaBatch
from headway.data.order import Ids, after_skips
from headway.models.diffusion import TextStates
from headway.models.noise import HELD_OUT, TRAINING, Draw, draw
from headway.models.noising import NoisePath, noise_path
from headway.models.pixels import first_frame, to_samples
from headway.models.transfer import on_device
from headway.parallel import ParallelModel, World
from headway.parallel.objective import IMAGE, LABEL, TEXT, TEXT_MASK, DeviceBatch
from headway.recipe import Recipe
from headway.recipe.diffusion import DiffusionObjective
from headway.recipe.families.diffusion import DiffusionModel
from headway.train.feed import CountedBatch, FedStep
from headway.train.objectives.diffusion import DenoisingLoss

VIDEO_DECODERS = 2
GOLDEN = (math.sqrt(5) - 1) / 2
HELD_OUT_SEED = 0
"""Of all runs, so that their held-out losses compare."""
Encode = Callable[[Sequence[str]], TextStates]
"""A frozen text encoder: prompts to states."""


class _Host(NamedTuple):
    """Samples of a step on the host."""

    media: MediaBatch
    drawn: Draw


class DiffusionFeed:
    """Reads, noises and conditions samples."""

    masks = False

    def __init__(
        self,
        recipe: Recipe,
        corpus: MediaCorpus,
        world: World,
        objective: DenoisingLoss,
        encode: Encode | None,
        on_replaced: Callable[[str], None] | None = None,
    ) -> None:
        """Read with a frozen text encoder, if captions need one; `on_replaced` is told of decoders that died."""
        assert isinstance(recipe.objective, DiffusionObjective)
        assert isinstance(recipe.model, DiffusionModel)
        self._recipe, self._corpus, self._world = recipe, corpus, world
        self._model, self._objective, self._encode = recipe.model, objective, encode
        self._pool = pooled_reader(recipe, corpus, world, on_replaced)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._ahead: tuple[tuple[int, int], Future[_Host]] | None = None

    # -- what the loop calls

    def samples(self, step: int) -> bool:
        """See Feed."""
        return False

    def take(self, step: int, cursor: int, batch: int, chain_before: str) -> FedStep:
        """See Feed."""
        host = self._host(cursor, batch)
        following = self._recipe.train.batch_at(step + 1)
        if step < self._recipe.train.steps:
            place = after_skips(cursor + batch, following, self._recipe.data.skip), following
            self._ahead = place, self._thread.submit(self._read, *place)
        counted = self._noised(host.media, host.drawn)
        tokens = len(counted.batch.inputs) * self._model.tokens(*counted.batch.inputs.shape[2:])
        return FedStep(*counted, cursor + batch, tokens * self._world.data.size)

    def read(self, cursor: int, batch: int | None = None) -> CountedBatch:
        """Return the samples of the step that begins at a cursor."""
        return self._noised(*self._host(cursor, batch or max(self._recipe.train.batches)))

    def held_out_rows(
        self, spread: ParallelModel, world: World, ids: Ids
    ) -> Iterator[tuple[tuple[float, ...], DeviceBatch]]:
        """See Feed. Times are evenly distributed, the same for every run; no condition is dropped."""
        data, rows = world.data, spread.evaluation_rows(max(1, len(ids)))
        for specs in self._corpus.held_out_batches(ids, rows * data.size):
            own = specs[rows * data.rank : rows * (data.rank + 1)]
            filled = [*own, *specs[:1] * (min(rows, len(specs)) - len(own))]
            media = (self._pool or self._corpus.reader).read_specs(filled)
            numbers = media.numbers.tolist()
            drawn = draw(HELD_OUT_SEED, HELD_OUT, numbers, self._shape(media))
            even_N = (0.5 + GOLDEN * np.array(numbers)) % 1
            drawn = drawn._replace(uniform_N=even_N, drop_N=np.ones(len(numbers)))
            counted = self._noised(media, drawn, counting=len(own))
            yield counted.counts, counted.batch

    def held_out_rewards(self, held_out: Ids, version: int) -> None:
        """See Feed."""

    def settle(self) -> None:
        """See Feed."""

    def discard(self, version: int) -> None:
        """See Feed."""

    def close(self) -> None:
        """See Feed."""
        self._thread.shutdown(cancel_futures=True)
        if self._pool is not None:
            self._pool.close()

    # -- samples

    def _host(self, cursor: int, batch: int) -> _Host:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == (cursor, batch):
            return ahead[1].result()
        return self._read(cursor, batch)

    def _read(self, cursor: int, batch: int) -> _Host:
        """Read this worker's rows of a step; called from the thread, too."""
        data = self._world.data
        rows = batch // data.size
        numbers = self._corpus.order.numbers(cursor, (rows * data.rank, rows * (data.rank + 1)))
        pooled = self._pool is not None and batch == self._corpus.order.batch
        media = self._pool.read(cursor) if pooled and self._pool is not None else self._corpus.reader.read(numbers)
        return _Host(media, draw(self._recipe.seed, TRAINING, numbers, self._shape(media)))

    def _shape(self, media: MediaBatch) -> tuple[int, ...]:
        """Return the shape of a sample: channels, frames, height, width."""
        return (self._model.in_channels, *media.pixels.shape[1:4])

    def _noised(self, media: MediaBatch, drawn: Draw, counting: int | None = None) -> CountedBatch:
        """Return samples on the device, noised; only the first `counting` of them count."""
        path = self._path(media)
        times_N = path.times(drawn.uniform_N)
        columns = self._objective.sample_columns(times_N, path.weights(times_N))
        if counting is not None:
            columns = self._objective.padded(columns, counting)
        data = to_samples(self._on_device(torch.from_numpy(media.pixels)), self._model.in_channels)
        noise = self._on_device(torch.from_numpy(drawn.noise))
        inputs = mixed(path.scales(times_N), data, noise)
        targets = mixed(path.target(times_N), data, noise)
        dropped_N = drawn.drop_N < self._drop
        conditions = self._conditions(media, dropped_N)
        if self._model.beside_channels:
            conditions[IMAGE] = first_frame(data, self._model.beside_channels)
        on_device = {name: self._on_device(torch.from_numpy(column)) for name, column in columns.items()}
        read = Batch(media.numbers, media.numbers, len(media.numbers), None, columns)
        counts = self._objective.counts(read)
        return CountedBatch(DeviceBatch(inputs, targets, None, {**on_device, **conditions}), int(counts[0]), counts)

    @property
    def _drop(self) -> float:
        assert isinstance(self._recipe.objective, DiffusionObjective)
        return self._recipe.objective.drop_condition

    def _path(self, media: MediaBatch) -> NoisePath:
        assert isinstance(self._recipe.objective, DiffusionObjective)
        return noise_path(self._recipe.objective, self._model.tokens(*media.pixels.shape[1:4]))

    def _conditions(self, media: MediaBatch, dropped_N: np.ndarray) -> dict[str, Tensor]:
        """Return the columns of classes or captions, with those of nothing where they are dropped."""
        if self._model.conditioning == "class":
            assert media.labels is not None, "checked when the data was opened"
            assert self._model.num_classes is not None
            labels_N = np.where(dropped_N, self._model.num_classes, media.labels)
            return {LABEL: self._on_device(torch.from_numpy(labels_N))}
        assert self._encode is not None, "a model of texts has an encoder"
        captions = ["" if drop else caption for caption, drop in zip(media.captions, dropped_N, strict=True)]
        states, mask = self._encode(captions)
        return {TEXT: states, TEXT_MASK: mask}

    def _on_device(self, tensor: Tensor) -> Tensor:
        return on_device(tensor, self._world.device)


def pooled_reader(
    recipe: Recipe, corpus: MediaCorpus, world: World, on_replaced: Callable[[str], None] | None
) -> PooledReader | None:
    """Return a reader with decoder processes, as many as the recipe says; None if the worker decodes itself."""
    media = recipe.data.media
    assert media is not None, "the corpus is of media"
    count = media.decoders if media.decoders is not None else VIDEO_DECODERS * (recipe.data.kind == "video")
    if not count:
        return None
    rows = corpus.order.batch // world.data.size
    own = (rows * world.data.rank, rows * (world.data.rank + 1))
    return PooledReader(corpus.reader.dataset, corpus.order, rows=own, processes=count, on_replaced=on_replaced)


def mixed(factors: tuple[np.ndarray, np.ndarray], data: Tensor, noise: Tensor) -> Tensor:
    """Return data and noise added up with a factor each per sample."""
    of_data, of_noise = (
        on_device(torch.from_numpy(factor_N).float(), data.device).view(-1, *(1,) * (data.dim() - 1))
        for factor_N in factors
    )
    return of_data * data + of_noise * noise
