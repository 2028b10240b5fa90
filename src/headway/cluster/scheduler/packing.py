"""Packing in small clusters: non-preemptible jobs share nodes by when they end, so that other nodes become empty.

In a cluster of many nodes, some are always about to become empty. In one of four or five, a single non-preemptible job
that runs for days on each of them keeps every gang of whole nodes from starting. So a job smaller than a node goes
where it keeps the node in use for the shortest additional time, by time limits; of equals, where such jobs hold most
GPUs.
"""

import math

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.policy import Flags, Rows
from headway.cluster.scheduler.snapshot import ClusterSnapshot

LARGE_SHARE = 1 / 8
"""A gang of whole nodes and more than this share of the cluster is large; if one node is more, the cluster is small."""


def large_gangs(snapshot: ClusterSnapshot, rows: Rows) -> Flags:
    """Return which gangs of whole nodes need a large share of the cluster: such nodes seldom become empty by chance.

    One whose deadline has passed is not worth emptying nodes for."""
    jobs, whole = snapshot.jobs, max(min((pool.size for pool in snapshot.nodes.pools), default=1), 2)
    large: Flags = (jobs.gpus[rows] > LARGE_SHARE * snapshot.gpus) & (jobs.gpus[rows] >= whole)
    return large & (jobs.deadline_s[rows] > snapshot.now_s)


def is_small(snapshot: ClusterSnapshot) -> bool:
    """Return whether a gang of one node is large."""
    return any(pool.size > LARGE_SHARE * snapshot.gpus for pool in snapshot.nodes.pools)


def busy_until_s(snapshot: ClusterSnapshot, now: float) -> list[NDArray[np.float64]]:
    """Return, per pool and node, when the last non-preemptible job there ends by its limit; `now` if there is none."""
    jobs = snapshot.jobs
    until_s = [np.full(pool.end - pool.first, float(now)) for pool in snapshot.nodes.pools]
    for row in snapshot.active[~jobs.preemptible[snapshot.active]].tolist():
        pool, placement = snapshot.placements[row]
        end_s = float(jobs.since_s[row] + jobs.limit_s[row] - jobs.ran_s[row])
        until_s[pool][placement.nodes] = np.maximum(until_s[pool][placement.nodes], end_s)
    return until_s


def packing_scores(held: NDArray[np.int32], until_s: NDArray[np.float64], end_s: float) -> NDArray[np.float64]:
    """Return how well a non-preemptible job that ends by `end_s` suits each node; the highest is best.

    `held`: GPUs of such jobs per node; `until_s`: when the last of them ends.
    """
    if not math.isfinite(end_s):  # without a limit it outlasts all others
        return held.astype(np.float64)
    scores: NDArray[np.float64] = held.astype(np.float64) - np.maximum(end_s - until_s, 0.0)
    return scores
