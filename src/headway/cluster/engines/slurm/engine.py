"""Slurm, from 22.05 on, with the rights that every user has.

A job is a folder `jobs/slurm-<key>` in the folder of its request:

    job.sh  task.sh        what Slurm starts, and what srun starts on each machine
    ids                    Slurm's numbers for it, where it was submitted again; the last one counts
    starts  ended  lost    a line for each start: when and where; which one ended, and how; machines that it lost
    cancelled              somebody does not want it any more
    0001-0.log             what the first machine printed in the first start

`<place>/<id>.json` leads from Slurm's first number to that folder. An array has a folder a copy in it.

Where machines do not see that folder, the script has all that it needs, tells how it stands in the job's comment, and
keeps its logs on its machine; whoever looks writes the same files here, for the time when Slurm has forgotten it.
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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from headway.cluster.engines.engine import (
    OVER,
    REQUEUE,
    Engine,
    JobStatus,
    LaunchRequest,
    Machine,
    array_status,
    end_of,
    read_end,
    secret_values,
)
from headway.cluster.engines.scripts import logs_in
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
    meant,
    parse_accounts,
    parse_comments,
    parse_nodes,
    parse_partitions,
    parse_queue,
)
from headway.errors import EngineError, UsageError

__all__ = ["SlurmEngine"]

AT_ONCE = 500
"""Jobs that one command is asked about."""
CLEARED_S = 10.0
"""How long after a start the next may follow. One that comes within the second is refused by Slurm's own credentials,
and the last word of the old one is taken for the new one's; its authors say "at least ten seconds", and hold jobs back
for 120."""
LATE_S = 20.0
"""How long after a command has said how the whole ended its script must have heard of it."""
OVERDUE_S = 60.0
"""How long after its grace a cancelled job may still be there before it is ended by force."""
_ID = re.compile(r"[0-9]+(_[0-9]+)?")


@dataclass(frozen=True)
class _Copy:
    """A job, or one of an array's copies."""

    id: str
    folder: Path
    grace_s: float
    key: str = ""
    """What its comment begins with, where its machines do not see the folder."""

    @property
    def index(self) -> str:
        """Which copy of an array it is."""
        return self.id.partition("_")[2]

    def note(self, told: CommentState) -> None:
        """Write down what its script would have, if it could."""
        lines = {"ids": [told.number], "starts": [*["0"] * (told.starts - 1), f"0 {told.machines}"][: told.starts]}
        if told.ended is not None:
            lines["ended"] = [f"{told.starts} {told.ended}"]
        if told.lost:
            lines["lost"] = [f"{told.starts} {told.lost}"]
        self.folder.mkdir(exist_ok=True)
        for name, wanted in lines.items():
            if _lines(self.folder / name) != wanted:
                beside = self.folder / f".{name}.{os.getpid()}"
                beside.write_text("".join(f"{line}\n" for line in wanted))
                beside.replace(self.folder / name)

    def with_place(self, status: JobStatus) -> JobStatus:
        """Where to read why it failed, if that is not here."""
        if not self.key or status.state != "failed" or not status.machines:
            return status
        place = f"{status.machines[0]}:/tmp/headway-{os.getuid()}/{self.key}"
        return replace(status, reason=f"{status.reason}; {place} has its words")

    @property
    def number(self) -> str:
        """What Slurm calls it now."""
        lines = _lines(self.folder / "ids")
        return lines[-1] if lines else self.id

    def own(self) -> ScriptState:
        """What its script has left."""
        starts, ended = _lines(self.folder / "starts"), _lines(self.folder / "ended")
        start, _, status = ended[-1].partition(" ") if ended else ("", "", "")
        machines = starts[-1].partition(" ")[2].split(",") if starts else []
        last = int(status) if start == str(len(starts)) and status.isdecimal() else None
        lost = dict(line.split(" ", 1) for line in _lines(self.folder / "lost")).get(str(len(starts)), "")
        said = None if last is not None else self._said(len(starts))
        orphaned = said is not None
        return ScriptState(
            len(starts), tuple(filter(None, machines)), said if orphaned else last, self.cancelled is not None, lost,
            orphaned,
        )  # fmt: skip

    def _said(self, start: int) -> int | None:
        """What the commands of a start have said of the whole, if that is so long ago that its script, which should
        have gone on from there, is no more."""
        files = [path for path in self.folder.glob(f"{start:04d}-*.end") if path.stat().st_mtime < time.time() - LATE_S]
        return end_of(end[0] for path in files if (end := read_end(path)) is not None)

    @property
    def cancelled(self) -> float | None:
        """When somebody cancelled it, in Unix seconds."""
        for folder in (self.folder, self.folder.parent):
            try:
                return (folder / "cancelled").stat().st_mtime
            except FileNotFoundError:
                continue
        return None


