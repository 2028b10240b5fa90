"""`headway logs RUN`: prints or follows the logs of a run."""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import from_json, to_json

from headway.agent.remote.store_mirror import start_failures
from headway.cli.job_logs import LogChoice, LogLine, log_lines
from headway.cli.jobs import sweep_named
from headway.cli.options import Json, Run, Runs
from headway.cli.run_sync import RunSync
from headway.cli.service_jobs import service_job
from headway.cli.view import LiveStatus
from headway.cluster.engines import OVER
from headway.cluster.engines.settings import open_engine
from headway.cluster.engines.submissions import last_submission
from headway.cluster.submit.runs import submitted_runs
from headway.cluster.submit.sweeps import Sweep
from headway.errors import FEW, EngineError, RunError
from headway.track import RunFolder, find_run, find_set_aside, history, lock_holder, read_run, runs_root
from headway.track.divergence import find_divergence

_POLL_S = 0.25
_POLL_ENGINE_S = 2.0
"""Between queries of an engine, which serves other users too."""
SHOWN_RUNS = 8
"""Runs of a sweep that an error names."""


def logs(
    run: Run,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Only the log of this worker; of a job, of this machine.")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="Attempt to show (default: the last; of a job, all).")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the run ends.")] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Print the logs of a run and of its engine's job, or of a job of the service.

    With --json, one object per line: file, line.

    An agent started in a terminal has no log; its record is shown instead.
    """
    root = runs_root(runs)
    sweep = sweep_named(root, run)
    if sweep is not None:
        raise _sweep_error(sweep)
    jobs = service_job(root, run)
    if jobs is not None:
        choice = LogChoice(rank, attempt)
        _show_jobs(jobs, log_lines(root, run, follow=follow, choice=choice), _printer(json, headings=True))
        return
    folder = find_run(root, run)
    sync = RunSync(folder)
    sync.now()
    files = _files(folder, rank, attempt)
    if not files and not follow:
        names = sorted(path.name for path in folder.logs.glob("*-*.log"))
        raise RunError(f"run {folder.name} has no such log", hint=_available(names, folder.logs), usage=True)
    show = _printer(json, headings=rank is None)
    for name, line in _lines(folder, rank, attempt, follow, sync):
        show(name, line)


def _show_jobs(jobs: list[dict[str, Any]], lines: Iterator[LogLine], show: Callable[[str, str], None]) -> None:
    """Print the logs of jobs of the service; say so if there is nothing in them."""
    shown = False
    for name, line in lines:
        shown = True
        show(name, line)
    if not shown:
        job = jobs[0]["id"]
        print(f"note: job {job} ({jobs[0]['name']}) has printed nothing; headway why {job} says why", file=sys.stderr)


def _available(names: list[str], folder: Path) -> str:
    """Return a hint with the newest logs."""
    more = f" and {len(names) - FEW} more in {folder}" if len(names) > FEW else ""
    return f"available: {', '.join(names[-FEW:]) or 'none'}{more}"


def _sweep_error(sweep: Sweep) -> RunError:
    """Return an error that names the runs of a sweep."""
    names = [point.run for point in sweep.points]
    more = f" and {len(names) - SHOWN_RUNS} more" if len(names) > SHOWN_RUNS else ""
    return RunError(
        f"{sweep.name} is a sweep; its runs have separate logs",
        hint=f"its runs: {', '.join(names[:SHOWN_RUNS])}{more}",
        usage=True,
    )


def _files(run: RunFolder, rank: int | None, attempt: int | None) -> list[Path]:
    """Return the selected logs: of the given attempt, else of the last that has any."""
    process = "*" if rank is None else f"rank-{rank}"
    paths = [path for path in run.logs.glob(f"*-{process}.log") if path.name.partition("-")[0].isdecimal()]
    number = attempt or max((_attempt(path) for path in paths), default=0)
    own = sorted(path for path in paths if _attempt(path) == number)
    if rank is not None:
        return own
    job_logs = [*_job_logs(run), *start_failures(run)] if attempt is None else []
    has_output = job_logs or any(path.name.endswith("-keeper.log") for path in own)
    return [*job_logs, *([] if has_output else _agent_records(run, attempt)), *own]


def _agent_records(run: RunFolder, attempt: int | None) -> list[Path]:
    """Return the records of leading agents, of one attempt or of all: what a terminal showed is in no log."""
    return sorted(run.events.glob("*-agent.jsonl" if attempt is None else f"{attempt:04d}-agent.jsonl"))


def _job_logs(run: RunFolder) -> list[Path]:
    """Return the logs of the newest start of a submitted run's job, one per machine."""
    if not (run.path / "jobs.jsonl").exists():
        return []
    job = last_submission(run.path)
    try:
        paths = [] if job is None else open_engine(job.engine, run.path.parent).logs(job.job)
    except EngineError:  # the run's own logs are still here
        return []
    last = max((path.name.partition("-")[0] for path in paths), default="")
    return [path for path in paths if path.exists() and path.name.startswith(f"{last}-")]


