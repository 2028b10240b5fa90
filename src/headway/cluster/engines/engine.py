"""The interface of all engines, which start processes on machines.

    probe          check within seconds that the engine answers at all
    inventory      list the machines and what is free on each
    launch         start one command on each of N machines, as soon as they are free
    status         report job states, both in Headway's terms and in the engine's own
    signal         send a signal to the processes of a job
    logs           list the log files of a job
    release        let a job start that the engine holds back
    cancel         end a job, waiting or running

Only launch, signal, release and cancel change anything; status and the other queries never do.

An engine knows machines and processes, not training. Calls are atomic: a launch that fails leaves nothing behind, and a
cancel may be repeated. A LaunchRequest uses terms that all engines share; settings of a single engine go into `site`.
"""

import math
import os
import re
import signal
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal

from headway.errors import EngineError, UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MACHINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

REQUEUE = 75
"""Exit status of a command that has saved and wants to be restarted."""

EARLY_S = 30
"""Seconds after its start within which a command may not have installed its signal handlers yet."""

PROBE_S = 5.0
"""How long an engine may take to show that it is alive."""

CANCELLED = "cancelled by the user"

State = Literal["waiting", "running", "ending", "finished", "failed", "cancelled", "impossible", "unknown"]
"""waiting: no machines yet, or again. running: its processes run. ending: they were asked to stop. finished: the work
is done. failed: its command or its machines failed. cancelled: by a user. impossible: it can never get what it asks
for. unknown: the engine does not know the job, or has forgotten it."""

OVER: frozenset[State] = frozenset({"finished", "failed", "cancelled", "impossible"})
"""Terminal states."""


@dataclass(frozen=True)
class Machine:
    """A machine as an engine sees it."""

    name: str
    state: Literal["free", "busy", "away"]
    """free: nothing runs there. busy: something does, perhaps on a part of it. away: unavailable."""
    gpus: int = 0
    gpus_free: int = 0
    cpus: int = 0
    memory_bytes: int = 0
    groups: tuple[str, ...] = ()
    """Partitions or pools that it belongs to."""
    reason: str = ""
    """Why it is away, as the engine says it."""


@dataclass(frozen=True)
class LaunchRequest:
    """What to start, and with which resources. A job is over when all of its commands are. Its exit status is the
    highest of theirs, unless one of them has reported a status for the whole job (`combined_exit_status`)."""

    name: str
    """For people and lists: letters, digits, dots, dashes and underscores."""
    command: tuple[str, ...]
    """Started once per machine, on all or none; an argument vector, never a shell line. HEADWAY_MACHINES holds the
    names of the machines, comma-separated, HEADWAY_MACHINE the index of this one, from 0, and HEADWAY_START, except on
    Kubernetes, the number of this start of the job, from 1. The service also sets HEADWAY_GPUS to the number of GPUs on
    each machine, comma-separated. A command that knows how the whole job ended may write that
    exit status to the file HEADWAY_END, where the engine sets it, followed by one line per machine that the next start
    should avoid."""
    folder: Path
    """Working directory, and where logs go."""
    shared: bool = True
    """Whether every machine sees that folder at this path. Otherwise a command starts in a folder on its own machine,
    and its logs stay there."""
    machines: int = 1
    spares: int = 0
    """How many of the machines may be lost while the others continue. When one more is lost, all are stopped and
    restarted."""
    gpus: int = 0
    """Per machine."""
    cpus: int = 1
    """Per machine."""
    memory_bytes: int | None = None
    """Per machine; None leaves it to the engine."""
    limit_s: float | None = None
    """Time limit per start; None is the longest allowed. A command that has saved by then and exits with REQUEUE is
    restarted with the same limit, so a job can outlast any limit."""
    grace_s: float = 60.0
    """How long before a stop, whatever its cause, the processes receive SIGUSR1."""
    startup_s: float = 0.0
    """How long a start takes at least until it has something new to save. A time limit that cannot hold this and the
    grace period is refused: the job would be restarted for ever."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the command. Never secrets: they may be written to scripts and records."""
    secrets: tuple[str, ...] = ()
    """Names of variables taken from the submitter's environment; their values are never written."""
    setup: tuple[str, ...] = ()
    """Shell lines to run before the command."""
    avoid: tuple[str, ...] = ()
    """Machines not to use."""
    array: int | None = None
    """Number of array tasks, each with HEADWAY_ARRAY_INDEX from 0. JOB_3 is the id of the fourth; JOB stands for
    all."""
    at_once: int | None = None
    """Array tasks that may run at a time."""
    site: Mapping[str, str] = field(default_factory=dict)
    """Settings of this engine only: a partition, an account, a placement strategy."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"invalid job name {self.name!r}",
                hint="at most 128 letters, digits, dots, dashes and underscores, a letter or digit first",
            )
        if not self.command:
            raise UsageError(f"job {self.name} has no command", hint="name a program and its arguments")
        texts = (*self.command, *self.environment.values(), *self.setup, str(self.folder))
        if any("\0" in text for text in texts):
            raise UsageError(f"job {self.name}: NUL character in an argument", hint="no program accepts one")
        for variable in (*self.environment, *self.secrets):
            if not _VARIABLE.fullmatch(variable):
                raise UsageError(f"invalid variable name {variable!r}", hint="letters, digits and underscores")
        positive = ("machines", "cpus", "array", "at_once", "limit_s", "memory_bytes")
        for key in (*positive, "spares", "gpus", "grace_s", "startup_s"):
            value, lowest = getattr(self, key), int(key in positive)
            if value is not None and not lowest <= value < 2**63:
                raise UsageError(f"job {self.name}: {key} is {value}", hint=f"{lowest} or more")
        if self.spares >= self.machines:
            raise UsageError(f"job {self.name}: {self.spares} of {self.machines} machines are spares")
        if not self.folder.is_absolute():
            raise UsageError(f"job {self.name}: folder {self.folder} is not an absolute path")


@dataclass(frozen=True)
class JobStatus:
    """The state of a job."""

    state: State
    reason: str = ""
    """Why it waits, or how it ended: a sentence."""
    machines: tuple[str, ...] = ()
    """Those that it has, or had last, in order."""
    exit_status: int | None = None
    starts: int = 0
    """How many times it was started."""
    native: str = ""
    """The engine's own name for the state."""
    remedy: Literal["", "requeue", "cancel"] = ""
    """The command that a user may give to help a job along that is stuck, or held back by its engine."""


