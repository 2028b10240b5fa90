"""Why does a job wait? What binds it, who holds what it waits for, and what would start it now."""

from dataclasses import dataclass

import numpy as np

from headway.cluster.decide import decide
from headway.cluster.decisions import Code, Reason
from headway.cluster.policy import Policy
from headway.cluster.snapshot import Snapshot
from headway.cluster.trial import Trial
from headway.errors import UsageError

__all__ = ["Holder", "Why", "why"]


@dataclass(frozen=True)
class Holder:
    """A tenant and the GPUs that its jobs hold."""

    tenant: str
    gpus: int
    jobs: int
    guarantee: int


@dataclass(frozen=True)
class Why:
    """The answer for one job at one time."""

    job: str
    state: str
    """"runs", "starts" (in this cycle) or "waits"."""
    reason: Reason
    holders: tuple[Holder, ...]
    """Of those it waits for, the largest first."""
    instead: tuple[str, ...]
    """Changes that would start it now, the smallest first."""


def why(snapshot: Snapshot, now: float, policy: Policy, name: str) -> Why:
    """UsageError for a job that is not there."""
    row = snapshot.jobs.rows.get(name)
    if row is None:
        raise UsageError(f"there is no job {name} at {now:.0f} s", hint="it has not come yet, or is done")
    gpus = int(snapshot.jobs.gpus[row])
    if snapshot.jobs.running[row]:
        since = float(snapshot.jobs.since_s[row])
        return Why(name, "runs", Reason(Code.RUNS, (("gpus", gpus), ("since_s", since))), (), ())
    decisions = decide(snapshot, now, policy)
    for decision in decisions:
        if decision.job == row and decision.kind != "stop":
            state = "starts" if decision.kind == "start" else "waits"
            return Why(name, state, decision.reason, _holders(snapshot) if state == "waits" else (), ())
    trial = Trial(snapshot, policy, now)
    for decision in decisions:
        if decision.kind in ("stop", "move"):
            trial.give(decision.job)
        elif decision.kind == "start":
            trial.take(decision.job, decision.pool, decision.place)
        elif decision.kind == "resize":
            trial.swap(decision.job, snapshot.places[decision.job], (decision.pool, decision.place))
    reason = _binds(snapshot, trial, policy, row, now)
    return Why(name, "waits", reason, _holders(snapshot), tuple(_instead(trial, row)))


def _binds(snapshot: Snapshot, trial: Trial, policy: Policy, row: int, now: float) -> Reason:
    """The constraint that keeps it from starting, once everything that was decided now is done."""
    gpus, tenant = int(snapshot.jobs.gpus[row]), int(snapshot.jobs.tenant[row])
    if row in trial.broke:
        budget = float(snapshot.tenants.budget_gpu_s[snapshot.tenants.path(tenant)].min()) / 3600
        return Reason(Code.BUDGET, (("tenant", snapshot.tenants.names[tenant]), ("budget_gpu_h", budget)))
    if trial.fixed + gpus > trial.most(row):
        return Reason(Code.BAND, (("held", trial.fixed), ("gpus", gpus), ("most", trial.most(row))))
    if trial.allowed is not None and not trial.allows(row, gpus):
        room = int(trial.allowed[tenant])
        names = (("gpus", gpus), ("tenant", snapshot.tenants.names[tenant]), ("room", room))
        return Reason(Code.QUOTA, names)
    if trial.find(row) is None and any(room.find(gpus, int(snapshot.jobs.within[row])) for room in trial.rooms):
        return Reason(Code.WINDOW, (("gpus", gpus),))
    if trial.find(row) is None:
        return Reason(Code.NO_ROOM, (("gpus", gpus), ("largest", max(trial.largest))))
    order = policy.order(snapshot, now)
    return Reason(Code.BEHIND, (("head", snapshot.jobs.names[int(order[0])]),))


def _holders(snapshot: Snapshot) -> tuple[Holder, ...]:
    """Who holds GPUs, the most first."""
    jobs, tenants = snapshot.jobs, snapshot.tenants
    count = len(tenants)
    held = np.bincount(jobs.tenant[snapshot.active], jobs.gpus[snapshot.active], count).astype(int)
    many = np.bincount(jobs.tenant[snapshot.active], minlength=count)
    order = [row for row in np.argsort(-held, kind="stable").tolist() if held[row]]
    return tuple(
        Holder(tenants.names[row], int(held[row]), int(many[row]), int(tenants.guarantee[row])) for row in order
    )


def _instead(trial: Trial, row: int) -> list[str]:
    """What could be asked for instead, and would start."""
    jobs = trial.snapshot.jobs
    gpus = int(jobs.gpus[row])
    most = max(trial.largest)
    if trial.allowed is not None:
        most = min(most, int(trial.allowed[jobs.tenant[row]]))
    return [f"asking for {most} GPUs instead of {gpus}"] if 0 < most < gpus else []
