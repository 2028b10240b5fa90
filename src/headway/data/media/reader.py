"""Read samples of images or video in this process; `headway.data.media.pool` has others decode them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.data.media.dataset import Clip, Ints, MediaDataset, open_media
from headway.data.media.decode import Pixels, decode_samples
from headway.data.media.order import MediaOrder, media_order, same_bucket
from headway.data.media.specs import SampleSpec
from headway.data.shards import check_data_version
from headway.errors import DataError
from headway.recipe import Data


@dataclass(frozen=True)
class MediaBatch:
    """Samples of one bucket."""

    pixels: npt.NDArray[np.uint8]
    """[N, frames, H, W, 3] in RGB; of images one frame."""
    captions: list[str]
    """Of each sample; empty where it has none."""
    labels: Ints | None
    """None if a sample has no label."""
    numbers: Ints
    """Of the samples in the run; of held-out ones, in their own count from 0."""


class MediaReader:
    """The samples of a run, each a function of its number alone."""

    def __init__(self, dataset: MediaDataset, order: MediaOrder) -> None:
        self.dataset, self.order = dataset, order

    def read(self, numbers: Sequence[int]) -> MediaBatch:
        """Read samples of the run, which belong to one bucket: those of a step (`MediaOrder.numbers`) do."""
        return self.read_specs(self.order.specs(numbers))

    def read_specs(self, specs: Sequence[SampleSpec]) -> MediaBatch:
        """Read samples of one bucket, held-out ones for example."""
        return make_batch(self.dataset, specs, self._decode(specs))

    def _decode(self, specs: Sequence[SampleSpec]) -> list[Pixels]:
        """Decode samples, those of one clip together."""
        by_clip: dict[int, list[int]] = {}
        for place, spec in enumerate(specs):
            by_clip.setdefault(spec.clip, []).append(place)
        out: dict[int, Pixels] = {}
        for number, places in by_clip.items():
            clip = self.dataset.clip(number)
            decoded = decode_samples(
                self.dataset.kind, self.dataset.content(clip), clip, [specs[place] for place in places]
            )
            out.update(zip(places, decoded, strict=True))
        return [out[place] for place in range(len(specs))]


def make_batch(dataset: MediaDataset, specs: Sequence[SampleSpec], pixels: Sequence[Pixels]) -> MediaBatch:
    """Return decoded samples with their captions and labels."""
    if not specs or not same_bucket(specs):
        raise DataError("samples of different sizes cannot be one batch", hint="read the numbers of one step")
    clips = [dataset.clip(spec.clip) for spec in specs]
    captions = [_caption(clip, spec) for clip, spec in zip(clips, specs, strict=True)]
    labels = [clip.label for clip in clips]
    known = [label for label in labels if label is not None]
    return MediaBatch(
        pixels=np.stack(pixels),
        captions=captions,
        labels=np.array(known, dtype=np.int64) if len(known) == len(labels) else None,
        numbers=np.array([spec.number for spec in specs], dtype=np.int64),
    )


def _caption(clip: Clip, spec: SampleSpec) -> str:
    return "" if spec.caption is None else clip.captions[spec.caption]


def open_reader(data: Data, seed: int, batch: int) -> MediaReader:
    """Open the data of a recipe for a run with so many rows per step; raise DataError naming what is wrong."""
    assert data.path is not None, "data of images or video is one folder"
    dataset = open_media(data.path, kind="image" if data.kind == "image" else "video")
    check_data_version(dataset.path, dataset.version, data.version)
    return MediaReader(dataset, media_order(dataset.index, data, seed, batch))
