"""Carries out the faults of a FaultPlan in the agent, at the named points of a save."""

from dataclasses import dataclass

from headway.recipe import FaultPlan
from headway.recipe.faults import AGENT, AgentPoint, carry_out

__all__ = ["Injector"]


@dataclass(frozen=True)
class Injector:
    """The agent's share of a plan."""

    plan: FaultPlan

    def reach(self, point: AgentPoint, step: int, attempt: int) -> None:
        """Strike if a fault is due here; an empty plan costs one loop over nothing."""
        for fault in self.plan.due(point, step, AGENT, attempt):
            carry_out(fault)
