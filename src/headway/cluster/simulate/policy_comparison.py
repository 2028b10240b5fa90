"""Policies side by side on one job trace."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headway.cluster.scheduler.decision_log import record_of
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.policy import Policy
from headway.cluster.simulate.job_trace import JobTrace
from headway.cluster.simulate.metrics import CAUSES, SimulationResult, summary
from headway.cluster.simulate.simulator import SimulationSetup, simulate
from headway.errors import UsageError


def find_policies(names: str) -> list[Policy]:
    """Return policies by their comma-separated names."""
    policies = dict[str, Policy]()
    for name in (name.strip() for name in names.split(",")):
        if name not in POLICIES:
            raise UsageError(f"unknown policy '{name}'", hint=f"known policies: {', '.join(POLICIES)}")
        policies[name] = POLICIES[name]
    return list(policies.values())


def compare_policies(
    trace: JobTrace,
    setup: SimulationSetup,
    policies: Sequence[Policy],
    progress: Callable[[str, int], None] = lambda *_: None,
    record: Path | None = None,
) -> dict[str, SimulationResult]:
    """Simulate a trace under each policy; `progress` receives the policy and how many more jobs have ended.

    A policy that plans with time limits runs twice, with users' guesses and with the longest limit for all, and the
    better run counts. `record` is a folder for decision logs; of two runs, the one with guesses is recorded.
    """
    results = dict[str, SimulationResult]()
    for policy in policies:
        setups = [setup]
        if policy.when_blocked == "backfill" and setup.limits:
            setups.append(replace(setup, limits=None))
        path = None if record is None else record_of(record, policy.name)
        runs = [
            simulate(trace, each, policy, partial(progress, policy.name), path if each is setup else None)
            for each in setups
        ]
        results[policy.name] = min(runs, key=lambda result: float(result.delay_s.mean()))
    return results


def zero_wait_bound(trace: JobTrace) -> dict[str, Any]:
    """Return the bound: every job starts when it is submitted, and never stops."""
    none = np.empty(0, np.int64)
    result = SimulationResult(
        trace, 1, trace.submit_s, trace.submit_s + trace.duration_s, np.ones(len(trace), np.int64),
        0.0, {}, dict.fromkeys(CAUSES, 0), 0.0, 1.0, 0, np.empty(0), none, none,
    )  # fmt: skip
    return {key: value for key, value in summary(result).items() if key.endswith("_s") and "gpu" not in key}
