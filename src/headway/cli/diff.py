"""`headway diff RUN RUN`: compares two runs bit for bit."""

from dataclasses import asdict
from typing import Any

import typer
from pydantic_core import to_json

from headway.cli.options import Json, Run, Runs
from headway.cli.text import print_json, shortened
from headway.track import RunComparison, compare_runs, find_run, runs_root
from headway.track.differences import Cause

CAUSES = 8
"""Differences that are printed."""


def diff(
    run_a: Run,
    run_b: Run,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Compare two runs bit for bit, by their chains and digests.

    If they differ, first comes what differs between their recipes, data, workers and environments, then the first
    number that does. Exits with 0 if they are equal, 1 if not.
    """
    root = runs_root(runs)
    a, b = find_run(root, run_a), find_run(root, run_b)
    comparison = compare_runs(a, b)
    if json:
        print_json({"runs": [a.name, b.name], **asdict(comparison), "sentence": comparison.sentence})
    else:
        if not comparison.equal:
            print("\n".join(_cause_lines(comparison, a.name, b.name)))
        print(f"{a.name} and {b.name}: {comparison.sentence}")
        if comparison.tensors:
            print(f"tensors that differ at step {comparison.tensors_step}: {', '.join(comparison.tensors)}")
    if not comparison.equal:
        raise typer.Exit(1)


def _cause_lines(comparison: RunComparison, name_a: str, name_b: str) -> list[str]:
    """Return what differs between two runs, the most likely cause first, and the first number that does."""

    def both(values: tuple[Any, Any]) -> str:
        value_a, value_b = ("not set" if value is None else _shown(value) for value in values)
        return f"{value_a} in {name_a}, {value_b} in {name_b}"

    causes = [f"{_label(cause)}: {both(cause.values)}" for cause in comparison.causes]
    if len(causes) > CAUSES:
        causes[CAUSES:] = [f"{len(causes) - CAUSES} more differences (--json lists all)"]
    if not causes:
        causes = ["none in recipe, data, workers or environment: a fault, other code, or kernels that are not exact"]
    lines = [f"cause: {causes[0]}", *(f"       {cause}" for cause in causes[1:])]
    if comparison.first is not None:
        first = comparison.first
        lines.append(f"first: {first.metric} of step {first.step}: {both(first.values)}")
    return lines


def _label(cause: Cause) -> str:
    return cause.key if cause.kind in ("recipe", "workers") else f"{cause.kind} {cause.key}"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else to_json(value, inf_nan_mode="constants").decode()
    return shortened(text, 60)
