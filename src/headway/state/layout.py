"""Layouts: which region of a tensor each of its holders has. Pure arithmetic.

A holder is a number that stands for whatever has a part of the tensor: a rank, a file, a peer, an inference engine.
Holders of the same box are copies; the distinct boxes tile the tensor.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from headway.state.box import Box, overlap


@dataclass(frozen=True, slots=True)
class LayoutPart:
    """A holder and its region, which may be empty."""

    holder: int
    box: Box


@dataclass(frozen=True)
class Layout:
    """How a tensor is distributed over holders; each holder has at most one part."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    parts: tuple[LayoutPart, ...]


def replicated(shape: Sequence[int], holders: Sequence[int]) -> Layout:
    """Return the layout with a copy of the whole tensor on each holder."""
    box = Box((0,) * len(shape), tuple(shape))
    return Layout(tuple(shape), tuple(LayoutPart(holder, box) for holder in holders))


def sharded(
    shape: Sequence[int],
    mesh: Sequence[int],
    cuts: Sequence[tuple[int, int]],
    ranks: Sequence[int] | None = None,
) -> Layout:
    """Return the layout of a tensor sharded over a mesh of ranks; axes without a cut hold copies.

    `mesh` has the sizes of the axes, the last one fastest, and `ranks[i]` is the rank at position i (by default i).
    `cuts` are pairs (mesh axis, tensor dim), applied in order: see `box_at`.
    """
    ranks = range(math.prod(mesh)) if ranks is None else ranks
    assert len(ranks) == math.prod(mesh), f"{len(ranks)} ranks for a mesh of {tuple(mesh)}"
    boxes: dict[tuple[int, ...], Box] = {}  # shared by copies, which saves most of the work when there are many
    parts = []
    for rank, coordinate in zip(ranks, product(*map(range, mesh)), strict=True):
        shard = tuple([coordinate[axis] for axis, _ in cuts])
        if shard not in boxes:
            boxes[shard] = box_at(shape, mesh, cuts, coordinate)
        parts.append(LayoutPart(rank, boxes[shard]))
    return Layout(tuple(shape), tuple(parts))


def box_at(
    shape: Sequence[int], mesh: Sequence[int], cuts: Sequence[tuple[int, int]], coordinate: Sequence[int]
) -> Box:
    """Return the region at one coordinate of the mesh.

    Each cut divides what the cuts before it left, as torch.chunk does: into chunks of size / axis, rounded up, the
    last ones shorter or empty. Two cuts of one dim nest: first tensor parallel, say, then FSDP within its shard.
    """
    assert len({axis for axis, _ in cuts}) == len(cuts), f"an axis cuts twice in {cuts}"
    start, size = [0] * len(shape), list(shape)
    for axis, dim in cuts:
        chunk = -(-size[dim] // mesh[axis])
        before = min(chunk * coordinate[axis], size[dim])
        start[dim] += before
        size[dim] = min(chunk, size[dim] - before)
    return Box(tuple(start), tuple(size))


class BoxIndex:
    """An index of distinct boxes that finds overlaps by bisection, dim by dim.

    For boxes that form a grid, as sharding over a mesh does, a lookup takes one bisection per dim. A box that is far
    longer than its neighbours makes all of them candidates along its length.
    """

    __slots__ = ("_below", "_boxes", "_dim", "_reach", "_starts")

    def __init__(self, boxes: Collection[Box], dim: int = 0) -> None:
        self._boxes = boxes
        self._dim = dim
        if len(boxes) <= 1:
            return
        groups: dict[tuple[int, int], list[Box]] = {}
        for box in boxes:
            groups.setdefault((box.start[dim], box.start[dim] + box.shape[dim]), []).append(box)
        ordered = sorted(groups)
        self._starts = [start for start, _ in ordered]
        # The furthest stop so far, not each interval's own: bisection needs sorted values.
        self._reach = list(accumulate((stop for _, stop in ordered), max))
        self._below = [BoxIndex(groups[interval], dim + 1) for interval in ordered]

    def find(self, box: Box) -> list[tuple[Box, Box]]:
        """Return the boxes that overlap a box, each with the intersection."""
        if len(self._boxes) <= 1:
            return [(other, common) for other in self._boxes if (common := overlap(other, box))]
        start = box.start[self._dim]
        first = bisect_right(self._reach, start)
        last = bisect_left(self._starts, start + box.shape[self._dim])
        return [pair for below in self._below[first:last] for pair in below.find(box)]
