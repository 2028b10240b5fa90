"""Policies side by side on one log."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headway.cluster.policies import POLICIES
from headway.cluster.policy import Policy
from headway.cluster.record import record_of
from headway.cluster.simulate.engine import Setup, simulate
from headway.cluster.simulate.outcome import CAUSES, Outcome, summary
from headway.cluster.simulate.trace import Trace
from headway.errors import UsageError

__all__ = ["compare", "find_policies", "without_waiting"]


def find_policies(names: str) -> list[Policy]:
    """Policies by their names, with commas between."""
    found = []
    for name in (name.strip() for name in names.split(",")):
        if name not in POLICIES:
            raise UsageError(f"there is no policy {name!r}", hint=f"there are {', '.join(POLICIES)}")
        if POLICIES[name] not in found:
            found.append(POLICIES[name])
    return found


def compare(
    trace: Trace,
    setup: Setup,
    policies: Sequence[Policy],
    progress: Callable[[str, int], None] = lambda *_: None,
    record: Path | None = None,
) -> dict[str, Outcome]:
    """What each makes of the log; `progress` hears whose jobs have ended, and how many.

    A policy that plans with time limits runs with users' guesses and with the longest for all, and the better counts.
    `record` is a folder for what each decided; of two runs of a policy the one with guesses is kept.
    """
    found = dict[str, Outcome]()
    for policy in policies:
        both = [setup, replace(setup, limits=None)] if policy.behind == "backfill" and setup.limits else [setup]
        file = None if record is None else record_of(record, policy.name)
        tries = [
            simulate(trace, one, policy, partial(progress, policy.name), file if one is setup else None) for one in both
        ]
        found[policy.name] = min(tries, key=lambda one: float(one.delay_s.mean()))
    return found


def without_waiting(trace: Trace) -> dict[str, Any]:
    """The bound: every job starts when it comes, and never stops."""
    counts = np.empty(0, np.int64)
    outcome = Outcome(
        trace, 1, trace.submit_s, trace.submit_s + trace.duration_s, np.ones(len(trace), np.int64),
        0.0, {}, dict.fromkeys(CAUSES, 0), 0.0, 1.0, 0, np.empty(0), counts, counts,
    )  # fmt: skip
    return {key: value for key, value in summary(outcome).items() if key.endswith("_s") and "gpu" not in key}
