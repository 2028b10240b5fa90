"""Starts as real processes of this machine, under scripts that outlive the node's agent.

<node>/
  epoch                 of the newest service, and the id of its cluster
  starts/<start>/         JOB-START-RANK
    start.json          what was asked for; written before the command runs
    task.sh start.sh    its scripts
    lock pid exit       held while it runs; its process group; its exit status
    signals ended       signals sent so far; when it was told to end
  scratch/<start>/      its private folder, which belongs to its user; as another user its task.sh is there
  logs/                 where logs are: node_logs.py
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from headway.cluster.engines.engine import LaunchRequest, read_exit_report
from headway.cluster.engines.local.jobs import is_locked
from headway.cluster.engines.local.task_processes import LOCK_FD, boot_id, kill_task, reserve_lock_fd, start_lock
from headway.cluster.engines.scripts import replace_file, start_script, task_script
from headway.cluster.engines.submissions import request_from_json
from headway.cluster.service.faults import WritePoints
from headway.cluster.service.isolation import Isolation, make_scratch, remove_scratch, run_as, variables_of
from headway.cluster.service.messages import StartReport, WantedStart, start_folder
from headway.cluster.service.node import Starts
from headway.cluster.service.node_logs import NodeLogs, is_here
from headway.cluster.service.outcome import RankResult
from headway.cluster.service.run_progress import JobProgress, read_progress
from headway.cluster.service.secret_files import names_of_files, write_secret_files
from headway.cluster.service.uploaded_code import CodeStore, cached, unpack
from headway.track.access import umask_of

PROGRESS_S = 10.0
"""Between looks at a run's records."""


@dataclass
class _Start:
    """A start that was begun, as remembered on disk."""

    key: str
    own: Path
    boot: str
    began: float
    limit_s: float | None
    grace_s: float
    warned: float | None = None
    """When it first received SIGUSR1, in Unix seconds."""
    ended: float | None = None
    """When it was told to end, in Unix seconds."""
    sent: int = 0
    """Signals sent so far."""
    result: RankResult | None = None
    folder: str | None = None
    """Of the job, for its first rank; it may be a run's."""
    progress: JobProgress | None = None
    looked: float | None = None
    """When the progress was read, by the monotonic clock."""


