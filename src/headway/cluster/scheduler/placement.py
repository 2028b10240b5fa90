"""Where a gang of GPUs can lie: which nodes, and how many GPUs of each.

A gang that fits into a node lies in one, the fullest that has room, so that empty nodes stay for larger gangs; where
it is to lie beside others of its kind, in the one that has most of them, so that other nodes have none. A
larger one takes whole nodes, and for what is left over the fullest that has room for that. It goes into the smallest
domain of the network that holds it (a rack before a block, say), and of those into the one with least to spare. So
whoever can place a gang can place every smaller one, and one failure answers for all that are larger.
"""

from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

__all__ = ["ANYWHERE", "FreeGpus", "Placement"]

ANYWHERE = -1
"""The level of a gang that may lie across all domains."""


@dataclass(frozen=True)
class Placement:
    """GPUs of nodes."""

    nodes: NDArray[np.int32]
    gpus: NDArray[np.int32]

    @cached_property
    def total(self) -> int:
        """GPUs in all."""
        return int(self.gpus.sum())


class FreeGpus:
    """Free GPUs of nodes of one size, to try placements on; the nodes themselves learn nothing of it."""

    def __init__(
        self,
        free: NDArray[np.int32],
        size: int,
        domains: NDArray[np.int32] | None = None,
        usable: NDArray[np.bool_] | None = None,
    ) -> None:
        """`domains`: of each level, from the smallest, the number of each node's domain. Of nodes that are not
        `usable` nothing is free, whatever is given back."""
        self.free = free.copy() if usable is None or usable.all() else np.where(usable, free, 0)
        self.usable = np.ones(len(free), np.bool_) if usable is None else usable
        self.size = size
        self.domains = np.empty((0, len(free)), np.int32) if domains is None else domains
        self.total = int(self.free.sum())
        self._counts: list[int] = np.bincount(self.free, minlength=size + 1).tolist()
        """How many nodes have 0, 1, 2 ... GPUs free."""
        self._heaps: dict[int, list[int]] = {}
        """Nodes by their free GPUs, the first first, where somebody has asked; those that have other numbers free by
        now are passed over."""

    @property
    def whole(self) -> int:
        """Nodes of which all is free."""
        return self._counts[self.size]

    def copy(self, at_most: NDArray[np.int32] | None = None) -> "FreeGpus":
        """Another to try on, with no more free than `at_most`."""
        free = self.free if at_most is None else np.minimum(self.free, at_most)
        return FreeGpus(free, self.size, self.domains, self.usable)

    def only(self, nodes: NDArray[np.bool_]) -> "FreeGpus":
        """Another to try on, of some of the nodes alone."""
        return FreeGpus(self.free, self.size, self.domains, self.usable & nodes)

    def largest(self, within: int = ANYWHERE) -> int:
        """GPUs of the largest gang that would find a place, or find one within a domain of a level."""
        if within == ANYWHERE or not self.whole:
            most = next((free for free in range(self.size - 1, 0, -1) if self._counts[free]), 0)
            return self.whole * self.size + most
        partial = np.where(self.free < self.size, self.free, 0)
        level = self.domains[within]
        whole = np.bincount(level, self.free == self.size)
        rest = np.zeros(len(whole))
        np.maximum.at(rest, level, partial)
        return int((whole * self.size + rest).max())

    def find(self, gpus: int, within: int = ANYWHERE, beside: NDArray[np.int32] | None = None) -> Placement | None:
        """A place for a gang, or one within a domain of a level; None where there is none. `beside`: of each node, GPUs
        of those that it is to lie with."""
        whole, rest = divmod(gpus, self.size)
        if gpus > self.total or whole > self.whole:
            return None
        if not whole and beside is not None:
            node = self._most(rest, beside)
        elif not whole:
            node = next((node for free in range(rest, self.size + 1) if (node := self._first(free)) is not None), None)
        if not whole:
            return None if node is None else Placement(np.array([node], np.int32), np.array([rest], np.int32))
        for level in self.domains if within == ANYWHERE else self.domains[: within + 1]:
            counts = np.bincount(level[self.free == self.size], minlength=1)
            for domain in np.argsort(counts, kind="stable")[np.searchsorted(np.sort(counts), whole) :]:
                place = self._in(level == domain, whole, rest)
                if place is not None:
                    return place
        return self._in(None, whole, rest) if within == ANYWHERE else None

    def _most(self, gpus: int, beside: NDArray[np.int32]) -> int | None:
        """Of the nodes with so many GPUs free the one with most `beside`, and of those the fullest."""
        able = np.flatnonzero(self.free >= gpus)
        if not len(able):
            return None
        return int(able[(beside[able] * (self.size + 1) - self.free[able]).argmax()])

    def _first(self, free: int) -> int | None:
        """The first node with so many GPUs free."""
        if not self._counts[free]:
            return None
        if free not in self._heaps:
            self._heaps[free] = np.flatnonzero(self.free == free).tolist()
        heap = self._heaps[free]
        while self.free[heap[0]] != free:
            heappop(heap)
        return heap[0]

    def _in(self, domain: NDArray[np.bool_] | None, whole: int, rest: int) -> Placement | None:
        """Whole nodes and GPUs of one more, all in a domain."""
        free = self.free if domain is None else np.where(domain, self.free, 0)
        nodes = np.flatnonzero(free == self.size)[:whole] if whole else np.empty(0, np.int64)
        if len(nodes) < whole:
            return None
        counts = np.full(whole, self.size, np.int32)
        if rest:
            scores = np.where(free >= rest, free, self.size + 1)
            scores[nodes] = self.size + 1
            best = int(scores.argmin())
            if scores[best] > self.size:
                return None
            nodes, counts = np.append(nodes, best), np.append(counts, np.int32(rest))
        return Placement(nodes.astype(np.int32), counts)

    def take(self, place: Placement) -> None:
        """Use a place."""
        self._change(place, -1)

    def give(self, place: Placement) -> None:
        """Have a place free again."""
        self._change(place, 1)

    def _change(self, place: Placement, sign: int) -> None:
        for node, gpus in zip(place.nodes.tolist(), place.gpus.tolist(), strict=True):
            if not self.usable[node]:
                continue
            before = int(self.free[node])
            after = before + sign * gpus
            self.free[node] = after
            self._counts[before] -= 1
            self._counts[after] += 1
            self.total += sign * gpus
            if after in self._heaps:
                heappush(self._heaps[after], node)