def status_from_json(fields: Mapping[str, Any]) -> JobStatus:
    """A JobStatus from its fields as JSON."""
    return JobStatus(**{**fields, "machines": tuple(fields["machines"])})


def state_after_exit(exit_status: int, cancelled: bool, signalled_after_s: float | None = None) -> State:
    """The state of a job whose command exited; `waiting` means that it is restarted. A command killed by a SIGUSR1 that
    came before it could install a handler has lost nothing and is restarted too."""
    if exit_status == 128 + signal.SIGUSR1 and signalled_after_s is not None and signalled_after_s < EARLY_S:
        exit_status = REQUEUE
    if exit_status == 0:
        return "finished"
    if cancelled:
        return "cancelled"
    return "waiting" if exit_status == REQUEUE else "failed"


def exit_reason(state: State, exit_status: int, machine: str = "") -> str:
    """Why a job is in a state after its command exited, as a sentence."""
    on = f" on {machine}" if machine else ""
    reasons = {"finished": "", "cancelled": CANCELLED, "waiting": "saved; waiting to be restarted"}
    meaning = {126: ", which means: it cannot be executed", 127: ", which means: it was not found"}.get(exit_status, "")
    return reasons.get(state, f"the command exited with status {exit_status}{on}{meaning}")


def read_exit_report(path: Path) -> tuple[int, tuple[str, ...]] | None:
    """The file HEADWAY_END of a command: the exit status of the whole job, and the machines to avoid."""
    try:
        first, *others = _read_regular(path).splitlines()
        return int(first), tuple(name for name in others if _MACHINE.fullmatch(name))
    except (OSError, ValueError):
        return None