class HostStarts(Starts):
    """Processes on this machine; for one thread."""

    def __init__(
        self,
        folder: Path,
        points: WritePoints | None = None,
        isolation: Isolation | None = None,
        fetch: Callable[[str], bytes] | None = None,
    ) -> None:
        """`fetch` returns the uploaded code of a digest."""
        self._folder, self._points = folder, points or WritePoints()
        self._isolation = isolation or Isolation()
        self._code, self._fetch = CodeStore(folder / "code"), fetch
        self.logs = NodeLogs(folder / "logs")
        """Of all starts, forgotten ones too."""
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "starts").mkdir(mode=0o700, parents=True, exist_ok=True)
        reserve_lock_fd()
        self._starts = {start.key: start for start in map(_read, (folder / "starts").iterdir()) if start is not None}

    # -- as Starts says

    def report(self) -> list[StartReport]:
        """See Starts."""
        for start in self._starts.values():
            if start.result is None:
                self._check(start)
        return [
            StartReport(key, "running" if start.result is None else "exited", start.result, self._progress_of(start))
            for key, start in self._starts.items()
        ]

    def _progress_of(self, start: _Start) -> JobProgress | None:
        """The progress of the run of a job's first rank, read now and then."""
        if start.result is not None or start.folder is None:
            return None
        now = time.monotonic()
        if start.looked is None or now - start.looked >= PROGRESS_S:
            start.looked, start.progress = now, read_progress(Path(start.folder))
        return start.progress

    def begin(self, wanted: WantedStart) -> None:
        """See Starts. A start whose files are there, but which wrote no pid, never ran its command."""
        if wanted.key in self._starts:
            return
        self._isolation.check(wanted.tenant)
        request = request_from_json(wanted.request)
        own = self._folder / "starts" / start_folder(wanted.key)
        own.mkdir(mode=0o700, exist_ok=True)
        for name in ("pid", "exit", "signals", "ended"):
            (own / name).unlink(missing_ok=True)
        start = _Start(wanted.key, own, boot_id(), time.time(), request.limit_s, request.grace_s)
        start.folder = str(request.folder) if wanted.rank == 0 else None
        self._write_scripts(wanted, request, own)
        self._points.reach("before start.json")
        fields = {key: getattr(start, key) for key in ("key", "boot", "began", "limit_s", "grace_s", "folder")}
        replace_file(own / "start.json", to_json(fields).decode())
        self._points.reach("after start.json")
        variables = {
            "CUDA_VISIBLE_DEVICES": ",".join(wanted.gpus),
            "HEADWAY_MACHINE": str(wanted.rank),
            "HEADWAY_MACHINES": ",".join(wanted.machines),
            "HEADWAY_GPUS": ",".join(map(str, wanted.gpu_counts)),
            "HEADWAY_START": str(wanted.number),
            "HEADWAY_SCRATCH": str(self._scratch(own)),
            "HEADWAY_UPLOAD": str(self._scratch(own) / "code"),
            "PATH": os.defpath,
        }
        variables |= {"HEADWAY_END": str(self._scratch(own) / "end")} if len(wanted.machines) > 1 else {}
        variables |= {} if wanted.index is None else {"HEADWAY_ARRAY_INDEX": str(wanted.index)}
        variables |= self._secrets(wanted, request, own)
        with umask_of(request.folder), start_lock(own / "lock"):
            self._children[wanted.key] = subprocess.Popen(
                ["bash", str(own / "start.sh")],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=variables,
                pass_fds=[LOCK_FD],
                start_new_session=True,
            )
        self._starts[wanted.key] = start
        self._points.reach("after the process")

    def _write_scripts(self, wanted: WantedStart, request: LaunchRequest, own: Path) -> None:
        """Write the scripts of a start. Another user's task makes its log itself: nothing of ours writes where it can
        put links."""
        user, scratch = self._isolation.user(wanted.tenant), self._scratch(own)
        make_scratch(scratch, user)
        if "code" in request.site:
            assert self._fetch is not None, "whoever runs jobs can fetch their code"
            unpack(cached(self._code, request.site["code"], self._fetch), scratch / "code", user)
        here = is_here(request.folder)
        log = self.logs.place(wanted.key, request.folder if here else None, user)
        folder = None if here else shlex.quote(str(scratch))
        enter = list[str]()
        if self._isolation.cgroups is not None:
            entries = self._isolation.cgroups.create(own.name, request.cpus, request.memory_bytes)
            enter = [f'echo "$BASHPID" >{shlex.quote(str(entry))}' for entry in entries]
        if user is None:
            with umask_of(request.folder):
                log.parent.mkdir(parents=True, exist_ok=True)
            (own / "task.sh").write_text(task_script(request, folder=folder))
            (own / "start.sh").write_text(start_script(own / "task.sh", log, own, first=enter))
            return
        first = list[str]()
        if here:
            first += [f"mkdir -p -- {shlex.quote(str(log.parent))} || exit 1"]
            first += [f"exec >>{shlex.quote(str(log))} 2>&1 || exit 1"]
            log = Path(os.devnull)
        request = replace(request, environment={**request.environment, **variables_of(user)})
        task = scratch / "task.sh"
        task.write_text(task_script(request, first, folder))
        task.chmod(0o644)  # only its user gets to it, through the folder
        (own / "start.sh").write_text(start_script(task, log, own, first=enter, run_as=run_as(user)))

    def _scratch(self, own: Path) -> Path:
        return self._folder / "scratch" / own.name

    def _secret_folder(self, own: Path) -> Path:
        return self._folder / "secrets" / own.name

    def _secrets(self, wanted: WantedStart, request: LaunchRequest, own: Path) -> dict[str, str]:
        """The secrets of a start as variables: their values, or the files that have them."""
        values, filed = dict(wanted.secrets or {}), names_of_files(request)
        files = {name: values.pop(name) for name in filed if name in values}
        if not files:
            return values
        user = self._isolation.user(wanted.tenant)
        return values | write_secret_files(self._secret_folder(own), files, user)

    def signal(self, key: str, numbers: tuple[int, ...]) -> None:
        """See Starts."""
        start = self._starts.get(key)
        while start is not None and start.result is None and start.sent < len(numbers):
            number = numbers[start.sent]
            if not (self._warn(start) if number == signal.SIGUSR1 else self._kill(start, number)):
                return  # it has no process yet; the next orders repeat the signal
            start.sent += 1
            self._points.reach("after a signal")
            replace_file(start.own / "signals", str(start.sent))

    def end(self, key: str) -> None:
        """See Starts."""
        start = self._starts[key]
        if start.ended is None:
            start.ended = time.time()
            replace_file(start.own / "ended", str(start.ended))
            self._points.reach("after being told to end")
            self._warn(start)

    def kill(self, key: str) -> None:
        """See Starts."""
        start = self._starts[key]
        self._kill(start, signal.SIGKILL)
        if self._isolation.cgroups is not None:
            self._isolation.cgroups.kill(start.own.name)

    def forget(self, key: str) -> None:
        """See Starts."""
        start = self._starts.pop(key)
        self._points.reach("before forgetting")
        (start.own / "start.json").unlink(missing_ok=True)  # first: half a folder is no start
        shutil.rmtree(start.own, ignore_errors=True)
        remove_scratch(self._scratch(start.own))
        remove_scratch(self._secret_folder(start.own))
        if self._isolation.cgroups is not None:
            self._isolation.cgroups.remove(start.own.name)

    def accept(self, epoch: int, cluster: str) -> bool:
        """See Starts."""
        path = self._folder / "epoch"
        with contextlib.suppress(FileNotFoundError, ValueError):
            newest, known = path.read_text().split()
            if known != cluster or int(newest) > epoch:
                return False
            if int(newest) == epoch:
                return True
        replace_file(path, f"{epoch} {cluster}")
        return True

    # -- processes

    @property
    def busy(self) -> bool:
        """Whether anything runs."""
        return any(start.result is None for start in self._starts.values())

    def _check(self, start: _Start) -> None:
        """Notice the exit of a start; enforce its end and its time limit."""
        child = self._children.get(start.key)
        if not is_locked(start.own / "lock") if child is None else child.poll() is not None:
            self._children.pop(start.key, None)
            self._kill(start, signal.SIGKILL, our_child=child is not None)  # what the command has left behind
            if self._isolation.cgroups is None or self._isolation.cgroups.kill(start.own.name):
                start.result = _result(start, self._scratch(start.own) / "end")
                remove_scratch(self._secret_folder(start.own))
            return
        now = time.time()
        deadline = None if start.limit_s is None else start.began + start.limit_s
        if start.ended is not None:
            if start.warned is None:  # it had no process yet
                self._warn(start)
            if now >= start.ended + start.grace_s:
                self._kill(start, signal.SIGKILL)
        if deadline is not None and now >= deadline:
            self._kill(start, signal.SIGKILL)
        elif deadline is not None and start.warned is None and now >= deadline - start.grace_s:
            self._warn(start)

    def _warn(self, start: _Start) -> bool:
        sent = self._kill(start, signal.SIGUSR1)
        if sent and start.warned is None:
            start.warned = time.time()
        return sent

    def _kill(self, start: _Start, number: int, *, our_child: bool = False) -> bool:
        is_child = our_child or start.key in self._children
        return kill_task(start.own, start.boot, number, our_child=is_child)


def _result(start: _Start, end: Path) -> RankResult:
    """How a start ended, by the files that it left."""
    after_s = None if start.warned is None else start.warned - start.began
    reported = read_exit_report(end)
    try:
        status: int | None = int((start.own / "exit").read_text())
    except (OSError, ValueError):
        status = None
    return RankResult(
        status=status,
        signalled_after_s=after_s,
        at_limit=start.limit_s is not None and time.time() >= start.began + start.limit_s,
        lost=status is None and start.boot != boot_id(),
        reported=None if reported is None else reported[0],
    )


def _read(own: Path) -> _Start | None:
    """A start as its folder tells it; None if its command never ran."""
    try:
        fields: dict[str, Any] = from_json((own / "start.json").read_bytes())
        start = _Start(own=own, **fields)
    except (OSError, ValueError, TypeError):
        return None
    if not is_locked(own / "lock") and not (own / "pid").exists() and start.boot == boot_id():
        return None
    with contextlib.suppress(OSError, ValueError):
        start.sent = int((own / "signals").read_text())
    with contextlib.suppress(OSError, ValueError):
        start.ended = float((own / "ended").read_text())
    return start
