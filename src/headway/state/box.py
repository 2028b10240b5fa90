"""Boxes: rectangular regions of a tensor's index space, and how they overlap. Pure arithmetic."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from operator import add


@dataclass(frozen=True, order=True, slots=True)
class Box:
    """The region [start, start + shape) of a tensor, dimension by dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.start) == len(self.shape), f"start {self.start} and shape {self.shape} differ in length"

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index, per dimension."""
        return tuple(start + size for start, size in zip(self.start, self.shape, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def inside(self, shape: tuple[int, ...]) -> bool:
        """Whether the box lies inside a tensor of this shape."""
        return len(shape) == len(self.start) and all(
            start >= 0 and stop <= size for start, stop, size in zip(self.start, self.stop, shape, strict=True)
        )

    def slices(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """The box as an index into an array whose first element is the tensor's element at `origin`."""
        return tuple(
            slice(start - zero, start - zero + size)
            for start, size, zero in zip(self.start, self.shape, origin, strict=True)
        )


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    start = tuple(map(max, a.start, b.start))
    shape = tuple(min(stop) - first for first, stop in zip(start, zip(a.stop, b.stop, strict=True), strict=True))
    return Box(start, shape) if all(size > 0 for size in shape) else None


def bands(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Cut a box into contiguous boxes of at most `limit` bytes (or one element), in row-major order."""
    if not box.volume or not box.shape:
        yield from [box] * box.volume
        return
    shape = box.shape
    inner = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]  # bytes of one index of each dim
    cut = next((dim for dim, size in enumerate(inner) if size <= limit), len(shape) - 1)
    rows, below = max(1, limit // inner[cut]), shape[cut + 1 :]
    for outer in product(*map(range, shape[:cut])):
        for begin in range(0, shape[cut], rows):
            start = tuple(map(add, box.start, (*outer, begin, *(0,) * len(below))))
            yield Box(start, (*(1,) * cut, min(rows, shape[cut] - begin), *below))


def tiling_fault(shape: tuple[int, ...], boxes: Iterable[Box]) -> str | None:
    """Return why these boxes do not tile a tensor of this shape exactly once, or None if they do."""
    boxes = sorted(boxes)
    for box in boxes:
        if not box.inside(shape):
            return f"the piece at {box.start} of shape {box.shape} is outside shape {shape}"
    open_boxes: list[Box] = []  # boxes that may reach the rows of the next box
    for box in boxes:
        open_boxes = [other for other in open_boxes if not shape or other.stop[0] > box.start[0]]
        for other in open_boxes:
            if overlap(box, other):
                return f"the pieces at {other.start} and {box.start} overlap"
        open_boxes.append(box)
    covered = sum(box.volume for box in boxes)
    if covered != math.prod(shape):
        return f"the pieces cover {covered} of {math.prod(shape)} elements"
    return None
