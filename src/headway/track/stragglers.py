"""Straggler detection, `straggler(arrivals) -> Straggler | None`: a worker that delays the others every step. Pure.

All workers end a step together, since each waits for the summed loss; so they start the next one together, and a worker
that gets its data later than the others delays them. This shows on every mesh.

A slow forward pass is harder to see. Replicas run it independently, but with sharded weights or tensor parallelism the
workers wait for each other in every block: slow and fast ones leave the last block almost together, and a worker whose
data came early waits inside its forward pass, which then looks long. So a worker's forward pass counts as late by the
lesser of two delays: how much longer it took than the others', counted from the worker's own data, and how much later
it ended. Waiting for another worker makes the first large and the second small; late data does the reverse. On a
sharded mesh this leaves about the last block's share of slow arithmetic.

Not detected: a slow backward pass or optimizer, which record nothing; on GPUs, slowness of the device alone, since
times are the host's, which only enqueues work; forward passes of compiled blocks, which make no marks. Pipeline stages
do different work, so forward passes are compared within a stage only.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from headway.track.heartbeat import Arrival

OFTEN = 0.8
"""Share of the steps in which it must be last."""
LEAST = 0.05
"""Share of a step's time by which it must be late each time."""

_Moments = Mapping[int, Sequence[float]]
"""One number per step, by rank."""


@dataclass(frozen=True)
class Straggler:
    """The worker that delays the others, by how much, and in what."""

    rank: int
    share: float
    """The others' wait as a share of the step time: the median over the steps in which it was last."""
    what: Literal["data", "forward"]
    steps: int
    """Number of steps in which it was last by that much."""


def straggler(arrivals: Mapping[int, Sequence[Arrival]], steps: int = 20, stages: int = 1) -> Straggler | None:
    """Return the worker that was last in most of the last `steps` steps; None while there are fewer.

    Each of a pipeline's `stages` consists of neighbouring ranks. Of several delays, the largest is returned.
    """
    by_step = {
        rank: {arrival.step: arrival for arrival in rank_arrivals if arrival.data_ns}
        for rank, rank_arrivals in sorted(arrivals.items())
    }
    if len(by_step) < 2:
        return None
    common = sorted(set.intersection(*(set(rank_arrivals) for rank_arrivals in by_step.values())))
    step_ns = _step_ns(by_step)
    stragglers = list[Straggler]()
    if len(common) >= steps and step_ns:
        data = {
            rank: [rank_arrivals[step].data_ns for step in common[-steps:]] for rank, rank_arrivals in by_step.items()
        }
        stragglers += _persistent(_late(data), step_ns, "data")
    forward_done = [
        step for step in common if all(rank_arrivals[step].forward_ns for rank_arrivals in by_step.values())
    ][-steps:]
    if len(forward_done) >= steps and step_ns:
        for group in _groups(list(by_step), stages):
            group_arrivals = {rank: [by_step[rank][step] for step in forward_done] for rank in group}
            stragglers += _persistent(_forward_late(group_arrivals), step_ns, "forward")
    return max(stragglers, key=lambda arrival: arrival.share, default=None)


def _groups(ranks: Sequence[int], stages: int) -> list[Sequence[int]]:
    """Return the ranks of each stage; nothing if stages have one rank each."""
    size = len(ranks) // stages
    return [ranks[first : first + size] for first in range(0, len(ranks), size)] if size > 1 else []


def _step_ns(by_step: Mapping[int, Mapping[int, Arrival]]) -> float:
    """Return the median step time, from data to data; 0 if no rank has two consecutive steps."""
    gaps = [
        after.data_ns - before.data_ns
        for arrivals in by_step.values()
        for before, after in pairwise(arrivals[step] for step in sorted(arrivals))
        if after.step == before.step + 1
    ]
    return median(gaps) if gaps else 0.0


def _late(moments: _Moments) -> dict[int, list[float]]:
    """Return each rank's delay behind the median of the others, per step."""
    rows = zip(*moments.values(), strict=True)
    behind = [[value - median(row[:i] + row[i + 1 :]) for i, value in enumerate(row)] for row in rows]
    return {rank: list(delays) for rank, delays in zip(moments, zip(*behind, strict=True), strict=True)}


def _forward_late(arrivals: Mapping[int, Sequence[Arrival]]) -> dict[int, list[float]]:
    """Return each rank's own forward delay per step: the lesser of how much longer and how much later it was."""
    longer = _late(
        {rank: [a.forward_ns - a.data_ns for a in rank_arrivals] for rank, rank_arrivals in arrivals.items()}
    )
    later = _late({rank: [a.forward_ns for a in rank_arrivals] for rank, rank_arrivals in arrivals.items()})
    return {rank: [min(pair) for pair in zip(longer[rank], later[rank], strict=True)] for rank in arrivals}


def _persistent(late: _Moments, step_ns: float, what: Literal["data", "forward"]) -> list[Straggler]:
    """Return the rank that was last often enough and by enough, if any."""
    last = [max(zip(row, late, strict=True)) for row in zip(*late.values(), strict=True)]
    enough = [(behind, rank) for behind, rank in last if behind > LEAST * step_ns]
    ((rank, times),) = Counter(rank for _, rank in enough).most_common(1) or [(-1, 0)]
    if not times or times < OFTEN * len(last):
        return []
    share = median(behind for behind, other in enough if other == rank) / step_ns
    return [Straggler(rank, share, what, times)]
