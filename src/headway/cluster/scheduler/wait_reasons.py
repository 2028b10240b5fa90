"""Why a job waits: the binding constraint, who holds the GPUs, when it may start, and what would start it now."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.decisions import Decision, Reason, ReasonCode
from headway.cluster.scheduler.history import JobHistory
from headway.cluster.scheduler.placement import ANYWHERE
from headway.cluster.scheduler.policy import Policy
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.start_estimate import StartEstimate, estimate_start
from headway.cluster.scheduler.starvation_guard import reserve_for_gang
from headway.cluster.scheduler.what_if import WhatIf
from headway.errors import UsageError, plural


@dataclass(frozen=True)
class Holder:
    """A tenant and the GPUs that its jobs hold."""

    tenant: str
    gpus: int
    jobs: int
    guarantee: int


@dataclass(frozen=True)
class Alternative:
    """A changed request that would start a job now."""

    what: Literal["within", "preemptible", "chip", "gpus"]
    to: str | int
    sentence: str
    """Continues "it would start now by"."""


@dataclass(frozen=True)
class WaitExplanation:
    """The state of one job at one time, and the reason for it."""

    job: str
    state: str
    """"runs", "starts" (in this cycle) or "waits"."""
    reason: Reason
    holders: tuple[Holder, ...]
    """Who holds GPUs, most first."""
    instead: tuple[Alternative, ...]
    """Changes that would each start it now, the cheapest first: a wider part of the network costs speed, being
    preemptible costs time, another chip costs money, and fewer GPUs cost all of that."""
    start: StartEstimate | None = None
    """When it may start, if it waits and its history is known."""


def explain_wait(
    snapshot: ClusterSnapshot, now: float, policy: Policy, name: str, history: JobHistory | None = None
) -> WaitExplanation:
    """Explain the state of a job; raise UsageError if it does not exist."""
    row = snapshot.jobs.rows.get(name)
    if row is None:
        raise UsageError(f"no job '{name}' at {now:.0f} s", hint="it is not submitted yet, or has ended")
    if snapshot.jobs.running[row]:
        numbers = (("gpus", int(snapshot.jobs.gpus[row])), ("since_s", float(snapshot.jobs.since_s[row])))
        return WaitExplanation(name, "runs", Reason(ReasonCode.RUNS, numbers), (), ())
    decisions = decide(snapshot, now, policy)
    own = next((decision for decision in decisions if decision.job == row and decision.kind != "stop"), None)
    if own is not None and own.kind == "start":
        return WaitExplanation(name, "starts", own.reason, (), ())
    reason = own.reason if own is not None else _binding_constraint(snapshot, decisions, policy, row, now)
    start = None if history is None else estimate_start(snapshot, name, now, policy, history)
    alternatives = tuple(_alternatives(snapshot, now, policy, row))
    return WaitExplanation(name, "waits", reason, _holders(snapshot), alternatives, start)


def _binding_constraint(
    snapshot: ClusterSnapshot, decisions: list[Decision], policy: Policy, row: int, now: float
) -> Reason:
    """Return the constraint that keeps a job from starting once all decisions are applied."""
    trial = WhatIf(snapshot, policy, now)
    for decision in decisions:
        if decision.kind in ("stop", "move"):
            trial.release(decision.job)
        elif decision.kind == "start":
            trial.take(decision.job, decision.pool, decision.placement)
        elif decision.kind == "resize":
            trial.replace(decision.job, snapshot.placements[decision.job], (decision.pool, decision.placement))
    gpus, tenant = int(snapshot.jobs.gpus[row]), int(snapshot.jobs.tenant[row])
    tenant_name = snapshot.tenants.names[tenant]
    if row in trial.over_budget:
        budget = float(snapshot.tenants.budget_gpu_s[snapshot.tenants.path(tenant)].min()) / 3600
        return Reason(ReasonCode.BUDGET, (("tenant", tenant_name), ("budget_gpu_h", budget)))
    if (refused := trial.refused_by_budget(row)) is not None:
        needs, left = refused
        numbers = (("needs_gpu_h", needs / 3600), ("tenant", tenant_name), ("left_gpu_h", left / 3600))
        return Reason(ReasonCode.LIMIT_BUDGET, numbers)
    if trial.must_not_borrow(row):
        return Reason(ReasonCode.BLOCKS)
    if trial.fixed + gpus > trial.cap(row):
        return Reason(ReasonCode.BAND, (("held", trial.fixed), ("gpus", gpus), ("most", trial.cap(row))))
    if trial.headroom is not None and not trial.admits(row, gpus):
        room = int(trial.headroom[tenant])
        return Reason(ReasonCode.QUOTA, (("gpus", gpus), ("tenant", tenant_name), ("room", room)))
    reservation = reserve_for_gang(snapshot, policy.order(snapshot, now), policy, now)
    if reservation is not None and reservation.barred[row] and trial.find(row) is not None:
        return Reason(ReasonCode.KEPT, (("head", snapshot.jobs.names[reservation.row]),))
    if trial.find(row) is None:
        machines, within = int(snapshot.jobs.machines[row]), int(snapshot.jobs.within[row])
        if any(free_gpus.find(gpus, within, machines=machines) for free_gpus in trial.pools):
            if row in snapshot.avoided:
                return Reason(ReasonCode.AVOIDS, (("gpus", gpus), ("nodes", ", ".join(snapshot.avoided[row]))))
            if snapshot.nodes.counted and not trial.maintenance_ahead:
                gib = float(snapshot.jobs.memory_bytes[row]) / 2**30
                return Reason(ReasonCode.NO_CPUS, (("cpus", float(snapshot.jobs.cpus[row])), ("gib", gib)))
            return Reason(ReasonCode.WINDOW, (("gpus", gpus),))
        return Reason(ReasonCode.NO_ROOM, (("gpus", gpus), ("largest", max(trial.largest))))
    first = int(policy.order(snapshot, now)[0])
    return Reason(ReasonCode.BEHIND, (("head", snapshot.jobs.names[first]),))


def _holders(snapshot: ClusterSnapshot) -> tuple[Holder, ...]:
    """Return who holds GPUs, most first."""
    jobs, tenants = snapshot.jobs, snapshot.tenants
    count = len(tenants)
    held = np.bincount(jobs.tenant[snapshot.active], jobs.gpus[snapshot.active], count).astype(int)
    running = np.bincount(jobs.tenant[snapshot.active], minlength=count)
    order = [row for row in np.argsort(-held, kind="stable").tolist() if held[row]]
    return tuple(
        Holder(tenants.names[row], int(held[row]), int(running[row]), int(tenants.guarantee[row])) for row in order
    )


def _alternatives(snapshot: ClusterSnapshot, now: float, policy: Policy, row: int) -> list[Alternative]:
    """Return the changes that would start a job now, each tried alone on a copy of the snapshot."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    alternatives = list[Alternative]()
    within = int(jobs.within[row])
    for level in () if within == ANYWHERE else (*range(within + 1, len(nodes.levels)), ANYWHERE):
        if _would_start(snapshot, now, policy, row, within=level):
            where = "anywhere" if level == ANYWHERE else f"within a {nodes.levels[level]}"
            sentence = f"running {where} instead of within a {nodes.levels[within]}"
            alternatives.append(Alternative("within", where, sentence))
            break
    if not jobs.preemptible[row] and _would_start(snapshot, now, policy, row, preemptible=True):
        alternatives.append(Alternative("preemptible", True, "being preemptible"))
    for pool in nodes.pools:
        more = int(jobs.pools[row]) | 1 << pool.number
        if more != jobs.pools[row] and _would_start(snapshot, now, policy, row, pools=more):
            alternatives.append(Alternative("chip", pool.chip, f"accepting {pool.chip} too"))
            break
    gpus, machines = int(jobs.gpus[row]), max(int(jobs.machines[row]), 1)
    most = machines * _most(
        gpus // machines, lambda count: _would_start(snapshot, now, policy, row, gpus=machines * count)
    )
    if most:
        alternatives.append(Alternative("gpus", most, f"requesting {plural(most, 'GPU')} instead of {gpus}"))
    return alternatives


def _most(below: int, starts: Callable[[int], bool]) -> int:
    """Return the largest number below one that starts, by bisection; 0 if none does."""
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if starts(middle) else (low, middle)
    return low


def _would_start(snapshot: ClusterSnapshot, now: float, policy: Policy, row: int, **changed: int) -> bool:
    """Return whether a job would start now with a changed request."""
    trial = snapshot.copy()
    gpus = int(trial.jobs.gpus[row])
    trial.tenants.add_wanted(int(trial.jobs.tenant[row]), changed.get("gpus", gpus) - gpus)
    for column, value in changed.items():
        getattr(trial.jobs, column)[row] = value
    return any(decision.job == row and decision.kind == "start" for decision in decide(trial, now, policy))
