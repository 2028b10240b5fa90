"""The engine of a Slurm cluster (22.05 or later), with the permissions of an ordinary user.

A job is a folder `jobs/slurm-<key>` in the folder of its request:

    job.sh  task.sh        the batch script, and what srun starts on each machine
    ids                    Slurm's job ids, if it was submitted again; the last one counts
    starts  ended  lost    one line per start: when and where; its exit status; machines that it lost
    cancelled              mark of a cancelled job
    0001-0.log             output of the first machine in the first start

`<folder>/<id>.json` leads from Slurm's first job id to that folder. An array has a subfolder per task.

Without a shared folder, the batch script contains the task, reports its state in the job's comment, and keeps its logs
on its machine; each status query writes the same files here, for the time when Slurm has forgotten the job.
"""

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

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
    combined_exit_status,
    read_exit_report,
    secret_values,
)
from headway.cluster.engines.scripts import list_logs, replace_file
from headway.cluster.engines.slurm.batch_script import batch_script, check_site, slurm_task
from headway.cluster.engines.slurm.commands import PATIENCE_S, SlurmRefused, run
from headway.cluster.engines.slurm.parse import (
    ACCOUNTS,
    COMMENTS,
    NODES,
    PARTITIONS,
    QUEUE,
    CommentState,
    ScriptState,
    SlurmJobRow,
    check_room,
    job_status,
    parse_accounts,
    parse_comments,
    parse_nodes,
    parse_partitions,
    parse_queue,
    release_in,
    select_partitions,
)
from headway.errors import EngineError, EngineUnreachable, UsageError
from headway.track.access import umask_of

JOBS_PER_QUERY = 500
"""Jobs that one command is asked about."""
CLEARED_S = 10.0
"""How long after one start the next may follow. Within the same second, Slurm's own credentials refuse it, and the last
message of the old start is taken for one of the new; Slurm's authors recommend "at least ten seconds", and hold jobs
for 120."""
LATE_S = 20.0
"""How long after a command reports the exit status of the whole job its script must have reacted."""
SIGNAL_EARLY_S = 60.0
"""How much sooner than asked for Slurm may signal a job before its time limit, by its manual."""
OVERDUE_S = 60.0
"""How long after its grace period a cancelled job may live until its script must be lost."""
_ID = re.compile(r"[0-9]+(_[0-9]+)?")
_PING_HINT = "try again when scontrol ping shows a controller that is UP"


@dataclass(frozen=True)
class _Task:
    """A job, or one task of an array."""

    id: str
    folder: Path
    grace_s: float
    key: str = ""
    """First word of its comment, where its machines do not see the folder."""

    @property
    def index(self) -> str:
        """Its index in an array."""
        return self.id.partition("_")[2]

    def record(self, comment: CommentState) -> None:
        """Write the files that its script would write if it could."""
        lines = {
            "ids": [comment.number],
            "starts": [*["0"] * (comment.starts - 1), f"0 {comment.machines}"][: comment.starts],
        }
        if comment.ended is not None:
            lines["ended"] = [f"{comment.starts} {comment.ended}"]
        if comment.lost:
            lines["lost"] = [f"{comment.starts} {comment.lost}"]
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for name, content in lines.items():
            if _lines(self.folder / name) != content:
                replace_file(self.folder / name, "".join(f"{line}\n" for line in content))

    def with_log_location(self, status: JobStatus) -> JobStatus:
        """The status of a failed job, with the location of its logs if that is another machine."""
        if not self.key or status.state != "failed" or not status.machines:
            return status
        location = f"{status.machines[0]}:/tmp/headway-{os.getuid()}/{self.key}"
        return replace(status, reason=f"{status.reason}; logs in {location}")

    @property
    def number(self) -> str:
        """Its current job id in Slurm."""
        lines = _lines(self.folder / "ids")
        return lines[-1] if lines else self.id

    def script_state(self) -> ScriptState:
        """The state that its script has recorded."""
        starts, ended = _lines(self.folder / "starts"), _lines(self.folder / "ended")
        start, _, status = ended[-1].partition(" ") if ended else ("", "", "")
        machines = starts[-1].partition(" ")[2].split(",") if starts else []
        last = int(status) if start == str(len(starts)) and status.isdecimal() else None
        lost = dict(line.split(" ", 1) for line in _lines(self.folder / "lost")).get(str(len(starts)), "")
        orphan_status = None if last is not None else self._orphan_status(len(starts))
        orphaned = orphan_status is not None
        return ScriptState(
            len(starts), tuple(filter(None, machines)), orphan_status if orphaned else last,
            self.cancelled is not None, lost, orphaned,
            self.cancelled is not None and time.time() > self.cancelled + self.grace_s + OVERDUE_S,
        )  # fmt: skip

    def _orphan_status(self, start: int) -> int | None:
        """The exit status that the commands of a start reported, if that is so long ago that the script, which should
        have reacted, must be dead."""
        files = [path for path in self.folder.glob(f"{start:04d}-*.end") if path.stat().st_mtime < time.time() - LATE_S]
        return combined_exit_status(report[0] for path in files if (report := read_exit_report(path)) is not None)

    @property
    def cancelled(self) -> float | None:
        """When it was cancelled, in Unix seconds."""
        for folder in (self.folder, self.folder.parent):
            try:
                return (folder / "cancelled").stat().st_mtime
            except FileNotFoundError:
                continue
        return None


