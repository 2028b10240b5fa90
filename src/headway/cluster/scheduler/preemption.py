"""Who yields: of the jobs that run and may be stopped, those whose stopping loses least and makes room for a gang.

Stopping a job loses the work it has done since it last saved, and what a restart takes, times its GPUs.
"""

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.placement import ANYWHERE, FreeGpus
from headway.cluster.scheduler.policy import Rows
from headway.cluster.scheduler.snapshot import ClusterSnapshot

__all__ = ["PreemptionCandidates"]


class PreemptionCandidates:
    """Jobs that may be stopped now, each on its nodes."""

    def __init__(self, snapshot: ClusterSnapshot, rows: Rows, now: float) -> None:
        self.rows = rows
        self.lost_gpu_s = snapshot.lost_gpu_s(rows, now)
        self.there = np.ones(len(rows), np.bool_)
        """Which of them have not been stopped yet."""
        pools, places = zip(*(snapshot.places[row] for row in rows.tolist()), strict=True) if len(rows) else ((), ())
        nodes = [place.nodes for place in places] or [np.empty(0, np.int32)]
        counts = [len(some) for some in nodes][: len(rows)]
        self._index = np.repeat(np.arange(len(rows)), counts)
        self._pool = np.array(pools, np.int64)[self._index]
        self._node = np.concatenate(nodes)
        self._gpus = np.concatenate([place.gpus for place in places] or [np.empty(0, np.int32)])
        # what one node of a gang costs: stopping it frees the others too
        self._cost = self.lost_gpu_s[self._index] / np.repeat(np.array(counts, np.float64), counts)

    def cheapest_victims(
        self, room: FreeGpus, pool: int, gpus: int, may: NDArray[np.bool_], within: int = ANYWHERE
    ) -> NDArray[np.int64] | None:
        """Which of those that `may` be stopped yield so that a gang fits; None where not even all of them do."""
        here = np.flatnonzero((self._pool == pool) & (may & self.there)[self._index])
        here = here[room.usable[self._node[here]]]  # what a drained node gives back is nobody's
        if not len(here):
            return None
        whole, rest = divmod(gpus, room.size)
        if whole:
            return self._whole_nodes(room, here, whole + (rest > 0), within)
        return self._one_node(room, here, gpus)

    def _one_node(self, room: FreeGpus, here: NDArray[np.int64], gpus: int) -> NDArray[np.int64] | None:
        """One job that is enough, or on a node those that lose least for each GPU: whichever loses less."""
        lost, freed, nodes = self.lost_gpu_s[self._index[here]], self._gpus[here], self._node[here]
        alone = np.flatnonzero(freed + room.free[nodes] >= gpus)
        one = int(alone[np.argmin(lost[alone])]) if len(alone) else None
        order = np.lexsort((lost / freed, nodes))
        first = np.flatnonzero(np.r_[True, nodes[order][1:] != nodes[order][:-1]])
        lengths = np.diff(np.r_[first, len(order)])
        sums, losses = np.cumsum(freed[order]), np.cumsum(lost[order])
        sums -= np.repeat(sums[first] - freed[order[first]], lengths)
        losses -= np.repeat(losses[first] - lost[order[first]], lengths)
        enough = np.flatnonzero(sums + room.free[nodes[order]] >= gpus)
        if not len(enough):
            return None
        last = int(enough[np.argmin(losses[enough])])
        if one is not None and lost[one] <= losses[last]:
            return np.array([self._index[here[one]]])
        begin = int(first[np.searchsorted(first, last, side="right") - 1])
        chosen = order[begin : last + 1]
        return np.unique(self._index[here[self._needed(chosen, freed, gpus - int(room.free[nodes[chosen[0]]]))]])

    @staticmethod
    def _needed(chosen: NDArray[np.int64], freed: NDArray[np.int32], gpus: int) -> list[int]:
        """Those of some jobs on a node that are needed for so many GPUs: the dearest is spared first."""
        kept: list[int] = chosen.tolist()
        spare = int(freed[chosen].sum()) - gpus
        for number in chosen[::-1].tolist():
            if freed[number] <= spare:
                kept.remove(number)
                spare -= int(freed[number])
        return kept

    def _whole_nodes(
        self, room: FreeGpus, here: NDArray[np.int64], count: int, within: int
    ) -> NDArray[np.int64] | None:
        """The nodes that can be emptied at the least loss, all in one domain where they must be."""
        freed = room.free + np.bincount(self._node[here], self._gpus[here], len(room.free)).astype(np.int64)
        lost = np.bincount(self._node[here], self._cost[here], len(room.free))
        able = np.flatnonzero(freed >= room.size)
        if len(able) < count:
            return None
        domain = np.zeros(len(room.free), np.int64) if within == ANYWHERE else room.domains[within]
        order = able[np.lexsort((lost[able], domain[able]))]
        # of each domain the cheapest `count` nodes, by their sum
        first = np.flatnonzero(np.r_[True, domain[order][1:] != domain[order][:-1]])
        first = first[np.diff(np.r_[first, len(order)]) >= count]
        if not len(first):
            return None
        sums = np.r_[0.0, np.cumsum(lost[order])]
        best = int(first[np.argmin(sums[first + count] - sums[first])])
        chosen = np.zeros(len(room.free), np.bool_)
        chosen[order[best : best + count]] = True
        return np.unique(self._index[here[chosen[self._node[here]]]])
