"""Elastic sizes: idle GPUs go to the jobs that gain most, and come back before any job is preempted.

A job's goodput is counted in GPUs, with its smallest size taken as fully used: a job of 4 GPUs that is 1.8 times as
fast with 8 has a goodput of 7.2 there. GPUs on which no job can start go where each adds most goodput, one step of a
scaling curve after another: optimal for concave curves with equal steps. A running job grows only if it gains more in
the next half hour than its restart takes; one that starts now takes the larger size at once. If a waiting job could
start on GPUs that others hold beyond their smallest size, those shrink, the ones that lose least goodput first. A job
saves before it is resized: it loses a restart, and no work.
"""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from headway.cluster.scheduler.decisions import Decision, Reason, ReasonCode
from headway.cluster.scheduler.placement import Placement
from headway.cluster.scheduler.policy import Rows
from headway.cluster.scheduler.what_if import PAYBACK_S, WhatIf

Curve = Sequence[tuple[int, float]]
"""GPUs, and a job's speed with them; the smallest size first."""


def goodput(curve: Curve, gpus: int) -> float:
    """Return the goodput of a size, in GPUs; the smallest size is fully used."""
    least, speed = curve[0]
    return least * dict(curve)[gpus] / speed


def grown_sizes(curves: Mapping[int, Curve], sizes: Mapping[int, int], free: int) -> dict[int, int]:
    """Return sizes of jobs after `free` GPUs went, step by step, where each adds most goodput; of equals the first."""
    grown, jobs = dict(sizes), list(sizes)
    steps = [(-gain, i, gpus) for i, job in enumerate(jobs) for gain, gpus in _next_step(curves[job], sizes[job])]
    heapify(steps)
    while steps:
        _, i, gpus = heappop(steps)
        more = gpus - grown[jobs[i]]
        if more > free:
            continue
        free -= more
        grown[jobs[i]] = gpus
        for gain, larger in _next_step(curves[jobs[i]], gpus):
            heappush(steps, (-gain, i, larger))
    return grown


def _next_step(curve: Curve, gpus: int) -> list[tuple[float, int]]:
    """Return the next size of a job and the goodput per GPU that it adds; empty after the last size."""
    larger = [size for size, _ in curve if size > gpus][:1]
    return [((goodput(curve, size) - goodput(curve, gpus)) / (size - gpus), size) for size in larger]


def grow_jobs(trial: WhatIf, decisions: list[Decision], now: float) -> list[Decision]:
    """Return the decisions with idle GPUs given to the jobs that gain most."""
    snapshot, jobs = trial.snapshot, trial.snapshot.jobs
    starts = {decision.job: decision for decision in decisions if decision.kind == "start"}
    decided = {decision.job for decision in decisions}
    able = [
        row
        for row in snapshot.sizes
        if row in starts or (row in snapshot.placements and row not in decided and now - jobs.since_s[row] >= PAYBACK_S)
    ]
    rows = sorted(able, key=lambda row: (jobs.submit_s[row], jobs.number[row]))
    curves = {row: snapshot.sizes[row] for row in rows}
    sizes = {row: int(jobs.gpus[row]) for row in rows}
    for row, gpus in grown_sizes(curves, sizes, trial.free).items() if trial.free else ():
        while gpus > sizes[row]:
            larger = _grow(trial, row, gpus, starts.get(row))
            if larger is not None:
                decisions = [decision for decision in decisions if decision is not starts.get(row)] + [larger]
                break
            gpus = max(size for size, _ in curves[row] if size < gpus)
    return decisions


def _grow(trial: WhatIf, row: int, gpus: int, start: Decision | None) -> Decision | None:
    """Return the decision to grow a running or just started job, if it is worth it and fits."""
    snapshot, jobs = trial.snapshot, trial.snapshot.jobs
    curve, before = snapshot.sizes[row], int(jobs.gpus[row])
    speeds = dict(curve)
    if start is None and (speeds[gpus] - speeds[before]) * PAYBACK_S <= speeds[gpus] * jobs.restart_s[row]:
        return None
    if trial.headroom is not None and gpus - before > trial.headroom[jobs.tenant[row]]:
        return None
    held = snapshot.placements[row] if start is None else (start.pool, start.placement)
    trial.replace(row, held, None)
    larger = trial.find(row, gpus)
    trial.replace(row, None, held if larger is None else larger)
    if larger is None:
        return None
    adds = goodput(curve, gpus) - goodput(curve, before)
    reason = Reason(ReasonCode.GROWS, (("gpus", gpus), ("before", before), ("adds", adds)))
    return Decision("resize" if start is None else "start", row, *larger, reason)


def shrink_jobs(trial: WhatIf, rows: Rows, able: Rows) -> list[Decision]:
    """Start waiting jobs on GPUs that the `able` running jobs hold beyond their smallest sizes."""
    snapshot, jobs = trial.snapshot, trial.snapshot.jobs
    grown = {row: snapshot.placements[row] for row in able[jobs.gpus[able] > jobs.least[able]].tolist()}
    decisions, smallest = list[Decision](), np.inf
    for row in rows.tolist():
        if not grown:
            break
        gpus = int(jobs.gpus[row])
        spare = sum(placement.total - int(jobs.least[other]) for other, (_, placement) in grown.items())
        if gpus >= smallest or gpus > trial.free + spare or not trial.admits(row, spare):
            continue
        resizes = _shrink_for(trial, row, grown)
        if resizes is None:
            smallest = gpus if jobs.pools[row] == -1 and jobs.within[row] < 0 else smallest
            continue
        for resize in resizes:
            del grown[resize.job]
        decisions += [*resizes, trial.start(row)]
    return decisions


def _shrink_for(trial: WhatIf, row: int, grown: Mapping[int, tuple[int, Placement]]) -> list[Decision] | None:
    """Shrink jobs so that a waiting one fits; None, with nothing changed, if not even all of them suffice."""
    snapshot, jobs = trial.snapshot, trial.snapshot.jobs

    def loss(job: int) -> tuple[float, float, int]:
        """Goodput lost per GPU; of equals the first submitted."""
        gpus, least = int(jobs.gpus[job]), int(jobs.least[job])
        return (goodput(snapshot.sizes[job], gpus) - least) / (gpus - least), jobs.submit_s[job], jobs.number[job]

    shrunk = dict[int, tuple[int, Placement]]()
    for job in sorted(grown, key=loss):
        if trial.fits(row):
            break
        pool, placement = grown[job]
        shrunk[job] = pool, _reduced(placement, int(jobs.least[job]))
        trial.replace(job, grown[job], shrunk[job])
    enough = trial.fits(row)
    # jobs that turn out not to be needed stay as they are, the most useful first
    for job in list(shrunk)[::-1]:
        trial.replace(job, shrunk[job], grown[job])
        if enough and not trial.fits(row):
            trial.replace(job, grown[job], shrunk[job])
        else:
            del shrunk[job]
    if not enough:
        return None
    head = ("head", jobs.names[row])
    return [
        Decision("resize", job, *smaller, Reason(ReasonCode.SHRINKS, (("gpus", int(jobs.least[job])), head)))
        for job, smaller in shrunk.items()
    ]


def _reduced(placement: Placement, gpus: int) -> Placement:
    """Return `gpus` of a placement, on the nodes where it holds most."""
    order = np.argsort(-placement.gpus, kind="stable")
    before = np.concatenate(([0], np.cumsum(placement.gpus[order])[:-1]))
    counts = np.clip(gpus - before, 0, placement.gpus[order])
    return Placement(placement.nodes[order][counts > 0], counts[counts > 0].astype(np.int32))
