"""Carries out the faults of a FaultPlan in the agent, at the named points of a save."""

import errno
import os
import signal
import time
from dataclasses import dataclass

from headway.recipe import FaultPlan
from headway.recipe.faults import AGENT, AgentPoint

__all__ = ["Injector"]


@dataclass(frozen=True)
class Injector:
    """The agent's share of a plan."""

    plan: FaultPlan

    def reach(self, point: AgentPoint, step: int, attempt: int) -> None:
        """Strike if a fault is due here; an empty plan costs one comparison."""
        if not self.plan.faults:
            return
        for fault in self.plan.due(point, step, AGENT, attempt):
            match fault.action:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stall":
                    time.sleep(fault.seconds)
                case "raise":
                    raise RuntimeError(f"injected at {point} of step {step}")
                case "full-disk":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                case "out-of-memory":
                    raise MemoryError("injected")
