"""`headway diff RUN RUN`: whether two runs are the same, bit for bit."""

from typing import Annotated

import typer

from headway.cli.options import Json, Runs

__all__ = ["diff"]

_RUN_HELP = "A run's name, a unique prefix of it, or `last`."


def diff(
    run_a: Annotated[str, typer.Argument(metavar="RUN", help=_RUN_HELP)],
    run_b: Annotated[str, typer.Argument(metavar="RUN", help=_RUN_HELP)],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Compare two runs' chains and digests.

    Exit status 0 when they are equal, 1 when not.
    """
    from dataclasses import asdict

    from headway.cli.text import print_json
    from headway.track import compare_runs, find_run, runs_root

    root = runs_root(runs)
    a, b = find_run(root, run_a), find_run(root, run_b)
    found = compare_runs(a, b)
    if json:
        print_json({"runs": [a.name, b.name], **asdict(found), "sentence": found.sentence})
    else:
        print(f"{a.name} and {b.name}: {found.sentence}")
        if found.tensors:
            print(f"tensors that differ at step {found.tensors_step}: {', '.join(found.tensors)}")
    if not found.equal:
        raise typer.Exit(1)
