"""A job on a Ray cluster as its owner knows it, and what it comes to on a machine."""

import asyncio
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.cluster.engines.engine import LaunchRequest, State
from headway.cluster.engines.ray.rules import bundle, strategy_of
from headway.cluster.engines.scripts import log_of

__all__ = ["WAITS", "WARN", "RayJob", "logs_of", "order_of", "shape_of"]

WARN = f"signal {int(signal.SIGUSR1)}"
"""What the commands of a job hear before an end."""
WAITS = "it waits for room"
"""Why it has no machines yet."""


@dataclass
class RayJob:
    """A job, and the start of it that is under way."""

    id: str
    request: LaunchRequest
    index: int | None = None
    """Which copy of an array it is."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The request in JSON's words."""
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    state: State = "waiting"
    reason: str = WAITS
    starts: int = 0
    machines: list[str] = field(default_factory=list)
    exit_status: int | None = None
    cancelled: bool = False
    suspects: tuple[str, ...] = ()
    """Machines that its last start wanted the next one to do without."""
    order: float = field(default_factory=time.time)
    """When it came, in Unix seconds."""
    short: int = 0
    """Starts in a row that were over soon."""

    group: Any = None
    """What Ray has reserved, or is asked to."""
    asked: bool = False
    """Whether that is still open."""
    turn: "asyncio.Future[Any] | None" = None
    """Comes true when another's placement group is handed on to it, or (None) when Ray may be asked for one."""
    number: int = 0
    """Of the start that is under way; not every one gets as far as starting a command."""
    tasks: dict[int, Any] = field(default_factory=dict)
    arrived: dict[int, str] = field(default_factory=dict)
    began: float | None = None
    off: bool = False
    """Whether the start is called off."""
    told: bool = False
    """Whether the commands were told to end."""
    told_after_s: float | None = None
    """When they first heard SIGUSR1, from their start on."""
    limited: bool = False
    """Whether that was because their time is up."""
    wishes: list[str] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self) -> None:
        """Wake up whoever waits for something to change."""
        news, self.news = self.news, asyncio.Event()
        news.set()

    def wish(self, word: str) -> None:
        """Something for the commands of this start."""
        if word == WARN and self.told_after_s is None and self.began is not None:
            self.told_after_s = time.monotonic() - self.began
        self.wishes.append(word)
        self.tell()

    def status(self) -> dict[str, Any]:
        """How it stands, in plain words."""
        native = {"waiting": "PENDING", "running": "CREATED", "ending": "CREATED"}.get(self.state, "REMOVED")
        fields = ("state", "reason", "starts", "exit_status")
        return {name: getattr(self, name) for name in fields} | {"machines": list(self.machines), "native": native}


def shape_of(request: LaunchRequest) -> tuple[Any, ...]:
    """What two jobs have in common that could have each other's machines."""
    return bundle(request), request.machines, strategy_of(request), sorted(request.avoid)


def order_of(job: RayJob, rank: int) -> dict[str, Any]:
    """What one task is to run."""
    request = job.request
    words = list(request.command)
    if request.setup:
        words = ["bash", "-c", "\n".join(["set -e", *request.setup, "set +e", 'exec -- "$@"']), "bash", *words]
    log = log_of(logs_of(request.folder, job.id), job.starts, rank)
    own = {"HEADWAY_JOB": job.id, "HEADWAY_MACHINE": str(rank), "HEADWAY_MACHINES": ",".join(job.machines)}
    own["HEADWAY_END"] = str(log.with_suffix(".end"))
    if job.index is not None:
        own["HEADWAY_ARRAY_INDEX"] = str(job.index)
    return {
        "words": words,
        "folder": str(request.folder),
        "log": str(log),
        "environment": {**request.environment, **own, **job.secrets},
        "gpus": request.gpus,
    }


def logs_of(folder: Path, job: str) -> Path:
    """Where what a job prints lies."""
    base, _, index = job.partition("_")
    return folder / "jobs" / base / index
