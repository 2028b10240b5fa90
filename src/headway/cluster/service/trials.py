"""Try before changing: what a job, or another policy, would do to the live cluster. Pure: the state does not change."""

from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.start_estimate import estimate_start
from headway.cluster.scheduler.wait_reasons import explain_wait
from headway.cluster.service.live_state import LiveState
from headway.errors import UsageError

MOST_COMPARED = 10
"""Waiting jobs whose starts are estimated before and after, the first of the queue."""


def try_change(state: LiveState, now_s: float, job: Job | None, policy: str | None) -> dict[str, Any]:
    """Return what a job that is submitted now, or another policy from now on, would change."""
    if policy is not None and policy not in POLICIES:
        raise UsageError(f"unknown policy {policy!r}", hint=f"one of {', '.join(POLICIES)}")
    before = _at(state, now_s)
    after = _at(state, now_s)
    if policy is not None:
        after.policy = POLICIES[policy]
    explanation = None
    if job is not None:
        added = replace(job, submit_s=after.snapshot.now_s)
        after.snapshot.submit([added])
        after.history = deepcopy(state.history)
        after.history.submitted(added)
        explained = explain_wait(after.snapshot, after.snapshot.now_s, after.policy, added.name, after.history)
        explanation = asdict(explained) | {"sentence": explained.reason.sentence, "policy": after.policy.name}
    first = before.policy.order(before.snapshot, before.snapshot.now_s)[:MOST_COMPARED].tolist()
    names = [before.snapshot.jobs.names[row] for row in first]
    return {
        "policy": after.policy.name,
        "job": explanation,
        "stops": _stopped(after) if job is None else sorted(set(_stopped(after)) - set(_stopped(before))),
        "waiting": [
            {"job": name, "before": _estimate(before, name), "after": _estimate(after, name)} for name in names
        ],
    }


def _at(state: LiveState, now_s: float) -> LiveState:
    snapshot = state.snapshot.copy()
    snapshot.advance(max(now_s, snapshot.now_s))
    return replace(state, snapshot=snapshot)


def _stopped(state: LiveState) -> list[str]:
    """The jobs that the next cycle would stop or move."""
    snapshot = state.snapshot
    decisions = decide(snapshot, snapshot.now_s, state.policy)
    return sorted(snapshot.jobs.names[decision.job] for decision in decisions if decision.kind in ("stop", "move"))


def _estimate(state: LiveState, name: str) -> dict[str, float]:
    estimate = estimate_start(state.snapshot, name, state.snapshot.now_s, state.policy, state.history)
    return {"p50_s": estimate.p50_s, "p90_s": estimate.p90_s}