def is_alive(run: RunFolder) -> bool:
    """Whether more may follow: a process holds the run's lock, or an engine will start it."""
    if lock_holder(run) is not None:
        return True
    if not (run.path / "jobs.jsonl").exists():
        return False
    return any(
        submitted.status.state not in OVER and submitted.status.state != "unknown"
        for submitted in submitted_runs(run.path.parent, [run])
    )


def _attempt(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _lines(
    run: RunFolder, rank: int | None, attempt: int | None, follow: bool, sync: RunSync
) -> Iterator[tuple[str, str]]:
    """Yield file names and lines; when following, new lines as they come until the run has ended."""
    offsets: dict[Path, int] = {}
    event_lines = defaultdict[Path, _EventLines](_EventLines)
    while True:
        if not run.path.exists() and (aside := find_set_aside(run.path.parent, run.name)) is not None:
            offsets = {aside.path / path.relative_to(run.path): offset for path, offset in offsets.items()}
            run = aside
        alive = follow and is_alive(run)  # checked before reading, so that the last lines are not missed
        if follow:
            sync.now(at_once=not alive)
        for path in _files(run, rank, attempt):
            data = _read_from(path, offsets.get(path, 0))
            end = data.rfind(b"\n") + 1 if alive else len(data)
            offsets[path] = offsets.get(path, 0) + end
            for line in data[:end].splitlines():
                lines = event_lines[path].parse(line) if path.suffix == ".jsonl" else [line.decode(errors="replace")]
                yield from ((path.name, text) for text in lines)
        if not alive and (run.path.exists() or find_set_aside(run.path.parent, run.name) is None):
            yield from [] if rank is not None or attempt is not None else _warnings(run)
            return
        time.sleep(_POLL_S if lock_holder(run) is not None else _POLL_ENGINE_S)


def _warnings(run: RunFolder) -> Iterator[tuple[str, str]]:
    """Yield what a run's losses say, which no process has logged if it was on a terminal."""
    steps = history(read_run(run, "rank-0"))
    divergence = find_divergence((event["step"], event.get("loss")) for event in steps)
    if divergence is not None:
        yield "warnings", divergence.text


class _EventLines:
    """Turns the events of an agent's record into the lines that its view would show."""

    def __init__(self) -> None:
        self._status, self._wall, self._shown = LiveStatus(), 0.0, 0

    def parse(self, line: bytes) -> list[str]:
        """Return the lines of one event, each after its time of day."""
        try:
            event = from_json(line)
            clock = time.strftime("%H:%M:%S", time.localtime(self._wall + event.get("t", 0) / 1e9))
            return [f"{clock} {text}" for text in self._texts(event)]
        except (ValueError, TypeError, KeyError, AttributeError):
            return []  # a torn line

    def _texts(self, event: dict[str, Any]) -> list[str]:
        self._status.take(event)
        notices, self._shown = self._status.notices[self._shown :], len(self._status.notices)
        match event["kind"]:
            case "open":
                self._wall = event.get("wall", 0.0)
            case "attempt":
                nodes = f", {event['nodes']} nodes" if "nodes" in event else ""
                again = f", from step {event['from_step']}" if event["from_step"] else ""
                return [f"{event['workers']} worker{'s' * (event['workers'] != 1)} on {event['device']}{nodes}{again}"]
            case "end":
                return [f"{event['outcome']}: {event['reason']}", *notices]
            case "log" if event.get("message"):
                return [event["message"]]
        return notices


def _read_from(path: Path, offset: int) -> bytes:
    """Return what a log has from an offset on; nothing if its run was set aside a moment ago."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except FileNotFoundError:
        return b""


def _printer(json: bool, headings: bool) -> Callable[[str, str], None]:
    """Return what prints lines as JSON objects, or as text with a heading wherever the file changes."""
    last = ""

    def show(name: str, line: str) -> None:
        nonlocal last
        if json:
            print(to_json({"file": name, "line": line}).decode(), flush=True)
            return
        if headings and name != last:
            print(f"== {name}", flush=True)
            last = name
        print(line, flush=True)

    return show
