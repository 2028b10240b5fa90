"""`headway runs`: lists runs with their state, step and loss."""

import time
from dataclasses import asdict, replace
from pathlib import Path

from headway.cli.options import Json, Runs
from headway.cli.run_sync import is_elsewhere
from headway.cli.text import columns, duration, plural, print_json, wrap_lines
from headway.track import FAILED, RunFolder, RunSummary, command, list_runs, runs_root, summarize

COLUMNS = {"run": 3, "state": 11, "step": 9, "loss": 7, "on": 6, "started": 11, "took": 8}
"""Columns, and how wide each is at least."""
DROPPED = ("started", "took", "on", "loss")
"""Columns that narrow terminals go without, in this order."""
LEFT = ("run", "state", "started")


def runs(runs: Runs = None, json: Json = False) -> None:
    """List runs, most recently active first."""
    root = runs_root(runs)
    folders = list_runs(root)
    summaries = [_summary(run) for run in folders]
    if json:
        print_json([asdict(summary) for summary in summaries])
    elif not summaries:
        print("\n".join([f"no runs in {root}", *_set_aside(root), f"next: {command(root, 'train RECIPE')}"]))
    else:
        print("\n".join(_table(summaries)))
        print(
            "\n".join(
                [*_outdated(root, folders, summaries), *_set_aside(root), f"next: {command(root, 'report last')}"]
            )
        )


def _outdated(root: Path, folders: list[RunFolder], summaries: list[RunSummary]) -> list[str]:
    """Return a note if machines that do not share this folder may be further on."""
    names = [
        run.name
        for run, summary in zip(folders, summaries, strict=True)
        if summary.state != "finished" and is_elsewhere(run)
    ]
    if not names:
        return []
    what = f"{names[0]} is" if len(names) == 1 else f"{len(names)} runs are"
    which = names[0] if len(names) == 1 else "RUN"
    text = f"note: {what} on other machines and may be further on: {command(root, 'fetch', which)}"
    return wrap_lines(text)


def _set_aside(root: Path) -> list[str]:
    """Return a note on runs that failed before their first step."""
    count = len(list_runs(root / FAILED))
    if not count:
        return []
    text = f"note: {plural(count, 'run')} failed before the first step: {command(root / FAILED, 'runs')}"
    return wrap_lines(text)


def _summary(run: RunFolder) -> RunSummary:
    """Summarize a run; one that its engine has not started yet is `submitted`."""
    summary = summarize(run)
    is_waiting = summary.attempts == 0 and summary.state == "interrupted" and (run.path / "jobs.jsonl").exists()
    return replace(summary, state="submitted") if is_waiting else summary


def _table(summaries: list[RunSummary]) -> list[str]:
    names = tuple(COLUMNS)
    cells = [names, *(_cells(summary) for summary in summaries)]
    widths = [max(least, *(len(row[i]) for row in cells)) for i, least in enumerate(COLUMNS.values())]
    shown = list(range(len(COLUMNS)))
    for name in DROPPED:  # as a narrow terminal has no room for all
        if sum(widths[i] + 2 for i in shown) - 2 > columns(200):
            shown.remove(names.index(name))
    sides = ["<" if name in LEFT else ">" for name in names]
    return ["  ".join(f"{row[i]:{sides[i]}{widths[i]}}" for i in shown).rstrip() for row in cells]


def _cells(summary: RunSummary) -> tuple[str, ...]:
    total = "" if summary.total_steps is None else f"/{summary.total_steps}"
    loss = "-" if summary.loss is None else f"{summary.loss:.4f}"
    on = "-" if summary.workers is None else f"{summary.workers} {summary.device}"
    started = "-" if summary.started is None else time.strftime("%m-%d %H:%M", time.localtime(summary.started))
    step = f"{summary.step}{total}"
    return (summary.name, summary.state, step, loss, on, started, duration(summary.seconds))
