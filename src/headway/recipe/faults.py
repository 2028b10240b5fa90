"""Faults on purpose: a scripted, replayable list of what breaks where and when.

    FaultPlan().kill(rank=1, step=3).stall("data", step=5, seconds=2.0)

A plan is plain data. It travels to the workers as JSON (`HEADWAY_FAULTS` holds it for a command), each worker
asks at named points of a step which faults are due, and carries them out. Without a plan nothing is asked. What has
struck leaves a file with the moment in the run's folder, so that a fault meant once strikes once, whatever is
restarted, and so that what came after can be timed.
"""

import errno
import os
import signal
import time
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "AGENT",
    "KEEPER",
    "POINTS",
    "Fault",
    "FaultPlan",
    "FiredFault",
    "Mutation",
    "execute_fault",
    "mark_fired",
    "read_fired_faults",
]

AGENT, KEEPER = -1, -2
"""The agent and the process that keeps it, where faults count ranks. It is the agent that strikes its keeper."""

WorkerPoint = Literal["restore", "start", "data", "compute", "collective", "optimizer", "evaluation", "save", "saved"]
AgentPoint = Literal["watch", "write", "written", "commit", "committed", "upload", "uploaded"]
Point = WorkerPoint | AgentPoint
POINTS: tuple[Point, ...] = (*get_args(WorkerPoint), *get_args(AgentPoint))
"""Where a fault can strike. In a worker: when its state is restored (or drawn), at a step's start, in the data wait, in
the forward and backward, before the gradients of all are added up, before the update, in an evaluation, before a save's
copy, after it. In the agent: when it sees a step (or a later one) under way, before a save's files are written, when
they are, before its commit, after it, before and after the upload to a store."""

Action = Literal[
    "kill", "exit", "stop", "stall", "slow", "hang", "raise", "full-disk", "out-of-memory", "nan", "flip",
    "kill-node", "stop-node"
]  # fmt: skip
"""kill: SIGKILL. kill-node, stop-node: of the agent of the node that a worker is on. exit: leave without a word. stop:
SIGSTOP. stall: sleep. slow: sleep in every step from here on. hang: never come back; at the point `collective` in an
exchange that nobody else takes part in. nan: the step's loss is not a number. flip: one bit of a parameter."""
FOR_EVER_S = 1e6

Mutation = Literal["no-gradient-reduction", "pipeline-loss-scale", "whole-norm"]
"""A mistake in how a model is put onto a mesh: gradients that nobody adds up, a loss that a pipeline divides once
more, norms taken for whole where each worker sees a share of the sequence. Training goes on with it, and goes wrong; by
these `headway check` shows that it finds such mistakes."""


class Fault(BaseModel):
    """One thing that breaks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: Action
    point: Point = "start"
    step: Annotated[int, Field(ge=1)] | None = None
    """The step it strikes in; None strikes in the first that gets to the point."""
    rank: int | None = None
    """The worker it strikes, AGENT for the agent; None strikes all that get there."""
    attempt: Annotated[int, Field(ge=1)] | None = 1
    """The attempt it strikes in, so that a resumed run is not struck again; None: any, but once (for each rank)."""
    always: bool = False
    """Strike whenever the step is reached, in every attempt."""
    cursor: int | None = None
    """Only where the step's samples begin with this one: a run that passes them over is spared."""
    seconds: Annotated[float, Field(ge=0)] = 0.0


