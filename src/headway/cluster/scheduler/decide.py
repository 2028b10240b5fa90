"""One scheduling cycle: which waiting jobs start now, and where. Pure: the snapshot does not change."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.compaction import compact_for_gangs, move_or_stop
from headway.cluster.scheduler.decisions import Decision, Reason, ReasonCode
from headway.cluster.scheduler.elastic import grow_jobs, shrink_jobs
from headway.cluster.scheduler.packing import is_small, large_gangs
from headway.cluster.scheduler.placement import FreeGpus, Placement
from headway.cluster.scheduler.policy import Flags, Policy, PreemptionRules, RankedJobs, Rows
from headway.cluster.scheduler.preemption import PreemptionCandidates
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.starvation_guard import NodeReservation, reserve_for_gang, reserve_for_overdue
from headway.cluster.scheduler.what_if import WhatIf

BLOCK = 1024
"""Jobs that are checked together."""
MIN_RUN_S = 120.0
"""Minimum run time of every job before preemption."""
MIN_PREEMPTION_LIMIT = 16
"""Jobs that one cycle may preempt, or a fiftieth of the running ones if that is more."""


def decide(snapshot: ClusterSnapshot, now: float, policy: Policy) -> list[Decision]:
    """Return the decisions of a cycle; a stop comes before the start that it makes room for."""
    # 1 find what is free; jobs on nodes with maintenance ahead save and wait
    trial = WhatIf(snapshot, policy, now)
    moves = _move_for_maintenance(trial, now)
    # 2 rank the waiting jobs
    rows = policy.order(snapshot, now)
    reservation = reserve_for_gang(snapshot, rows, policy, now)
    trial.reservation = reserve_for_overdue(snapshot, rows, policy, now) or reservation
    # 3 start all that fit, in this order, until one does not
    decisions, blocked = _start_in_order(trial, rows, policy)
    decisions = [*moves, *decisions]
    if blocked is not None and policy.when_blocked == "backfill":
        # 4 reserve a placement for that one, and start others that do not delay it
        head = int(rows[blocked])
        backfilled = _reserve(trial, head, decisions, now)
        if backfilled is not None:
            decisions.append(backfilled.decision)
            decisions += _backfill(trial, rows[blocked + 1 :], head, backfilled, now)
    # 5 shrink elastic jobs for the others
    if blocked is not None and policy.elastic and snapshot.sizes:
        able = snapshot.settled[now - snapshot.jobs.since_s[snapshot.settled] >= MIN_RUN_S]
        decisions += shrink_jobs(trial, _undecided(rows, decisions), _undecided(able, moves))
    # 6 move jobs to other free GPUs so that gangs fit
    if blocked is not None and policy.drains is not None:
        able = snapshot.settled[preemptible_from_s(snapshot, snapshot.settled, policy) <= now]
        decisions += compact_for_gangs(trial, _undecided(rows, decisions), _undecided(able, decisions), now)
    # 7 preempt jobs for them
    if blocked is not None and policy.preemption is not None:
        decisions += _preempt(trial, _undecided(rows, decisions), now, policy, policy.preemption, decisions)
    # 8 say for which gang nodes are reserved, unless it starts
    if reservation is not None and trial.reservation is reservation:
        decisions += _reserved(snapshot, reservation, decisions, now)
    # 9 grow elastic jobs onto GPUs that are still idle
    return grow_jobs(trial, decisions, now) if policy.elastic and snapshot.sizes else decisions


def _reserved(
    snapshot: ClusterSnapshot, reservation: NodeReservation, before: Sequence[Decision], now: float
) -> list[Decision]:
    """Return the reservation of a waiting gang as a decision, unless it starts."""
    row = reservation.row
    if any(decision.job == row for decision in before):
        return []
    nodes = np.flatnonzero(reservation.nodes).astype(np.int32)
    size, gpus = snapshot.nodes.pools[reservation.pool].size, int(snapshot.jobs.gpus[row])
    counts = np.minimum(size, gpus - size * np.arange(len(nodes))).astype(np.int32)
    wait_s = float(now - snapshot.jobs.waits_s[row])
    numbers = (("wait_s", wait_s), ("nodes", len(nodes)), ("held", reservation.held))
    return [Decision("reserve", row, reservation.pool, Placement(nodes, counts), Reason(ReasonCode.DRAINS, numbers))]


def _move_for_maintenance(trial: WhatIf, now: float) -> list[Decision]:
    """Move jobs off nodes whose maintenance is about to begin."""
    snapshot, nodes = trial.snapshot, trial.snapshot.nodes
    if not trial.maintenance_ahead:
        return []
    moves, leaving = list[Decision](), nodes.leaving(now)
    for row in snapshot.settled.tolist():
        pool, placement = snapshot.placements[row]
        here = placement.nodes + nodes.pools[pool].first
        here = here[leaving[here]]
        if len(here):
            trial.release(row)
            numbers = (("node", nodes.names[int(here[0])]), ("in_s", max(float(nodes.away_s[here].min()) - now, 0.0)))
            moves.append(Decision("move", row, pool, placement, Reason(ReasonCode.AWAY, numbers)))
    return moves


def _undecided(rows: Rows, decisions: Sequence[Decision]) -> Rows:
    """Return the rows without a decision yet."""
    decided = {decision.job for decision in decisions}
    if not decided:
        return rows
    return rows[[row not in decided for row in rows.tolist()]]


def _start_in_order(trial: WhatIf, rows: Rows, policy: Policy) -> tuple[list[Decision], int | None]:
    """Start jobs in order; return the decisions, and the index of the first job that has to wait."""
    decisions, blocked = list[Decision](), None
    for begin in range(0, len(rows), BLOCK):
        block = rows[begin : begin + BLOCK]
        # a job that does not fit now will not fit after the others of the block have started
        fits = trial.fitting(block)
        blocked = begin + int(fits.argmin()) if blocked is None and not fits.all() else blocked
        left = np.flatnonzero(fits)
        while len(left):
            number, left = int(left[0]), left[1:]
            if blocked is not None and begin + number > blocked and policy.when_blocked != "pass":
                return decisions, blocked
            if trial.fits(int(block[number])):
                decisions.append(trial.start(int(block[number])))
            else:
                blocked = min(begin + number, len(rows) if blocked is None else blocked)
                left = left[trial.fitting(block[left])]
        if blocked is not None and policy.when_blocked != "pass":
            return decisions, blocked
    return decisions, blocked


def preemptible_from_s(snapshot: ClusterSnapshot, rows: Rows, policy: Policy) -> NDArray[np.float64]:
    """Return when the minimum run times of running jobs end. In a small cluster, a job that has been started several
    times runs until it has saved: the cheapest victim would else be the same job again and again, before it saves."""
    jobs = snapshot.jobs
    least_s = np.maximum(jobs.min_run_s[rows], MIN_RUN_S)
    if policy.max_starts_unsaved is not None and is_small(snapshot):
        save_s = np.where(np.isfinite(jobs.save_every_s[rows]), jobs.save_every_s[rows] + jobs.restart_s[rows], 0.0)
        often = (jobs.starts[rows] > policy.max_starts_unsaved) & (jobs.deadline_s[rows] > snapshot.now_s)
        least_s = np.where(often, np.maximum(least_s, save_s), least_s)
    since: NDArray[np.float64] = jobs.since_s[rows] + least_s
    return since


def _preempt(
    trial: WhatIf, rows: Rows, now: float, policy: Policy, rules: PreemptionRules, before: Sequence[Decision]
) -> list[Decision]:
    """Preempt jobs without a decision for waiting ones, and start these in their place."""
    snapshot, jobs = trial.snapshot, trial.snapshot.jobs
    # those without GPUs neither preempt nor yield: which nodes to empty is decided by GPUs
    stoppable, rows = _stoppable(snapshot, now, policy, before), rows[jobs.gpus[rows] > 0]
    most = trial.free + int(jobs.gpus[stoppable].sum())
    rows = rows[trial.under_cap(rows) & (jobs.gpus[rows] <= most)]  # the others do not fit, whatever is preempted
    if not len(stoppable) or not len(rows):
        return []
    waiting, running = (RankedJobs(some, rules.levels(snapshot, some, now)) for some in (rows, stoppable))
    could_fit: Flags = jobs.gpus[rows] <= rules.reach(snapshot, trial.used, waiting, running, now) + trial.free
    if not could_fit.any() and all(decision.kind == "start" for decision in before):  # nothing was freed since
        return []
    stops_left, decisions = max(MIN_PREEMPTION_LIMIT, len(snapshot.settled) // 50), list[Decision]()
    groups = rules.groups(snapshot, waiting, now)
    alike = _group_numbers(
        waiting.levels, groups, jobs.priority[rows], jobs.pools[rows], jobs.within[rows], trial.node_access(rows)
    )
    candidates, left, at = PreemptionCandidates(snapshot, stoppable, now), np.ones(len(rows), np.bool_), 0
    while at < len(rows) and stops_left > 0:  # the next cycle resumes: a storm of restarts would stall all I/O
        at += int(left[at:].argmax())
        if not left[at]:
            break
        row = int(rows[at])
        left[at] = False
        if not trial.admits(row, int(jobs.gpus[row])):
            continue
        victims = np.empty(0, np.int64)
        if (target := trial.find(row)) is None:
            chosen = None
            if could_fit[at]:
                head = RankedJobs(waiting.rows[at : at + 1], waiting.levels[at : at + 1])
                allowed = rules.may_preempt(snapshot, trial.used, head, running, now)
                chosen = _choose_victims(trial, row, candidates, allowed)
            if chosen is None:
                left &= (alike != alike[at]) | (jobs.gpus[rows] < jobs.gpus[row])  # larger ones will not fit either
                continue
            victims = chosen
        if not trial.admits_after(row, candidates.rows[victims]):
            continue
        stops = list[Decision]()
        if target is None:
            stops, target = _make_room(trial, row, candidates, victims)
            if target is None:
                continue
        trial.take(row, *target)
        moves = bool(stops) and policy.drains is not None and bool(large_gangs(snapshot, rows[at : at + 1])[0])
        decisions += [move_or_stop(trial, stop, row) for stop in stops] if moves else stops
        stops_left -= len(victims)
        lost = float(candidates.lost_gpu_s[victims].sum())
        reason = Reason(ReasonCode.DISPLACES, (("count", len(victims)), ("lost_gpu_s", lost)))
        decisions.append(Decision("start", row, *target, reason))
        could_fit |= len(victims) > 0  # a tenant that has less now may be owed something: check all again
    return decisions


def _stoppable(snapshot: ClusterSnapshot, now: float, policy: Policy, before: Sequence[Decision]) -> Rows:
    """Return the running jobs with GPUs that may be preempted now, and are neither resized nor moved."""
    active = snapshot.settled
    may_stop = snapshot.jobs.preemptible[active] & (preemptible_from_s(snapshot, active, policy) <= now)
    stoppable = active[may_stop & (snapshot.jobs.gpus[active] > 0)]
    return _undecided(stoppable, [decision for decision in before if decision.kind in ("resize", "move")])


def _make_room(
    trial: WhatIf, row: int, candidates: PreemptionCandidates, victims: Rows
) -> tuple[list[Decision], tuple[int, Placement] | None]:
    """Stop the victims of a job; return their decisions and where it then fits.

    They run again if it still does not: CPUs or memory are short, or its machines are not those that were emptied.
    """
    stops = [_stop(trial, candidates, number, row) for number in victims.tolist()]
    target = trial.find(row)
    if target is None:
        for number in victims.tolist():
            candidates.running[number] = True
            trial.take_back(int(candidates.rows[number]))
    return stops, target


def _group_numbers(*columns: NDArray[Any]) -> NDArray[np.int64]:
    """Return equal numbers for rows that agree in all columns."""
    number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        if column.min() < column.max():
            values, indices = np.unique(column, return_inverse=True)
            number = number * len(values) + indices
    return number


def _choose_victims(
    trial: WhatIf, row: int, candidates: PreemptionCandidates, allowed: Flags
) -> NDArray[np.int64] | None:
    """Return the cheapest victims in the first pool where a job would then fit."""
    jobs = trial.snapshot.jobs
    gpus, pools, within = int(jobs.gpus[row]), int(jobs.pools[row]), int(jobs.within[row])
    for pool in range(len(trial.pools)):
        if pools >> pool & 1 and trial.pools[pool].size:
            chosen = candidates.cheapest_victims(trial.free_gpus(row, pool), pool, gpus, allowed, within)
            if chosen is not None:
                return chosen
    return None


def _stop(trial: WhatIf, candidates: PreemptionCandidates, number: int, row: int) -> Decision:
    """Preempt a candidate for a job."""
    snapshot, victim = trial.snapshot, int(candidates.rows[number])
    candidates.running[number] = False
    trial.release(victim)
    numbers = (("head", snapshot.jobs.names[row]), ("lost_gpu_s", float(candidates.lost_gpu_s[number])))
    return Decision("stop", victim, *snapshot.placements[victim], Reason(ReasonCode.YIELDS, numbers))


@dataclass(frozen=True)
class _Reservation:
    """The placement of a job that starts later, and the pool's other free GPUs at that time."""

    decision: Decision
    later: FreeGpus


