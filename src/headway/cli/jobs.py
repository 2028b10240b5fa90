"""`headway jobs`: what engines have of the runs that were submitted."""

import time
from textwrap import wrap
from typing import TYPE_CHECKING

from headway.cli.options import Json, Runs
from headway.cli.text import print_json, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from headway.cluster.submit.runs import SubmittedRun
    from headway.cluster.submit.sweeps import Sweep

__all__ = ["as_document", "jobs", "sweep_named", "tell_of_sweep"]

WIDTH = 80


def jobs(runs: Runs = None, json: Json = False) -> None:
    """List the jobs of all runs that were submitted, the most recently active first."""
    from headway.cluster.submit.runs import submitted_runs
    from headway.track import runs_root

    root = runs_root(runs)
    found = submitted_runs(root)
    if json:
        print_json([as_document(one) for one in found])
    elif not found:
        print(f"no run in {root} was submitted")
        print("next: headway submit RECIPE --engine E --on CHIPxPERNODE")
    else:
        print("\n".join(_table(found)))
        print("next: headway logs RUN --follow, headway cancel RUN, headway requeue RUN")


def _table(found: "list[SubmittedRun]") -> list[str]:
    """A line a job, its run first; the run on a line of its own where they are too wide."""
    width = max(len("run"), *(len(one.run.name) for one in found))
    jobs = max(10, *(len(one.submission.job) for one in found))
    heads = ("state", "engine", "job", "on", "starts", "submitted")
    rest = [_cells(heads, jobs), *(_cells(_words(one), jobs) for one in found)]
    wide = width + 2 + max(map(len, rest)) > WIDTH
    lines = list[str]()
    for name, cells, under in zip(
        ("run", *(one.run.name for one in found)), rest, ([], *(_under(one) for one in found)), strict=True
    ):
        lines += [name, shortened(f"  {cells}", WIDTH)] if wide else [f"{name:{width}}  {cells}"]
        lines += under
    return lines


def _cells(words: tuple[str, ...], jobs: int) -> str:
    state, engine, job, on, starts, submitted = words
    return f"{state:10}  {engine:7}  {job:{jobs}}  {on:12}  {starts:>6}  {submitted:11}".rstrip()


def _words(one: "SubmittedRun") -> tuple[str, ...]:
    status, given = one.status, one.submission
    submitted = time.strftime("%m-%d %H:%M", time.localtime(given.time))
    return status.state, given.engine, given.job, given.on, str(status.starts), submitted


def _under(one: "SubmittedRun") -> list[str]:
    """Where it is, and why it stands so: whole, where something is wrong."""
    machines = f"on {', '.join(one.status.machines)}" if one.status.machines else ""
    text = "; ".join(filter(None, (machines, one.status.reason)))
    if one.status.state in ("failed", "impossible", "unknown"):
        return wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return [shortened(f"  {text}", WIDTH)] if text else []


def as_document(one: "SubmittedRun") -> dict[str, object]:
    """A run's job for programs."""
    from dataclasses import asdict

    given = one.submission
    fields = {"run": one.run.name, "engine": given.engine, "job": given.job, "on": given.on, "submitted": given.time}
    return fields | asdict(one.status)


def sweep_named(root: "Path", name: str) -> "Sweep | None":
    """The sweep that somebody means who names one where runs are named too; runs come first."""
    if (root / name).exists() or not (root / ".sweeps" / name).is_dir():
        return None
    from headway.cluster.submit.sweeps import find_sweep

    return find_sweep(root, name)


def tell_of_sweep(sweep: "Sweep", after: "Mapping[str, SubmittedRun | None]", json: bool) -> None:
    """How the jobs of a sweep stand, after something was asked of them all."""
    there = [one for one in after.values() if one is not None]
    if json:
        print_json([as_document(one) for one in there])
        return
    states = [one.status.state for one in there]
    told = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    print(f"{sweep.name}: job {sweep.job}, {len(there)} runs: {told}")
    print(f"next: headway sweep {sweep.name}")
