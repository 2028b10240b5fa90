"""`headway compare A B ...`: what differs between runs in recipe, data, workers and environment, and what came out."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from pydantic_core import to_json

from headway.cli.options import Json, Runs, complete_run
from headway.cli.run_sync import say_which
from headway.cli.text import columns, next_line, print_json, printable, shortened, wrap_lines
from headway.errors import UsageError
from headway.track import RunFolder, command, find_run, read_run, runs_root, summarize
from headway.track.differences import read_conditions
from headway.track.own_code import code_file
from headway.track.store.comparison import OUTCOMES, SPEEDS, ManyComparison, Outcome, compare_many, read_outcomes
from headway.track.store.edits import match_runs

NARROWEST = 8
"""Characters of a run's column."""


def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN...", autocompletion=complete_run, help="Names, prefixes, or patterns: 'demo-*'."
        ),
    ],
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="KEY", help="Metric to compare instead of the usual ones; repeatable."),
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Compare runs: what differs in recipe, code, data, workers and environment, and their metrics side by side.

    A cause is named only where exactly one key differs. `headway diff` compares two runs bit for bit.
    """
    root = runs_root(runs)
    folders = match_runs(root, names)
    for name in names:
        if not any(character in name for character in "*?["):
            say_which(name, find_run(root, name))
    if len(folders) < 2:
        raise UsageError("compare needs at least two runs", hint="headway compare RUN RUN")
    comparison = ManyComparison(
        tuple(folder.name for folder in folders),
        tuple(compare_many([read_conditions(folder, read_run(folder, process="agent")) for folder in folders])),
        tuple(read_outcomes(folders, key or OUTCOMES)),
    )
    if key and not comparison.outcomes:
        raise UsageError(f"no run has a metric {key[0]!r}", hint=f"{command(root, 'runs --keys')} lists all keys")
    if json:
        cause = None if comparison.cause is None else comparison.cause.key
        print_json(asdict(comparison) | {"cause": cause, "sentence": comparison.sentence})
        return
    print("\n".join([*_lines(comparison), *_code_lines(comparison, folders)]))
    print(next_line(_next(root, folders)))


def _next(root: Any, folders: Sequence[RunFolder]) -> str:
    if len(folders) == 2:
        return command(root, "diff", *(folder.name for folder in folders))
    key = "loss" if any(summarize(folder).reward is None for folder in folders) else "reward"
    return command(root, "metrics", *(folder.name for folder in folders[:3]), f"--key {key}")


def _lines(comparison: ManyComparison) -> list[str]:
    rows = [["differs", *comparison.runs]]
    rows += [[_label(item.kind, item.key), *map(_shown, item.values)] for item in comparison.differences]
    rows += [[_outcome_label(outcome), *_numbers(outcome)] for outcome in comparison.outcomes]
    speeds = [outcome.key for outcome in comparison.outcomes if outcome.key in SPEEDS]
    noise = ["speeds vary with the load of the machine, too"] if speeds and comparison.cause is not None else []
    return [*_table(rows), *wrap_lines(comparison.sentence), *noise]


def _code_lines(comparison: ManyComparison, folders: Sequence[RunFolder]) -> list[str]:
    """Return the command that shows how code differs, for two runs."""
    changed = [item for item in comparison.differences if item.kind == "code"]
    if len(folders) != 2:
        return []
    lines = list[str]()
    for item in changed:
        if item.key.startswith("commit of "):
            commits = [str(value).partition("+")[0] for value in item.values]
            lines += [f"code: git diff {' '.join(commits)}"] if commits[0] != commits[1] else []
        else:
            lines.append(f"code: diff -u {' '.join(str(code_file(folder, item.key)) for folder in folders)}")
    return lines


def _label(kind: str, key: str) -> str:
    return key if kind in ("recipe", "workers") else f"{kind} {key}"


def _outcome_label(outcome: Outcome) -> str:
    return f"{outcome.key} mean" if outcome.step is None else f"{outcome.key} @{outcome.step:,}"


def _numbers(outcome: Outcome) -> list[str]:
    """Return the values of an outcome, each with its difference to the first one."""
    first, *others = outcome.values
    cells = ["-" if first is None else f"{first:.4g}"]
    for value in others:
        if value is None or first is None:
            cells.append("-" if value is None else f"{value:.4g}")
        else:
            cells.append(f"{value:.4g} ({_signed(value - first)})")
    return cells


def _signed(difference: float) -> str:
    """Return a difference in two digits, without an exponent where that is short: -920, +0.0081."""
    text = f"{difference:+.2g}"
    return f"{float(text):+,.0f}" if "e" in text and 1 <= abs(difference) < 1e7 else text


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return printable(value if isinstance(value, str) else to_json(value, inf_nan_mode="constants").decode())


def _table(rows: list[list[str]]) -> list[str]:
    """Return rows as aligned columns; where the terminal is too narrow, in blocks of as many runs as fit."""
    room = columns()
    first = min(max(len(row[0]) for row in rows), room // 2)
    widest = [max(len(row[i]) for row in rows) for i in range(1, len(rows[0]))]
    limit = max(NARROWEST, min(max(widest), (room - first) // 2 - 2))
    at_a_time = max(1, (room - first) // (min(limit, max(widest)) + 2))
    lines = list[str]()
    for begin in range(1, len(rows[0]), at_a_time):
        block = range(begin, min(begin + at_a_time, len(rows[0])))
        widths = {i: min(limit, widest[i - 1]) for i in block}
        lines += [
            "  ".join(
                [f"{shortened(row[0], first):{first}}", *(f"{shortened(row[i], widths[i]):{widths[i]}}" for i in block)]
            ).rstrip()
            for row in rows
        ]
    return lines
