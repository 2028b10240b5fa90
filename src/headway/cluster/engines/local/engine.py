"""The engine of one machine: a queue that lives on when the terminal closes. The default, and the reference for others.

A process of its own owns the queue (daemon.py); it is started by whoever needs it, and ends itself when nothing is
left. This file is what the others call: it asks the owner through a socket, or reads what is over from disk.
"""

import fcntl
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
from pydantic_core import from_json, to_json

from headway.cluster.engines.engine import OVER, Engine, JobStatus, LaunchRequest, Machine, array_status, secret_values
from headway.cluster.engines.local.daemon import SOCKET
from headway.cluster.engines.local.jobs import read_job
from headway.cluster.engines.scripts import logs_in, passed_on, task_script
from headway.cluster.engines.submissions import request_to_json
from headway.errors import EngineError, UsageError
from headway.hardware import devices

__all__ = ["LocalEngine"]

START_S = 20.0
"""An owner that does not answer by then is not there."""
ANSWER_S = 60.0
_OWNER = "headway.cluster.engines.local.daemon"


class LocalEngine(Engine):
    """Starts processes on this machine, as many at a time as it has room for."""

    name: ClassVar[str] = "local"

    def __init__(self, place: Path, *, cpus: int | None = None, gpus: int | None = None) -> None:
        """`place` is the queue's folder. So many CPUs and GPUs are shared out; by default those that there are."""
        self.place = place.absolute()
        self.cpus = cpus or len(os.sched_getaffinity(0))
        self.gpus = _gpus() if gpus is None else tuple(map(str, range(gpus)))

    def inventory(self) -> list[Machine]:
        """This machine."""
        free = self._ask({"do": "room"}) if self._is_owned() else {"gpus_free": len(self.gpus), "cpus_free": self.cpus}
        busy = free["gpus_free"] < len(self.gpus) or free["cpus_free"] < self.cpus
        machine = Machine(
            name=socket.gethostname(),
            state="busy" if busy else "free",
            gpus=len(self.gpus),
            gpus_free=free["gpus_free"],
            cpus=self.cpus,
            memory_bytes=int(psutil.virtual_memory().total),
        )
        return [machine]

    def describe(self, request: LaunchRequest) -> str:
        """The script that would be run."""
        return task_script(self._complete(request))

    def launch(self, request: LaunchRequest) -> str:
        """Have a job started as soon as there is room; its id."""
        values = secret_values(request)
        fields, job = request_to_json(self._complete(request)), secrets.token_hex(4)
        self._ask({"do": "launch", "id": job, "request": fields, "secrets": values})
        return job

    def status(self, jobs: Sequence[str]) -> dict[str, JobStatus]:
        """How jobs stand, by their ids."""
        copies = {job: self._copies(job) for job in jobs}
        told = self._told(sorted({name for names in copies.values() for name in names}))
        return {
            job: told[names[0]] if names == [job] else array_status([told[name] for name in names])
            for job, names in copies.items()
        }

    def signal(self, job: str, number: signal.Signals) -> None:
        """Have the command of a running job hear a signal."""
        names, deadline = self._copies(job), time.monotonic() + START_S
        while not self._ask({"do": "signal", "jobs": names, "number": int(number)})["heard"]:
            state = self.status([job])[job].state
            if state not in ("running", "ending") or time.monotonic() > deadline:
                raise EngineError(f"job {job} cannot be signalled: it is {state}", hint="headway jobs shows what runs")
            time.sleep(0.02)  # it has been started, and its process is not there yet

    def logs(self, job: str) -> list[Path]:
        """What its processes print, a file for each start."""
        found = [read_job(self.place, name) for name in self._copies(job)]
        return [path for one in found if one is not None for path in logs_in(one.logs)]

    def cancel(self, job: str) -> None:
        """Have a job end: SIGUSR1, and after its grace for good."""
        live = [name for name, status in self._told(self._copies(job)).items() if status.state not in OVER]
        if live:
            self._ask({"do": "cancel", "jobs": live})

    def _complete(self, request: LaunchRequest) -> LaunchRequest:
        """The request with what it has from here; UsageError if this machine can never hold it."""
        _check_site(request)
        for what, asked, there in (
            ("machines", request.machines, 1),
            ("GPUs", request.gpus, len(self.gpus)),
            ("CPUs", request.cpus, self.cpus),
            ("bytes of memory", request.memory_bytes or 0, psutil.virtual_memory().total),
        ):
            if asked > there:
                raise UsageError(
                    f"job {request.name} asks for {asked} {what}, and this machine has {there}",
                    hint="ask for less, or another --engine",
                )
        if socket.gethostname() in request.avoid:
            raise UsageError(f"job {request.name} is to avoid {socket.gethostname()}, and there is no other machine")
        return replace(request, environment={**passed_on(), **request.environment})

    def _copies(self, job: str) -> list[str]:
        """The ids of an array's copies, or the job's own."""
        found = [job]
        if not (self.place / "jobs" / job).exists() and not (self.place / "over" / job).exists():
            names = {path.name for where in ("jobs", "over") for path in (self.place / where).glob(f"{job}_*")}
            found = sorted(names, key=lambda name: int(name.rpartition("_")[2])) or [job]
        return found

    def _told(self, names: list[str]) -> dict[str, JobStatus]:
        """How jobs stand: from disk those that are over, the others from the owner."""
        read = {name: read_job(self.place, name) for name in names}
        machine = socket.gethostname()
        told = {name: job.status(machine) for name, job in read.items() if job is not None}
        live = [name for name, status in told.items() if status.state not in OVER]
        if live:
            answered = self._ask({"do": "status", "jobs": live})["states"]
            told |= {name: _status(fields) for name, fields in answered.items()}
        return {name: told.get(name, JobStatus("unknown", "no such job is known here")) for name in names}

    # -- the owner

    def _ask(self, words: dict[str, Any]) -> dict[str, Any]:
        """The owner's answer; it is started if it is not there, and asked again if it died with the question."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                return _talk(self.place, words)
            except (ConnectionError, FileNotFoundError, NotADirectoryError):
                if not self._is_owned():
                    self._start_owner()
            except (OSError, ValueError) as error:
                raise EngineError(f"the owner of {self.place} does not answer: {error}", hint=self._hint) from None
            if time.monotonic() > deadline:
                raise EngineError(f"the owner of {self.place} did not start", hint=self._hint)
            time.sleep(0.01)

    @property
    def _hint(self) -> str:
        return f"its log is {self.place / 'owner.log'}"

    def _is_owned(self) -> bool:
        try:
            with (self.place / "owner.lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except BlockingIOError:
            return True
        return False

    def _start_owner(self) -> None:
        """In a session of its own, with nothing of our terminal; there when this returns, unless it could not be."""
        try:
            self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (self.place / "owner.log").open("ab") as log:
                subprocess.run(
                    [sys.executable, "-m", _OWNER, str(self.place), str(self.cpus), *self.gpus],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    timeout=START_S,
                )
        except subprocess.TimeoutExpired:
            raise EngineError(f"the owner of {self.place} did not start", hint=self._hint) from None
        except OSError as error:
            raise EngineError(
                f"{self.place} cannot hold a queue: {error.strerror}", hint="name another --runs"
            ) from None


def _talk(place: Path, words: dict[str, Any]) -> dict[str, Any]:
    """Say one thing to an owner, and hear one. A path through a descriptor, for those of sockets are short."""
    folder = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as talk:
            talk.settimeout(ANSWER_S)
            talk.connect(f"/proc/self/fd/{folder}/{SOCKET}")
            talk.sendall(to_json(words) + b"\n")
            with talk.makefile("rb") as line:
                answer = line.readline()
    finally:
        os.close(folder)
    if not answer:
        raise ConnectionResetError("no answer")
    heard: dict[str, Any] = from_json(answer)
    return heard


def _status(fields: dict[str, Any]) -> JobStatus:
    return JobStatus(**{**fields, "machines": tuple(fields["machines"])})


def _check_site(request: LaunchRequest) -> None:
    if request.site:
        raise UsageError(
            f"the local engine has no setting {next(iter(request.site))!r}", hint="it takes none: leave `site` empty"
        )


def _gpus() -> tuple[str, ...]:
    """The GPUs of this machine, by the names that CUDA knows them by."""
    found = devices("auto")
    if found.kind != "cuda":
        return ()
    stated = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(map(str, range(found.count))) if stated is None else tuple(stated.split(","))[: found.count]
