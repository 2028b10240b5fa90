"""`headway diff RUN RUN`: compares two runs bit for bit."""

from dataclasses import asdict

import typer

from headway.cli.options import Json, Run, Runs
from headway.cli.text import print_json
from headway.track import compare_runs, find_run, runs_root


def diff(
    run_a: Run,
    run_b: Run,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Compare two runs bit for bit, by their chains and digests.

    Exits with 0 if they are equal, 1 if not.
    """
    root = runs_root(runs)
    a, b = find_run(root, run_a), find_run(root, run_b)
    comparison = compare_runs(a, b)
    if json:
        print_json({"runs": [a.name, b.name], **asdict(comparison), "sentence": comparison.sentence})
    else:
        print(f"{a.name} and {b.name}: {comparison.sentence}")
        if comparison.tensors:
            print(f"tensors that differ at step {comparison.tensors_step}: {', '.join(comparison.tensors)}")
    if not comparison.equal:
        raise typer.Exit(1)
