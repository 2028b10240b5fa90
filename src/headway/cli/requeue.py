"""`headway requeue`: a submitted run is started again, or what of a sweep has not finished."""

from typing import Annotated

import typer

from headway.cli.options import Json, RunOrSweep, Runs

__all__ = ["requeue"]


def requeue(
    run: RunOrSweep,
    avoid: Annotated[
        list[str] | None, typer.Option("--avoid", metavar="MACHINE", help="Not on this one; repeatable.")
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Have a run started again: one that runs saves first, one that is over has a new job.

    Of a sweep, those that are over and have not finished.
    """
    from headway.cli.jobs import as_document, sweep_named, tell_of_sweep
    from headway.cli.text import print_json
    from headway.cluster.submit import runs as submit
    from headway.cluster.submit.sweeps import requeue_sweep
    from headway.track import find_run, runs_root

    root = runs_root(runs)
    sweep = sweep_named(root, run)
    if sweep is not None:
        tell_of_sweep(sweep, requeue_sweep(root, sweep, tuple(avoid or ())), json)
        return
    after = submit.requeue(root, find_run(root, run), tuple(avoid or ()))
    if json:
        print_json(as_document(after))
        return
    print(f"{after.run.name}: job {after.submission.job} is {after.status.state}")
    print(f"next: headway jobs, headway logs {after.run.name} --follow")
