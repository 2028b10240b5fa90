"""The jobs of this machine's queue: their records on disk, and which of them start next.

<queue>/
  owner.lock  owner.sock  owner.log    of the queue daemon
  jobs/<id>/                           a job that waits or runs
    job.json                           its request and state
    task.sh  start.sh                  its scripts
    lock  pid  exit                    held while it runs; its process group; its exit status
  over/<id>/                           a job that is over
"""

import fcntl
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from headway.cluster.engines.engine import OVER, JobStatus, LaunchRequest, State
from headway.cluster.engines.scripts import log_folder, replace_file
from headway.errors import EngineError

RECORD = "job.json"
_ID = re.compile(r"[0-9a-f]+(_[0-9]+)?")


@dataclass(frozen=True)
class MachineCapacity:
    """The CPUs and GPUs of this machine that jobs share."""

    cpus: int
    gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES names them."""


@dataclass(frozen=True)
class LocalJob:
    """A job of the queue: its request and its state."""

    id: str
    order: int
    """Jobs start in this order."""
    request: LaunchRequest
    index: int | None = None
    """Which task of an array it is."""
    state: State = "waiting"
    reason: str = ""
    starts: int = 0
    exit_status: int | None = None
    gpus: tuple[str, ...] = ()
    """Those that it has, while it runs."""
    started: float = 0.0
    """Time of the last start, in Unix seconds."""
    told: float | None = None
    """When the current start first received SIGUSR1, in Unix seconds."""
    cancelled: float | None = None
    """When it was cancelled, in Unix seconds."""
    boot: str = ""
    """Boot id of the machine when it was started: its pid means nothing after a reboot."""

    @property
    def alive(self) -> bool:
        """Whether it has processes, as far as is known."""
        return self.state in ("running", "ending")

    @property
    def array(self) -> str:
        """The id that all tasks of an array share."""
        return self.id.partition("_")[0]

    @property
    def logs(self) -> Path:
        """The folder of its logs."""
        return log_folder(self.request.folder, self.id)

    def status(self, machine: str) -> JobStatus:
        """Its state, as all engines report it."""
        machines = (machine,) if self.starts else ()
        return JobStatus(self.state, self.reason, machines, self.exit_status, self.starts, self.state)


def free_capacity(capacity: MachineCapacity, jobs: Iterable[LocalJob]) -> MachineCapacity:
    """What the running jobs leave free."""
    alive = [job for job in jobs if job.alive]
    taken = {gpu for job in alive for gpu in job.gpus}
    cpus = capacity.cpus - sum(job.request.cpus for job in alive)
    return MachineCapacity(cpus, tuple(gpu for gpu in capacity.gpus if gpu not in taken))


def startable(capacity: MachineCapacity, jobs: Iterable[LocalJob]) -> list[tuple[LocalJob, tuple[str, ...]]]:
    """The jobs to start now, and on which GPUs: in order of submission, with no backfill past a job that waits for
    more. Tasks of an array that already runs its maximum at a time are skipped."""
    jobs = list(jobs)
    free, running = free_capacity(capacity, jobs), Counter(job.array for job in jobs if job.alive)
    chosen = []
    for job in sorted((job for job in jobs if job.state == "waiting"), key=lambda job: job.order):
        request = job.request
        if request.at_once is not None and running[job.array] >= request.at_once:
            continue
        if request.cpus > free.cpus or request.gpus > len(free.gpus):
            break
        chosen.append((job, free.gpus[: request.gpus]))
        free = MachineCapacity(free.cpus - request.cpus, free.gpus[request.gpus :])
        running[job.array] += 1
    return chosen


# -- on disk


FORMAT = 1
_JOB = TypeAdapter(LocalJob)


def write_job(queue: Path, job: LocalJob) -> None:
    """Write a job's record atomically, and move the job's folder if it is over."""
    folder = queue / "jobs" / job.id
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / RECORD, to_json({"format": FORMAT, **_JOB.dump_python(job, mode="json")}).decode() + "\n")
    if job.state in OVER:
        folder.rename(queue / "over" / job.id)


def read_job(queue: Path, job: str) -> LocalJob | None:
    """A job of the queue, live or over; None if there never was one."""
    if not _ID.fullmatch(job):
        return None
    for folder in ("jobs", "over", "jobs"):  # the job may move from one to the other meanwhile
        path = queue / folder / job / RECORD
        try:
            return _JOB.validate_python(from_json(path.read_bytes()))
        except FileNotFoundError:
            continue
        except (ValidationError, ValueError) as error:
            raise EngineError(f"{path} is not a job record: {error}", hint="restore the file") from None
    return None


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on a file."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False