def _reserve(trial: WhatIf, row: int, before: Sequence[Decision], now: float) -> _Reservation | None:
    """Return the earliest placement of a job if all jobs end by their limits; None if no limit tells."""
    jobs, best = trial.snapshot.jobs, None
    gpus, within, machines = int(jobs.gpus[row]), int(jobs.within[row]), int(jobs.machines[row])
    ends = _ends(trial.snapshot, before, now)
    for number in range(len(trial.pools)):
        if not jobs.pools[row] >> number & 1:
            continue
        later = trial.free_gpus(row, number).copy()
        freed = later.total
        for end_s, pool, held in ends:
            if pool != number or not math.isfinite(end_s):
                continue
            later.release(held)
            freed += held.total
            if freed < gpus or (best is not None and end_s >= best.decision.at_s):
                continue
            placement = later.find(gpus, within, machines=machines)
            if placement is not None:
                later.take(placement)
                reason = Reason(ReasonCode.RESERVED, (("gpus", gpus), ("wait_s", end_s - now)))
                best = _Reservation(Decision("reserve", row, number, placement, reason, end_s), later)
                break
    return best


def _ends(snapshot: ClusterSnapshot, before: Sequence[Decision], now: float) -> list[tuple[float, int, Placement]]:
    """Return when running and just started jobs end by their limits, and what they free; the earliest first."""
    jobs, active = snapshot.jobs, _undecided(snapshot.active, before)
    limits = np.maximum(jobs.since_s[active] + jobs.limit_s[active] - jobs.ran_s[active], now).tolist()
    ends = [(end_s, *snapshot.placements[row]) for end_s, row in zip(limits, active.tolist(), strict=True)]
    for start in before:
        if start.kind == "start":
            left_s = max(float(jobs.limit_s[start.job] - jobs.ran_s[start.job]), 0.0)
            ends.append((now + left_s, start.pool, start.placement))
    return sorted(ends, key=itemgetter(0))


