"""Carries out the faults of a FaultPlan at the named points of a step."""

import errno
import os
import signal
import time
from dataclasses import dataclass

import torch

from headway.recipe import FaultPlan
from headway.recipe.faults import Point

__all__ = ["Injector"]


@dataclass(frozen=True)
class Injector:
    """One worker's share of a plan."""

    plan: FaultPlan
    rank: int
    attempt: int

    def reach(self, point: Point, step: int) -> None:
        """Strike if a fault is due here; an empty plan costs one comparison."""
        if not self.plan.faults:
            return
        for fault in self.plan.due(point, step, self.rank, self.attempt):
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
                    raise torch.OutOfMemoryError("injected")
