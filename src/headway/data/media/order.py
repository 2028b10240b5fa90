"""Which part of which clip sample n of a run is: a pure function of the data version, the recipe, the seed and n.

Clips are divided into buckets (`headway.data.media.buckets`). A batch has one bucket, and every row of it as many
samples as have the tokens of one sample of the largest bucket. So rows have equal tokens if sizes divide each other,
and a run's position is the number of rows before it, whatever the number of workers.

A bucket's segments are traversed in epochs, each in an order of its own (`headway.data.order`). The `samples` of a
segment belong to one row of the batch and to the steps of one window, in an order of their own: one worker reads them
all, however many there are, and decodes their group of pictures once. Buckets take turns window by window, in
proportion to their rows.

Sources are held out, not clips: no held-out clip shares its source with a clip that is trained on.
"""

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from headway.data.media.buckets import BucketShape, Segments, assign_buckets, segments_of
from headway.data.media.dataset import Ints, MediaIndex
from headway.data.media.specs import SampleSpec, span
from headway.data.mixture import Rotation, rotation
from headway.data.order import Split, held_out, order_at, shuffled, split_windows
from headway.errors import DataError, plural
from headway.recipe import Data
from headway.recipe.media import Media

TURNS = 1024
"""Windows in which buckets take turns before their order repeats."""


@dataclass(frozen=True)
class Bucket:
    """Samples of one shape."""

    shape: BucketShape
    segments: Segments
    """Of the clips that are trained on."""
    per_row: int
    """Samples per row of a batch."""


