"""A random trace for tests of the simulator."""

import math

import numpy as np

from headway.cluster.simulate.job_trace import JobTrace


def synthetic_trace(seed: int, span_s: float, jobs: int = 60) -> JobTrace:
    """Return short and long jobs of two tenants that arrive at random within a span, up to a node in size."""
    rng, none = np.random.default_rng(seed), np.full(jobs, math.nan)
    return JobTrace(
        tuple(f"job-{number}" for number in range(jobs)), np.sort(rng.uniform(0, span_s, jobs)).round(),
        rng.choice([300.0, 4000.0, 30_000.0], jobs), rng.choice([1, 2, 4, 8], jobs),
        rng.integers(0, 2, jobs), ("blue", "red"), none, none,
    )  # fmt: skip
