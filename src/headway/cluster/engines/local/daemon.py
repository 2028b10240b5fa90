"""The queue daemon of this machine: starts jobs as capacity allows, and exits when none is left.

It listens on a socket in the queue's folder, one JSON object per line, and wakes up on a request or when a job's
process ends. All state is on disk before it answers, so that the next daemon, even after a `kill -9`, knows what waits,
what runs and how jobs ended; except for secrets, which are in memory only.
"""

import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from headway.cluster.engines.engine import CANCELLED, OVER, exit_reason, state_after_exit
from headway.cluster.engines.local.jobs import (
    LocalJob,
    MachineCapacity,
    free_capacity,
    is_locked,
    read_job,
    startable,
    write_job,
)
from headway.cluster.engines.local.task_processes import LOCK_FD, boot_id, kill_task, reserve_lock_fd, start_lock
from headway.cluster.engines.scripts import log_path, start_script, task_script
from headway.cluster.engines.submissions import request_from_json
from headway.track.access import umask_of

SOCKET = "owner.sock"
POLL_S = 0.2
LINGER_S = 3.0
"""How long a daemon without jobs waits for another one."""
CLIENT_S = 5.0
"""How long a client may take to send its request."""


@dataclass
class _Queue:
    """The queue as its daemon knows it."""

    folder: Path
    machine: str
    capacity: MachineCapacity
    jobs: dict[str, LocalJob] = field(default_factory=dict)
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    children: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def update(self, job: LocalJob, **changes: Any) -> None:
        """Write a job with changes to disk, and remember it while it is not over."""
        job = replace(job, **changes)
        write_job(self.folder, job)
        if job.state in OVER:
            self.jobs.pop(job.id, None)
            self.secrets.pop(job.id, None)
        else:
            self.jobs[job.id] = job

    def find(self, name: str) -> LocalJob | None:
        """A job by its id, live or over."""
        return self.jobs.get(name) or read_job(self.folder, name)


def main() -> int:
    """Serve the queue in the folder that the first argument names, with that many CPUs and those GPUs."""
    reserve_lock_fd()
    folder, cpus, *gpus = sys.argv[1:]
    with contextlib.suppress(BlockingIOError), _locked_queue(Path(folder)), _listening(Path(folder)) as listener:
        # Whoever starts a daemon waits for this process, and then finds the queue locked and the socket there.
        if os.fork():
            os._exit(0)
        queue = _Queue(Path(folder), socket.gethostname(), MachineCapacity(int(cpus), tuple(gpus)))
        for name in os.listdir(queue.folder / "jobs"):  # noqa: PTH208
            job = read_job(queue.folder, name)
            if job is not None and job.state not in OVER:
                queue.jobs[job.id] = job
        with _child_wakeup() as wakeup:
            _serve(queue, listener, wakeup)
    return 0


def _serve(queue: _Queue, listener: socket.socket, wakeup: socket.socket) -> None:
    """Run jobs and answer requests until nothing is left."""
    idle = time.monotonic()
    while queue.jobs or time.monotonic() - idle < LINGER_S:
        # 1 check on running jobs
        for job in [job for job in queue.jobs.values() if job.alive]:
            _check_running(queue, job)
        # 2 start what fits
        for job, gpus in startable(queue.capacity, queue.jobs.values()):
            try:
                _start(queue, job, gpus)
            except OSError as error:
                queue.update(job, state="failed", reason=f"cannot start: {error.strerror}: {error.filename}")
        # 3 wait for a request, an exit or a timeout
        if queue.jobs:
            idle = time.monotonic()
        ready, _, _ = select.select([listener, wakeup], [], [], POLL_S)
        if wakeup in ready:
            wakeup.recv(4096)
        if listener in ready:
            _answer(queue, listener)


# -- jobs


def _start(queue: _Queue, job: LocalJob, gpus: tuple[str, ...]) -> None:
    """Start a job's command, under a script that records its exit status; files are as private as the run's folder."""
    with umask_of(job.request.folder):
        _start_command(queue, job, gpus)


def _start_command(queue: _Queue, job: LocalJob, gpus: tuple[str, ...]) -> None:
    secrets = queue.secrets.get(job.id, {})
    lost = sorted(set(job.request.secrets) - set(secrets))
    if lost:
        text = f"the queue daemon died, and the values of {', '.join(lost)} with it: submit the job again"
        queue.update(job, state="failed", reason=text)
        return
    number, own = job.starts + 1, queue.folder / "jobs" / job.id
    job.logs.mkdir(parents=True, exist_ok=True)
    (own / "task.sh").write_text(task_script(job.request))
    (own / "start.sh").write_text(start_script(own / "task.sh", log_path(job.logs, number), own))
    for name in ("pid", "exit"):
        (own / name).unlink(missing_ok=True)
    # Recorded before it happens: a daemon that dies in between leaves a start whose lock is free, which has
    # failed.
    queue.update(
        job, state="running", reason="", starts=number, gpus=gpus, started=time.time(), told=None, boot=boot_id()
    )
    index = {} if job.index is None else {"HEADWAY_ARRAY_INDEX": str(job.index)}
    own_variables = {"HEADWAY_MACHINE": "0", "HEADWAY_MACHINES": queue.machine, "HEADWAY_START": str(number)}
    variables = {**own_variables, "PATH": os.defpath, **index}
    with start_lock(own / "lock"):
        queue.children[job.id] = subprocess.Popen(
            ["bash", str(own / "start.sh")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"CUDA_VISIBLE_DEVICES": ",".join(gpus), **variables, **secrets},
            pass_fds=[LOCK_FD],
            start_new_session=True,
        )


