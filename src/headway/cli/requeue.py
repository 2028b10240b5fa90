"""`headway requeue`: a submitted run is started again."""

from typing import Annotated

import typer

from headway.cli.options import Json, Run, Runs

__all__ = ["requeue"]


def requeue(
    run: Run,
    avoid: Annotated[
        list[str] | None, typer.Option("--avoid", metavar="MACHINE", help="Not on this one; repeatable.")
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Have a run started again: one that runs saves first, one that is over has a new job."""
    from headway.cli.jobs import as_document
    from headway.cli.text import print_json
    from headway.cluster import submit
    from headway.track import find_run, runs_root

    root = runs_root(runs)
    after = submit.requeue(root, find_run(root, run), tuple(avoid or ()))
    if json:
        print_json(as_document(after))
        return
    print(f"{after.run.name}: job {after.submission.job} is {after.status.state}")
    print(f"next: headway jobs, headway logs {after.run.name} --follow")
