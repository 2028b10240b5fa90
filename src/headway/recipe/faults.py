"""Faults on purpose: a scripted, replayable list of what breaks where and when.

    FaultPlan().kill(rank=1, step=3).stall("data", step=5, seconds=2.0)

A plan is plain data. It travels to the workers as JSON (`HEADWAY_FAULTS` holds it for a command), each worker
asks at named points of a step which faults are due, and carries them out. Without a plan nothing is asked.
"""

import errno
import os
import signal
import time
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["AGENT", "POINTS", "Fault", "FaultPlan", "Mutation", "carry_out"]

AGENT = -1
"""The agent, where faults count ranks."""

WorkerPoint = Literal["start", "data", "compute", "evaluation", "save", "saved"]
AgentPoint = Literal["write", "written", "commit", "committed", "upload", "uploaded"]
Point = WorkerPoint | AgentPoint
POINTS: tuple[Point, ...] = (*get_args(WorkerPoint), *get_args(AgentPoint))
"""Where a fault can strike. In a worker: at a step's start, in the data wait, in the forward and backward, in an
evaluation, before a save's copy, after it. In the agent: before a save's files are written, when they are, before its
commit, after it, before and after the upload to a store."""

Mutation = Literal["no-gradient-reduction", "pipeline-loss-scale", "whole-norm"]
"""A mistake in how a model is put onto a mesh: gradients that nobody adds up, a loss that a pipeline divides once
more, norms taken for whole where each worker sees a share of the sequence. Training goes on with it, and goes wrong; by
these `headway check` shows that it finds such mistakes."""


class Fault(BaseModel):
    """One thing that breaks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: Literal["kill", "stall", "raise", "full-disk", "out-of-memory"]
    point: Point = "start"
    step: Annotated[int, Field(ge=1)]
    rank: int | None = None
    """The worker it strikes, AGENT for the agent; None strikes all that get there."""
    attempt: Annotated[int, Field(ge=1)] = 1
    """The attempt it strikes in, so that a resumed run is not struck again."""
    seconds: Annotated[float, Field(ge=0)] = 0.0


class FaultPlan(BaseModel):
    """Faults in the order they were asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    faults: tuple[Fault, ...] = ()
    mutations: tuple[Mutation, ...] = ()
    """Mistakes in how the model is spread over workers, that `headway check` must find."""

    def kill(self, step: int, rank: int | None = None, point: Point = "start", attempt: int = 1) -> Self:
        """SIGKILL a worker."""
        return self._with(Fault(action="kill", point=point, step=step, rank=rank, attempt=attempt))

    def stall(self, point: Point, step: int, seconds: float, rank: int | None = None, attempt: int = 1) -> Self:
        """Sleep at a point."""
        return self._with(Fault(action="stall", point=point, step=step, rank=rank, seconds=seconds, attempt=attempt))

    def fail(self, step: int, rank: int | None = None, point: Point = "start", attempt: int = 1) -> Self:
        """Raise an exception."""
        return self._with(Fault(action="raise", point=point, step=step, rank=rank, attempt=attempt))

    def full_disk(self, step: int, rank: int | None = None, point: Point = "write", attempt: int = 1) -> Self:
        """Meet a full disk; with rank=AGENT in what the agent writes."""
        return self._with(Fault(action="full-disk", point=point, step=step, rank=rank, attempt=attempt))

    def out_of_memory(self, step: int, rank: int | None = None, attempt: int = 1) -> Self:
        """Meet the end of the device's memory in the forward pass."""
        return self._with(Fault(action="out-of-memory", point="compute", step=step, rank=rank, attempt=attempt))

    def due(self, point: Point, step: int, rank: int, attempt: int) -> list[Fault]:
        """The faults that strike here and now."""
        return [
            fault
            for fault in self.faults
            if (fault.point, fault.step, fault.attempt) == (point, step, attempt) and fault.rank in (None, rank)
        ]

    def _with(self, fault: Fault) -> Self:
        return self.model_copy(update={"faults": (*self.faults, fault)})


def carry_out(fault: Fault) -> None:
    """Break what a fault says, in this process."""
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stall":
            time.sleep(fault.seconds)
        case "raise":
            raise RuntimeError(f"injected at {fault.point} of step {fault.step}")
        case "full-disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "out-of-memory":
            raise MemoryError("injected")