def _read_regular(path: Path) -> str:
    """A small file that somebody else may have put there: neither a link nor a pipe is followed or waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a file")
        return file.read(2**16).decode()


def combined_exit_status(reported: Iterable[int]) -> int | None:
    """The exit status of a job, from what its commands reported for the whole of it; None if none did. A command that
    lost contact with the others may not know that they finished."""
    statuses = set(reported)
    return 0 if 0 in statuses else REQUEUE if REQUEUE in statuses else max(statuses, default=None)


def array_status(tasks: Sequence[JobStatus]) -> JobStatus:
    """The state of an array: that of its most active task; once all are over, of the worst."""
    order = ["ending", "running", "waiting", "unknown", "impossible", "failed", "cancelled", "finished"]
    first = min(tasks, key=lambda task: order.index(task.state))
    counts = {state: sum(task.state == state for task in tasks) for state in order}
    summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    statuses = [task.exit_status for task in tasks if task.exit_status is not None]
    return JobStatus(
        state=first.state,
        reason=f"{len(tasks)} tasks: {summary}" + (f"; {first.reason}" if first.reason else ""),
        machines=tuple(dict.fromkeys(name for task in tasks for name in task.machines)),
        exit_status=max(statuses) if len(statuses) == len(tasks) else None,
        starts=sum(task.starts for task in tasks),
        native=first.native,
        remedy=next((task.remedy for task in tasks if task.remedy), ""),
    )


def check_limit(request: LaunchRequest, limit_s: float | None, early_s: float = 0.0) -> None:
    """Raise UsageError if a time limit leaves a start no time for anything new: it is signalled its grace period before
    the limit, and up to `early_s` sooner where the engine is not exact."""
    needed_s = math.ceil(request.startup_s + request.grace_s + early_s)
    if limit_s is None or not request.startup_s or limit_s >= needed_s:
        return
    imposed = request.limit_s is None or limit_s < request.limit_s
    longer = f"use a partition that allows {needed_s} s" if imposed else f"set limit_s to {needed_s} or more"
    parts = [f"{request.startup_s:.0f} s to start and take a step", f"{request.grace_s:g} s of grace to save"]
    parts += [f"{early_s:g} s by which the signal may come early"] if early_s else []
    shorter = request.grace_s - (needed_s - limit_s)
    raise UsageError(
        f"job {request.name}: a time limit of {limit_s:g} s cannot hold {', '.join(parts)}",
        hint=longer + (f", or set grace_s to {shorter:g} or less" if shorter >= 1 else ""),
    )


def secret_values(request: LaunchRequest) -> dict[str, str]:
    """The secrets of a job, from this process's environment."""
    missing = [name for name in request.secrets if name not in os.environ]
    if missing:
        raise UsageError(
            f"job {request.name} needs {', '.join(missing)}, not set in the environment",
            hint=f"export {missing[0]}=..., or remove it from `secrets`",
        )
    return {name: os.environ[name] for name in request.secrets}


def cannot_signal(job: str, state: State) -> EngineError:
    """The error for a signal to a job that does not run."""
    return EngineError(f"cannot signal job {job}: it is {state}", hint="headway jobs lists running jobs")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown word: those that look alike, else all."""
    known = list(known)
    return f"did you mean {' or '.join(get_close_matches(word, known, n=3, cutoff=0.5) or known)}?"


class Engine(ABC):
    """Starts processes on machines. A bad request raises UsageError, a failing engine EngineError."""

    name: ClassVar[str]
    """As used with --engine."""

    @abstractmethod
    def probe(self) -> None:
        """Raise EngineUnreachable if the engine does not answer within seconds. One that is started on demand, and does
        not run, is no error."""

    @abstractmethod
    def inventory(self) -> list[Machine]:
        """All machines that can be requested."""

    @abstractmethod
    def describe(self, request: LaunchRequest) -> str:
        """Exactly what `launch` would submit, without submitting it; UsageError if it would refuse the request."""

    @abstractmethod
    def launch(self, request: LaunchRequest) -> str:
        """Queue a job, to start as soon as there are resources, and return its id. Refuse one that can never start."""

    @abstractmethod
    def status(self, jobs: Sequence[str]) -> dict[str, JobStatus]:
        """The states of jobs, by id, in as few queries as the engine allows."""

    @abstractmethod
    def signal(self, job: str, number: signal.Signals) -> None:
        """Send a signal to the command of a running job, on each of its machines."""

    @abstractmethod
    def logs(self, job: str) -> list[Path]:
        """The log files of a job, one per machine and start, oldest first; they may not exist yet."""

    @abstractmethod
    def release(self, job: str) -> bool:
        """Let a waiting job start as soon as there is room if the engine holds it back, and restart one that its engine
        has lost track of. False if there is nothing to release."""

    @abstractmethod
    def cancel(self, job: str) -> None:
        """End a job: SIGUSR1, then SIGKILL after its grace period. No effect on one that is over."""