def _backfill(trial: WhatIf, rows: Rows, head: int, reservation: _Reservation, now: float) -> list[Decision]:
    """Start jobs that end before the reservation begins, or fit beside it."""
    decisions, jobs = list[Decision](), trial.snapshot.jobs
    name, gap = jobs.names[head], reservation.decision.at_s - now
    for begin in range(0, len(rows), BLOCK):
        block = rows[begin : begin + BLOCK]
        for row in block[trial.fitting(block)].tolist():
            short = bool(jobs.limit_s[row] - jobs.ran_s[row] <= gap)
            target = trial.find(row) if short else _find_beside(trial, row, reservation)
            if target is None or not trial.fits(row):
                continue
            trial.take(row, *target)
            if short:
                numbers = (("limit_s", float(jobs.limit_s[row])), ("head", name), ("gap_s", gap))
                decisions.append(Decision("start", row, *target, Reason(ReasonCode.BACKFILL, numbers)))
            else:
                if target[0] == reservation.decision.pool:
                    reservation.later.take(target[1])
                decisions.append(Decision("start", row, *target, Reason(ReasonCode.PAST, (("head", name),))))
    return decisions


def _find_beside(trial: WhatIf, row: int, reservation: _Reservation) -> tuple[int, Placement] | None:
    """Return a placement that leaves the reservation intact, however long the job runs."""
    jobs = trial.snapshot.jobs
    gpus, pools, within = int(jobs.gpus[row]), int(jobs.pools[row]), int(jobs.within[row])
    machines = int(jobs.machines[row])
    for number in range(len(trial.pools)):
        if pools >> number & 1 and (machines > 1 or gpus <= trial.largest[number]):
            free_gpus = trial.free_gpus(row, number)
            if number == reservation.decision.pool:
                free_gpus = reservation.later.copy(free_gpus.free).only(free_gpus.usable)
            placement = free_gpus.find(gpus, within, machines=machines)
            if placement is not None:
                return number, placement
    return None