def _check_running(queue: _Queue, job: LocalJob) -> None:
    """Detect a running job's exit; enforce its cancellation and its time limit."""
    child = queue.children.get(job.id)
    lock = queue.folder / "jobs" / job.id / "lock"
    exited = not is_locked(lock) if child is None else child.poll() is not None
    if exited:
        _handle_exit(queue, job)
        return
    now, request = time.time(), job.request
    if job.cancelled is not None:
        if job.told is None:  # cancelled before it had a process
            _warn(queue, job)
        if now >= job.cancelled + request.grace_s:
            _kill(queue, job, signal.SIGKILL)
    limit = request.limit_s
    if limit is None:
        return
    if now >= job.started + limit:
        _kill(queue, job, signal.SIGKILL)
    elif job.told is None and now >= job.started + limit - request.grace_s:
        _warn(queue, job)


def _handle_exit(queue: _Queue, job: LocalJob) -> None:
    """A job's processes have exited: decide whether it is over or restarted."""
    _kill(queue, job, signal.SIGKILL)  # what the command has left behind
    child, own = queue.children.pop(job.id, None), queue.folder / "jobs" / job.id
    if child is None and not (own / "pid").exists():  # the previous daemon died before the job was started
        queue.update(job, state="waiting", starts=job.starts - 1, gpus=())
        return
    try:
        status = int((own / "exit").read_text())
    except (OSError, ValueError):
        queue.update(job, state="failed", reason="its processes were killed; no exit status was recorded", gpus=())
        return
    signalled_after_s = None if job.told is None else job.told - job.started
    state, limit = state_after_exit(status, job.cancelled is not None, signalled_after_s), job.request.limit_s
    reason = exit_reason(state, status)
    if state == "failed" and limit is not None and time.time() >= job.started + limit:
        reason = f"killed at its time limit of {limit:g} s"
    queue.update(job, state=state, reason=reason, exit_status=status, gpus=())


def _cancel(queue: _Queue, job: LocalJob) -> None:
    """Cancel a job: a waiting one at once, a running one with grace. Repeating it has no effect."""
    if not job.alive:
        queue.update(job, state="cancelled", reason=CANCELLED, cancelled=time.time())
    elif job.cancelled is None:
        _warn(queue, replace(job, state="ending", cancelled=time.time()))


def _warn(queue: _Queue, job: LocalJob) -> bool:
    """Send SIGUSR1 to a job, and record when; False if it has no process (yet)."""
    sent = _kill(queue, job, signal.SIGUSR1)
    queue.update(job, told=(job.told or time.time()) if sent else job.told)
    return sent


def _kill(queue: _Queue, job: LocalJob, number: int) -> bool:
    """Send a signal to a job's command, SIGKILL to its whole process group; False if it has no process (yet)."""
    return kill_task(queue.folder / "jobs" / job.id, job.boot, number, our_child=job.id in queue.children)


# -- requests


def _answer(queue: _Queue, listener: socket.socket) -> None:
    """Answer one client; do not wait for one that sends nothing or disconnects."""
    with contextlib.suppress(OSError, ValueError):
        client, _ = listener.accept()
        with client, client.makefile("rwb") as stream:
            client.settimeout(CLIENT_S)
            stream.write(to_json(_handle(queue, from_json(stream.readline()))) + b"\n")


def _handle(queue: _Queue, message: dict[str, Any]) -> dict[str, Any]:
    """Carry out a request, and return the answer."""
    jobs = [job for name in message.get("jobs", []) if (job := queue.find(name)) is not None]
    match message["do"]:
        case "launch":
            _enqueue(queue, message)
        case "cancel":
            for job in jobs:
                if job.state not in OVER:
                    _cancel(queue, job)
        case "signal":
            send = _warn if message["number"] == signal.SIGUSR1 else partial(_kill, number=message["number"])
            return {"heard": [job.id for job in jobs if job.alive and send(queue, job)]}
        case "room":
            free = free_capacity(queue.capacity, queue.jobs.values())
            return {"gpus_free": len(free.gpus), "cpus_free": free.cpus}
    return {"states": {job.id: job.status(queue.machine).__dict__ for job in jobs}}


def _enqueue(queue: _Queue, message: dict[str, Any]) -> None:
    """Add a new job, or the tasks of an array; a repeated request has no effect."""
    request, order, base = request_from_json(message["request"]), time.time_ns(), message["id"]
    names = {base: None} if request.array is None else {f"{base}_{index}": index for index in range(request.array)}
    for name, index in names.items():
        if queue.find(name) is None:
            queue.secrets[name] = message["secrets"]
            queue.update(LocalJob(name, order + (index or 0), request, index))


# -- the process


@contextlib.contextmanager
def _locked_queue(folder: Path) -> Any:
    """Be the only daemon of a queue; BlockingIOError if there is one."""
    for path in (folder, folder / "jobs", folder / "over"):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "owner.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def _listening(folder: Path) -> Any:
    """Listen on a socket in the queue's folder; bound by a relative name, since socket paths must be short."""
    os.chdir(folder)
    Path(SOCKET).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(SOCKET)
        listener.listen(128)
        try:
            yield listener
        finally:
            Path(SOCKET).unlink(missing_ok=True)


@contextlib.contextmanager
def _child_wakeup() -> Any:
    """A socket that becomes readable when a child exits. SIGHUP is ignored: the daemon outlives its terminal."""
    read, write = socket.socketpair()
    write.setblocking(False)
    signal.set_wakeup_fd(write.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGHUP, lambda *_: None)  # not SIG_IGN, which the jobs would inherit
    with read, write:
        yield read
        signal.set_wakeup_fd(-1)


if __name__ == "__main__":
    sys.exit(main())
