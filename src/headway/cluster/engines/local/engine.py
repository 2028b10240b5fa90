"""The engine of this machine: a queue that outlives the terminal. The default, and the reference for the others.

A daemon (daemon.py) runs the queue; it is started on demand and exits when nothing is left. The engine talks to the
daemon through a socket, and reads jobs that are over from disk.
"""

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

from headway.cluster.engines.engine import (
    OVER,
    PROBE_S,
    Engine,
    JobStatus,
    LaunchRequest,
    Machine,
    array_status,
    cannot_signal,
    check_limit,
    secret_values,
    status_from_json,
)
from headway.cluster.engines.local.daemon import SOCKET
from headway.cluster.engines.local.jobs import is_locked, read_job
from headway.cluster.engines.scripts import inherited_environment, list_logs, task_script
from headway.cluster.engines.submissions import request_to_json
from headway.errors import EngineError, EngineUnreachable, UsageError
from headway.hardware import devices

START_S = 20.0
"""How long a daemon may take to start."""
ANSWER_S = 60.0
_DAEMON = "headway.cluster.engines.local.daemon"


class LocalEngine(Engine):
    """Starts processes on this machine, as many at a time as it has capacity for."""

    name: ClassVar[str] = "local"

    def __init__(
        self, folder: Path, *, cpus: int | None = None, gpus: int | None = None, probe_s: float = PROBE_S
    ) -> None:
        """`folder` holds the queue. `cpus` and `gpus` limit what jobs may use; by default all of them. `probe_s` is the
        timeout of a probe."""
        self.folder, self.probe_s = folder.absolute(), probe_s
        self.cpus = cpus or len(os.sched_getaffinity(0))
        self.gpus = local_gpus() if gpus is None else tuple(map(str, range(gpus)))

    def probe(self) -> None:
        """See Engine: whether the daemon, if it runs, answers."""
        if not self._daemon_runs():
            return
        try:
            _exchange(self.folder, {"do": "room"}, self.probe_s)
        except TimeoutError:
            raise EngineUnreachable(
                f"the queue daemon of {self.folder} does not answer within {self.probe_s:g} s",
                hint=f"is it stopped? see {self.folder / 'owner.log'}",
            ) from None
        except OSError:
            return  # it has just exited

    def inventory(self) -> list[Machine]:
        """This machine."""
        idle = {"gpus_free": len(self.gpus), "cpus_free": self.cpus}
        free = self._request({"do": "room"}) if self._daemon_runs() else idle
        machine = Machine(
            name=socket.gethostname(),
            state="busy" if free["gpus_free"] < len(self.gpus) or free["cpus_free"] < self.cpus else "free",
            gpus=len(self.gpus),
            gpus_free=free["gpus_free"],
            cpus=self.cpus,
            memory_bytes=int(psutil.virtual_memory().total),
        )
        return [machine]

    def describe(self, request: LaunchRequest) -> str:
        """The script that would run."""
        return task_script(self._complete(request))

    def launch(self, request: LaunchRequest) -> str:
        """See Engine."""
        values = secret_values(request)
        fields, job = request_to_json(self._complete(request)), secrets.token_hex(4)
        self._request({"do": "launch", "id": job, "request": fields, "secrets": values})
        return job

    def status(self, jobs: Sequence[str]) -> dict[str, JobStatus]:
        """See Engine."""
        tasks = {job: self._tasks(job) for job in jobs}
        statuses = self._statuses(sorted({name for names in tasks.values() for name in names}))
        return {
            job: statuses[names[0]] if names == [job] else array_status([statuses[name] for name in names])
            for job, names in tasks.items()
        }

    def signal(self, job: str, number: signal.Signals) -> None:
        """See Engine."""
        names, deadline = self._tasks(job), time.monotonic() + START_S
        while not self._request({"do": "signal", "jobs": names, "number": int(number)})["heard"]:
            state = self.status([job])[job].state
            if state not in ("running", "ending") or time.monotonic() > deadline:
                raise cannot_signal(job, state)
            time.sleep(0.02)  # it has been started, and has no process yet

    def logs(self, job: str) -> list[Path]:
        """See Engine."""
        records = [read_job(self.folder, name) for name in self._tasks(job)]
        return [path for record in records if record is not None for path in list_logs(record.logs)]

    def release(self, job: str) -> bool:  # noqa: ARG002
        """See Engine: this queue holds nothing back."""
        return False

    def cancel(self, job: str) -> None:
        """See Engine."""
        live = [name for name, status in self._statuses(self._tasks(job)).items() if status.state not in OVER]
        if live:
            self._request({"do": "cancel", "jobs": live})

    def _complete(self, request: LaunchRequest) -> LaunchRequest:
        """The request with the inherited environment; UsageError if this machine can never hold it."""
        if request.site:
            raise UsageError(f"the local engine has no setting {next(iter(request.site))!r}", hint="leave `site` empty")
        for what, asked, available in (
            ("machines", request.machines, 1),
            ("GPUs", request.gpus, len(self.gpus)),
            ("CPUs", request.cpus, self.cpus),
            ("bytes of memory", request.memory_bytes or 0, psutil.virtual_memory().total),
        ):
            if asked > available:
                raise UsageError(
                    f"job {request.name} asks for {asked} {what}; this machine has {available}",
                    hint="ask for less, or use another --engine",
                )
        check_limit(request, request.limit_s)
        if socket.gethostname() in request.avoid:
            raise UsageError(f"job {request.name} must avoid {socket.gethostname()}, the only machine")
        return replace(request, environment={**inherited_environment(), **request.environment})

    def _tasks(self, job: str) -> list[str]:
        """The ids of an array's tasks, or the job's own."""
        folders = [self.folder / "jobs", self.folder / "over"]
        if any((folder / job).exists() for folder in folders):
            return [job]
        names = {path.name for folder in folders for path in folder.glob(f"{job}_*")}
        return sorted(names, key=lambda name: int(name.rpartition("_")[2])) or [job]

    def _statuses(self, names: list[str]) -> dict[str, JobStatus]:
        """The states of jobs: of those that are over from disk, of the others from the daemon."""
        jobs, machine = {name: read_job(self.folder, name) for name in names}, socket.gethostname()
        statuses = {name: job.status(machine) for name, job in jobs.items() if job is not None}
        live = [name for name, status in statuses.items() if status.state not in OVER]
        if live:
            answer = self._request({"do": "status", "jobs": live})["states"]
            statuses |= {name: status_from_json(fields) for name, fields in answer.items()}
        return {name: statuses.get(name, JobStatus("unknown", "unknown job")) for name in names}

    # -- the daemon

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        """The daemon's answer to a message. Start the daemon if it does not run; ask again if it died meanwhile."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                return _exchange(self.folder, message)
            except (ConnectionError, FileNotFoundError, NotADirectoryError):
                if not self._daemon_runs():
                    self._start_daemon()
            except (OSError, ValueError) as error:
                raise self._daemon_error(f"does not answer: {error}") from None
            if time.monotonic() > deadline:
                raise self._daemon_error("did not start")
            time.sleep(0.01)

    def _daemon_error(self, what: str) -> EngineError:
        return EngineError(f"the queue daemon of {self.folder} {what}", hint=f"see {self.folder / 'owner.log'}")

    def _daemon_runs(self) -> bool:
        return is_locked(self.folder / "owner.lock")

    def _start_daemon(self) -> None:
        """Start a daemon in its own session, detached from our terminal. It listens when this returns, or has
        failed."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (self.folder / "owner.log").open("ab") as log:
                subprocess.run(
                    [sys.executable, "-m", _DAEMON, str(self.folder), str(self.cpus), *self.gpus],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    timeout=START_S,
                )
        except subprocess.TimeoutExpired:
            raise self._daemon_error("did not start") from None
        except OSError as error:
            raise EngineError(
                f"cannot create a queue in {self.folder}: {error.strerror}", hint="use another --runs"
            ) from None


def _exchange(folder: Path, message: dict[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """Send a message to a daemon and return its answer. Through a descriptor, since socket paths must be short."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(f"/proc/self/fd/{descriptor}/{SOCKET}")
            connection.sendall(to_json(message) + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline()
    finally:
        os.close(descriptor)
    if not line:
        raise ConnectionResetError("no answer")
    answer: dict[str, Any] = from_json(line)
    return answer


def local_gpus() -> tuple[str, ...]:
    """The GPUs of this machine, by their CUDA names."""
    available = devices("auto")
    if available.kind != "cuda":
        return ()
    stated = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(available.count)] if stated is None else stated.split(",")
    return tuple(names[: available.count])
