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

WIDTHS = (3, 10, 7, 10, 12, 6, 11)
"""Of the columns, at least; only as wide as the cells where a job's line has no room for that."""


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
    """Return one line per job, or two or three where its columns do not fit into one."""
    words: list[tuple[str, ...]] = [("run", "state", "engine", "job", "on", "starts", "submitted")]
    words += [(job.run.name, *_words(job)) for job in submitted]
    widths = [max(map(len, column)) for column in zip(*words, strict=True)]
    rows = [[_line(row, list(map(max, widths, WIDTHS)))] for row in words]
    if max(len(line) for (line,) in rows) > columns():
        parts = [slice(1, 7)] if sum(widths[1:]) + 2 * 6 <= columns() else [slice(1, 5), slice(5, 7)]
        rows = [
            [row[0], *(shortened(f"  {_line(row[part], widths[part])}", columns()) for part in parts)] for row in words
        ]
    under = [list[str](), *map(_under, submitted)]
    return [line for row, lines in zip(rows, under, strict=True) for line in (*row, *lines)]


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _words(job: SubmittedRun) -> tuple[str, ...]:
    status, submission = job.status, job.submission
    submitted = time.strftime("%m-%d %H:%M", time.localtime(submission.time))
    starts = "-" if status.state == "unknown" and not status.starts else str(status.starts)
    return status.state, submission.engine, submission.job, submission.on, f"{starts:>6}", submitted


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
