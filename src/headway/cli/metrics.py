"""`headway metrics RUN`: prints one metric of a run by step, or exports all for TensorBoard."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.options import Json, Run, Runs
from headway.cli.run_sync import find_up_to_date
from headway.cli.text import print_json
from headway.track import export_tensorboard, metric_table, read_metric, runs_root


def metrics(
    run: Run,
    key: Annotated[
        str,
        typer.Option(
            "--key",
            help="Metric to print: loss, eval_loss, tokens_per_s, mfu, TASK/METRIC of headway eval and others; or what "
            "names begin with, up to a slash, such as ratio/.",
        ),
    ] = "loss",
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", metavar="DIR", help="Export all metrics for TensorBoard.")
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Print a metric, one step and value per line, or export all metrics.

    A key such as ratio/ prints all metrics that begin with it, one column each.
    """
    folder = find_up_to_date(runs_root(runs), run)
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


def _table_lines(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    names = [name.removeprefix(prefix) for name in table["values"]]
    widths = [max(8, len(name)) for name in names]
    yield _row("step", names, widths)
    for step, *row in zip(table["steps"], *table["values"].values(), strict=True):
        yield _row(step, ["" if value is None else f"{value:.4g}" for value in row], widths)


def _row(step: str | int, cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join([f"{step:>8}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))]).rstrip()
