"""Maintenance from the first second on, and elastic jobs under policies without sizes."""

import numpy as np
import pytest

from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.simulate.job_trace import JobTrace
from headway.cluster.simulate.simulator import MaintenanceWindow, SimulationSetup, simulate

NONE = np.full(1, np.nan)
SINGLE_JOB = JobTrace(
    ("a",), np.zeros(1), np.full(1, 600.0), np.array([8]), np.zeros(1, np.int64), ("all",), NONE, NONE
)


@pytest.mark.parametrize("from_s", [0.0, 1.0, 599.0])
def test_node_in_maintenance_from_the_beginning_is_not_used(from_s: float) -> None:
    setup = SimulationSetup("a100", 8, 1, away=(MaintenanceWindow(0, 1, from_s, 5000.0),), preemptible=0.0)
    result = simulate(SINGLE_JOB, setup, POLICIES["headway"])
    assert result.completion_s[0] >= 5000.0 + 600.0


@pytest.mark.parametrize("policy", ["fifo", "slurm", "kueue"])
def test_policy_without_elastic_sizes_runs_a_job_as_submitted(policy: str) -> None:
    result = simulate(SINGLE_JOB, SimulationSetup("a100", 8, 1, elastic=1.0), POLICIES[policy])
    assert result.completion_s[0] == pytest.approx(600.0, abs=60.0)
