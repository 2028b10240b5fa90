"""The scheduler's cycle: which of the jobs that wait start now, and where. Pure: the snapshot stays as it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.decisions import Decision, Reason, ReasonCode
from headway.cluster.scheduler.elastic import grow_jobs, shrink
from headway.cluster.scheduler.placement import FreeGpus, Placement
from headway.cluster.scheduler.policy import Flags, Policy, PreemptionRules, RankedJobs, Rows
from headway.cluster.scheduler.preemption import PreemptionCandidates
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.starvation_guard import reserve_for_overdue
from headway.cluster.scheduler.what_if import WhatIf

__all__ = ["MIN_RUN_S", "decide", "preemptible_from_s"]

BLOCK = 1024
"""Jobs that are looked at together."""
MIN_RUN_S = 120.0
"""Whoever was started runs so long before it may be stopped."""
FEW_STOPS = 16
"""Jobs that one cycle may stop, or a fiftieth of those that run, if that is more."""


def decide(snapshot: ClusterSnapshot, now: float, policy: Policy) -> list[Decision]:
    """What to do now, in the order it can be done: stops make room first."""
    # 1 what is free, to try on, without the nodes that go away: what runs there saves, and waits
    trial = WhatIf(snapshot, policy, now)
    moves = _moves(trial, now)
    # 2 who is first
    rows = policy.order(snapshot, now)
    trial.kept = reserve_for_overdue(snapshot, rows, policy, now)
    # 3 all that fit, in this order, until one does not
    decisions, blocked = _starts(trial, rows, policy)
    decisions = [*moves, *decisions]
    if blocked is not None and policy.behind == "backfill":
        # 4 keep a place for that one, and let others pass as far as they do not delay it
        head = int(rows[blocked])
        kept = _reserve(trial, head, decisions, now)
        decisions += [kept.decision] if kept else []
        decisions += _backfill(trial, rows[blocked + 1 :], head, kept, now)
    # 5 for the others, elastic jobs give back what they have beyond their least size
    if blocked is not None and policy.elastic and snapshot.sizes:
        able = snapshot.active[now - snapshot.jobs.since_s[snapshot.active] >= MIN_RUN_S]
        decisions += shrink(trial, _without(rows, decisions), _without(able, moves))
    # 6 and whoever may be stopped for them yields
    if blocked is not None and policy.stops is not None:
        decisions += _displace(trial, _without(rows, decisions), now, policy.stops, decisions)
    # 7 what idles still goes to those who make most of it
    return grow_jobs(trial, decisions, now) if policy.elastic and snapshot.sizes else decisions


def _moves(trial: WhatIf, now: float) -> list[Decision]:
    """Jobs on nodes that go away."""
    snapshot, nodes = trial.snapshot, trial.snapshot.nodes
    if not trial.windows:
        return []
    moves, leaving = list[Decision](), nodes.leaving(now)
    for row in snapshot.active.tolist():
        pool, place = snapshot.places[row]
        here = place.nodes + nodes.pools[pool].first
        here = here[leaving[here]]
        if len(here):
            trial.give(row)
            numbers = (("node", nodes.names[int(here[0])]), ("in_s", max(float(nodes.away_s[here].min()) - now, 0.0)))
            moves.append(Decision("move", row, pool, place, Reason(ReasonCode.AWAY, numbers)))
    return moves


def _without(rows: Rows, decisions: Sequence[Decision]) -> Rows:
    """Those of which nothing is decided yet."""
    decided = {decision.job for decision in decisions}
    if not decided:
        return rows
    return rows[[row not in decided for row in rows.tolist()]]


def _starts(trial: WhatIf, rows: Rows, policy: Policy) -> tuple[list[Decision], int | None]:
    """Those that start, in order, and the number in it of the first that has to wait."""
    decisions, blocked = list[Decision](), None
    for begin in range(0, len(rows), BLOCK):
        block = rows[begin : begin + BLOCK]
        # who does not fit now fits no better after the others of the block have started
        fits = trial.fitting(block)
        blocked = begin + int(fits.argmin()) if blocked is None and not fits.all() else blocked
        left = np.flatnonzero(fits)
        while len(left):
            number, left = int(left[0]), left[1:]
            if blocked is not None and begin + number > blocked and policy.behind != "pass":
                return decisions, blocked
            if trial.fits(int(block[number])):
                decisions.append(_start(trial, int(block[number])))
            else:
                blocked = min(begin + number, len(rows) if blocked is None else blocked)
                left = left[trial.fitting(block[left])]
        if blocked is not None and policy.behind != "pass":
            return decisions, blocked
    return decisions, blocked


def _start(trial: WhatIf, row: int) -> Decision:
    found = trial.find(row)
    assert found is not None, "what fits finds a place"
    trial.take(row, *found)
    gpus = int(trial.snapshot.jobs.gpus[row])
    return Decision("start", row, *found, Reason(ReasonCode.FIRST, (("gpus", gpus),)))


def preemptible_from_s(snapshot: ClusterSnapshot, rows: Rows) -> NDArray[np.float64]:
    """From when on jobs that run may be stopped."""
    jobs = snapshot.jobs
    since: NDArray[np.float64] = jobs.since_s[rows] + np.maximum(jobs.min_run_s[rows], MIN_RUN_S)
    return since


def _displace(
    trial: WhatIf, rows: Rows, now: float, stops: PreemptionRules, before: Sequence[Decision]
) -> list[Decision]:
    """Stop jobs for those that wait, and start these in their place; not those of which something is decided."""
    snapshot, jobs = trial.snapshot, trial.snapshot.jobs
    active = snapshot.active
    stoppable = active[jobs.preemptible[active] & (preemptible_from_s(snapshot, active) <= now)]
    stoppable = _without(stoppable, [one for one in before if one.kind in ("resize", "move")])
    most = sum(room.total for room in trial.rooms) + int(jobs.gpus[stoppable].sum())
    rows = rows[trial.bounded(rows) & (jobs.gpus[rows] <= most)]  # the others find no place, whoever yields
    if not len(stoppable) or not len(rows):
        return []
    waits, runs = (RankedJobs(some, stops.levels(snapshot, some, now)) for some in (rows, stoppable))
    might = _might(trial, waits, runs, stops, now)
    if not might.any() and all(one.kind == "start" for one in before):  # what found no place before finds none now
        return []
    brake, decisions = max(FEW_STOPS, len(active) // 50), list[Decision]()
    kinds = stops.kinds(snapshot, waits, now)
    alike = _alike(waits.levels, kinds, jobs.priority[rows], jobs.pools[rows], jobs.within[rows], trial.bars(rows))
    yielding, left, at = PreemptionCandidates(snapshot, stoppable, now), np.ones(len(rows), np.bool_), 0
    while at < len(rows) and brake > 0:  # the next cycle goes on: a storm of restarts would stall all who load and save
        at += int(left[at:].argmax())
        if not left[at]:
            break
        row = int(rows[at])
        left[at] = False
        if not trial.allows(row, int(jobs.gpus[row])):
            continue
        stopped = np.empty(0, np.int64)
        if (found := trial.find(row)) is None:
            chosen = None
            if might[at]:
                one = RankedJobs(waits.rows[at : at + 1], waits.levels[at : at + 1])
                chosen = _who_yields(trial, row, yielding, stops.may(snapshot, trial.used, one, runs, now))
            if chosen is None:
                left &= (alike != alike[at]) | (jobs.gpus[rows] < jobs.gpus[row])  # larger ones find no more
                continue
            stopped = chosen
        if not trial.allows_without(row, yielding.rows[stopped]):
            continue
        if found is None:
            brake -= len(stopped)
            decisions += [_stop(trial, yielding, i, row) for i in stopped.tolist()]
            found = trial.find(row)
            assert found is not None, "there is room now"
        trial.take(row, *found)
        lost = float(yielding.lost_gpu_s[stopped].sum())
        reason = Reason(ReasonCode.DISPLACES, (("count", len(stopped)), ("lost_gpu_s", lost)))
        decisions.append(Decision("start", row, *found, reason))
        might |= len(stopped) > 0  # a tenant that has less now may be owed something: all are asked again
    return decisions


def _might(trial: WhatIf, waits: RankedJobs, runs: RankedJobs, stops: PreemptionRules, now: float) -> Flags:
    """Which of those that wait could have enough GPUs by stopping others: a quick answer, so that few are asked for."""
    reach = stops.reach(trial.snapshot, trial.used, waits, runs, now) + sum(room.total for room in trial.rooms)
    might: Flags = trial.snapshot.jobs.gpus[waits.rows] <= reach
    return might


def _alike(*columns: NDArray[Any]) -> NDArray[np.int64]:
    """The same number for rows that agree in all columns."""
    number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        if column.min() < column.max():
            values, places = np.unique(column, return_inverse=True)
            number = number * len(values) + places
    return number


def _who_yields(
    trial: WhatIf, row: int, yielding: PreemptionCandidates, may: NDArray[np.bool_]
) -> NDArray[np.int64] | None:
    """In the first pool where a job would fit then."""
    jobs = trial.snapshot.jobs
    gpus, pools, within = int(jobs.gpus[row]), int(jobs.pools[row]), int(jobs.within[row])
    for pool in range(len(trial.rooms)):
        if pools >> pool & 1:
            chosen = yielding.cheapest_victims(trial.room(row, pool), pool, gpus, may, within)
            if chosen is not None:
                return chosen
    return None


def _stop(trial: WhatIf, yielding: PreemptionCandidates, number: int, row: int) -> Decision:
    """One of those that may be stopped yields to a job."""
    snapshot, victim = trial.snapshot, int(yielding.rows[number])
    yielding.there[number] = False
    trial.give(victim)
    numbers = (("head", snapshot.jobs.names[row]), ("lost_gpu_s", float(yielding.lost_gpu_s[number])))
    return Decision("stop", victim, *snapshot.places[victim], Reason(ReasonCode.YIELDS, numbers))


@dataclass(frozen=True)
class _Kept:
    """The place of a job that will start later, and what the pool has beside it then."""

    decision: Decision
    later: FreeGpus


def _reserve(trial: WhatIf, row: int, before: Sequence[Decision], now: float) -> _Kept | None:
    """The earliest place for a job, if all that runs ends by its limit; None where limits say nothing."""
    jobs, best = trial.snapshot.jobs, None
    gpus, within = int(jobs.gpus[row]), int(jobs.within[row])
    ends = _ends(trial.snapshot, before, now)
    for number in range(len(trial.rooms)):
        if not jobs.pools[row] >> number & 1:
            continue
        room = trial.room(row, number)
        here = [(end_s, place) for end_s, pool, place in ends if pool == number and math.isfinite(end_s)]
        later, freed = room.copy(), room.total
        for end_s, place in here:
            later.give(place)
            freed += place.total
            if freed < gpus or (best is not None and end_s >= best.decision.at_s):
                continue
            found = later.find(gpus, within)
            if found is not None:
                later.take(found)
                reason = Reason(ReasonCode.RESERVED, (("gpus", gpus), ("wait_s", end_s - now)))
                best = _Kept(Decision("reserve", row, number, found, reason, end_s), later)
                break
    return best


def _ends(snapshot: ClusterSnapshot, before: Sequence[Decision], now: float) -> list[tuple[float, int, Placement]]:
    """When all that stays, and what is started now, ends by its limit, and what it leaves; the first first."""
    jobs, active = snapshot.jobs, _without(snapshot.active, before)
    started = [one for one in before if one.kind == "start"]
    limits = np.maximum(jobs.since_s[active] + jobs.limit_s[active] - jobs.ran_s[active], now).tolist()
    ends = [(end_s, *snapshot.places[row]) for end_s, row in zip(limits, active.tolist(), strict=True)]
    left = [float(jobs.limit_s[one.job] - jobs.ran_s[one.job]) for one in started]
    ends += [(now + max(seconds, 0.0), one.pool, one.place) for seconds, one in zip(left, started, strict=True)]
    return sorted(ends, key=itemgetter(0))


def _backfill(trial: WhatIf, rows: Rows, head: int, kept: _Kept | None, now: float) -> list[Decision]:
    """Those that may pass: they end before the place is needed, or lie beside it."""
    decisions, jobs = list[Decision](), trial.snapshot.jobs
    if kept is None:
        return decisions
    name, gap = jobs.names[head], kept.decision.at_s - now
    for begin in range(0, len(rows), BLOCK):
        block = rows[begin : begin + BLOCK]
        for row in block[trial.fitting(block)].tolist():
            short = bool(jobs.limit_s[row] - jobs.ran_s[row] <= gap)
            found = trial.find(row) if short else _beside(trial, row, kept)
            if found is None or not trial.fits(row):
                continue
            trial.take(row, *found)
            if short:
                numbers = (("limit_s", float(jobs.limit_s[row])), ("head", name), ("gap_s", gap))
                decisions.append(Decision("start", row, *found, Reason(ReasonCode.BACKFILL, numbers)))
            else:
                if found[0] == kept.decision.pool:
                    kept.later.take(found[1])
                decisions.append(Decision("start", row, *found, Reason(ReasonCode.PAST, (("head", name),))))
    return decisions


def _beside(trial: WhatIf, row: int, kept: _Kept) -> tuple[int, Placement] | None:
    """A place that leaves the kept one as it is, however long the job may hold it."""
    jobs = trial.snapshot.jobs
    gpus, pools, within = int(jobs.gpus[row]), int(jobs.pools[row]), int(jobs.within[row])
    for number in range(len(trial.rooms)):
        if pools >> number & 1 and gpus <= trial.largest[number]:
            room = trial.room(row, number)
            there = kept.later.copy(room.free) if number == kept.decision.pool else room
            place = there.find(gpus, within)
            if place is not None:
                return number, place
    return None
