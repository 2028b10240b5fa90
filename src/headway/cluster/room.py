"""Where a gang of GPUs can lie: which nodes, and how many GPUs of each.

A gang that fits into a node lies in one, the fullest that has room, so that empty nodes stay for larger gangs. A
larger one takes whole nodes, and for what is left over the fullest that has room for that. So whoever can place a
gang can place every smaller one, and one failure answers for all that are larger.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Placement", "Room"]


@dataclass(frozen=True)
class Placement:
    """GPUs of nodes."""

    nodes: NDArray[np.int32]
    gpus: NDArray[np.int32]

    @property
    def total(self) -> int:
        """GPUs in all."""
        return int(self.gpus.sum())


class Room:
    """Free GPUs of nodes of one size, to try placements on; the nodes themselves learn nothing of it."""

    def __init__(self, free: NDArray[np.int32], size: int) -> None:
        self.free = free.copy()
        self.size = size
        self.total = int(self.free.sum())
        self.whole = int(np.count_nonzero(self.free == size))

    def largest(self) -> int:
        """GPUs of the largest gang that would find a place."""
        if not self.whole:
            return int(self.free.max(initial=0))
        partial = self.free[self.free < self.size]
        return self.whole * self.size + int(partial.max(initial=0))

    def find(self, gpus: int) -> Placement | None:
        """A place for a gang; None where there is none."""
        whole, rest = divmod(gpus, self.size)
        if gpus > self.total or whole + (rest > 0 and not self._partial(rest)) > self.whole:
            return None
        nodes = np.flatnonzero(self.free == self.size)[:whole] if whole else np.empty(0, np.int64)
        counts = np.full(whole, self.size, np.int32)
        if rest:
            scores = np.where(self.free >= rest, self.free, self.size + 1)
            scores[nodes] = self.size + 1
            nodes, counts = np.append(nodes, scores.argmin()), np.append(counts, np.int32(rest))
        return Placement(nodes.astype(np.int32), counts.astype(np.int32))

    def _partial(self, gpus: int) -> bool:
        """Whether a node that is in use already has room for so many."""
        return bool(((self.free >= gpus) & (self.free < self.size)).any())

    def take(self, place: Placement) -> None:
        """Use a place."""
        self._change(place, -1)

    def give(self, place: Placement) -> None:
        """Have a place free again."""
        self._change(place, 1)

    def _change(self, place: Placement, sign: int) -> None:
        before = np.count_nonzero(self.free[place.nodes] == self.size)
        self.free[place.nodes] += sign * place.gpus
        self.whole += int(np.count_nonzero(self.free[place.nodes] == self.size) - before)
        self.total += sign * place.total
