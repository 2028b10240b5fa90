"""`headway runs importance | pareto`: what a sweep tells, as tables and plots."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headway.cli.plot import new_axes, save_figure
from headway.cli.progress import Counting
from headway.cli.text import columns, next_line, plural, print_json, printable, shortened
from headway.errors import UsageError
from headway.track import command
from headway.track.store import RunRow, parse_name, select_runs, value_of
from headway.track.store.edits import match_runs
from headway.track.store.listing import parse_sort
from headway.track.store.sweep_results import KeyImportance, importances, pareto_front, varied_keys

BAR = 20
"""Characters of a share of 1."""
MOST_KEYS = 12
"""Rows that are printed; --json has all."""
FEWEST = 3
SHOWN_KEYS = 3
"""Keys of recipes beside a front."""


def show_importance(root: Path, refs: Sequence[str], where: str, by: str, json: bool) -> None:
    """Print how much each key that varies between runs explains of a result."""
    name, larger = parse_sort(by)
    rows, (results,) = _read(root, refs, where, [by])
    kept = [(row, value) for row, value in zip(rows, results, strict=True) if value is not None]
    if len(kept) < FEWEST:
        raise UsageError(f"{plural(len(kept), 'run')} with {name.text}: importance needs at least {FEWEST}",
                         hint=f"{command(root, 'runs --columns', name.text)} shows which have it")  # fmt: skip
    keys = importances([row.recipe for row, _ in kept], [value for _, value in kept], larger=larger)
    if json:
        print_json(
            {"by": name.text, "larger_is_better": larger, "runs": len(kept), "keys": [asdict(key) for key in keys]}
        )
        return
    if not keys:
        print(f"the recipes of these {len(kept)} runs are the same")
        return
    print(f"what explains {name.text} of {plural(len(kept), 'run')}\n")
    print("\n".join(_importance_lines(keys[:MOST_KEYS])))
    if len(keys) > MOST_KEYS:
        print(f"and {len(keys) - MOST_KEYS} more (--json lists all)")
    if any(key.share is None for key in keys):
        print("-: each run has its own value, or all have the same result")
    print(next_line(command(root, "runs pareto", *_quoted(refs), f"--by {by},step_s")))


def _importance_lines(keys: Sequence[KeyImportance]) -> list[str]:
    widest = max(8, columns() - 54)
    table = [("key", "share", "", "rank r", "best value")]
    for key in keys:
        share = "-" if key.share is None else f"{100 * key.share:.0f}%"
        bar = "#" * round(BAR * (key.share or 0))
        correlation = "-" if key.correlation is None else f"{key.correlation:+.2f}"
        table.append((shortened(key.key, widest), share, bar, correlation, f"{_text(key.best)} ({key.best_mean:.4g})"))
    first = max(len(row[0]) for row in table)
    bar_width = BAR if columns() >= 80 else 0
    return [
        shortened(
            f"{a:{first}}  {b:>5}  {c[:bar_width]:{bar_width}}{'  ' if bar_width else ''}{d:>6}  {e}".rstrip(),
            columns(),
        )
        for a, b, c, d, e in table
    ]


def show_pareto(root: Path, refs: Sequence[str], where: str, by: str, plot: str | None, json: bool) -> None:
    """Print the runs that no other run beats in all of some results."""
    keys = [part.strip() for part in by.split(",") if part.strip()]
    if len(keys) < 2:
        raise UsageError(f"--by {by}: a front needs at least two keys", hint="--by loss,-tokens_per_s")
    if plot is not None and len(keys) != 2:
        raise UsageError(f"--plot draws two keys, not {len(keys)}", hint="give --by two keys")
    larger = [key.startswith("-") for key in keys]
    names = [key.removeprefix("-") for key in keys]
    rows, values = _read(root, refs, where, keys)
    points = list(zip(*values, strict=True))
    front = pareto_front(points, larger)
    if not front:
        raise UsageError(f"no run has all of {', '.join(names)}", hint=f"{command(root, 'runs --keys')} lists all keys")
    if plot is not None:
        _save(points, front, names, [row.folder.name for row in rows], Path(plot))
    varied = [key for key in varied_keys([row.recipe for row in rows]) if key not in names]
    if json:
        print_json({
            "by": keys, "runs": len(rows), "file": plot,
            "front": [{"run": rows[at].folder.name, "values": dict(zip(names, points[at], strict=True)),
                       "settings": {key: rows[at].recipe.get(key) for key in varied}} for at in front],
        })  # fmt: skip
        return
    complete = sum(None not in point for point in points)
    print(f"{len(front)} of {plural(complete, 'run')} {'is' if len(front) == 1 else 'are'} not beaten in "
          f"{' and '.join(names)}\n")  # fmt: skip
    table = [["run", *names, *varied[:SHOWN_KEYS]]]
    for at in front:
        settings = [_text(rows[at].recipe.get(key)) for key in varied[:SHOWN_KEYS]]
        table.append([rows[at].folder.name, *(f"{value:.4g}" for value in points[at]), *settings])
    while len(table[0]) > 1 + len(names) and _width(table) > columns():
        table = [row[:-1] for row in table]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        cells = (f"{cell:{'<' if i == 0 else '>'}{widths[i]}}" for i, cell in enumerate(row))
        print(shortened("  ".join(cells).rstrip(), columns()))
    if plot is not None:
        print(f"\n{plot}: {complete} runs, the front as a line")
    best = [rows[at].folder.name for at in front[:2]]
    print(next_line(command(root, "compare", *best) if len(best) > 1 else command(root, "report", *best)))


def _width(table: Sequence[Sequence[str]]) -> int:
    return sum(max(len(row[i]) for row in table) + 2 for i in range(len(table[0]))) - 2


def _read(
    root: Path, refs: Sequence[str], where: str, keys: Sequence[str]
) -> tuple[list[RunRow], list[list[float | None]]]:
    """Return runs, and for each key their numbers."""
    named = {run.path for run in match_runs(root, refs)} if refs else None
    parsed = [parse_name(key.removeprefix("-")) for key in keys]
    now = time.time()
    with Counting("reading metrics of runs") as counting:
        rows = select_runs(root, where, columns=parsed, now=now, progress=counting.show)
    rows = [row for row in rows if named is None or row.folder.path in named]
    columns_read = [[value_of(row, name, now) for row in rows] for name in parsed]
    return rows, [
        [float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None for value in column]
        for column in columns_read
    ]


def _save(
    points: Sequence[Sequence[float | None]],
    front: Sequence[int],
    names: Sequence[str],
    runs: Sequence[str],
    path: Path,
) -> None:
    figure, axes = new_axes(path)
    rest = [points[at] for at in range(len(points)) if at not in front and None not in points[at]]
    best = [points[at] for at in front]
    axes.scatter([p[0] for p in rest], [p[1] for p in rest], s=16, color="#8a929c", label="other runs")
    axes.plot(
        [p[0] for p in best], [p[1] for p in best], marker="o", color="#0072b2", linewidth=1.2, alpha=0.6, label="front"
    )
    for at in front[:MOST_KEYS]:
        axes.annotate(runs[at], points[at], xytext=(4, 4), textcoords="offset points", fontsize="x-small")
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])
    axes.legend(frameon=False, fontsize="small")
    save_figure(figure, path)


def _text(value: Any) -> str:
    if value is None:
        return "not set"
    return f"{value:.4g}" if isinstance(value, float) else shortened(printable(str(value)), 24)


def _quoted(refs: Sequence[str]) -> list[str]:
    return [f"'{ref}'" if any(character in ref for character in "*?[") else ref for ref in refs]
