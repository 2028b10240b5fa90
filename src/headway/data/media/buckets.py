"""Which bucket a clip belongs to, and the segments of clips that samples are taken from: pure functions of an index.

A bucket is a size and a number of frames. A clip goes to the bucket with the most frames that it is long enough for,
and of those to the size of the nearest shape that needs no enlarging.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headway.data.media.dataset import Ints, MediaIndex
from headway.data.media.specs import span
from headway.recipe.media import Media

SHAPE_STEP = 0.05
"""Aspect ratios that differ by less than this from a clip's are equally near."""


class BucketShape(NamedTuple):
    """What the samples of a bucket are."""

    width: int
    height: int
    frames: int

    @property
    def pixels(self) -> int:
        """Pixels of a sample, which its tokens are proportional to."""
        return self.width * self.height * self.frames


def assign_buckets(index: MediaIndex, shapes: Sequence[BucketShape], stride: int) -> Ints:
    """Return the number of each clip's bucket; -1 for clips that are too short for any."""
    best = np.full(len(index), -1, dtype=np.int64)
    needed = np.array([span(shape.frames, stride) for shape in shapes])
    longest = np.array([shape.frames for shape in shapes])
    fits = index.frames[:, None] >= needed
    most = np.where(fits, longest, 0).max(axis=1, initial=0)
    # Sizes are tried from the smallest: of equals, the last one wins.
    for number in sorted(range(len(shapes)), key=lambda i: shapes[i].pixels):
        candidate = (most > 0) & (longest[number] == most)
        better = candidate & ((best < 0) | _nearer(index, shapes[number], shapes, best))
        best[better] = number
    return best


def _nearer(index: MediaIndex, shape: BucketShape, shapes: Sequence[BucketShape], best: Ints) -> np.ndarray:
    """Return for which clips a shape is at least as near as their best one so far."""
    sizes = np.array([(other.width, other.height) for other in shapes])[np.maximum(best, 0)]
    enlarging, ratio = _distance(index, np.array(shape.width), np.array(shape.height))
    best_enlarging, best_ratio = _distance(index, sizes[:, 0], sizes[:, 1])
    both_shrink = (enlarging <= 1) & (best_enlarging <= 1)
    less = enlarging < np.maximum(best_enlarging, 1)
    nearer: np.ndarray = np.where(
        both_shrink, ratio <= best_ratio, less | ((enlarging == best_enlarging) & (ratio < best_ratio))
    )
    return nearer


def _distance(index: MediaIndex, width: np.ndarray, height: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return by how much clips are enlarged to cover a size, and how far its shape is from theirs, in steps."""
    enlarging = np.maximum(width / index.width, height / index.height)
    across, down = index.width * height, index.height * width
    ratio = np.floor((np.maximum(across, down) / np.minimum(across, down) - 1) / SHAPE_STEP)
    return enlarging, ratio


class Segments(NamedTuple):
    """Parts of clips: frames `first` to `end` - 1 of a clip."""

    clip: Ints
    first: Ints
    end: Ints


def segments_of(index: MediaIndex, clips: Ints, shape: BucketShape, media: Media) -> Segments:
    """Return what an epoch takes samples from: whole clips, or their groups of pictures.

    A group that is too short for a sample is joined with those after it, at the end of a clip with those before.
    """
    if media.segment == "clip":
        return Segments(clips, np.zeros(len(clips), dtype=np.int64), index.frames[clips])
    least = span(shape.frames, media.stride)
    rows: list[tuple[int, int, int]] = []
    for clip in clips.tolist():
        frames = int(index.frames[clip])
        first = 0
        for keyframe in [*index.keyframes_of(clip)[1:].tolist(), frames]:
            # The rest of the clip must be long enough as well, or be a part of this segment.
            if keyframe - first >= least and (frames - keyframe >= least or keyframe == frames):
                rows.append((clip, first, keyframe))
                first = keyframe
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Segments(table[:, 0], table[:, 1], table[:, 2])
