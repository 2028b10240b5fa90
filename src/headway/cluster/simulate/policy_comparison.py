"""Policies side by side on one log."""

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

__all__ = ["compare_policies", "find_policies", "zero_wait_bound"]


def find_policies(names: str) -> list[Policy]:
    """Policies by their names, with commas between."""
    found = []
    for name in (name.strip() for name in names.split(",")):
        if name not in POLICIES:
            raise UsageError(f"there is no policy {name!r}", hint=f"there are {', '.join(POLICIES)}")
        if POLICIES[name] not in found:
            found.append(POLICIES[name])
    return found


def compare_policies(
    trace: JobTrace,
    setup: SimulationSetup,
    policies: Sequence[Policy],
    progress: Callable[[str, int], None] = lambda *_: None,
    record: Path | None = None,
) -> dict[str, SimulationResult]:
    """What each makes of the log; `progress` hears whose jobs have ended, and how many.

    A policy that plans with time limits runs with users' guesses and with the longest for all, and the better counts.
    `record` is a folder for what each decided; of two runs of a policy the one with guesses is kept.
    """
    found = dict[str, SimulationResult]()
    for policy in policies:
        both = [setup, replace(setup, limits=None)] if policy.behind == "backfill" and setup.limits else [setup]
        file = None if record is None else record_of(record, policy.name)
        tries = [
            simulate(trace, one, policy, partial(progress, policy.name), file if one is setup else None) for one in both
        ]
        found[policy.name] = min(tries, key=lambda one: float(one.delay_s.mean()))
    return found


def zero_wait_bound(trace: JobTrace) -> dict[str, Any]:
    """The bound: every job starts when it comes, and never stops."""
    counts = np.empty(0, np.int64)
    outcome = SimulationResult(
        trace, 1, trace.submit_s, trace.submit_s + trace.duration_s, np.ones(len(trace), np.int64),
        0.0, {}, dict.fromkeys(CAUSES, 0), 0.0, 1.0, 0, np.empty(0), counts, counts,
    )  # fmt: skip
    return {key: value for key, value in summary(outcome).items() if key.endswith("_s") and "gpu" not in key}
