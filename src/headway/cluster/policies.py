"""All policies there are."""

from headway.cluster.least_served import LEAST_SERVED
from headway.cluster.peers import PEERS
from headway.cluster.policy import Policy

__all__ = ["POLICIES"]

POLICIES: dict[str, Policy] = {policy.name: policy for policy in (LEAST_SERVED, *PEERS)}
"""By name, Headway's own first."""
