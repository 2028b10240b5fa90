"""Layouts: which region of a tensor each of its holders has. Pure arithmetic.

A holder is a number that stands for whatever has a part of the tensor: a rank, a file, a peer, an inference engine.
Holders of the same box are copies of each other; the distinct boxes together are the tensor, each element once.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from headway.state.box import Box, overlap

__all__ = ["BoxIndex", "Layout", "LayoutPart", "box_at", "layout_fault", "replicated", "sharded"]


@dataclass(frozen=True, slots=True)
class LayoutPart:
    """A holder and the region that it has, which may be empty."""

    holder: int
    box: Box


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on its holders; each is named at most once, so that a holder and a region say where it is."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    parts: tuple[LayoutPart, ...]


def replicated(shape: Sequence[int], holders: Sequence[int]) -> Layout:
    """A copy of the whole tensor on each holder."""
    box = Box((0,) * len(shape), tuple(shape))
    return Layout(tuple(shape), tuple(LayoutPart(holder, box) for holder in holders))


def sharded(
    shape: Sequence[int],
    mesh: Sequence[int],
    cuts: Sequence[tuple[int, int]],
    ranks: Sequence[int] | None = None,
) -> Layout:
    """A tensor cut over a mesh of ranks; the axes that no cut names hold copies.

    `mesh` has the sizes of the axes, the last one fastest, and `ranks[i]` is the rank at place i (by default i).
    `cuts` are pairs (mesh axis, tensor dim) in the order in which they cut: see `box_at`.
    """
    ranks = range(math.prod(mesh)) if ranks is None else ranks
    assert len(ranks) == math.prod(mesh), f"{len(ranks)} ranks for a mesh of {tuple(mesh)}"
    boxes: dict[tuple[int, ...], Box] = {}  # copies share one, which saves most of the work where there are many
    parts = []
    for rank, place in zip(ranks, product(*map(range, mesh)), strict=True):
        among_cuts = tuple([place[axis] for axis, _ in cuts])
        if among_cuts not in boxes:
            boxes[among_cuts] = box_at(shape, mesh, cuts, place)
        parts.append(LayoutPart(rank, boxes[among_cuts]))
    return Layout(tuple(shape), tuple(parts))


def box_at(shape: Sequence[int], mesh: Sequence[int], cuts: Sequence[tuple[int, int]], place: Sequence[int]) -> Box:
    """The region at one coordinate of the mesh.

    Each cut divides what the cuts before it left, as torch.chunk does: into chunks of size / axis, rounded up, the
    last ones shorter or empty. Two cuts of one dim nest: first tensor parallel, say, then FSDP within its share.
    """
    assert len({axis for axis, _ in cuts}) == len(cuts), f"an axis cuts twice in {cuts}"
    start, size = [0] * len(shape), list(shape)
    for axis, dim in cuts:
        chunk = -(-size[dim] // mesh[axis])
        before = min(chunk * place[axis], size[dim])
        start[dim] += before
        size[dim] = min(chunk, size[dim] - before)
    return Box(tuple(start), tuple(size))


def layout_fault(layout: Layout) -> str | None:
    """Why these parts are no layout of their tensor, or None when they are; nothing checks this at construction."""
    holders: set[int] = set()
    first: dict[Box, int] = {}
    for holder, box in ((part.holder, part.box) for part in layout.parts):
        if holder in holders:
            return f"holder {holder} is named twice"
        if not box.inside(layout.shape):
            return f"the part of holder {holder}, at {box.start} of shape {box.shape}, is outside shape {layout.shape}"
        holders.add(holder)
        first.setdefault(box, holder)
    index = BoxIndex(first)
    for box, holder in first.items():
        for other, _ in index.find(box):
            if other != box:
                return f"the parts of holders {holder} and {first[other]} overlap and are not the same"
    covered, size = sum(box.volume for box in first), math.prod(layout.shape)
    return None if covered == size else f"the parts have {covered} of its {size} elements"


class BoxIndex:
    """Distinct boxes, sorted dim by dim, so that those which overlap another are found without trying each.

    Boxes that form a grid, as cuts over a mesh do, are found in the time of a bisection for each dim. Others are too,
    but a box that is far longer than its neighbours makes them all candidates along its length.
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
        # The furthest stop so far rather than each one's own: bisection needs it to rise.
        self._reach = list(accumulate((stop for _, stop in ordered), max))
        self._below = [BoxIndex(groups[interval], dim + 1) for interval in ordered]

    def find(self, box: Box) -> list[tuple[Box, Box]]:
        """Those that share elements with a box, each with the region that both have."""
        if len(self._boxes) <= 1:
            return [(other, common) for other in self._boxes if (common := overlap(other, box))]
        start = box.start[self._dim]
        first = bisect_right(self._reach, start)
        last = bisect_left(self._starts, start + box.shape[self._dim])
        return [pair for below in self._below[first:last] for pair in below.find(box)]
