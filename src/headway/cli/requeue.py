"""`headway requeue`: restarts a submitted run, or the failed runs of a sweep."""

from typing import Annotated

import typer

from headway.cli.jobs import as_document, print_sweep_jobs, sweep_named
from headway.cli.options import Json, RunOrSweep, Runs
from headway.cli.text import next_line, print_json
from headway.cluster.submit import runs as submit
from headway.cluster.submit.sweeps import requeue_sweep
from headway.track import command, find_run, runs_root


def requeue(
    run: RunOrSweep,
    avoid: Annotated[
        list[str] | None, typer.Option("--avoid", metavar="MACHINE", help="Do not use this machine; repeatable.")
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Restart a submitted run, or a sweep's runs that ended without finishing.

    A running one saves first; one that has ended gets a new job.
    """
    root = runs_root(runs)
    sweep = sweep_named(root, run)
    if sweep is not None:
        print_sweep_jobs(root, sweep, requeue_sweep(root, sweep, tuple(avoid or ())), json)
        return
    after = submit.requeue(root, find_run(root, run), tuple(avoid or ()))
    if json:
        print_json(as_document(after))
        return
    print(f"{after.run.name}: job {after.submission.job} is {after.status.state}")
    print(next_line(command(root, "jobs"), after.run.command("logs", "--follow")))
