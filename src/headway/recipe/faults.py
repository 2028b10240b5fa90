"""Fault injection: a scripted, reproducible plan of what breaks where and when.

    FaultPlan().kill(rank=1, step=3).stall("data", step=5, seconds=2.0)

A plan is plain data, sent to workers as JSON (a command takes it from `HEADWAY_FAULTS`). At named points of a step each
worker executes the faults that are due; without a plan there are no checks. A fired fault leaves a file with the time
in the run's folder, so that it fires once across restarts and recovery can be timed.
"""

import errno
import os
import signal
import time
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field

AGENT, KEEPER = -1, -2
"""Pseudo-ranks of the agent and its launcher. Faults of the launcher are executed by the agent."""

WorkerPoint = Literal[
    "restore", "start", "data", "generate", "score", "compute", "collective", "optimizer", "evaluation", "save", "saved"
]
ChildPoint = Literal["scorer", "sandbox", "generator"]
AgentPoint = Literal["watch", "write", "written", "commit", "committed", "upload", "uploaded"]
Point = WorkerPoint | ChildPoint | AgentPoint
POINTS: tuple[Point, ...] = (*get_args(WorkerPoint), *get_args(ChildPoint), *get_args(AgentPoint))
"""Where a fault can fire. In a worker: when its state is restored (or initialized), at the start of a step, while
waiting for data, before answers are sampled, once they are and the last are scored, in forward and backward, before
gradients are reduced, before the update, in an evaluation, before and after a save's copy. In a process of a worker,
to which `kill` and `stop` go: one that scores an answer, one that is a sandbox, one that samples answers. In the
agent: when it sees a step (or a later one) running, before and after a save's files are written, before and after its
commit, before and after the upload to a store."""

Action = Literal[
    "kill", "exit", "stop", "stall", "slow", "hang", "raise", "full-disk", "out-of-memory", "nan", "flip",
    "kill-node", "stop-node"
]  # fmt: skip
"""kill: SIGKILL. kill-node, stop-node: the same, and SIGSTOP, to the agent of the worker's node. exit: exit silently.
stop: SIGSTOP. stall: sleep. slow: sleep in every step from here on. hang: sleep forever; at the point `collective`,
enter a collective that no other worker joins. nan: make the step's loss NaN. flip: flip one bit of a parameter."""
FOR_EVER_S = 1e6

Mutation = Literal["no-gradient-reduction", "pipeline-loss-scale", "whole-norm"]
"""A deliberate parallelization bug: gradients that are not reduced, a pipeline loss that is divided twice, norm
gradients that are not summed though each worker sees a share of the sequence. Training runs, but wrongly; `headway
check` must detect each."""


class Fault(BaseModel):
    """One injected fault."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: Action
    point: Point = "start"
    step: Annotated[int, Field(ge=1)] | None = None
    """The step it fires in; None: the first to reach the point."""
    rank: int | None = None
    """The worker it fires in, AGENT for the agent; None: all that reach the point."""
    attempt: Annotated[int, Field(ge=1)] | None = 1
    """The attempt it fires in, so that it does not fire again after a restart; None: any, but once per rank."""
    always: bool = False
    """Fire whenever the step is reached, in every attempt."""
    cursor: int | None = None
    """Fire only if the step's samples start with this one: a run that skips them is unaffected."""
    seconds: Annotated[float, Field(ge=0)] = 0.0


class FaultPlan(BaseModel):
    """A list of faults to inject."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    faults: tuple[Fault, ...] = ()
    mutations: tuple[Mutation, ...] = ()
    """Parallelization bugs that `headway check` must detect."""

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
        """Simulate a full disk; with rank=AGENT, in what the agent writes."""
        return self.add("full-disk", point=point, step=step, rank=rank, attempt=attempt)

    def out_of_memory(self, step: int, rank: int | None = None, attempt: int = 1) -> Self:
        """Simulate running out of device memory in the forward pass."""
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
        """Add any fault; see Fault."""
        fault = Fault(
            action=action, point=point, step=step, rank=rank, attempt=attempt, always=always, cursor=cursor,
            seconds=seconds,
        )  # fmt: skip
        return self.model_copy(update={"faults": (*self.faults, fault)})

    def due(self, point: Point, step: int, rank: int, attempt: int, cursor: int | None = None) -> list[int]:
        """Return the numbers of the faults that are due here, unless they have fired before."""
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
    """Whether a fault's step is reached, or passed: agents only poll steps, and a slow worker stays slow."""
    if fault.step is None:
        return True
    return step >= fault.step if fault.point == "watch" or fault.action == "slow" else step == fault.step


class FiredFault(BaseModel):
    """A fault that has fired: its number in the plan, where and when."""

    number: int
    rank: int
    at_ns: int
    """On the machine's monotonic clock."""
    step: int


def mark_fired(folder: Path, number: int, fault: Fault, rank: int, step: int) -> bool:
    """Record that a fault fires now; return False if it already fired in this rank and must not again."""
    folder.mkdir(exist_ok=True)
    moment = FiredFault(number=number, rank=rank, at_ns=time.monotonic_ns(), step=step).model_dump_json()
    try:
        with (folder / f"{number:04d}-rank-{rank}.json").open("x") as file:
            file.write(moment)
    except FileExistsError:
        return fault.always or fault.action == "slow" or fault.attempt is not None
    return True


def read_fired_faults(folder: Path) -> list[FiredFault]:
    """Return the faults that have fired in a run, by time."""
    fired = [FiredFault.model_validate_json(text) for path in folder.glob("*.json") if (text := path.read_text())]
    return sorted(fired, key=lambda fault: fault.at_ns)


def execute_fault(fault: Fault, pid: int | None = None) -> None:
    """Execute a fault in this process or, if it is a signal, in process `pid`."""
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
    """Return the pid of the agent: the parent of the zygote that forked this worker."""
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
