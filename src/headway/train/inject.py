"""Carries out the faults of a FaultPlan in a worker, at the named points of a step."""

from dataclasses import dataclass

import torch

from headway.recipe import FaultPlan
from headway.recipe.faults import WorkerPoint, carry_out

__all__ = ["Injector"]


@dataclass(frozen=True)
class Injector:
    """One worker's share of a plan."""

    plan: FaultPlan
    rank: int
    attempt: int

    def reach(self, point: WorkerPoint, step: int) -> None:
        """Strike if a fault is due here; an empty plan costs one loop over nothing."""
        for fault in self.plan.due(point, step, self.rank, self.attempt):
            if fault.action == "out-of-memory":
                raise torch.OutOfMemoryError("injected")
            carry_out(fault)
