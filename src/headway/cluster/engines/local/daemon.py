"""The process that owns this machine's queue: starts jobs when there is room, and ends itself when none is left.

It listens on a socket beside its queue, one JSON object a line, and wakes up when somebody speaks or a job's process
ends. Everything that it must not forget is written before it answers, so that one that follows it after a `kill -9`
knows what waits, what runs, and how it ended; but secrets, which are in its memory only.
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from headway.cluster.engines.engine import OVER, state_after_exit
from headway.cluster.engines.local.jobs import LocalJob, MachineCapacity, free_room, read_job, startable, write_job
from headway.cluster.engines.scripts import log_of, start_script, task_script
from headway.cluster.engines.submissions import request_from_json

__all__ = ["SOCKET", "main"]

SOCKET = "owner.sock"
POLL_S = 0.2
LINGER_S = 3.0
"""How long an owner without jobs waits for another one."""
TALK_S = 5.0
"""How long one who has called may take to say what it wants."""
LOCK_FILE = 9
"""What start.sh keeps open."""


@dataclass
class _Owner:
    """What the owner knows."""

    place: Path
    machine: str
    room: MachineCapacity
    jobs: dict[str, LocalJob] = field(default_factory=dict)
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    children: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def keep(self, job: LocalJob) -> None:
        """Write a job down, and know it."""
        write_job(self.place, job)
        if job.state in OVER:
            self.jobs.pop(job.id, None)
            self.secrets.pop(job.id, None)
        else:
            self.jobs[job.id] = job


def main() -> int:
    """Own the queue in the folder that the first word names, with so many CPUs and the GPUs that are named."""
    os.dup2(0, LOCK_FILE, inheritable=False)  # so that nothing else has this number
    place, cpus, *gpus = sys.argv[1:]
    with contextlib.suppress(BlockingIOError), _owning(Path(place)), _listening(Path(place)) as door:
        # Whoever starts an owner waits for this process, and then finds the queue owned and the door there.
        if os.fork():
            os._exit(0)
        owner = _Owner(Path(place), socket.gethostname(), MachineCapacity(int(cpus), tuple(gpus)))
        for name in os.listdir(owner.place / "jobs"):  # noqa: PTH208
            job = read_job(owner.place, name)
            if job is not None and job.state not in OVER:
                owner.jobs[job.id] = job
        with _woken_by_children() as woken:
            _serve(owner, door, woken)
    return 0


def _serve(owner: _Owner, door: socket.socket, woken: socket.socket) -> None:
    """Until nothing is left."""
    idle = time.monotonic()
    while owner.jobs or time.monotonic() - idle < LINGER_S:
        # 1 hear what has ended
        for job in [job for job in owner.jobs.values() if job.alive]:
            _look_after(owner, job)
        # 2 start what there is room for
        for job, gpus in startable(owner.room, owner.jobs.values()):
            try:
                _start(owner, job, gpus)
            except OSError as error:
                reason = f"it could not be started: {error.strerror}: {error.filename}"
                owner.keep(job.but(state="failed", reason=reason))
        # 3 wait for a word, an end or a time
        if owner.jobs:
            idle = time.monotonic()
        ready, _, _ = select.select([door, woken], [], [], POLL_S)
        if woken in ready:
            woken.recv(4096)
        if door in ready:
            _answer(owner, door)


# -- jobs


def _start(owner: _Owner, job: LocalJob, gpus: tuple[str, ...]) -> None:
    """Start a job's command, and somebody beside it who writes down how it ended."""
    secrets = owner.secrets.get(job.id, {})
    lost = sorted(set(job.request.secrets) - set(secrets))
    if lost:
        text = f"the queue's owner died, and with it the values of {', '.join(lost)}: submit it again"
        owner.keep(job.but(state="failed", reason=text))
        return
    number, own = job.starts + 1, owner.place / "jobs" / job.id
    job.logs.mkdir(parents=True, exist_ok=True)
    (own / "task.sh").write_text(task_script(job.request))
    (own / "start.sh").write_text(start_script(own / "task.sh", log_of(job.logs, number), own))
    for name in ("pid", "exit"):
        (own / name).unlink(missing_ok=True)
    # Written before it is done: who dies in between leaves a start whose lock nobody holds, which has failed.
    job = job.but(state="running", reason="", starts=number, gpus=gpus, started=time.time(), told=None, boot=_boot())
    owner.keep(job)
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), **_own_variables(job), **secrets}
    with _locked(own / "lock"):
        owner.children[job.id] = subprocess.Popen(
            ["bash", str(own / "start.sh")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            pass_fds=[LOCK_FILE],
            start_new_session=True,
        )


def _own_variables(job: LocalJob) -> dict[str, str]:
    index = {} if job.index is None else {"HEADWAY_ARRAY_INDEX": str(job.index)}
    return {"HEADWAY_MACHINE": "0", "HEADWAY_MACHINES": socket.gethostname(), "PATH": os.defpath, **index}


def _look_after(owner: _Owner, job: LocalJob) -> None:
    """One that runs: has it ended, has its time come?"""
    child = owner.children.get(job.id)
    gone = not _is_locked(owner.place, job) if child is None else child.poll() is not None
    if gone:
        _hear_the_end(owner, job)
        return
    now, wanted = time.time(), job.request
    if job.cancelled is not None:
        if job.told is None:  # it was cancelled before it had a process
            _tell(owner, job)
        if now >= job.cancelled + wanted.grace_s:
            _kill(owner, job, signal.SIGKILL)
    limit = wanted.limit_s
    if limit is None:
        return
    if now >= job.started + limit:
        _kill(owner, job, signal.SIGKILL)
    elif job.told is None and now >= job.started + limit - wanted.grace_s:
        _tell(owner, job)


def _hear_the_end(owner: _Owner, job: LocalJob) -> None:
    """A job's processes are gone: is it over, or started again?"""
    _kill(owner, job, signal.SIGKILL)  # what the command has left behind
    child, own = owner.children.pop(job.id, None), owner.place / "jobs" / job.id
    if child is None and not (own / "pid").exists():  # whoever owned the queue died before it was started
        owner.keep(job.but(state="waiting", starts=job.starts - 1, gpus=()))
        return
    try:
        status = int((own / "exit").read_text())
    except (OSError, ValueError):
        owner.keep(job.but(state="failed", reason="its processes were ended without a word", gpus=()))
        return
    after_s = None if job.told is None else job.told - job.started
    state, limit = state_after_exit(status, job.cancelled is not None, after_s), job.request.limit_s
    reason = {
        "finished": "",
        "cancelled": "somebody cancelled it",
        "waiting": "it has saved, and waits to be started again",
    }.get(state, f"its command exited with {status}")
    if state == "failed" and limit is not None and time.time() >= job.started + limit:
        reason = f"it was ended at its limit of {limit:g} s"
    owner.keep(job.but(state=state, reason=reason, exit_status=status, gpus=()))


def _cancel(owner: _Owner, job: LocalJob) -> None:
    """The first time with grace; again and again changes nothing."""
    if not job.alive:
        owner.keep(job.but(state="cancelled", reason="somebody cancelled it", cancelled=time.time()))
    elif job.cancelled is None:
        _tell(owner, job.but(state="ending", cancelled=time.time()))


def _tell(owner: _Owner, job: LocalJob) -> bool:
    """Have a job hear SIGUSR1, and know of it; False if it has no process (yet)."""
    heard = _kill(owner, job, signal.SIGUSR1)
    owner.keep(job.but(told=job.told or time.time()) if heard else job)
    return heard


def _kill(owner: _Owner, job: LocalJob, number: int) -> bool:
    """A signal to a job's command, SIGKILL to all that it started; False if it has no process (yet)."""
    if job.boot != _boot():
        return False
    try:
        pid, session = map(int, (owner.place / "jobs" / job.id / "pid").read_text().split())
        if not _is_of(pid, session, ours=job.id in owner.children):
            return False
        os.killpg(pid, number) if number == signal.SIGKILL else os.kill(pid, number)
    except (OSError, ValueError):
        return False
    return True


def _is_of(pid: int, session: int, ours: bool) -> bool:
    """Whether a number still means the process that it meant, or at least its group."""
    try:
        return os.getsid(pid) == session
    except ProcessLookupError:
        return ours  # its group may live on without it; if it was not just now, it may be anybody's


# -- words


def _answer(owner: _Owner, door: socket.socket) -> None:
    """Hear one who calls, and answer; one who does not speak, or goes away, is not waited for."""
    with contextlib.suppress(OSError, ValueError):
        talk, _ = door.accept()
        with talk, talk.makefile("rwb") as line:
            talk.settimeout(TALK_S)
            words = from_json(line.readline())
            line.write(to_json(_do(owner, words)) + b"\n")


def _do(owner: _Owner, words: dict[str, Any]) -> dict[str, Any]:
    """What somebody wants."""
    jobs = [_known(owner, name) for name in words.get("jobs", [])]
    known = [job for job in jobs if job is not None]
    match words["do"]:
        case "launch":
            _take_in(owner, words)
        case "cancel":
            for job in known:
                if job.state not in OVER:
                    _cancel(owner, job)
        case "signal":
            act = _tell if words["number"] == signal.SIGUSR1 else partial(_kill, number=words["number"])
            return {"heard": [job.id for job in known if job.alive and act(owner, job)]}
        case "room":
            free = free_room(owner.room, owner.jobs.values())
            return {
                "cpus": owner.room.cpus,
                "gpus": len(owner.room.gpus),
                "gpus_free": len(free.gpus),
                "cpus_free": free.cpus,
            }
    return {"states": {job.id: job.status(owner.machine).__dict__ for job in known}}


def _known(owner: _Owner, name: str) -> LocalJob | None:
    return owner.jobs.get(name) or read_job(owner.place, name)


def _take_in(owner: _Owner, words: dict[str, Any]) -> None:
    """A new job, or the copies of one; who says the same twice is heard once."""
    request, order = request_from_json(words["request"]), time.time_ns()
    names = [words["id"]] if request.array is None else [f"{words['id']}_{i}" for i in range(request.array)]
    for index, name in enumerate(names):
        if _known(owner, name) is None:
            owner.secrets[name] = words["secrets"]
            owner.keep(LocalJob(name, order + index, request, None if request.array is None else index))


# -- the process


@contextlib.contextmanager
def _owning(place: Path) -> Any:
    """Be the only owner of a queue; BlockingIOError if there is one."""
    for folder in (place, place / "jobs", place / "over"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (place / "owner.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def _listening(place: Path) -> Any:
    """A door in the queue's folder. The name is bound from within, for paths of sockets are short."""
    os.chdir(place)
    Path(SOCKET).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(SOCKET)
        door.listen(128)
        try:
            yield door
        finally:
            Path(SOCKET).unlink(missing_ok=True)


@contextlib.contextmanager
def _woken_by_children() -> Any:
    """Something to wait for that is ready when a child has ended. Terminals that close are none of our business."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGHUP, lambda *_: None)  # not SIG_IGN, which the jobs would inherit
    with ours, theirs:
        yield ours
        signal.set_wakeup_fd(-1)


@contextlib.contextmanager
def _locked(path: Path) -> Any:
    """A lock for a child to hold, as the file of the number that start.sh knows."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.dup2(file, LOCK_FILE, inheritable=True)
        yield
    finally:
        os.dup2(0, LOCK_FILE, inheritable=False)
        os.close(file)


def _is_locked(place: Path, job: LocalJob) -> bool:
    """Whether a job's start.sh lives."""
    try:
        with (place / "jobs" / job.id / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _boot() -> str:
    """Which life of the machine this is."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
