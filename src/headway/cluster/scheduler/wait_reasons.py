"""Why does a job wait? What binds it, who holds what it waits for, when it may start, and what would start it now."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.decisions import Reason, ReasonCode
from headway.cluster.scheduler.history import JobHistory
from headway.cluster.scheduler.placement import ANYWHERE
from headway.cluster.scheduler.policy import Policy
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.start_estimate import StartEstimate, estimate_start
from headway.cluster.scheduler.what_if import WhatIf
from headway.errors import UsageError

__all__ = ["Alternative", "Holder", "WaitExplanation", "explain_wait"]


@dataclass(frozen=True)
class Holder:
    """A tenant and the GPUs that its jobs hold."""

    tenant: str
    gpus: int
    jobs: int
    guarantee: int


@dataclass(frozen=True)
class Alternative:
    """Something else that a job could ask for."""

    what: Literal["within", "preemptible", "chip", "gpus"]
    to: str | int
    sentence: str
    """After "it would start now by"."""


@dataclass(frozen=True)
class WaitExplanation:
    """The answer for one job at one time."""

    job: str
    state: str
    """"runs", "starts" (in this cycle) or "waits"."""
    reason: Reason
    holders: tuple[Holder, ...]
    """Of those it waits for, the largest first."""
    instead: tuple[Alternative, ...]
    """Changes that would each start it now, the cheapest first: a wider network costs speed, letting itself be stopped
    costs time, another chip costs money, and fewer GPUs cost all of that."""
    start: StartEstimate | None = None
    """When it may start, if it waits and what happened before is known."""


def explain_wait(
    snapshot: ClusterSnapshot, now: float, policy: Policy, name: str, history: JobHistory | None = None
) -> WaitExplanation:
    """UsageError for a job that is not there."""
    row = snapshot.jobs.rows.get(name)
    if row is None:
        raise UsageError(f"there is no job {name} at {now:.0f} s", hint="it has not come yet, or is done")
    gpus = int(snapshot.jobs.gpus[row])
    if snapshot.jobs.running[row]:
        since = float(snapshot.jobs.since_s[row])
        return WaitExplanation(name, "runs", Reason(ReasonCode.RUNS, (("gpus", gpus), ("since_s", since))), (), ())
    decisions = decide(snapshot, now, policy)
    for decision in decisions:
        if decision.job == row and decision.kind != "stop":
            if decision.kind == "start":
                return WaitExplanation(name, "starts", decision.reason, (), ())
            return _waits(snapshot, now, policy, row, decision.reason, history)
    trial = WhatIf(snapshot, policy, now)
    for decision in decisions:
        if decision.kind in ("stop", "move"):
            trial.give(decision.job)
        elif decision.kind == "start":
            trial.take(decision.job, decision.pool, decision.place)
        elif decision.kind == "resize":
            trial.swap(decision.job, snapshot.places[decision.job], (decision.pool, decision.place))
    reason = _binds(snapshot, trial, policy, row, now)
    return _waits(snapshot, now, policy, row, reason, history)


def _waits(
    snapshot: ClusterSnapshot, now: float, policy: Policy, row: int, reason: Reason, history: JobHistory | None
) -> WaitExplanation:
    """All that can be said of a job that waits."""
    name = snapshot.jobs.names[row]
    start = None if history is None else estimate_start(snapshot, name, now, policy, history)
    return WaitExplanation(
        name, "waits", reason, _holders(snapshot), tuple(_changes(snapshot, now, policy, row)), start
    )


def _binds(snapshot: ClusterSnapshot, trial: WhatIf, policy: Policy, row: int, now: float) -> Reason:
    """The constraint that keeps it from starting, once everything that was decided now is done."""
    gpus, tenant = int(snapshot.jobs.gpus[row]), int(snapshot.jobs.tenant[row])
    if row in trial.broke:
        budget = float(snapshot.tenants.budget_gpu_s[snapshot.tenants.path(tenant)].min()) / 3600
        return Reason(ReasonCode.BUDGET, (("tenant", snapshot.tenants.names[tenant]), ("budget_gpu_h", budget)))
    if trial.fixed + gpus > trial.most(row):
        return Reason(ReasonCode.BAND, (("held", trial.fixed), ("gpus", gpus), ("most", trial.most(row))))
    if trial.allowed is not None and not trial.allows(row, gpus):
        room = int(trial.allowed[tenant])
        names = (("gpus", gpus), ("tenant", snapshot.tenants.names[tenant]), ("room", room))
        return Reason(ReasonCode.QUOTA, names)
    if trial.find(row) is None and any(room.find(gpus, int(snapshot.jobs.within[row])) for room in trial.rooms):
        return Reason(ReasonCode.WINDOW, (("gpus", gpus),))
    if trial.find(row) is None:
        return Reason(ReasonCode.NO_ROOM, (("gpus", gpus), ("largest", max(trial.largest))))
    order = policy.order(snapshot, now)
    return Reason(ReasonCode.BEHIND, (("head", snapshot.jobs.names[int(order[0])]),))


def _holders(snapshot: ClusterSnapshot) -> tuple[Holder, ...]:
    """Who holds GPUs, the most first."""
    jobs, tenants = snapshot.jobs, snapshot.tenants
    count = len(tenants)
    held = np.bincount(jobs.tenant[snapshot.active], jobs.gpus[snapshot.active], count).astype(int)
    many = np.bincount(jobs.tenant[snapshot.active], minlength=count)
    order = [row for row in np.argsort(-held, kind="stable").tolist() if held[row]]
    return tuple(
        Holder(tenants.names[row], int(held[row]), int(many[row]), int(tenants.guarantee[row])) for row in order
    )


def _changes(snapshot: ClusterSnapshot, now: float, policy: Policy, row: int) -> list[Alternative]:
    """What could be asked for instead: each alone, tried with the same decisions on a copy."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    found = list[Alternative]()
    within = int(jobs.within[row])
    for level in () if within == ANYWHERE else (*range(within + 1, len(nodes.levels)), ANYWHERE):
        if _would_start(snapshot, now, policy, row, within=level):
            where = "anywhere" if level == ANYWHERE else f"within a {nodes.levels[level]}"
            found.append(Alternative("within", where, f"lying {where} instead of within a {nodes.levels[within]}"))
            break
    if not jobs.preemptible[row] and _would_start(snapshot, now, policy, row, preemptible=True):
        found.append(Alternative("preemptible", True, "letting itself be stopped and go on later"))
    for pool in nodes.pools:
        more = int(jobs.pools[row]) | 1 << pool.number
        if more != jobs.pools[row] and _would_start(snapshot, now, policy, row, pools=more):
            found.append(Alternative("chip", pool.chip, f"taking {pool.chip} too"))
            break
    gpus = int(jobs.gpus[row])
    most = _most(gpus, lambda count: _would_start(snapshot, now, policy, row, gpus=count))
    if most:
        found.append(Alternative("gpus", most, f"asking for {most} GPUs instead of {gpus}"))
    return found


def _most(below: int, starts: Callable[[int], bool]) -> int:
    """The largest number below one that starts, if whoever starts would with fewer too; 0 where none does."""
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if starts(middle) else (low, middle)
    return low


def _would_start(snapshot: ClusterSnapshot, now: float, policy: Policy, row: int, **changed: int) -> bool:
    """Whether a job would start now if it had asked for something else."""
    trial = snapshot.copy()
    trial.tenants.want(
        int(trial.jobs.tenant[row]), changed.get("gpus", int(trial.jobs.gpus[row])) - int(trial.jobs.gpus[row])
    )
    for column, value in changed.items():
        getattr(trial.jobs, column)[row] = value
    return any(decision.job == row and decision.kind == "start" for decision in decide(trial, now, policy))
