"""A made-up log for tests of the simulator."""

import math

import numpy as np

from headway.cluster.simulate.job_trace import JobTrace


def log(seed: int, span_s: float, jobs: int = 60) -> JobTrace:
    """Jobs of two tenants that come at any time of a span: short ones and long ones, up to a node large."""
    chance, none = np.random.default_rng(seed), np.full(jobs, math.nan)
    return JobTrace(
        tuple(f"job-{number}" for number in range(jobs)), np.sort(chance.uniform(0, span_s, jobs)).round(),
        chance.choice([300.0, 4000.0, 30_000.0], jobs), chance.choice([1, 2, 4, 8], jobs),
        chance.integers(0, 2, jobs), ("blue", "red"), none, none,
    )  # fmt: skip