class SlurmEngine(Engine):
    """Starts processes through sbatch and srun."""

    name: ClassVar[str] = "slurm"

    def __init__(
        self, folder: Path, *, patience_s: float = PATIENCE_S, cleared_s: float = CLEARED_S, probe_s: float = PROBE_S
    ) -> None:
        """`folder` holds a record per job; `patience_s` is the timeout of Slurm's commands, `probe_s` of a probe."""
        self.folder, self.patience_s, self.cleared_s = folder.absolute(), patience_s, cleared_s
        self.probe_s = probe_s

    def probe(self) -> None:
        """See Engine: whether a controller answers a ping."""
        try:
            answer = run("scontrol", "ping", patience_s=self.probe_s)
        except EngineError as error:
            raise EngineUnreachable(f"Slurm does not answer: {error.message}", hint=_PING_HINT) from None
        if " is UP" not in answer:
            raise EngineUnreachable(f'Slurm is down: scontrol ping printed "{" ".join(answer.split())}"', _PING_HINT)

    def inventory(self) -> list[Machine]:
        """All nodes that the user may see."""
        return parse_nodes(self._run("sinfo", "--noheader", "--Node", f"--Format={NODES}"))

    def describe(self, request: LaunchRequest) -> str:
        """The scripts that would be submitted."""
        job = request.folder / "jobs" / "slurm-new"
        scripts = {"job.sh": batch_script(request, job, self._minutes(request))}
        if request.shared:
            scripts["task.sh"] = slurm_task(request)
        return "\n".join(f"# -- {job / name}\n{text}" for name, text in scripts.items())

    def launch(self, request: LaunchRequest) -> str:
        """Submit a job and return Slurm's job id."""
        values = secret_values(request)
        job = request.folder / "jobs" / f"slurm-{secrets.token_hex(4)}"
        script = batch_script(request, job, self._minutes(request))
        try:
            with umask_of(request.folder):  # which Slurm passes on to the job
                job.mkdir(parents=True)
                (job / "job.sh").write_text(script)
                if request.shared:
                    (job / "task.sh").write_text(slurm_task(request))
                number = _number(self._run("sbatch", "--parsable", str(job / "job.sh"), secrets=values))
                self._record(number, job, request)
        except BaseException as error:
            # A job that Slurm has nevertheless accepted finds its folder gone and exits: nothing is half submitted.
            # Without a shared folder, it is looked up in Slurm and cancelled.
            shutil.rmtree(job, ignore_errors=True)
            if not request.shared:
                with contextlib.suppress(EngineError):
                    accepted = [state.number for (key, _), state in self._comments().items() if key == job.name]
                    self._try("scancel", "--quiet", *accepted) if accepted else None
            if isinstance(error, OSError):
                raise EngineError(f"cannot write {job}: {error.strerror}") from None
            raise
        return number

    def status(self, jobs: Sequence[str]) -> dict[str, JobStatus]:
        """The states of jobs, from one squeue and, for those it has forgotten, one sacct."""
        tasks_of = {job: self._tasks(job) for job in jobs}
        statuses = {name: status for name, (_, status) in self._views(tasks_of).items()}
        return {
            job: JobStatus("unknown", "unknown job") if not job_tasks
            else statuses[job] if len(job_tasks) == 1 and job_tasks[0].id == job
            else array_status([statuses[task.id] for task in job_tasks])
            for job, job_tasks in tasks_of.items()
        }  # fmt: skip

    def _views(self, tasks_of: Mapping[str, list[_Task]]) -> "dict[str, tuple[SlurmJobRow | None, JobStatus]]":
        """What Slurm reports of each task, and the state that follows."""
        tasks = {task.id: task for job_tasks in tasks_of.values() for task in job_tasks}
        numbers = {name: task.number for name, task in tasks.items()}
        rows = self._rows(set(numbers.values()))
        if any(task.key for task in tasks.values()):
            comments = self._comments()  # after the rows: the comment of a job that is over is final
            for task in tasks.values():
                if (task.key, task.index) in comments:
                    task.record(comments[task.key, task.index])
        views = dict[str, tuple[SlurmJobRow | None, JobStatus]]()
        for name, task in tasks.items():
            row, script = rows.get(numbers[name]), task.script_state()
            if task.key and script.ended is None and row is not None and row.state == "COMPLETED":
                script = replace(script, ended=0)  # not every user may write the last comment
            if task.number != numbers[name]:  # submitted again meanwhile
                row = SlurmJobRow("PENDING", "Dependency")
            is_released = row is not None and row.begin is not None and self._release_in(row.begin) is None
            status = task.with_log_location(job_status(row, script, is_released=is_released))
            if task.key and row is None and script.ended is None and not script.cancelled:
                status = replace(status, state="unknown", reason="Slurm has forgotten it")
            views[name] = row, status
        return views

    def signal(self, job: str, number: signal.Signals) -> None:
        """See Engine."""
        state = self.status([job])[job].state
        if state not in ("running", "ending"):
            raise cannot_signal(job, state)
        # SIGUSR1 goes to the script, which takes note and forwards it; other signals go to the commands themselves.
        target = ["--batch"] if number == signal.SIGUSR1 else []
        numbers = [task.number for task in self._tasks(job)]
        self._run("scancel", *target, f"--signal={number.name.removeprefix('SIG')}", *numbers)

    def logs(self, job: str) -> list[Path]:
        """See Engine."""
        return [path for task in self._tasks(job) for path in list_logs(task.folder)]

    def release(self, job: str) -> bool:
        """See Engine: lift the hold of two minutes after a requeue, and requeue a job whose script was lost with its
        machine. The next start still waits until Slurm can tell it from the last."""
        released = False
        tasks = self._tasks(job)
        views = self._views({job: tasks})
        for task in tasks:
            row, status = views[task.id]
            if row is not None and row.begin is not None and row.held_since() is not None and status.state == "waiting":
                if (wait_s := self._release_in(row.begin)) is not None:
                    self._run("scontrol", "update", f"JobId={task.number}", f"StartTime=now+{wait_s}seconds")
                released = True
            elif row is not None and status.remedy == "requeue":
                self._run("scontrol", "requeue", task.number)
                released = True
        return released

    def _release_in(self, begin: float) -> int | None:
        return release_in(begin, time.time(), self.cleared_s)

    def cancel(self, job: str) -> None:
        """See Engine. The mark in its folder keeps the job from being restarted."""
        tasks = self._tasks(job)
        states = self.status([task.id for task in tasks])
        live = [task for task in tasks if states[task.id].state not in OVER or states[task.id].native == "PENDING"]
        if not live:
            return
        lost = [task for task in live if task.script_state().orphaned]
        late = [task for task in live if task.cancelled is not None and time.time() > task.cancelled + task.grace_s]
        for task in live:
            with umask_of(task.folder.parent):
                task.folder.mkdir(exist_ok=True)
                if task.cancelled is None:
                    (task.folder / "cancelled").touch()
        # With one task of an array, scancel's filter by state would cancel all that wait: name those, without a filter.
        # A task that starts at that moment has nothing to lose.
        waiting = {task.number for task in live if states[task.id].native == "PENDING" and "_" in task.number}
        if waiting:
            self._try("scancel", "--quiet", *sorted(waiting))
        others = [task.number for task in live if task.number not in waiting]
        if whole := [number for number in others if "_" not in number]:
            self._try("scancel", "--quiet", "--state=PENDING", *whole)
        no_shared_folder = [task.number for task in live if task.key and task.number in others]
        see_the_mark = [number for number in others if number not in no_shared_folder]
        for name, numbers in (("USR2", no_shared_folder), ("USR1", see_the_mark)):
            if numbers:
                self._try("scancel", "--quiet", "--batch", f"--signal={name}", *numbers)
        if late or lost:
            self._try("scancel", "--quiet", *{task.number for task in (*late, *lost)})

    # -- queries

    def _rows(self, numbers: set[str]) -> dict[str, SlurmJobRow]:
        """Slurm's view of jobs, one row per array task."""
        rows, ordered = dict[str, SlurmJobRow](), sorted(numbers)
        for start in range(0, len(ordered), JOBS_PER_QUERY):
            batch = ordered[start : start + JOBS_PER_QUERY]
            queue = ["squeue", "--noheader", "--array", "--states=all", f"--format={QUEUE}"]
            try:
                rows |= parse_queue(self._run(*queue, f"--jobs={','.join(batch)}"))
            except SlurmRefused as error:
                if "Invalid job id" not in error.output:  # printed for a single job that it has forgotten
                    raise
            missing = [number for number in batch if number not in rows]
            if missing:
                rows |= self._accounted(missing)
        return rows

    def _comments(self) -> dict[tuple[str, str], CommentState]:
        """The states in the comments of the user's jobs."""
        queue = ["squeue", "--me", "--noheader", "--array", "--states=all", f"--Format={COMMENTS}"]
        return parse_comments(self._run(*queue))

    def _accounted(self, numbers: list[str]) -> dict[str, SlurmJobRow]:
        """Jobs in Slurm's accounting, where there is one."""
        command = ["sacct", "--noheader", "--parsable2", "--allocations", "--duplicates", f"--format={ACCOUNTS}"]
        try:
            return parse_accounts(self._run(*command, f"--jobs={','.join(numbers)}"))
        except SlurmRefused:
            return {}

    def _minutes(self, request: LaunchRequest) -> int | None:
        """The time limit of one start: the requested one, at most its partition's; UsageError if the partition can
        never hold the job."""
        check_site(request.site)
        partitions = parse_partitions(self._run("sinfo", "--noheader", f"--format={PARTITIONS}"))
        allowed = select_partitions(partitions, request.site.get("partition"))
        check_room(request, self.inventory(), allowed)
        requested = None if request.limit_s is None else math.ceil(request.limit_s / 60)
        limits = [requested, *(partition.minutes for partition in allowed)]
        minutes = min((minutes for minutes in limits if minutes is not None), default=None)
        check_limit(request, None if minutes is None else minutes * 60, SIGNAL_EARLY_S)
        return minutes

    def _run(self, *command: str, secrets: dict[str, str] | None = None) -> str:
        return run(*command, secrets=secrets, patience_s=self.patience_s)

    def _try(self, *command: str) -> None:
        """Run a command that may come too late: a job that has ended meanwhile is no error."""
        with contextlib.suppress(SlurmRefused, UsageError):
            self._run(*command)

    # -- records

    def _record(self, number: str, job: Path, request: LaunchRequest) -> None:
        """Record the folder of a job; cancel the job if that fails, since it could not be found again."""
        fields = {"format": 1, "name": request.name, "folder": str(job), "array": request.array}
        fields |= {"shared": request.shared, "grace_s": request.grace_s}
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self.folder / f"{number}.json", json.dumps(fields) + "\n")
        except OSError:
            self._try("scancel", "--quiet", number)
            raise

    def _tasks(self, job: str) -> list[_Task]:
        """A job, all tasks of an array, or one of them; nothing for an unknown job."""
        base, _, index = job.partition("_")
        if not _ID.fullmatch(job):
            return []
        path = self.folder / f"{base}.json"
        try:
            record = json.loads(path.read_text())
            folder, array, grace_s = Path(record["folder"]), record["array"], float(record["grace_s"])
            key = "" if record.get("shared", True) else folder.name
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EngineError(f"{path} is not a job record: {error}") from None
        if array is None:
            return [] if index else [_Task(job, folder, grace_s, key)]
        indices = [int(index)] if index else range(array)
        return [_Task(f"{base}_{i}", folder / str(i), grace_s, key) for i in indices if i < array]


def _number(text: str) -> str:
    """The job id in sbatch's output: `123`, or `123;cluster`."""
    number = text.strip().partition(";")[0]
    if not number.isdecimal():
        raise EngineError(f'sbatch printed "{" ".join(text.split())}", expected a job id')
    return number


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:
        return []
