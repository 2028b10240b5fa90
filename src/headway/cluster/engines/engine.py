"""What starts processes on machines: one small interface, whatever is behind it.

    inventory      the machines there are, and what is free of them
    launch         have one command started on each of so many machines, when they are free
    status         how jobs stand, in our words and in the engine's own
    signal         have the processes of a job told something
    logs           where what they print lies
    cancel         have a job end, waiting or running

An engine knows machines and processes, and nothing of training. Whatever it does has happened, or has not, when the
call returns: a launch that fails has left nothing behind, and a cancel may be repeated. A Request says what is wanted
in words that all engines share; what only one of them understands goes into `site`.
"""

import os
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from headway.errors import UsageError

__all__ = [
    "EARLY_S",
    "OVER",
    "REQUEUE",
    "Engine",
    "JobStatus",
    "LaunchRequest",
    "Machine",
    "State",
    "array_status",
    "end_of",
    "read_end",
    "secret_values",
    "state_after_exit",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MACHINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

REQUEUE = 75
"""What a command exits with that has saved, and wants to be started again."""

EARLY_S = 30
"""Seconds within which a command may not listen to signals yet."""

State = Literal["waiting", "running", "ending", "finished", "failed", "cancelled", "impossible", "unknown"]
"""A job has no machines yet, or again; its processes run; it has been told to end. It has done its work; its command
failed, or its machines did; somebody cancelled it. It can never have what it asks for. The engine does not know it,
or no longer."""

OVER: frozenset[State] = frozenset({"finished", "failed", "cancelled", "impossible"})
"""States that nothing follows."""


@dataclass(frozen=True)
class Machine:
    """A machine as an engine sees it."""

    name: str
    state: Literal["free", "busy", "away"]
    """Nothing runs there; something does, perhaps on a part of it; nothing can."""
    gpus: int = 0
    gpus_free: int = 0
    cpus: int = 0
    memory_bytes: int = 0
    groups: tuple[str, ...] = ()
    """What it belongs to: partitions, pools."""
    reason: str = ""
    """Why nothing can run there, in the engine's own words."""


@dataclass(frozen=True)
class LaunchRequest:
    """What to start, and on what. A job is over when all of its commands are; the highest exit status is the job's,
    unless one of them has said how the whole ended (`end_of`)."""

    name: str
    """For people and lists: letters, digits, dots, dashes and underscores."""
    command: tuple[str, ...]
    """Started once on each machine, all or none; words, never a line for a shell. It finds the machines' names in
    HEADWAY_MACHINES, with commas between them, and its own place among them, from 0 on, in HEADWAY_MACHINE. One that
    knows how the work of all of them ended may write that exit status into the file that HEADWAY_END names, where an
    engine of several machines sets it, and then machines that the next start should do without, a line each."""
    folder: Path
    """Where it runs, and where its logs are put."""
    shared: bool = True
    """Whether every machine sees that folder at this path. Where they do not, a command begins in one of its machine's
    own, and what it prints stays there."""
    machines: int = 1
    spares: int = 0
    """So many of its machines may be lost, and the others go on as if nothing had happened. When one more is lost, all
    are ended and started again."""
    gpus: int = 0
    """Of each machine."""
    cpus: int = 1
    """Of each machine."""
    memory_bytes: int | None = None
    """Of each machine; None leaves it to the engine."""
    limit_s: float | None = None
    """After which one start of it is ended; None is the longest that is allowed. Whoever has saved by then, and exits
    with REQUEUE, is started again with as much: that is how a job lasts longer than any limit."""
    grace_s: float = 60.0
    """How long before its end, whoever wants it, its processes hear SIGUSR1."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the command: nothing secret, for it may be written into scripts and records."""
    secrets: tuple[str, ...] = ()
    """Names of variables that it has from whoever submits it; their values are written nowhere."""
    setup: tuple[str, ...] = ()
    """Lines for the shell, before the command."""
    avoid: tuple[str, ...] = ()
    """Machines that are suspected of something."""
    array: int | None = None
    """So many copies, each with HEADWAY_ARRAY_INDEX from 0 on. JOB_3 is the id of the fourth; JOB stands for all."""
    at_once: int | None = None
    """Of an array: so many copies at a time, and no more."""
    site: Mapping[str, str] = field(default_factory=dict)
    """What only this engine understands: a partition, an account, a strategy of placement."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"{self.name!r} cannot name a job",
                hint="at most 128 letters, digits, dots, dashes and underscores, a letter or digit first",
            )
        if not self.command:
            raise UsageError(f"job {self.name} has no command", hint="name a program, and its words after it")
        texts = (*self.command, *self.environment.values(), *self.setup, str(self.folder))
        if any("\0" in text for text in texts):
            raise UsageError(f"job {self.name}: no word may hold a NUL", hint="no program could be given it")
        for variable in (*self.environment, *self.secrets):
            if not _VARIABLE.fullmatch(variable):
                raise UsageError(f"{variable!r} cannot name a variable", hint="letters, digits and underscores")
        least = {
            "machines": 1,
            "spares": 0,
            "gpus": 0,
            "cpus": 1,
            "array": 1,
            "at_once": 1,
            "limit_s": 1,
            "grace_s": 0,
            "memory_bytes": 1,
        }
        for key, lowest in least.items():
            value = getattr(self, key)
            if value is not None and not lowest <= value < 2**63:
                raise UsageError(f"job {self.name}: {key} is {value}", hint=f"{lowest} or more")
        if self.spares >= self.machines:
            raise UsageError(f"job {self.name}: {self.spares} of {self.machines} machines are spares")
        if not self.folder.is_absolute():
            raise UsageError(f"job {self.name}: its folder {self.folder} is not absolute")


@dataclass(frozen=True)
class JobStatus:
    """How a job stands."""

    state: State
    reason: str = ""
    """Why it waits, or how it ended: a sentence."""
    machines: tuple[str, ...] = ()
    """Those that it has, or had last, the first one first."""
    exit_status: int | None = None
    starts: int = 0
    """How often it was started."""
    native: str = ""
    """The engine's own word for the state."""


def state_after_exit(exit_status: int, cancelled: bool, told_after_s: float | None = None) -> State:
    """What a job is whose command has exited so: `waiting` is one that is started again. One that heard SIGUSR1 so soon
    after its start that it did not listen yet has died of it, and has lost nothing."""
    if exit_status == 128 + signal.SIGUSR1 and told_after_s is not None and told_after_s < EARLY_S:
        exit_status = REQUEUE
    if exit_status == 0:
        return "finished"
    if cancelled:
        return "cancelled"
    return "waiting" if exit_status == REQUEUE else "failed"


def read_end(path: Path) -> tuple[int, tuple[str, ...]] | None:
    """What a command has written into the file of HEADWAY_END: how the whole ended, and the machines it suspects."""
    try:
        first, *others = path.read_text().splitlines()
        return int(first), tuple(name for name in others if _MACHINE.fullmatch(name))
    except (OSError, ValueError):
        return None


def end_of(said: Iterable[int]) -> int | None:
    """How a job ended by what its commands have said of the whole; None where none has. One that was cut off from the
    others may not know that they finished."""
    found = set(said)
    return 0 if 0 in found else REQUEUE if REQUEUE in found else max(found, default=None)


def array_status(copies: Sequence[JobStatus]) -> JobStatus:
    """How an array stands: as the liveliest of its copies; once all are over, as the worst."""
    order: tuple[State, ...] = (
        "ending",
        "running",
        "waiting",
        "unknown",
        "impossible",
        "failed",
        "cancelled",
        "finished",
    )
    first = min(copies, key=lambda one: order.index(one.state))
    counts = {state: sum(one.state == state for one in copies) for state in order}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    statuses = [one.exit_status for one in copies if one.exit_status is not None]
    return JobStatus(
        state=first.state,
        reason=f"of {len(copies)} copies: {told}" + (f"; {first.reason}" if first.reason else ""),
        machines=tuple(dict.fromkeys(name for one in copies for name in one.machines)),
        exit_status=max(statuses) if len(statuses) == len(copies) else None,
        starts=sum(one.starts for one in copies),
        native=first.native,
    )


def secret_values(request: LaunchRequest) -> dict[str, str]:
    """The secrets of a job from this process's environment."""
    missing = [name for name in request.secrets if name not in os.environ]
    if missing:
        raise UsageError(
            f"job {request.name} takes {', '.join(missing)} from the environment, where there is no such variable",
            hint=f"export {missing[0]}=..., or leave it out of `secrets`",
        )
    return {name: os.environ[name] for name in request.secrets}


class Engine(ABC):
    """Starts processes on machines. UsageError tells of a request that is wrong, EngineError of an engine that is."""

    name: ClassVar[str]
    """What people call it."""

    @abstractmethod
    def inventory(self) -> list[Machine]:
        """All machines that may be asked for."""

    @abstractmethod
    def describe(self, request: LaunchRequest) -> str:
        """Exactly what `launch` would send, without sending it; UsageError where it would refuse the request."""

    @abstractmethod
    def launch(self, request: LaunchRequest) -> str:
        """Have a job started as soon as there is room; its id. A job that can never start is refused."""

    @abstractmethod
    def status(self, jobs: Sequence[str]) -> dict[str, JobStatus]:
        """How jobs stand, by their ids; all of them in as few questions as the engine allows."""

    @abstractmethod
    def signal(self, job: str, number: signal.Signals) -> None:
        """Have the command of a running job hear a signal on each of its machines."""

    @abstractmethod
    def logs(self, job: str) -> list[Path]:
        """What a job's processes print, a file for each machine and start, the oldest first; they may not exist yet."""

    @abstractmethod
    def cancel(self, job: str) -> None:
        """Have a job end: SIGUSR1, and after its grace for good. One that is over stays as it is."""
