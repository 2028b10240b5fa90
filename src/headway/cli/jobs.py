"""`headway jobs`: lists submitted jobs and their state."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from headway.cli.options import Json, Runs
from headway.cli.text import columns, next_line, plural, print_json, shortened, wrap_lines
from headway.cluster.submit.runs import SubmittedRun, submitted_runs
from headway.cluster.submit.sweeps import Sweep, find_sweep
from headway.track import command, runs_root


def jobs(runs: Runs = None, json: Json = False) -> None:
    """List submitted jobs and their state, most recently active first."""
    root = runs_root(runs)
    submitted = submitted_runs(root)
    if json:
        print_json([as_document(run) for run in submitted])
    elif not submitted:
        print(f"no submitted runs in {root}")
        print(f"next: {command(root, 'submit', 'RECIPE --engine E --on CHIPxPERNODE')}")
    else:
        print("\n".join([*_table(submitted), *_unreachable(submitted)]))
        follow_ups = [command(root, words) for words in ("logs RUN --follow", "cancel RUN", "requeue RUN")]
        print(next_line(*follow_ups))


def _table(submitted: list[SubmittedRun]) -> list[str]:
    """Return one line per job, or two where run and job do not fit into one."""
    width = max(len("run"), *(len(job.run.name) for job in submitted))
    job_width = max(10, *(len(job.submission.job) for job in submitted))
    heads = ("state", "engine", "job", "on", "starts", "submitted")
    rest = [_cells(heads, job_width), *(_cells(_words(job), job_width) for job in submitted)]
    wide = width + 2 + max(map(len, rest)) > columns()
    lines = list[str]()
    for name, cells, under in zip(
        ("run", *(job.run.name for job in submitted)), rest, ([], *(_under(job) for job in submitted)), strict=True
    ):
        lines += [name, shortened(f"  {cells}", columns())] if wide else [f"{name:{width}}  {cells}"]
        lines += under
    return lines


def _cells(cells: tuple[str, ...], jobs: int) -> str:
    state, engine, job, on, starts, submitted = cells
    return f"{state:10}  {engine:7}  {job:{jobs}}  {on:12}  {starts:>6}  {submitted:11}".rstrip()


def _words(job: SubmittedRun) -> tuple[str, ...]:
    status, submission = job.status, job.submission
    submitted = time.strftime("%m-%d %H:%M", time.localtime(submission.time))
    return status.state, submission.engine, submission.job, submission.on, str(status.starts), submitted


def _under(job: SubmittedRun) -> list[str]:
    """Return the machines and reason of a job, and the command that helps: cut at the width unless a user should
    act."""
    machines = f"on {', '.join(job.status.machines)}" if job.status.machines else ""
    remedy = job.run.command(job.status.remedy) if job.status.remedy else ""
    text = "; ".join(filter(None, (machines, job.status.reason, remedy)))
    if remedy or job.status.state in ("failed", "impossible", "unknown"):
        return wrap_lines(text, "  ")
    return [shortened(f"  {text}", columns())] if text else []


def _unreachable(submitted: list[SubmittedRun]) -> list[str]:
    """Return a note per engine that does not answer."""
    errors = {job.submission.engine: job.unreachable for job in submitted if job.unreachable is not None}
    lines = list[str]()
    for engine, error in errors.items():
        lines += wrap_lines(f"{engine} is unreachable: {error.message}")
        lines += wrap_lines(error.hint, "hint:  ", 7) if error.hint else []
    return lines


def as_document(job: SubmittedRun) -> dict[str, object]:
    """Return a run's job as JSON-ready values."""
    submission = job.submission
    fields = {
        "run": job.run.name,
        "engine": submission.engine,
        "job": submission.job,
        "on": submission.on,
        "submitted": submission.time,
        "unreachable": None if job.unreachable is None else job.unreachable.message,
    }
    return fields | asdict(job.status)


def sweep_named(root: Path, name: str) -> Sweep | None:
    """Return the sweep of this name, if there is one and no run has the name."""
    if (root / name).exists() or not (root / ".sweeps" / name).is_dir():
        return None
    return find_sweep(root, name)


def print_sweep_jobs(root: Path, sweep: Sweep, after: Mapping[str, SubmittedRun | None], json: bool) -> None:
    """Print the state of all jobs of a sweep."""
    submitted = [job for job in after.values() if job is not None]
    if json:
        print_json([as_document(job) for job in submitted])
        return
    states = [job.status.state for job in submitted]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    print(f"{sweep.name}: job {sweep.job}, {plural(len(submitted), 'run')}: {counts}")
    print(f"next: {command(root, 'sweep', sweep.name)}")
