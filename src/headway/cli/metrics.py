"""`headway metrics RUN`: prints one metric of a run by step, plots it for several, or exports all for TensorBoard."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.options import Json, Runs, complete_run
from headway.cli.plot import MARKS, draw, has_braille, save_picture
from headway.cli.run_sync import find_up_to_date
from headway.cli.text import columns, first_names, next_line, plural, print_json
from headway.errors import UsageError
from headway.track import RunFolder, command, export_tensorboard, metric_table, read_metric, runs_root
from headway.track.store import SeriesView, metric_keys, read_series
from headway.track.store.edits import match_runs

POINTS, LEGEND = 2000, 10
"""Buckets of a plot in a file, and lines that a plot on the terminal names."""


def metrics(
    run: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", autocompletion=complete_run, help="Runs: names, prefixes, `last`, or patterns: 'demo-*'."
        ),
    ],
    key: Annotated[
        str,
        typer.Option(
            "--key",
            help="Metric to print: loss, eval_loss, tokens_per_s, mfu, TASK/METRIC of headway eval and others; or what "
            "names begin with, up to a slash, such as ratio/.",
        ),
    ] = "loss",
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Plot into a .png, .svg or .pdf file; - for the terminal."),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", metavar="DIR", help="Export all metrics for TensorBoard.")
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Print a metric, one step and value per line; plot it for several runs; or export all metrics of a run.

    A key such as ratio/ prints all metrics that begin with it, one column each.
    """
    root = runs_root(runs)
    if plot is not None or len(run) > 1 or any(character in run[0] for character in "*?["):
        if tensorboard is not None:
            raise UsageError("--tensorboard takes one run, and no --plot", hint="export the runs one by one")
        _plot(match_runs(root, run), key, plot, root, json)
        return
    folder = find_up_to_date(root, run[0])
    if tensorboard is not None:
        values = export_tensorboard(folder, tensorboard)
        if json:
            print_json({"run": folder.name, "folder": str(tensorboard / folder.name), "values": values})
        else:
            print(f"{tensorboard / folder.name}: {values} values")
            print(f"next: tensorboard --logdir {tensorboard}")
        return
    if key.endswith("/"):
        table = metric_table(folder, key)
        if json:
            print_json({"run": folder.name, "key": key, **table})
        else:
            print("\n".join(_table_lines(table, key)))
        return
    steps, numbers = read_metric(folder, key)
    if json:
        print_json({"run": folder.name, "key": key, "steps": steps.tolist(), "values": numbers.tolist()})
    else:
        lines = (f"{step} {number:.8g}" for step, number in zip(steps.tolist(), numbers.tolist(), strict=True))
        print("\n".join(lines))


def _plot(folders: Sequence[RunFolder], key: str, file: str | None, root: Path, json: bool) -> None:
    """Plot one metric of some runs into a file or on the terminal, or print its buckets as JSON."""
    width, ascii_only = columns(), not has_braille()
    in_file = file is not None and file != "-"
    views = read_series(folders, key, points=POINTS if in_file or json else max(2, 2 * width))
    missing = [view.run for view in views if not len(view.steps)]
    drawn = [view for view in views if len(view.steps)]
    if not drawn:
        names = dict.fromkeys(name for folder in folders for name in metric_keys(folder))
        raise UsageError(
            f"{'run' if len(folders) == 1 else 'runs'} {first_names(missing)} {'has' if len(missing) == 1 else 'have'} "
            f"no metric {key!r}",
            hint=f"recorded metrics: {', '.join(names) or 'none yet'}",
        )
    if file is not None and in_file:
        save_picture(drawn, key, Path(file))
    if json:
        print_json({"key": key, "file": file if in_file else None, "runs": [_document(view) for view in views]})
        return
    if in_file:
        print(f"{file}: {key} of {plural(len(drawn), 'run')}")
    else:
        print(key)
        # Lines of dots look alike: a few runs have a mark each; of many, the dots show the whole.
        marked = ascii_only or 1 < len(drawn) <= len(MARKS)
        print("\n".join([*draw(drawn, width, ascii_only=marked), *_legend(drawn, marked)]))
    if missing:
        print(f"note: no {key} in {first_names(missing)}", file=sys.stderr)
    names_shown = " ".join(view.run for view in drawn[:2])
    print(next_line(command(root, "compare", names_shown) if len(drawn) > 1 else command(root, "report", names_shown)))


def _document(view: SeriesView) -> dict[str, Any]:
    arrays = {name: getattr(view, name).tolist() for name in ("steps", "minimum", "maximum", "mean", "count")}
    return {"run": view.run, "width": view.width, **arrays}


def _legend(views: Sequence[SeriesView], marked: bool) -> list[str]:
    """Return each line's mark, run and last value."""
    shown = views[:LEGEND]
    marks = [MARKS[index % len(MARKS)] if marked else "-" for index in range(len(shown))]
    rows = [
        f"  {mark} {view.run}  {view.mean[-1]:.5g} from step {view.steps[-1]:,} on"
        for mark, view in zip(marks, shown, strict=True)
    ]
    more = len(views) - len(shown)
    return [*rows, *([f"  and {more} more"] if more else [])]


def _table_lines(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    names = [name.removeprefix(prefix) for name in table["values"]]
    widths = [max(8, len(name)) for name in names]
    yield _row("step", names, widths)
    for step, *row in zip(table["steps"], *table["values"].values(), strict=True):
        yield _row(step, ["" if value is None else f"{value:.4g}" for value in row], widths)


def _row(step: str | int, cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join([f"{step:>8}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))]).rstrip()
