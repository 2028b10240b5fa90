"""The jobs of this machine's queue: what is written down of each, and who starts next.

<place>/
  owner.lock  owner.sock  owner.log    of the process that owns the queue
  jobs/<id>/                           a job that waits or runs
    job.json                           what it is and how it stands
    task.sh  start.sh                  what is started
    lock  pid  exit                    held while it runs; its process group; how it ended
  over/<id>/                           one that does neither any more
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from headway.cluster.engines.engine import OVER, JobStatus, LaunchRequest, State
from headway.errors import EngineError

__all__ = ["LocalJob", "MachineCapacity", "free_room", "read_job", "startable", "write_job"]

RECORD = "job.json"
_ID = re.compile(r"[0-9a-f]+(_[0-9]+)?")


@dataclass(frozen=True)
class MachineCapacity:
    """What jobs share of this machine."""

    cpus: int
    gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES names them."""


@dataclass(frozen=True)
class LocalJob:
    """A job of the queue: what it asks for, and how it stands."""

    id: str
    order: int
    """Who came first, starts first."""
    request: LaunchRequest
    index: int | None = None
    """Which copy of an array it is."""
    state: State = "waiting"
    reason: str = ""
    starts: int = 0
    exit_status: int | None = None
    gpus: tuple[str, ...] = ()
    """Those that it has, while it runs."""
    started: float = 0.0
    """Unix seconds, of the last start."""
    told: float | None = None
    """When this start of it first heard SIGUSR1, in Unix seconds."""
    cancelled: float | None = None
    """When somebody cancelled it, in Unix seconds."""
    boot: str = ""
    """Which life of the machine it was started in: its process's number means nothing in another."""

    @property
    def alive(self) -> bool:
        """Whether it has processes, as far as is known."""
        return self.state in ("running", "ending")

    @property
    def array(self) -> str:
        """What copies of one array have in common."""
        return self.id.partition("_")[0]

    @property
    def logs(self) -> Path:
        """The folder of what it prints."""
        base, _, index = self.id.partition("_")
        return self.request.folder / "jobs" / base / index

    def but(self, **changes: Any) -> "LocalJob":
        """The same job, otherwise."""
        return replace(self, **changes)

    def status(self, machine: str) -> JobStatus:
        """How it stands, in the words of all engines."""
        machines = (machine,) if self.starts else ()
        return JobStatus(self.state, self.reason, machines, self.exit_status, self.starts, self.state)


def free_room(room: MachineCapacity, jobs: Iterable[LocalJob]) -> MachineCapacity:
    """What is left of it beside those that run."""
    alive = [job for job in jobs if job.alive]
    taken = {gpu for job in alive for gpu in job.gpus}
    return MachineCapacity(
        room.cpus - sum(job.request.cpus for job in alive), tuple(g for g in room.gpus if g not in taken)
    )


def startable(room: MachineCapacity, jobs: Iterable[LocalJob]) -> list[tuple[LocalJob, tuple[str, ...]]]:
    """Who starts now, and on which GPUs: in the order they came, and nobody overtakes one who waits for more. Copies of
    an array that has as many at work as may be at a time are passed over."""
    jobs = list(jobs)
    free, at_work = free_room(room, jobs), Counter(job.array for job in jobs if job.alive)
    found = []
    for job in sorted((job for job in jobs if job.state == "waiting"), key=lambda job: job.order):
        wanted = job.request
        if wanted.at_once is not None and at_work[job.array] >= wanted.at_once:
            continue
        if wanted.cpus > free.cpus or wanted.gpus > len(free.gpus):
            break
        gpus = free.gpus[: wanted.gpus]
        free = MachineCapacity(free.cpus - wanted.cpus, free.gpus[wanted.gpus :])
        found.append((job, gpus))
        at_work[job.array] += 1
    return found


# -- on disk


FORMAT = 1
_JOB = TypeAdapter(LocalJob)


def write_job(place: Path, job: LocalJob) -> None:
    """Write a job down, whole or not at all, where its state says that it belongs."""
    folder = place / "jobs" / job.id
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f"{RECORD}.partial"
    beside.write_bytes(to_json({"format": FORMAT, **_JOB.dump_python(job, mode="json")}) + b"\n")
    beside.replace(folder / RECORD)
    if job.state in OVER:
        folder.rename(place / "over" / job.id)


def read_job(place: Path, job: str) -> LocalJob | None:
    """A job of the queue, or one that is over; None where there never was one."""
    if not _ID.fullmatch(job):
        return None
    for where in ("jobs", "over", "jobs"):  # it may be moved from the one to the other while we look
        path = place / where / job / RECORD
        try:
            return _JOB.validate_python(from_json(path.read_bytes()))
        except FileNotFoundError:
            continue
        except (ValidationError, ValueError) as error:
            raise EngineError(f"{path} is no record of a job: {error}", hint="put back what was there") from None
    return None
