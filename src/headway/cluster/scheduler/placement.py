"""Placement of gangs: which nodes, and how many GPUs of each.

A gang smaller than a node gets one node, the fullest that fits it, so that empty nodes stay free for larger gangs; with
`pack_with`, the node with most GPUs of such jobs, so that other nodes have none. A larger gang takes whole nodes, and
for the remainder the fullest node that fits it. It goes into the smallest network domain that holds it (a rack before a
block), and of those into the one with the fewest whole nodes to spare. So if a gang fits, every smaller one does, and
one failure answers for all larger gangs.
"""

from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

PackWith = NDArray[np.int32] | NDArray[np.float64]
ANYWHERE = -1
"""Level of a gang that may span all network domains."""


@dataclass(frozen=True)
class Placement:
    """Nodes of a pool, and the GPUs used on each."""

    nodes: NDArray[np.int32]
    gpus: NDArray[np.int32]

    @cached_property
    def total(self) -> int:
        """GPUs of all nodes."""
        return int(self.gpus.sum())


@dataclass(frozen=True)
class Kept:
    """What a job that was told to stop holds until it has exited."""

    placement: Placement
    """Its nodes, even those where it keeps no GPU."""
    cpus: NDArray[np.float64]
    """On each of them."""
    memory_bytes: NDArray[np.float64]
    """On each of them."""


class FreeGpus:
    """Scratch copy of the free GPUs of a pool, to try placements on."""

    def __init__(
        self,
        free: NDArray[np.int32],
        size: int,
        domains: NDArray[np.int32] | None = None,
        usable: NDArray[np.bool_] | None = None,
    ) -> None:
        """`domains`: per level, from the smallest, the domain number of each node. Nodes that are not `usable` have no
        free GPUs, whatever is released on them."""
        self.free = free.copy() if usable is None or usable.all() else np.where(usable, free, 0)
        self.usable = np.ones(len(free), np.bool_) if usable is None else usable
        self.size = size
        self.domains = np.empty((0, len(free)), np.int32) if domains is None else domains
        self.total = int(self.free.sum())
        self._counts: list[int] = np.bincount(self.free, minlength=size + 1).tolist()
        """How many nodes have 0, 1, 2 ... GPUs free."""
        self._heaps: dict[int, list[int]] = {}
        """Heap of nodes per number of free GPUs, built on first use; outdated entries are skipped."""

    @property
    def whole_nodes(self) -> int:
        """Nodes with all GPUs free."""
        return self._counts[self.size]

    def copy(self, at_most: NDArray[np.int32] | None = None) -> "FreeGpus":
        """Return an independent copy, with at most `at_most` GPUs free per node."""
        free = self.free if at_most is None else np.minimum(self.free, at_most)
        return FreeGpus(free, self.size, self.domains, self.usable)

    def only(self, nodes: NDArray[np.bool_]) -> "FreeGpus":
        """Return an independent copy where only some of the nodes are usable."""
        return FreeGpus(self.free, self.size, self.domains, self.usable & nodes)

    def largest_gang(self, within: int = ANYWHERE) -> int:
        """Return the GPUs of the largest gang that fits, or fits into one domain of a level."""
        if within == ANYWHERE or not self.whole_nodes:
            most = next((free for free in range(self.size - 1, 0, -1) if self._counts[free]), 0)
            return self.whole_nodes * self.size + most
        partial = np.where(self.free < self.size, self.free, 0)
        level = self.domains[within]
        whole = np.bincount(level, self.free == self.size)
        rest = np.zeros(len(whole))
        np.maximum.at(rest, level, partial)
        return int((whole * self.size + rest).max())

    def find(
        self, gpus: int, within: int = ANYWHERE, pack_with: PackWith | None = None, machines: int = 0
    ) -> Placement | None:
        """Return a placement for a gang, within one domain of a level if given; None if it does not fit.

        A gang smaller than a node goes where `pack_with` is highest, such as the GPUs of jobs that it should join. With
        `machines`, it gets so many nodes and as many GPUs on each.
        """
        if not gpus or (machines and gpus != machines * self.size and (machines > 1 or gpus > self.size)):
            return self._find_even(max(machines, 1), gpus // max(machines, 1), within)
        if gpus > self.total or not self.size:
            return None
        whole, rest = divmod(gpus, self.size)
        if whole > self.whole_nodes:
            return None
        if not whole:
            node = self._fullest(rest) if pack_with is None else self._most_packed(rest, pack_with)
            return None if node is None else Placement(np.array([node], np.int32), np.array([rest], np.int32))
        for level in self.domains if within == ANYWHERE else self.domains[: within + 1]:
            counts = np.bincount(level[self.free == self.size], minlength=1)
            for domain in np.argsort(counts, kind="stable")[np.searchsorted(np.sort(counts), whole) :]:
                placement = self._find_whole(level == domain, whole, rest)
                if placement is not None:
                    return placement
        return self._find_whole(None, whole, rest) if within == ANYWHERE else None

    def _find_even(self, machines: int, gpus: int, within: int) -> Placement | None:
        """Return the fullest nodes that fit `gpus` each, in the smallest domain that has so many; `gpus` may be 0."""
        able = self.usable & (self.free >= gpus)
        levels = self.domains if within == ANYWHERE else self.domains[: within + 1]
        masks = [level == domain for level in levels for domain in np.unique(level[able])]
        for mask in (*masks, *([np.ones_like(able)] if within == ANYWHERE else [])):
            nodes = np.flatnonzero(able & mask)
            if len(nodes) >= machines:
                chosen = nodes[np.argsort(self.free[nodes], kind="stable")][:machines]
                return Placement(np.sort(chosen).astype(np.int32), np.full(machines, gpus, np.int32))
        return None

    def _most_packed(self, gpus: int, pack_with: PackWith) -> int | None:
        """Return the node that fits and has most of `pack_with`; of equals the fullest."""
        able = np.flatnonzero(self.free >= gpus)
        if not len(able):
            return None
        return int(able[(pack_with[able] * (self.size + 1) - self.free[able]).argmax()])

    def _fullest(self, gpus: int) -> int | None:
        """Return the fullest node that fits; of equals the first."""
        free = next((free for free in range(gpus, self.size + 1) if self._counts[free]), None)
        if free is None:
            return None
        if free not in self._heaps:
            self._heaps[free] = np.flatnonzero(self.free == free).tolist()
        heap = self._heaps[free]
        while self.free[heap[0]] != free:
            heappop(heap)
        return heap[0]

    def _find_whole(self, domain: NDArray[np.bool_] | None, whole: int, rest: int) -> Placement | None:
        """Return `whole` nodes, and `rest` GPUs of one more, all in one domain."""
        free = self.free if domain is None else np.where(domain, self.free, 0)
        nodes = np.flatnonzero(free == self.size)[:whole]
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

    def take(self, placement: Placement) -> None:
        """Count a placement as used."""
        self._update(placement, -1)

    def release(self, placement: Placement) -> None:
        """Count a placement as free again."""
        self._update(placement, 1)

    def _update(self, placement: Placement, sign: int) -> None:
        for node, gpus in zip(placement.nodes.tolist(), placement.gpus.tolist(), strict=True):
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
