"""Elastic sizes: idle GPUs go to jobs that make most of them, and come back before anybody is stopped.

What a job makes of GPUs is its goodput: counted in GPUs, with its least size taken as fully used, so that a job of 4
GPUs that works 1.8 times as fast with 8 has a goodput of 7.2 there. GPUs that nobody can start on go where each adds
most goodput, one step of a scaling curve after another: the best there is where curves are concave and steps are
equal. A job that runs changes its size for that only if it gains more in the next half hour than its restart takes;
one that has just been started takes the larger size at once. When a job that waits could start with GPUs that others
have beyond their least size, those give them back, the ones that lose least goodput first. Whoever changes its size
is asked to save: it loses a restart, and no work.
"""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from headway.cluster.scheduler.decisions import Decision, Reason, ReasonCode
from headway.cluster.scheduler.placement import Placement
from headway.cluster.scheduler.policy import Rows
from headway.cluster.scheduler.what_if import WORTH_S, WhatIf

__all__ = ["Curve", "goodput", "grow_jobs", "grown_sizes", "shrink"]

Curve = Sequence[tuple[int, float]]
"""GPUs, and how fast a job works with them; the least first."""


def goodput(curve: Curve, gpus: int) -> float:
    """In GPUs, of which its least size is fully used."""
    least, speed = curve[0]
    return least * dict(curve)[gpus] / speed


def grown_sizes(curves: Mapping[int, Curve], sizes: Mapping[int, int], free: int) -> dict[int, int]:
    """Sizes of jobs once `free` GPUs have gone, step by step, where each adds most goodput; among equals the first."""
    found, jobs = dict(sizes), list(sizes)
    steps = [(-gain, i, gpus) for i, job in enumerate(jobs) for gain, gpus in _next(curves[job], sizes[job])]
    heapify(steps)
    while steps:
        _, i, gpus = heappop(steps)
        more = gpus - found[jobs[i]]
        if more > free:
            continue
        free -= more
        found[jobs[i]] = gpus
        for gain, larger in _next(curves[jobs[i]], gpus):
            heappush(steps, (-gain, i, larger))
    return found


def _next(curve: Curve, gpus: int) -> list[tuple[float, int]]:
    """The next size of a job, and what each GPU adds there; none after the last."""
    larger = [size for size, _ in curve if size > gpus][:1]
    return [((goodput(curve, size) - goodput(curve, gpus)) / (size - gpus), size) for size in larger]


def grow_jobs(trial: WhatIf, decisions: list[Decision], now: float) -> list[Decision]:
    """All that was decided, and idle GPUs for those that make most of them."""
    snapshot, jobs = trial.snapshot, trial.snapshot.jobs
    new = {one.job: one for one in decisions if one.kind == "start" and one.job in snapshot.sizes}
    touched = {one.job for one in decisions}
    able = [
        row
        for row in snapshot.sizes
        if row in snapshot.places and row not in touched and now - jobs.since_s[row] >= WORTH_S
    ]
    rows = sorted((*new, *able), key=lambda row: (jobs.submit_s[row], jobs.number[row]))
    curves = {row: snapshot.sizes[row] for row in rows}
    sizes = {row: int(jobs.gpus[row]) for row in curves}
    free = sum(room.total for room in trial.rooms)
    for row, gpus in grown_sizes(curves, sizes, free).items() if free else ():
        while gpus > sizes[row]:
            larger = _grown(trial, row, gpus, new.get(row))
            if larger is not None:
                decisions = [one for one in decisions if one is not new.get(row)] + [larger]
                break
            gpus = max(size for size, _ in curves[row] if size < gpus)
    return decisions


