"""`headway jobs`: what engines have of the runs that were submitted."""

import time
from typing import TYPE_CHECKING

from headway.cli.options import Json, Runs

if TYPE_CHECKING:
    from headway.cluster.submit import Standing

__all__ = ["as_document", "jobs"]

WIDTH = 80


def jobs(runs: Runs = None, json: Json = False) -> None:
    """List the jobs of all runs that were submitted, the most recently active first."""
    from headway.cli.text import print_json
    from headway.cluster.submit import standings
    from headway.track import runs_root

    root = runs_root(runs)
    found = standings(root)
    if json:
        print_json([as_document(one) for one in found])
    elif not found:
        print(f"no run in {root} was submitted")
        print("next: headway submit RECIPE --engine E --on CHIPxPERNODE")
    else:
        print("\n".join(_table(found)))
        print("next: headway logs RUN --follow, headway cancel RUN, headway requeue RUN")


def _table(found: "list[Standing]") -> list[str]:
    width = max(len("run"), *(len(one.run.name) for one in found))
    jobs = max(10, *(len(one.submission.job) for one in found))
    head = f"{'run':{width}}  {'state':10}  {'engine':7}  {'job':{jobs}}  {'on':12}  {'starts':>6}  submitted"
    return [head, *(line for one in found for line in _rows(one, width, jobs))]


def _rows(one: "Standing", width: int, jobs: int) -> list[str]:
    status, given = one.status, one.submission
    submitted = time.strftime("%m-%d %H:%M", time.localtime(given.time))
    row = f"{one.run.name:{width}}  {status.state:10}  {given.engine:7}  {given.job:{jobs}}  {given.on:12}"
    machines = f"on {', '.join(status.machines)}" if status.machines else ""
    more = "; ".join(filter(None, (machines, status.reason)))
    under = f"  {more}"
    rows = [f"{row}  {status.starts:>6}  {submitted:11}"]
    return [*rows, under if len(under) <= WIDTH else under[: WIDTH - 3] + "..."] if more else rows


def as_document(one: "Standing") -> dict[str, object]:
    """A run's job for programs."""
    from dataclasses import asdict

    given = one.submission
    fields = {"run": one.run.name, "engine": given.engine, "job": given.job, "on": given.on, "submitted": given.time}
    return fields | asdict(one.status)
