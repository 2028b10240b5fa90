"""`headway runs`: what runs there are and how each stands."""

import time
from textwrap import wrap
from typing import TYPE_CHECKING

from headway.cli.options import Json, Runs

if TYPE_CHECKING:
    from headway.track import RunFolder, RunSummary

__all__ = ["runs"]


def runs(runs: Runs = None, json: Json = False) -> None:
    """List the runs, the most recently active first."""
    from dataclasses import asdict

    from headway.cli.text import print_json
    from headway.track import list_runs, runs_root

    root = runs_root(runs)
    there = list_runs(root)
    found = [_summary(run) for run in there]
    if json:
        print_json([asdict(summary) for summary in found])
    elif not found:
        print(f"no runs in {root}")
        print("next: headway train RECIPE")
    else:
        print("\n".join(_table(found)))
        print("\n".join([*_old(there, found), "next: headway report last"]))


def _old(there: "list[RunFolder]", found: "list[RunSummary]") -> list[str]:
    """A line where machines that do not see this folder may know more than it says."""
    from headway.cli.run_lookup import is_elsewhere

    names = [run.name for run, how in zip(there, found, strict=True) if how.state != "finished" and is_elsewhere(run)]
    if not names:
        return []
    what = f"{names[0]} is" if len(names) == 1 else f"{len(names)} runs are"
    which = names[0] if len(names) == 1 else "RUN"
    return wrap(f"note: {what} elsewhere and may be further on: headway fetch {which}", 80, subsequent_indent="  ")


def _summary(run: "RunFolder") -> "RunSummary":
    """How a run stands; one that an engine was given, and nobody has started yet, has been submitted."""
    from dataclasses import replace

    from headway.track import summarize

    summary = summarize(run)
    waits = summary.attempts == 0 and summary.state == "interrupted" and (run.path / "jobs.jsonl").exists()
    return replace(summary, state="submitted") if waits else summary


def _table(found: "list[RunSummary]") -> list[str]:
    width = max(len("run"), *(len(summary.name) for summary in found))
    head = f"{'run':{width}}  {'state':11}  {'step':>9}  {'loss':>7}  {'on':>6}  {'started':11}  {'took':>8}"
    return [head, *(_row(summary, width) for summary in found)]


def _row(summary: "RunSummary", width: int) -> str:
    from headway.cli.text import duration

    total = "" if summary.total_steps is None else f"/{summary.total_steps}"
    loss = "-" if summary.loss is None else f"{summary.loss:.4f}"
    on = "-" if summary.workers is None else f"{summary.workers} {summary.device}"
    started = "-" if summary.started is None else time.strftime("%m-%d %H:%M", time.localtime(summary.started))
    took = duration(summary.seconds)
    name = f"{summary.name:{width}}  {summary.state:11}"
    return f"{name}  {f'{summary.step}{total}':>9}  {loss:>7}  {on:>6}  {started:11}  {took:>8}"
