"""Fires the agent's share of a FaultPlan: at named points of a save, and at a step that it observes."""

import os
from dataclasses import dataclass
from pathlib import Path

from headway.recipe import FaultPlan
from headway.recipe.faults import AGENT, KEEPER, AgentPoint, execute_fault, mark_fired


@dataclass(frozen=True)
class AgentFaultInjector:
    """Faults of the agent and of its launcher."""

    plan: FaultPlan
    folder: Path
    """Where fired faults are recorded."""

    def reach(self, point: AgentPoint, step: int, attempt: int) -> None:
        """Fire the faults that are due here; the launcher is the agent's parent process."""
        for rank in (KEEPER, AGENT) if self.plan.faults else ():
            for number in self.plan.due(point, step, rank, attempt):
                fault = self.plan.faults[number]
                if mark_fired(self.folder, number, fault, rank, step):
                    execute_fault(fault, pid=os.getppid() if rank == KEEPER else None)
