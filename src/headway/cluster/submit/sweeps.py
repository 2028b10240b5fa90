"""Submitted sweeps: many runs of one recipe, one per point of a grid, as one job array of an engine.

runs/.sweeps/<name>/
  making.json         which runs it will have: written first, to clean up if its creator dies
  points-<token>/     one script per point, which array tasks find by their index
  jobs/               their logs
  sweep.json          the job, and the runs with their settings: written last, and nothing trains before

A sweep without sweep.json was never submitted, since its creator died. The next sweep removes it, with its runs.

Without a shared folder, runs travel through their object stores (store_runs.py), there are no scripts, and the list of
runs in the store commits a sweep. The content of sweep.json is in ready.json before that.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from headway.cluster.engines.engine import OVER
from headway.cluster.engines.settings import reach_engine
from headway.cluster.submit.runs import SubmittedRun, requeue, submitted_runs
from headway.errors import RunError, UsageError
from headway.track import RunFolder, command

FORMAT = 1
RECORD, READY, MAKING, OF_RUN = "sweep.json", "ready.json", "making.json", "sweep.json"
SWEEP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    run: str
    settings: dict[str, str]
    """By key, as written."""
    address: str = ""
    """In its object store, if there is no shared folder."""


@dataclass(frozen=True)
class Sweep:
    """A submitted sweep."""

    name: str
    engine: str
    job: str
    on: str
    points: tuple[SweepRun, ...]
    keys: dict[str, str]
    """The name of each key of the grid in tables."""
    identity: str
    """Hash of the request: an equal request is the same sweep."""
    time: float = 0.0
    """Unix seconds."""
    format: int = FORMAT


_SWEEP = TypeAdapter(Sweep)


def folder_of_sweep(root: Path, name: str) -> Path:
    """The folder of a sweep's records."""
    return root.absolute() / ".sweeps" / name


def is_sweep(root: Path, name: str) -> bool:
    """Whether a sweep of this name was submitted."""
    return bool(SWEEP_NAME.fullmatch(name)) and (folder_of_sweep(root, name) / RECORD).exists()


def list_sweeps(root: Path) -> list[Sweep]:
    """All sweeps, newest first."""
    sweeps = [find_sweep(root, path.parent.name) for path in (root / ".sweeps").glob(f"*/{RECORD}")]
    return sorted(sweeps, key=lambda sweep: sweep.time, reverse=True)


def find_sweep(root: Path, ref: str) -> Sweep:
    """The sweep of this name or unique prefix, or the `last` one."""
    names = sorted(path.parent.name for path in (root / ".sweeps").glob(f"*/{RECORD}"))
    matches = [ref] if ref in names else [name for name in names if ref and name.startswith(ref)]
    if ref == "last" and names:
        return list_sweeps(root)[0]
    if len(matches) != 1:
        message = f"{len(matches)} sweeps begin with {ref!r}" if matches else f"no sweep {ref!r} in {root}"
        known = ", ".join((matches or names)[:8])
        raise UsageError(
            message, hint=f"there are: {known}" if known else "headway sweep RECIPE --grid KEY=A,B starts one"
        )
    path = folder_of_sweep(root, matches[0]) / RECORD
    try:
        return _SWEEP.validate_python(from_json(path.read_bytes()))
    except (OSError, ValueError, ValidationError) as error:
        raise RunError(f"{path} is not a sweep record: {error}", hint="restore the file") from None


def submitted_sweep_runs(root: Path, sweep: Sweep) -> dict[str, SubmittedRun | None]:
    """The newest jobs of a sweep's runs, by run; None if the folder is missing."""
    folders = [run for point in sweep.points if (run := RunFolder(root.absolute() / point.run)).path.is_dir()]
    by_name = {submitted.run.name: submitted for submitted in submitted_runs(root, folders)}
    return {point.run: by_name.get(point.run) for point in sweep.points}


def cancel_sweep(root: Path, sweep: Sweep) -> dict[str, SubmittedRun | None]:
    """Cancel all runs of a sweep that are not over: those of its array with one call, requeued ones one by one."""
    jobs = set[tuple[str, str]]()
    for run in submitted_sweep_runs(root, sweep).values():
        if run and run.status.state not in OVER:
            job = run.submission.job
            jobs.add((run.submission.engine, sweep.job if job.partition("_")[0] == sweep.job else job))
    for engine, job in sorted(jobs):
        reach_engine(engine, root).cancel(job)
    return submitted_sweep_runs(root, sweep)


def requeue_sweep(root: Path, sweep: Sweep, avoid: tuple[str, ...] = ()) -> dict[str, SubmittedRun | None]:
    """Restart all runs of a sweep that have ended without finishing, or that its engine does not know any more, each as
    its own job; release those that its engine holds back."""
    runs = submitted_sweep_runs(root, sweep).values()
    restartable = {*OVER, "unknown"} - {"finished"}
    unfinished = [run for run in runs if run and (run.status.state in restartable or run.status.remedy == "requeue")]
    if not unfinished:
        raise RunError(f"no run of sweep {sweep.name} failed or was cancelled", hint=command(root, "sweep", sweep.name))
    for run in unfinished:
        requeue(root, run.run, avoid)
    return submitted_sweep_runs(root, sweep)