@dataclass(frozen=True)
class MediaOrder:
    """The samples of a run; see `media_order`."""

    index: MediaIndex
    media: Media
    seed: int
    batch: int
    """Rows per step."""
    buckets: tuple[Bucket, ...]
    held_out_clips: Ints
    """In a fixed shuffled order."""
    held_out_buckets: Ints
    """The bucket of each."""
    too_short: int
    """Clips that have too few frames for any bucket."""

    @functools.cached_property
    def samples_per_number(self) -> int:
        """Sample numbers per row: those of the bucket with the most samples per row."""
        return max(bucket.per_row for bucket in self.buckets)

    @functools.cached_property
    def rows_per_epoch(self) -> int:
        """Rows in which every segment has had its samples, rounded up."""
        return sum(-(-len(b.segments.clip) * self.media.samples // b.per_row) for b in self.buckets)

    @functools.cached_property
    def _turns(self) -> Rotation:
        rows = [len(bucket.segments.clip) / bucket.per_row for bucket in self.buckets]
        turns = [max(1, round(TURNS * share / sum(rows))) for share in rows]
        return rotation([0] * len(turns), [Fraction(count, sum(turns)) for count in turns])

    def numbers(self, cursor: int, rows: tuple[int, int] | None = None) -> list[int]:
        """Return the numbers of the samples of a step that begins at row `cursor`; of some of its rows, if given."""
        low, high = rows or (0, self.batch)
        assert not cursor % self.batch or not self.aligned, "a step begins at a multiple of the batch"
        per_row = self.buckets[int(self._place(np.array([cursor]))[0][0])].per_row
        most = self.samples_per_number
        return [row * most + j for row in range(cursor + low, cursor + high) for j in range(per_row)]

    @property
    def aligned(self) -> bool:
        """Whether steps must begin at multiples of the batch: with several buckets, or samples that share windows."""
        return len(self.buckets) > 1 or self.media.steps_per_window > 1

    def _place(self, rows: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the bucket of rows, the number of their column among the bucket's, and their step in the window."""
        steps, column = np.divmod(rows, self.batch)
        windows, step = np.divmod(steps, self.media.steps_per_window)
        which, number = self._turns.at(windows)
        return which.astype(np.int64), number * self.batch + column, step

    def spec(self, number: int) -> SampleSpec:
        """Return sample `number` of the run."""
        return self.specs([number])[0]

    def specs(self, numbers: Sequence[int]) -> list[SampleSpec]:
        """Return samples by their numbers."""
        rows, within = np.divmod(np.array(numbers, dtype=np.int64), self.samples_per_number)
        which, columns, steps = self._place(rows)
        return [
            self._spec(*sample)
            for sample in zip(numbers, which.tolist(), columns.tolist(), steps.tolist(), within.tolist(), strict=True)
        ]

    def _spec(self, number: int, which: int, column: int, step: int, within: int) -> SampleSpec:
        bucket, length = self.buckets[which], self.media.steps_per_window
        if within >= bucket.per_row:
            raise DataError(f"there is no sample {number}: rows of its bucket have {bucket.per_row}")
        column = column * bucket.per_row + within
        if length > 1:
            key = (self.index.version, "steps", self.seed, which)
            step = int(shuffled(np.array([step]), length, np.array([column]), *key)[0, 0])
        turn, part = divmod(column * length + step, self.media.samples)
        count = len(bucket.segments.clip)
        split = Split(count, 0, f"{self.index.version}/media/{which}", by_number=True)
        segment = int(order_at(split, self.seed, turn, np.zeros(1, dtype=np.int64))[0])
        clip, first, end = (int(column[segment]) for column in bucket.segments)
        place, left, top, side, caption = _random_words(self.index.version, self.seed, "sample", number)
        length = span(bucket.shape.frames, self.media.stride)
        together = _random_words(self.index.version, self.seed, which, turn)[0]
        start = first + self._start(end - first - length + 1, length, part, place, together)
        random = (left, top) if self.media.crop == "random" else None
        flip = self.media.flip and side % 2 == 1
        chosen = caption if self.media.captions == "random" else 0
        return self._cut(number, clip, start, which, random, flip, chosen)._replace(segment=first)

    def _start(self, starts: int, length: int, part: int, place: int, together: int) -> int:
        """Return where sample `part` of a segment with so many possible starts begins.

        `place` is a random number of the sample, `together` one of all samples of the segment in this epoch.
        """
        samples = self.media.samples
        needed = (samples - 1) * length
        if self.media.placement == "adjacent" and needed < starts:
            return together % (starts - needed) + part * length
        low, high = part * starts // samples, (part + 1) * starts // samples
        return low + place % max(high - low, 1)

    def _cut(
        self, number: int, clip: int, start: int, which: int, random: tuple[int, int] | None, flip: bool, caption: int
    ) -> SampleSpec:
        shape, index = self.buckets[which].shape, self.index
        resize = cover((int(index.width[clip]), int(index.height[clip])), (shape.width, shape.height))
        slack = (resize[0] - shape.width, resize[1] - shape.height)
        left, top = (
            (slack[0] // 2, slack[1] // 2)
            if random is None
            else (random[0] % (slack[0] + 1), random[1] % (slack[1] + 1))
        )
        captions = 0 if self.media.captions == "none" else int(index.captions[clip])
        return SampleSpec(
            number=number,
            clip=clip,
            start=start,
            frames=shape.frames,
            stride=self.media.stride,
            resize=resize,
            crop=(left, top),
            size=(shape.width, shape.height),
            flip=flip,
            caption=caption % captions if captions else None,
            bucket=which,
        )

    def held_out(self, limit: int, rows: int) -> list[list[SampleSpec]]:
        """Return batches of at most `rows` held-out samples of one bucket each, at most `limit` samples in all.

        They are the same for every seed: the middle of each clip, cut at the center, with its first caption. Their
        numbers count from 0 on their own.
        """
        batches: list[list[SampleSpec]] = []
        chosen = list(
            enumerate(zip(self.held_out_clips[:limit].tolist(), self.held_out_buckets.tolist(), strict=False))
        )
        for which, bucket in enumerate(self.buckets):
            specs = []
            for number, (clip, its) in chosen:
                if its == which:
                    slack = int(self.index.frames[clip]) - span(bucket.shape.frames, self.media.stride)
                    specs.append(self._cut(number, clip, slack // 2, which, None, False, 0))
            batches += [specs[first : first + rows] for first in range(0, len(specs), rows)]
        return batches


def cover(clip: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    """Return the smallest width and height of a clip's shape that cover a size."""
    (across, down), (width, height) = clip, size
    if across * height >= down * width:
        return max(width, (2 * across * height + down) // (2 * down)), height
    return width, max(height, (2 * down * width + across) // (2 * across))


def media_order(index: MediaIndex, data: Data, seed: int, batch: int) -> MediaOrder:
    """Return the order of a run's samples; raise DataError if there is none to train on."""
    media = data.media
    assert media is not None, "data of this kind has its section"
    if index.kind != data.kind:
        other = "" if index.kind == "image" and media.frames != (1,) else f"--set data.kind={index.kind}, or "
        raise DataError(
            f"data.kind is {data.kind}, but the dataset holds data of kind {index.kind}",
            hint=f"{other}--set data.path=FOLDER of a dataset of kind {data.kind}",
        )
    shapes = [BucketShape(*shape) for shape in media.shapes]
    which = assign_buckets(index, shapes, media.stride)
    too_short = int((which < 0).sum())
    if too_short == len(index):
        needed = min(span(shape.frames, media.stride) for shape in shapes)
        raise DataError(
            f"no clip has the {plural(needed, 'frame')} of a sample: the longest has {int(index.frames.max())}",
            hint="lower data.media.frames or data.media.stride",
        )
    _check_captions(index, media)
    away = held_out_clips(index, data.holdout)
    buckets: list[Bucket] = []
    renumbered = np.full(len(shapes), -1, dtype=np.int64)
    most = max(shapes[number].pixels for number in np.unique(which[which >= 0]).tolist())
    for number, shape in enumerate(shapes):
        clips = np.flatnonzero((which == number) & ~away)
        if len(clips):
            renumbered[number] = len(buckets)
            buckets.append(Bucket(shape, segments_of(index, clips, shape, media), most // shape.pixels))
    if not buckets:
        raise DataError("every clip is held out or too short", hint="lower data.holdout, or add clips")
    kept = np.flatnonzero(away & (which >= 0))
    kept = kept[renumbered[which[kept]] >= 0]
    if len(kept):
        kept = kept[order_at(Split(len(kept), 0, f"{index.version}/held-out"), 0, 0, np.arange(len(kept)))]
    return MediaOrder(index, media, seed, batch, tuple(buckets), kept, renumbered[which[kept]], too_short)


def held_out_clips(index: MediaIndex, fraction: float) -> np.ndarray:
    """Return which clips are held out: all clips of a fraction of the sources, the same ones for every seed."""
    sources, which = np.unique(index.source, return_inverse=True)
    split = split_windows(len(sources), fraction, index.version)
    chosen = np.zeros(len(sources), dtype=np.bool_)
    chosen[held_out(split)] = True
    away: np.ndarray = chosen[which]
    return away


def _check_captions(index: MediaIndex, media: Media) -> None:
    """Raise DataError if captions are asked for and some clips, but not all, have none."""
    without = np.flatnonzero(index.captions == 0)
    if media.captions != "none" and 0 < len(without) < len(index):
        raise DataError(
            f"{plural(len(without), 'clip')} of {len(index):,} have no caption, the first is number {without[0]}",
            hint='caption them, or set data.media.captions = "none"',
        )


def sample_spec(index: MediaIndex, data: Data, seed: int, number: int, batch: int = 1) -> SampleSpec:
    """Return sample `number` of a run with so many rows per step; `media_order` is the way to many samples."""
    return media_order(index, data, seed, batch).spec(number)


def same_bucket(specs: Iterable[SampleSpec]) -> bool:
    """Return whether samples can be in one batch."""
    return len({(spec.size, spec.frames) for spec in specs}) <= 1


def _random_words(*key: object) -> tuple[int, ...]:
    """Return independent random numbers of a sample, or of the samples of a segment in an epoch."""
    digest = hashlib.sha512("/".join(map(str, ("headway-media-1", *key))).encode()).digest()
    return tuple(np.frombuffer(digest, dtype="<u8").tolist()[:5])