class SlurmEngine(Engine):
    """Starts processes through sbatch and srun."""

    name: ClassVar[str] = "slurm"

    def __init__(self, place: Path, *, patience_s: float = PATIENCE_S, cleared_s: float = CLEARED_S) -> None:
        """`place` is where it notes which job is which; commands are given so long to answer."""
        self.place, self.patience_s, self.cleared_s = place.absolute(), patience_s, cleared_s

    def inventory(self) -> list[Machine]:
        """All nodes that the user may see."""
        return parse_nodes(self._run("sinfo", "--noheader", "--Node", f"--Format={NODES}"))

    def describe(self, request: LaunchRequest) -> str:
        """The scripts that would be sent."""
        job = request.folder / "jobs" / "slurm-new"
        shown = {"job.sh": batch_script(request, job, self._minutes(request))}
        if request.shared:
            shown["task.sh"] = slurm_task(request)
        return "\n".join(f"# -- {job / name}\n{text}" for name, text in shown.items())

    def launch(self, request: LaunchRequest) -> str:
        """Submit a job; Slurm's number for it."""
        values = secret_values(request)
        job = request.folder / "jobs" / f"slurm-{secrets.token_hex(4)}"
        script = batch_script(request, job, self._minutes(request))
        try:
            job.mkdir(parents=True)
            (job / "job.sh").write_text(script)
            if request.shared:
                (job / "task.sh").write_text(slurm_task(request))
            number = _number(self._run("sbatch", "--parsable", str(job / "job.sh"), secrets=values))
            self._note(number, job, request)
        except BaseException as error:
            # Whatever Slurm has of it finds its folder gone, and ends without a word: nothing is half submitted. Where
            # machines see no folder, Slurm is asked for it.
            shutil.rmtree(job, ignore_errors=True)
            if not request.shared:
                with contextlib.suppress(EngineError):
                    named = [told.number for (key, _), told in self._told().items() if key == job.name]
                    self._try("scancel", "--quiet", *named) if named else None
            if isinstance(error, OSError):
                raise EngineError(f"{job} cannot be written: {error.strerror}") from None
            raise
        return number

    def status(self, jobs: Sequence[str]) -> dict[str, JobStatus]:
        """How jobs stand, in one question to squeue and, for those it has forgotten, one to sacct.

        Who looks also helps: a job that Slurm holds back after a start is let go, and one that was cancelled and does
        not end is ended.
        """
        copies = {job: self._copies(job) for job in jobs}
        flat = {copy.id: copy for of_job in copies.values() for copy in of_job}
        numbers = {name: copy.number for name, copy in flat.items()}
        rows = self._rows(set(numbers.values()))
        if any(copy.key for copy in flat.values()):
            told_by = self._told()  # after the rows: of one that is over it says all
            for copy in flat.values():
                if (copy.key, copy.index) in told_by:
                    copy.note(told_by[copy.key, copy.index])
        told = {}
        for name, copy in flat.items():
            row, own = rows.get(numbers[name]), copy.own()
            if copy.key and own.ended is None and row is not None and row.state == "COMPLETED":
                own = replace(own, ended=0)  # it could not say so: Slurm takes no comment from everybody
            if copy.number != numbers[name]:  # submitted again while we asked
                row = SlurmJobRow("PENDING", "Dependency")
            told[name] = copy.with_place(job_status(row, own))
            if copy.key and row is None and own.ended is None and not own.cancelled:
                told[name] = replace(told[name], state="unknown", reason="Slurm has forgotten it")  # when nobody looked
            if row is not None:
                self._help_on(copy, row, own)
        lost = JobStatus("unknown", "no such job is known here")
        return {
            job: lost if not found else told[job] if len(found) == 1 and found[0].id == job
            else array_status([told[copy.id] for copy in found])
            for job, found in copies.items()
        }  # fmt: skip

    def signal(self, job: str, number: signal.Signals) -> None:
        """Have the command of a running job hear a signal on each of its machines."""
        state = self.status([job])[job].state
        if state not in ("running", "ending"):
            raise EngineError(f"job {job} cannot be signalled: it is {state}", hint="headway jobs shows what runs")
        # SIGUSR1 goes to the script, which passes it on and knows of it; others to the commands themselves.
        to = ["--batch"] if number == signal.SIGUSR1 else []
        numbers = [copy.number for copy in self._copies(job)]
        self._run("scancel", *to, f"--signal={number.name.removeprefix('SIG')}", *numbers)

    def logs(self, job: str) -> list[Path]:
        """What its processes print, a file for each start and machine."""
        return [path for copy in self._copies(job) for path in logs_in(copy.folder)]

    def cancel(self, job: str) -> None:
        """Have a job end: SIGUSR1, and after its grace for good. The mark in its folder keeps it from coming back."""
        copies = self._copies(job)
        states = self.status([copy.id for copy in copies])
        live = [copy for copy in copies if states[copy.id].state not in OVER or states[copy.id].native == "PENDING"]
        if not live:
            return
        late = [copy for copy in live if copy.cancelled is not None and time.time() > copy.cancelled + copy.grace_s]
        for copy in live:
            copy.folder.mkdir(exist_ok=True)
            if copy.cancelled is None:
                (copy.folder / "cancelled").touch()
        # Of one copy of an array, a filter by state takes all that wait with it: those are named, and nothing else. One
        # that starts at that moment has nothing to lose.
        waiting = {copy.number for copy in live if states[copy.id].native == "PENDING" and "_" in copy.number}
        if waiting:
            self._try("scancel", "--quiet", *sorted(waiting))
        others = [copy.number for copy in live if copy.number not in waiting]
        if whole := [number for number in others if "_" not in number]:
            self._try("scancel", "--quiet", "--state=PENDING", *whole)
        apart = [copy.number for copy in live if copy.key and copy.number in others]
        for word, named in (("USR2", apart), ("USR1", [number for number in others if number not in apart])):
            if named:  # where they do not see the mark, another signal says the same
                self._try("scancel", "--quiet", "--batch", f"--signal={word}", *named)
        if late:
            self._try("scancel", "--quiet", *(copy.number for copy in late))

    # -- what Slurm knows

    def _rows(self, numbers: set[str]) -> dict[str, SlurmJobRow]:
        """What Slurm says of jobs; those of an array are named one by one."""
        found, ordered = dict[str, SlurmJobRow](), sorted(numbers)
        for at in range(0, len(ordered), AT_ONCE):
            some = ordered[at : at + AT_ONCE]
            queue = ["squeue", "--noheader", "--array", "--states=all", f"--format={QUEUE}"]
            try:
                found |= parse_queue(self._run(*queue, f"--jobs={','.join(some)}"))
            except SlurmRefused as error:
                if "Invalid job id" not in error.words:  # what it says of one job that it has forgotten
                    raise
            missing = [number for number in some if number not in found]
            if missing:
                found |= self._accounted(missing)
        return found

    def _told(self) -> dict[tuple[str, str], CommentState]:
        """What comments of the user's own jobs say."""
        queue = ["squeue", "--me", "--noheader", "--array", "--states=all", f"--Format={COMMENTS}"]
        return parse_comments(self._run(*queue))

    def _accounted(self, numbers: list[str]) -> dict[str, SlurmJobRow]:
        """What Slurm's accounting says, where there is one."""
        command = ["sacct", "--noheader", "--parsable2", "--allocations", "--duplicates", f"--format={ACCOUNTS}"]
        try:
            return parse_accounts(self._run(*command, f"--jobs={','.join(numbers)}"))
        except SlurmRefused:
            return {}

    def _help_on(self, copy: _Copy, row: SlurmJobRow, own: ScriptState) -> None:
        """What nobody but Slurm's administrator can have done for good, whoever looks may do once."""
        if row.state == "PENDING" and own.starts and own.cancelled:
            self._try("scancel", "--quiet", copy.number)
        elif row.state == "PENDING" and own.starts and (held := row.held_since()) is not None:
            if time.time() > held + self.cleared_s:
                self._try("scontrol", "update", f"JobId={copy.number}", "StartTime=now")
        elif own.orphaned and row.state == "RUNNING":
            again = own.ended == REQUEUE and not own.cancelled
            self._try(*(("scontrol", "requeue") if again else ("scancel", "--quiet")), copy.number)
        elif own.cancelled and row.state == "RUNNING":
            since = time.time() - (copy.cancelled or 0)
            if since > copy.grace_s + OVERDUE_S:
                self._try("scancel", "--quiet", copy.number)

    def _minutes(self, request: LaunchRequest) -> int | None:
        """How long one start may take: as was asked, and never longer than its partition allows; UsageError where that
        can never hold it."""
        check_site(request.site)
        partitions = parse_partitions(self._run("sinfo", "--noheader", f"--format={PARTITIONS}"))
        allowed = meant(partitions, request.site.get("partition"))
        check_room(request, self.inventory(), allowed)
        asked = None if request.limit_s is None else math.ceil(request.limit_s / 60)
        limits = [asked, *(one.minutes for one in allowed)]
        return min((minutes for minutes in limits if minutes is not None), default=None)

    def _run(self, *command: str, secrets: dict[str, str] | None = None) -> str:
        return run(*command, secrets=secrets, patience_s=self.patience_s)

    def _try(self, *command: str) -> None:
        """Something that may come too late: a job that has ended meanwhile is no mistake."""
        with contextlib.suppress(SlurmRefused, UsageError):
            self._run(*command)

    # -- which job is which

    def _note(self, number: str, job: Path, request: LaunchRequest) -> None:
        """Write down where a job's folder is; without that it must not run."""
        try:
            self.place.mkdir(parents=True, exist_ok=True)
            record = {"format": 1, "name": request.name, "folder": str(job), "array": request.array}
            record["shared"] = request.shared
            beside = self.place / f".{number}.partial"
            beside.write_text(json.dumps({**record, "grace_s": request.grace_s}) + "\n")
            beside.replace(self.place / f"{number}.json")
        except OSError:
            self._try("scancel", "--quiet", number)
            raise

    def _copies(self, job: str) -> list[_Copy]:
        """A job as one, an array as its copies, one copy by itself; nothing if it is not known here."""
        base, _, index = job.partition("_")
        if not _ID.fullmatch(job):
            return []
        try:
            record = json.loads((self.place / f"{base}.json").read_text())
            folder, array, grace_s = Path(record["folder"]), record["array"], float(record["grace_s"])
            key = "" if record.get("shared", True) else folder.name
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EngineError(f"{self.place / f'{base}.json'} is no record of a job: {error}") from None
        if array is None:
            return [] if index else [_Copy(job, folder, grace_s, key)]
        wanted = [int(index)] if index else range(array)
        return [_Copy(f"{base}_{one}", folder / str(one), grace_s, key) for one in wanted if one < array]


def _number(text: str) -> str:
    """The job's number from what sbatch prints: `123`, or `123;cluster`."""
    number = text.strip().partition(";")[0]
    if not number.isdecimal():
        raise EngineError(f'sbatch said "{" ".join(text.split())}", where a number was expected')
    return number


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:
        return []
