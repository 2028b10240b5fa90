"""`headway diff RUN RUN`: compares two runs bit for bit."""

from dataclasses import asdict
from textwrap import fill
from typing import Any

import typer
from pydantic_core import to_json

from headway.cli.options import Json, Run, Runs
from headway.cli.text import columns, print_json, shortened
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
            print("\n".join(_wrapped(line) for line in _cause_lines(comparison, a.name, b.name)))
        print(_wrapped(f"{a.name} and {b.name}: {comparison.sentence}"))
        if comparison.tensors:
            print(_wrapped(f"tensors that differ at step {comparison.tensors_step}: {', '.join(comparison.tensors)}"))
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


def _wrapped(line: str) -> str:
    """Return a line as wide as the terminal at most; a pipe gets it whole."""
    indent = " " * (9 if line.startswith(("cause: ", "first: ", "   ")) else 2)
    return fill(line, columns(10_000), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _label(cause: Cause) -> str:
    return cause.key if cause.kind in ("recipe", "workers") else f"{cause.kind} {cause.key}"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else to_json(value, inf_nan_mode="constants").decode()
    return shortened(text, 60)
