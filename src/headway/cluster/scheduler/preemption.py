"""Choice of victims: the running jobs whose preemption loses least and makes room for a gang.

Preempting a job loses the work since its last checkpoint and the time of a restart, times its GPUs.
"""

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.placement import ANYWHERE, FreeGpus
from headway.cluster.scheduler.policy import Flags, Rows
from headway.cluster.scheduler.snapshot import ClusterSnapshot


class PreemptionCandidates:
    """Jobs that may be preempted now, at least one, and the nodes they hold."""

    def __init__(self, snapshot: ClusterSnapshot, rows: Rows, now: float) -> None:
        self.rows = rows
        self.lost_gpu_s = snapshot.lost_gpu_s(rows, now)
        self.running = np.ones(len(rows), np.bool_)
        """Which of them have not been preempted yet."""
        held = [snapshot.placements[row] for row in rows.tolist()]
        nodes = [placement.nodes for _, placement in held]
        counts = [len(of_job) for of_job in nodes]
        # one entry per candidate and node
        self._index = np.repeat(np.arange(len(rows)), counts)
        self._pool = np.array([pool for pool, _ in held], np.int64)[self._index]
        self._node = np.concatenate(nodes)
        self._gpus = np.concatenate([placement.gpus for _, placement in held])
        # the cost of one node of a gang: preempting it frees the others too
        self._cost = self.lost_gpu_s[self._index] / np.repeat(np.array(counts, np.float64), counts)

    def cheapest_victims(
        self, free_gpus: FreeGpus, pool: int, gpus: int, allowed: Flags, within: int = ANYWHERE
    ) -> NDArray[np.int64] | None:
        """Return the `allowed` candidates to preempt so that a gang fits; None if not even all of them suffice."""
        here = np.flatnonzero((self._pool == pool) & (allowed & self.running)[self._index])
        here = here[free_gpus.usable[self._node[here]]]  # GPUs freed on a draining node cannot be used
        if not len(here):
            return None
        whole, rest = divmod(gpus, free_gpus.size)
        if whole:
            return self._empty_nodes(free_gpus, here, whole + (rest > 0), within)
        return self._free_on_one_node(free_gpus, here, gpus)

    def _free_on_one_node(self, free_gpus: FreeGpus, here: NDArray[np.int64], gpus: int) -> NDArray[np.int64] | None:
        """Return one job that suffices, or those of a node that lose least per GPU: whichever loses less."""
        lost, freed, nodes = self.lost_gpu_s[self._index[here]], self._gpus[here], self._node[here]
        sufficient = np.flatnonzero(freed + free_gpus.free[nodes] >= gpus)
        single = int(sufficient[np.argmin(lost[sufficient])]) if len(sufficient) else None
        order = np.lexsort((lost / freed, nodes))
        first = np.flatnonzero(np.r_[True, nodes[order][1:] != nodes[order][:-1]])
        lengths = np.diff(np.r_[first, len(order)])
        sums, losses = np.cumsum(freed[order]), np.cumsum(lost[order])
        sums -= np.repeat(sums[first] - freed[order[first]], lengths)
        losses -= np.repeat(losses[first] - lost[order[first]], lengths)
        enough = np.flatnonzero(sums + free_gpus.free[nodes[order]] >= gpus)
        if not len(enough):
            return None
        last = int(enough[np.argmin(losses[enough])])
        if single is not None and lost[single] <= losses[last]:
            return np.array([self._index[here[single]]])
        begin = int(first[np.searchsorted(first, last, side="right") - 1])
        chosen = order[begin : last + 1]
        needed = self._needed(chosen, freed, gpus - int(free_gpus.free[nodes[chosen[0]]]))
        return np.unique(self._index[here[needed]])

    @staticmethod
    def _needed(chosen: NDArray[np.int64], freed: NDArray[np.int32], gpus: int) -> list[int]:
        """Return the jobs of a node that are needed to free `gpus`; the most expensive is spared first."""
        needed: list[int] = chosen.tolist()
        excess = int(freed[chosen].sum()) - gpus
        for number in chosen[::-1].tolist():
            if freed[number] <= excess:
                needed.remove(number)
                excess -= int(freed[number])
        return needed

    def _empty_nodes(
        self, free_gpus: FreeGpus, here: NDArray[np.int64], count: int, within: int
    ) -> NDArray[np.int64] | None:
        """Return the jobs on the `count` nodes that are cheapest to empty, in one domain if required."""
        size, num_nodes = free_gpus.size, len(free_gpus.free)
        freed = free_gpus.free + np.bincount(self._node[here], self._gpus[here], num_nodes).astype(np.int64)
        lost = np.bincount(self._node[here], self._cost[here], num_nodes)
        able = np.flatnonzero(freed >= size)
        if len(able) < count:
            return None
        domain = np.zeros(num_nodes, np.int64) if within == ANYWHERE else free_gpus.domains[within]
        order = able[np.lexsort((lost[able], domain[able]))]
        # of each domain the cheapest `count` nodes, by their sum
        first = np.flatnonzero(np.r_[True, domain[order][1:] != domain[order][:-1]])
        first = first[np.diff(np.r_[first, len(order)]) >= count]
        if not len(first):
            return None
        sums = np.r_[0.0, np.cumsum(lost[order])]
        best = int(first[np.argmin(sums[first + count] - sums[first])])
        chosen = np.zeros(num_nodes, np.bool_)
        chosen[order[best : best + count]] = True
        return np.unique(self._index[here[chosen[self._node[here]]]])
