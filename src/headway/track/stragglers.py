"""A worker that keeps the others waiting, step after step: `straggler(arrivals) -> Straggler | None`. Pure.

All workers end a step together, for each waits for the loss of all; so they begin the next one together, and whoever is
ready with its data after the others has kept them waiting. That is plain to see on every mesh.

The forward pass is not. Where copies work alone it takes each worker what it takes. Where weights are sharded, or
matrices cut, all wait for each other block by block: the slow and the fast come out of the last block almost together,
and a worker whose data came early has waited inside its forward pass, which looks like a long one. So a worker counts
as late with its forward pass by the lesser of two: how much longer it took than the others, from its own data on, and
how much later it was done. Waiting for somebody else makes the first large and leaves the second small; data that came
late does the reverse. What is left of slow arithmetic on a sharded mesh is about its last block's share.

Not seen at all: a backward pass or an optimizer that is slow by itself, since nothing is noted there; on GPUs anything
that only the device is slow at, for these are moments of the host, which hands out work and goes on; forward passes of
compiled blocks, which make no marks. Stages of a pipeline have different work, and forward passes are compared within
one stage only.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from headway.track.heartbeat import Arrival

__all__ = ["Straggler", "straggler"]

OFTEN = 0.8
"""In which share of the steps it must be the last."""
LEAST = 0.05
"""By how much of a step's time it must be late each time."""

_Moments = Mapping[int, Sequence[float]]
"""Of each rank, one number a step."""


@dataclass(frozen=True)
class Straggler:
    """Who keeps the others waiting, by how much, and with what."""

    rank: int
    share: float
    """The time the others wait for it, as a share of a step's: the median over the steps it was last in."""
    what: Literal["data", "forward"]
    steps: int
    """In how many of the steps looked at it was the last by so much."""


def straggler(arrivals: Mapping[int, Sequence[Arrival]], steps: int = 20, stages: int = 1) -> Straggler | None:
    """The worker that was last in most of the last `steps` steps; None as long as there are not as many.

    A pipeline's `stages` hold blocks of neighbouring ranks. Of two reasons the one that costs more is told.
    """
    by_step = {rank: {one.step: one for one in own if one.data_ns} for rank, own in sorted(arrivals.items())}
    if len(by_step) < 2:
        return None
    common = sorted(set.intersection(*(set(own) for own in by_step.values())))
    step_ns = _step_ns(by_step)
    found = list[Straggler]()
    if len(common) >= steps and step_ns:
        data = {rank: [own[step].data_ns for step in common[-steps:]] for rank, own in by_step.items()}
        found += _persistent(_late(data), step_ns, "data")
    done = [step for step in common if all(own[step].forward_ns for own in by_step.values())][-steps:]
    if len(done) >= steps and step_ns:
        for group in _groups(list(by_step), stages):
            some = {rank: [by_step[rank][step] for step in done] for rank in group}
            found += _persistent(_forward_late(some), step_ns, "forward")
    return max(found, key=lambda one: one.share, default=None)


def _groups(ranks: Sequence[int], stages: int) -> list[Sequence[int]]:
    """The ranks of each stage that has more than one."""
    size = len(ranks) // stages
    return [ranks[first : first + size] for first in range(0, len(ranks), size)] if size > 1 else []


def _step_ns(by_step: Mapping[int, Mapping[int, Arrival]]) -> float:
    """How long a step takes, from one step's data to the next one's; 0 where nobody has made two."""
    gaps = [
        after.data_ns - before.data_ns
        for own in by_step.values()
        for before, after in pairwise(own[step] for step in sorted(own))
        if after.step == before.step + 1
    ]
    return median(gaps) if gaps else 0.0


def _late(moments: _Moments) -> dict[int, list[float]]:
    """By how much each rank was behind the median of the others, step by step."""
    rows = zip(*moments.values(), strict=True)
    behind = [[mine - median(row[:i] + row[i + 1 :]) for i, mine in enumerate(row)] for row in rows]
    return {rank: list(own) for rank, own in zip(moments, zip(*behind, strict=True), strict=True)}


def _forward_late(arrivals: Mapping[int, Sequence[Arrival]]) -> dict[int, list[float]]:
    """By how much each rank's forward pass was late by its own doing: longer than the others', and done later."""
    longer = _late({rank: [one.forward_ns - one.data_ns for one in own] for rank, own in arrivals.items()})
    later = _late({rank: [one.forward_ns for one in own] for rank, own in arrivals.items()})
    return {rank: [min(pair) for pair in zip(longer[rank], later[rank], strict=True)] for rank in arrivals}


def _persistent(late: _Moments, step_ns: float, what: Literal["data", "forward"]) -> list[Straggler]:
    """The rank that was last often enough, by enough; at most one."""
    last = [max(zip(row, late, strict=True)) for row in zip(*late.values(), strict=True)]
    enough = [(behind, rank) for behind, rank in last if behind > LEAST * step_ns]
    ((rank, times),) = Counter(rank for _, rank in enough).most_common(1) or [(-1, 0)]
    if not times or times < OFTEN * len(last):
        return []
    share = median(behind for behind, who in enough if who == rank) / step_ns
    return [Straggler(rank, share, what, times)]
