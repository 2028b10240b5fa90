"""Executes the faults of a FaultPlan in a worker, at the named points of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from headway.parallel.local_part import to_local
from headway.recipe import FaultPlan
from headway.recipe.faults import ChildPoint, Fault, WorkerPoint, execute_fault, mark_fired


@dataclass(frozen=True)
class WorkerFaultInjector:
    """One worker's faults."""

    plan: FaultPlan
    rank: int
    attempt: int
    model: nn.Module
    folder: Path
    """Where fired faults are recorded."""
    _poisoned: list[int] = field(default_factory=list)

    def reach(self, point: WorkerPoint, step: int, cursor: int | None = None) -> None:
        """Execute faults that are due here; an empty plan costs one comparison."""
        if not self.plan.faults:
            return
        for number in self.plan.due(point, step, self.rank, self.attempt, cursor):
            fault = self.plan.faults[number]
            if mark_fired(self.folder, number, fault, self.rank, step):
                self._carry_out(fault, step)

    def reach_child(self, point: ChildPoint, step: int, pids: Callable[[], Sequence[int]]) -> None:
        """Execute faults that are due in a process of this worker, if it has such a process now."""
        if not self.plan.faults:
            return
        for number in self.plan.due(point, step, self.rank, self.attempt):
            fault, children = self.plan.faults[number], pids()
            if children and mark_fired(self.folder, number, fault, self.rank, step):
                execute_fault(fault, children[0])

    def spoil(self, loss: torch.Tensor, step: int) -> torch.Tensor:
        """Return the loss of a step, or NaN if a fault of this step says so."""
        return loss * float("nan") if step in self._poisoned else loss

    def _carry_out(self, fault: Fault, step: int) -> None:
        if fault.action == "out-of-memory":
            raise torch.OutOfMemoryError("injected")
        if fault.action == "nan":
            self._poisoned.append(step)
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(float("nan"))
        elif fault.action == "flip":
            _flip(next(parameter for parameter in self.model.parameters() if to_local(parameter).numel()))
        elif fault.action == "hang" and fault.point == "collective" and dist.is_initialized():
            dist.recv(torch.zeros(1), src=(self.rank + 1) % dist.get_world_size(), tag=99)
        else:
            execute_fault(fault)


@torch.no_grad()
def _flip(parameter: torch.Tensor) -> None:
    """Flip the highest mantissa bit of the first element that a worker holds."""
    bits = to_local(parameter).view(-1)[:1].view(torch.int32)
    bits ^= 1 << 22