def _grown(trial: WhatIf, row: int, gpus: int, start: Decision | None) -> Decision | None:
    """A larger size of a job that runs or is started now, if it is worth it and there is room."""
    snapshot, jobs = trial.snapshot, trial.snapshot.jobs
    curve, before = snapshot.sizes[row], int(jobs.gpus[row])
    speeds = dict(curve)
    if start is None and (speeds[gpus] - speeds[before]) * WORTH_S <= speeds[gpus] * jobs.restart_s[row]:
        return None
    if trial.allowed is not None and gpus - before > trial.allowed[jobs.tenant[row]]:
        return None
    held = snapshot.places[row] if start is None else (start.pool, start.place)
    trial.swap(row, held, None)
    found = trial.find(row, gpus)
    trial.swap(row, None, held if found is None else found)
    if found is None:
        return None
    adds = goodput(curve, gpus) - goodput(curve, before)
    reason = Reason(ReasonCode.GROWS, (("gpus", gpus), ("before", before), ("adds", adds)))
    return Decision("resize" if start is None else "start", row, *found, reason)


def shrink(trial: WhatIf, rows: Rows, able: Rows) -> list[Decision]:
    """Start jobs that wait with what those that are `able` to give have beyond their least sizes."""
    snapshot, jobs = trial.snapshot, trial.snapshot.jobs
    grown = {row: snapshot.places[row] for row in able[jobs.gpus[able] > jobs.least[able]].tolist()}
    decisions, smallest = list[Decision](), np.inf
    for row in rows.tolist():
        if not grown:
            break
        gpus = int(jobs.gpus[row])
        spare = sum(place.total - int(jobs.least[one]) for one, (_, place) in grown.items())
        free = sum(room.total for room in trial.rooms)
        if gpus >= smallest or gpus > free + spare or not trial.allows(row, spare):
            continue
        given = _give_back(trial, row, grown)
        if given is None:
            smallest = gpus if jobs.pools[row] == -1 and jobs.within[row] < 0 else smallest
            continue
        for one in given:
            del grown[one.job]
        found = trial.find(row)
        assert found is not None, "there is room now"
        trial.take(row, *found)
        decisions += given
        decisions.append(Decision("start", row, *found, Reason(ReasonCode.FIRST, (("gpus", gpus),))))
    return decisions


def _give_back(trial: WhatIf, row: int, grown: Mapping[int, tuple[int, Placement]]) -> list[Decision] | None:
    """Jobs that become small so that one that waits finds room; None, and nothing done, where not even all of them
    make it."""
    snapshot, jobs = trial.snapshot, trial.snapshot.jobs

    def worth(one: int) -> float:
        gpus, least, curve = int(jobs.gpus[one]), int(jobs.least[one]), snapshot.sizes[one]
        return (goodput(curve, gpus) - least) / (gpus - least)

    given = dict[int, tuple[int, Placement]]()
    for one in sorted(grown, key=lambda one: (worth(one), jobs.submit_s[one], jobs.number[one])):
        if trial.fits(row):
            break
        pool, place = grown[one]
        given[one] = pool, _part(place, int(jobs.least[one]))
        trial.swap(one, grown[one], given[one])
    enough = trial.fits(row)
    # those that turn out not to be needed keep what they have, the most useful first
    for one in list(given)[::-1]:
        trial.swap(one, given[one], grown[one])
        if enough and not trial.fits(row):
            trial.swap(one, grown[one], given[one])
        else:
            del given[one]
    if not enough:
        return None
    numbers = ("head", jobs.names[row])
    return [
        Decision("resize", one, *there, Reason(ReasonCode.SHRINKS, (("gpus", int(jobs.least[one])), numbers)))
        for one, there in given.items()
    ]


def _part(place: Placement, gpus: int) -> Placement:
    """So many GPUs of a place: of the fullest nodes."""
    order = np.argsort(-place.gpus, kind="stable")
    before = np.concatenate(([0], np.cumsum(place.gpus[order])[:-1]))
    kept = np.clip(gpus - before, 0, place.gpus[order])
    return Placement(place.nodes[order][kept > 0], kept[kept > 0].astype(np.int32))
