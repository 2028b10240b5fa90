"""`headway cancel`: a submitted run, or all runs of a sweep, save and end, and are not started again."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json, Runs

__all__ = ["cancel"]


def cancel(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's name, a unique prefix of it, `last`, or a sweep's name.")
    ],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Have the job of a run end, or of all runs of a sweep: it saves within its grace, and nobody starts it again."""
    from headway.cli.jobs import as_document
    from headway.cli.text import print_json
    from headway.cluster import submit
    from headway.track import find_run, runs_root

    root = runs_root(runs)
    if not (root / run).exists() and (root / ".sweeps" / run).is_dir():
        _cancel_sweep(root, run, json)
        return
    after = submit.cancel(root, find_run(root, run))
    if json:
        print_json(as_document(after))
        return
    print(f"{after.run.name}: job {after.submission.job} is {after.status.state}")
    print(f"next: headway jobs, headway requeue {after.run.name}")


def _cancel_sweep(root: Path, name: str, json: bool) -> None:
    from headway.cli.jobs import as_document
    from headway.cli.text import print_json
    from headway.cluster.sweeps import cancel_sweep, find_sweep

    sweep = find_sweep(root, name)
    after = [one for one in cancel_sweep(root, sweep).values() if one is not None]
    if json:
        print_json([as_document(one) for one in after])
        return
    states = [one.status.state for one in after]
    told = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    print(f"{sweep.name}: job {sweep.job}, {len(after)} runs: {told}")
    print(f"next: headway sweep {sweep.name}")
