"""A job on a Ray cluster as its controller knows it, and what its tasks run."""

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.cluster.engines.engine import LaunchRequest, State
from headway.cluster.engines.ray.rules import WELL_S, NextState, TaskExit, next_state
from headway.cluster.engines.scripts import command_with_setup, log_folder, log_path
from headway.cluster.engines.submissions import request_from_json

WARN = f"signal {int(signal.SIGUSR1)}"
"""The message to commands before they are killed."""
WAITING_FOR_RESOURCES = "waiting for resources"


@dataclass
class RayJob:
    """A job, and its start that is under way."""

    id: str
    request: LaunchRequest
    index: int | None = None
    """Which task of an array it is."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The request as JSON."""
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    state: State = "waiting"
    reason: str = WAITING_FOR_RESOURCES
    starts: int = 0
    machines: list[str] = field(default_factory=list)
    exit_status: int | None = None
    cancelled: bool = False
    suspects: tuple[str, ...] = ()
    """Machines that the last start asked the next one to avoid."""
    order: float = field(default_factory=time.time)
    """When it was submitted, in Unix seconds."""
    short_starts: int = 0
    """Short starts in a row."""

    group: Any = None
    """Its placement group, granted or pending."""
    group_pending: bool = False
    turn: "asyncio.Future[Any] | None" = None
    """Resolves to a placement group that another job hands over, or to None when Ray may be asked for one."""
    start_number: int = 0
    """Counts all starts, even those that never get as far as a command."""
    tasks: dict[int, Any] = field(default_factory=dict)
    arrived: dict[int, str] = field(default_factory=dict)
    """Machines of the tasks that are ready to start, by rank."""
    started_at: float | None = None
    """When all commands were started, by the monotonic clock."""
    called_off: bool = False
    stopping: bool = False
    """Whether the commands were asked to stop."""
    signalled_after_s: float | None = None
    """When the commands first received SIGUSR1, after their start."""
    limit_reached: bool = False
    messages: list[str] = field(default_factory=list)
    """Messages to the commands of this start: `signal N` or `kill`."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    # -- records

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "RayJob":
        """A job of an earlier controller."""
        fields = record["request"]
        job = cls(record["id"], request_from_json(fields), record["index"], fields, order=record["order"])
        job.starts = record["status"]["starts"]
        return job

    def record(self) -> dict[str, Any]:
        """What is stored of it; never secrets."""
        fields = {"format": 1, "id": self.id, "index": self.index, "order": self.order}
        return {**fields, "request": self.fields, "status": self.status()}

    def status(self) -> dict[str, Any]:
        """The fields of its JobStatus as JSON."""
        native = {"waiting": "PENDING", "running": "CREATED", "ending": "CREATED"}.get(self.state, "REMOVED")
        fields = ("state", "reason", "starts", "exit_status")
        return {name: getattr(self, name) for name in fields} | {"machines": list(self.machines), "native": native}

    # -- events

    def notify(self) -> None:
        """Wake all that wait for a change."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def pause(self, seconds: float) -> None:
        """Wait, unless the job is cancelled."""
        until = time.monotonic() + seconds
        while not self.cancelled and (left := until - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(self.changed.wait(), left)
            except TimeoutError:
                return

    def send(self, message: str) -> None:
        """Send a message to the commands of this start."""
        if message == WARN and self.signalled_after_s is None and self.started_at is not None:
            self.signalled_after_s = time.monotonic() - self.started_at
        self.messages.append(message)
        self.notify()

    # -- a start

    def begin_start(self) -> None:
        """Reset what belongs to a start."""
        self.start_number += 1
        self.tasks, self.arrived, self.messages, self.started_at = {}, {}, [], None
        self.called_off = self.stopping = self.limit_reached = False
        self.signalled_after_s = None

    def mark_started(self) -> None:
        """All tasks are ready: the commands start, and their time limit runs."""
        self.started_at = time.monotonic()
        self.starts += 1
        self.machines = [self.arrived[rank] for rank in range(self.request.machines)]
        if self.request.limit_s is not None:
            delay_s = max(0.0, self.request.limit_s - self.request.grace_s)
            asyncio.get_running_loop().call_later(delay_s, self._reach_limit, self.start_number)

    def is_running(self, start_number: int) -> bool:
        """Whether the commands of that start run."""
        return self.start_number == start_number and self.started_at is not None

    def stop(self, grace_s: float | None = None) -> None:
        """Stop the commands: SIGUSR1, then SIGKILL after the grace period."""
        if not self.stopping:
            self.stopping = True
            self.send(WARN)
        grace_s = self.request.grace_s if grace_s is None else grace_s
        asyncio.get_running_loop().call_later(grace_s, self._kill, self.start_number)

    def _kill(self, start_number: int) -> None:
        if self.is_running(start_number) and "kill" not in self.messages:
            self.send("kill")

    def _reach_limit(self, start_number: int) -> None:
        if self.is_running(start_number):
            self.limit_reached = True
            self.stop(min(self.request.grace_s, self.request.limit_s or 0.0))

    def finish_start(self, exits: Sequence[TaskExit]) -> NextState:
        """All tasks of the start have ended: decide what follows."""
        lasted_s = 0.0 if self.started_at is None else time.monotonic() - self.started_at
        self.short_starts = 0 if lasted_s > WELL_S else self.short_starts + 1
        following = next_state(
            exits,
            self.machines,
            cancelled=self.cancelled,
            limit_s=self.request.limit_s if self.limit_reached else None,
            signalled_after_s=self.signalled_after_s,
        )
        self.exit_status, self.started_at = following.exit_status, None
        self.suspects = tuple(dict.fromkeys(name for task in exits for name in task.suspects))
        self.notify()
        return following


def task_order(job: RayJob, rank: int) -> dict[str, Any]:
    """What one task is to run, as the command runner reads it."""
    request = job.request
    log = log_path(log_folder(request.folder, job.id), job.starts, rank)
    own = {"HEADWAY_JOB": job.id, "HEADWAY_MACHINE": str(rank), "HEADWAY_MACHINES": ",".join(job.machines)}
    own["HEADWAY_START"] = str(job.starts)
    own["HEADWAY_END"] = str(log.with_suffix(".end"))
    if job.index is not None:
        own["HEADWAY_ARRAY_INDEX"] = str(job.index)
    return {
        "words": command_with_setup(request),
        "folder": str(request.folder),
        "log": str(log),
        "environment": {**request.environment, **own, **job.secrets},
        "gpus": request.gpus,
    }
