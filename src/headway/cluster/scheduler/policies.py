"""All scheduling policies by name."""

from headway.cluster.scheduler.baseline_policies import BASELINES
from headway.cluster.scheduler.least_served import LEAST_SERVED
from headway.cluster.scheduler.policy import Policy

POLICIES: dict[str, Policy] = {policy.name: policy for policy in (LEAST_SERVED, *BASELINES)}
"""Headway's own first."""
