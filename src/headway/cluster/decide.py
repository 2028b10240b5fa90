"""The scheduler's cycle: which of the jobs that wait start now, and where. Pure: the snapshot stays as it is."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cluster.decisions import Code, Decision, Reason
from headway.cluster.policies import MIN_RUN_S, Policy, Rows
from headway.cluster.room import Room
from headway.cluster.snapshot import Snapshot
from headway.cluster.trial import Trial
from headway.cluster.yielding import Yielding

__all__ = ["decide"]

MOST = 2**31
BLOCK = 1024
"""Jobs that are looked at together."""
FEW_STOPS = 16
"""Jobs that one cycle may stop, or a fiftieth of those that run, if that is more."""


def decide(snapshot: Snapshot, now: float, policy: Policy) -> list[Decision]:
    """What to do now."""
    # 1 what is free, to try on
    trial = Trial(snapshot, policy)
    # 2 who is first
    rows = policy.order(snapshot, now)
    # 3 all that fit, in this order, until one does not
    decisions, blocked = _starts(trial, rows, policy)
    if blocked is None:
        return decisions
    if policy.level is not None:
        # 4 for the others, whoever has had more of the cluster yields
        started = {decision.job for decision in decisions}
        left = rows[[row not in started for row in rows.tolist()]]
        return [*decisions, *_displace(trial, left, now, policy)]
    if policy.behind != "backfill":
        return decisions
    # 4 keep a place for that one, and let others pass as far as they do not delay it
    head = int(rows[blocked])
    kept = _reserve(trial, head, now)
    return [*decisions, *([kept.decision] if kept else ()), *_backfill(trial, rows[blocked + 1 :], head, kept, now)]


def _starts(trial: Trial, rows: Rows, policy: Policy) -> tuple[list[Decision], int | None]:
    """Those that start, in order, and the number in it of the first that has to wait."""
    decisions, blocked = list[Decision](), None
    for begin in range(0, len(rows), BLOCK):
        block = rows[begin : begin + BLOCK]
        # who does not fit now fits no better after the others of the block have started
        fits = trial.fitting(block)
        blocked = begin + int(fits.argmin()) if blocked is None and not fits.all() else blocked
        for number in np.flatnonzero(fits).tolist():
            if blocked is not None and begin + number > blocked and policy.behind != "pass":
                return decisions, blocked
            if trial.fits(int(block[number])):
                decisions.append(_start(trial, int(block[number])))
            else:
                blocked = min(begin + number, len(rows) if blocked is None else blocked)
        if blocked is not None and policy.behind != "pass":
            return decisions, blocked
    return decisions, blocked


def _start(trial: Trial, row: int) -> Decision:
    found = trial.find(row)
    assert found is not None, "what fits finds a place"
    trial.take(row, *found)
    gpus = int(trial.snapshot.jobs.gpus[row])
    return Decision("start", row, *found, Reason(Code.FIRST, (("gpus", gpus),)))


def _displace(trial: Trial, rows: Rows, now: float, policy: Policy) -> list[Decision]:
    """Stop jobs of higher levels for those that wait, and start these in their place."""
    assert policy.level is not None
    snapshot, jobs = trial.snapshot, trial.snapshot.jobs
    active = snapshot.active
    stoppable = active[jobs.preemptible[active] & (now - jobs.since_s[active] >= MIN_RUN_S)]
    if not len(stoppable):
        return []
    yielding = Yielding(snapshot, stoppable, now)
    above = policy.level(snapshot, stoppable, now)
    decisions, failed = list[Decision](), dict[tuple[int, int, int], int]()
    brake = max(FEW_STOPS, len(active) // 50)
    for row, level in zip(rows.tolist(), policy.level(snapshot, rows, now).tolist(), strict=True):
        gpus, pools = int(jobs.gpus[row]), int(jobs.pools[row])
        kind = (level, pools, int(jobs.within[row]))
        if gpus >= failed.get(kind, MOST) or not trial.allows(row, gpus):
            continue
        stopped = np.empty(0, np.int64)
        if (found := trial.find(row)) is None:
            chosen = _who_yields(trial, row, yielding, above > level)
            if chosen is None:
                failed[kind] = gpus  # larger ones find no more
                continue
            stopped = chosen
            brake -= len(stopped)
            decisions += [_stop(trial, yielding, i, row) for i in stopped.tolist()]
            found = trial.find(row)
            assert found is not None, "there is room now"
        trial.take(row, *found)
        lost = float(yielding.lost_gpu_s[stopped].sum())
        reason = Reason(Code.DISPLACES, (("count", len(stopped)), ("lost_gpu_s", lost)))
        decisions.append(Decision("start", row, *found, reason))
        if brake <= 0:  # the next cycle goes on: a storm of restarts would stall what all jobs load and save from
            break
    return decisions


def _who_yields(trial: Trial, row: int, yielding: Yielding, may: NDArray[np.bool_]) -> NDArray[np.int64] | None:
    """In the first pool where a job would fit then."""
    jobs = trial.snapshot.jobs
    gpus, pools, within = int(jobs.gpus[row]), int(jobs.pools[row]), int(jobs.within[row])
    for pool, room in enumerate(trial.rooms):
        if pools >> pool & 1:
            chosen = yielding.cheapest(room, pool, gpus, may, within)
            if chosen is not None:
                return chosen
    return None


def _stop(trial: Trial, yielding: Yielding, number: int, row: int) -> Decision:
    """One of those that may be stopped yields to a job."""
    snapshot, victim = trial.snapshot, int(yielding.rows[number])
    yielding.there[number] = False
    trial.give(victim)
    numbers = (("head", snapshot.jobs.names[row]), ("lost_gpu_s", float(yielding.lost_gpu_s[number])))
    return Decision("stop", victim, *snapshot.places[victim], Reason(Code.YIELDS, numbers))


@dataclass(frozen=True)
class _Kept:
    """The place of a job that will start later, and what the pool has beside it then."""

    decision: Decision
    later: Room


def _reserve(trial: Trial, row: int, now: float) -> _Kept | None:
    """The earliest place for a job, if all that runs ends by its limit; None where limits say nothing."""
    snapshot = trial.snapshot
    jobs, active = snapshot.jobs, snapshot.active
    ends = np.maximum(jobs.since_s[active] + jobs.limit_s[active] - jobs.ran_s[active], now)
    gpus, best = int(jobs.gpus[row]), None
    for number in range(len(trial.rooms)):
        if not jobs.pools[row] >> number & 1:
            continue
        later = trial.rooms[number].copy()
        order = np.argsort(ends, kind="stable")
        order = order[[snapshot.places[int(active[i])][0] == number for i in order]] if len(trial.rooms) > 1 else order
        # no use looking before enough GPUs are free at all
        freed = later.total + np.cumsum(jobs.gpus[active[order]])
        first = int(np.searchsorted(freed, gpus))
        for i, index in enumerate(order):
            later.give(snapshot.places[int(active[index])][1])
            if i >= first and np.isfinite(ends[index]):
                place = later.find(gpus, int(jobs.within[row]))
                if place is not None:
                    if best is None or ends[index] < best.decision.at_s:
                        later.take(place)
                        numbers = (("gpus", gpus), ("wait_s", float(ends[index] - now)))
                        reason = Reason(Code.RESERVED, numbers)
                        best = _Kept(Decision("reserve", row, number, place, reason, float(ends[index])), later)
                    break
    return best


def _backfill(trial: Trial, rows: Rows, head: int, kept: _Kept | None, now: float) -> list[Decision]:
    """Those that may pass: they end before the place is needed, or lie beside it."""
    snapshot, decisions = trial.snapshot, list[Decision]()
    jobs, name = snapshot.jobs, snapshot.jobs.names[head]
    if kept is None:
        return decisions
    gap = kept.decision.at_s - now
    short = jobs.limit_s[rows] - jobs.ran_s[rows] <= gap
    pool = kept.decision.pool
    open_ = np.ones(len(rows), np.bool_)
    while True:
        beside = kept.later.copy(trial.rooms[pool].free)
        able = open_ & trial.fitting(rows) & (short | (jobs.gpus[rows] <= beside.largest()) | (len(trial.rooms) > 1))
        at = int(able.argmax()) if len(able) else 0
        if not len(able) or not able[at]:
            return decisions
        open_[at] = False
        row = int(rows[at])
        if short[at]:
            found = trial.find(row)
            reason = Reason(Code.BACKFILL, (("limit_s", float(jobs.limit_s[row])), ("head", name), ("gap_s", gap)))
        else:
            place = beside.find(int(jobs.gpus[row]), int(jobs.within[row]))
            found = (pool, place) if place is not None else trial.find(row)
            if found is not None and place is None and found[0] == pool:
                continue
            reason = Reason(Code.PAST, (("head", name),))
        assert found is not None
        trial.take(row, *found)
        if not short[at] and found[0] == pool:
            kept.later.take(found[1])
        decisions.append(Decision("start", row, *found, reason))