class FaultPlan(BaseModel):
    """Faults in the order they were asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    faults: tuple[Fault, ...] = ()
    mutations: tuple[Mutation, ...] = ()
    """Mistakes in how the model is spread over workers, that `headway check` must find."""

    def kill(self, step: int | None, rank: int | None = None, point: Point = "start", attempt: int | None = 1) -> Self:
        """SIGKILL a worker."""
        return self.add("kill", point=point, step=step, rank=rank, attempt=attempt)

    def stall(self, point: Point, step: int, seconds: float, rank: int | None = None, attempt: int = 1) -> Self:
        """Sleep at a point."""
        return self.add("stall", point=point, step=step, rank=rank, seconds=seconds, attempt=attempt)

    def fail(self, step: int, rank: int | None = None, point: Point = "start", attempt: int = 1) -> Self:
        """Raise an exception."""
        return self.add("raise", point=point, step=step, rank=rank, attempt=attempt)

    def full_disk(self, step: int, rank: int | None = None, point: Point = "write", attempt: int = 1) -> Self:
        """Meet a full disk; with rank=AGENT in what the agent writes."""
        return self.add("full-disk", point=point, step=step, rank=rank, attempt=attempt)

    def out_of_memory(self, step: int, rank: int | None = None, attempt: int = 1) -> Self:
        """Meet the end of the device's memory in the forward pass."""
        return self.add("out-of-memory", point="compute", step=step, rank=rank, attempt=attempt)

    def add(
        self,
        action: Action,
        *,
        point: Point = "start",
        step: int | None = None,
        rank: int | None = None,
        attempt: int | None = 1,
        always: bool = False,
        cursor: int | None = None,
        seconds: float = 0.0,
    ) -> Self:
        """Any fault; see Fault."""
        fault = Fault(
            action=action, point=point, step=step, rank=rank, attempt=attempt, always=always, cursor=cursor,
            seconds=seconds,
        )  # fmt: skip
        return self.model_copy(update={"faults": (*self.faults, fault)})

    def due(self, point: Point, step: int, rank: int, attempt: int, cursor: int | None = None) -> list[int]:
        """The numbers of the faults that would strike here and now, if they have not struck before."""
        return [
            number
            for number, fault in enumerate(self.faults)
            if fault.point == point
            and _reached(fault, step)
            and fault.rank in (None, rank)
            and (fault.always or fault.attempt in (None, attempt))
            and (fault.cursor is None or fault.cursor == cursor)
        ]


def _reached(fault: Fault, step: int) -> bool:
    """An agent only looks at the steps now and then, and a slow worker stays slow."""
    if fault.step is None:
        return True
    return step >= fault.step if fault.point == "watch" or fault.action == "slow" else step == fault.step


class FiredFault(BaseModel):
    """What has struck: the fault's number in its plan, whom, when."""

    number: int
    rank: int
    at_ns: int
    """On the machine's monotonic clock."""
    step: int


def mark_fired(folder: Path, number: int, fault: Fault, rank: int, step: int) -> bool:
    """Note that a fault strikes now; False if it has struck this rank before and is not meant to do so again."""
    folder.mkdir(exist_ok=True)
    moment = FiredFault(number=number, rank=rank, at_ns=time.monotonic_ns(), step=step).model_dump_json()
    try:
        with (folder / f"{number:04d}-rank-{rank}.json").open("x") as file:
            file.write(moment)
    except FileExistsError:
        return fault.always or fault.action == "slow" or fault.attempt is not None
    return True


def read_fired_faults(folder: Path) -> list[FiredFault]:
    """What has struck a run, in the order it did."""
    found = [FiredFault.model_validate_json(text) for path in folder.glob("*.json") if (text := path.read_text())]
    return sorted(found, key=lambda one: one.at_ns)


def execute_fault(fault: Fault, pid: int | None = None) -> None:
    """Break what a fault says, in this process or, where that is by a signal, in another."""
    match fault.action:
        case "kill":
            os.kill(pid or os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(pid or os.getpid(), signal.SIGSTOP)
        case "kill-node":
            os.kill(_agent_of_this_worker(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop-node":
            os.kill(_agent_of_this_worker(), signal.SIGSTOP)
        case "exit":
            os._exit(3)
        case "stall" | "slow":
            time.sleep(fault.seconds)
        case "hang":
            time.sleep(FOR_EVER_S)
        case "raise":
            raise RuntimeError(f"injected at {fault.point} of step {fault.step}")
        case "full-disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "out-of-memory":
            raise MemoryError("injected")


def _agent_of_this_worker() -> int:
    """The parent of the zygote that forked it."""
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
