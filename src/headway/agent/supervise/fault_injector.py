"""Carries out the faults of a FaultPlan in the agent: at the named points of a save, and at a step that it sees."""

import os
from dataclasses import dataclass
from pathlib import Path

from headway.recipe import FaultPlan
from headway.recipe.faults import AGENT, KEEPER, AgentPoint, execute_fault, mark_fired

__all__ = ["AgentFaultInjector"]


@dataclass(frozen=True)
class AgentFaultInjector:
    """The agent's share of a plan."""

    plan: FaultPlan
    folder: Path
    """Where what has struck is noted."""

    def reach(self, point: AgentPoint, step: int, attempt: int) -> None:
        """Strike if a fault is due here; the keeper is the agent's parent."""
        for rank in (KEEPER, AGENT) if self.plan.faults else ():
            for number in self.plan.due(point, step, rank, attempt):
                fault = self.plan.faults[number]
                if mark_fired(self.folder, number, fault, rank, step):
                    execute_fault(fault, pid=os.getppid() if rank == KEEPER else None)
