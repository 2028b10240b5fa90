"""`headway metrics RUN`: prints one metric of a run by step, or exports all for TensorBoard."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json, Run, Runs
from headway.cli.run_sync import find_up_to_date
from headway.cli.text import print_json
from headway.track import export_tensorboard, read_metric, runs_root


def metrics(
    run: Run,
    key: Annotated[
        str,
        typer.Option(
            "--key", help="Metric to print: loss, eval_loss, tokens_per_s, mfu, TASK/METRIC of headway eval and others."
        ),
    ] = "loss",
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", metavar="DIR", help="Export all metrics for TensorBoard.")
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Print a metric, one step and value per line, or export all metrics."""
    folder = find_up_to_date(runs_root(runs), run)
    if tensorboard is not None:
        values = export_tensorboard(folder, tensorboard)
        if json:
            print_json({"run": folder.name, "folder": str(tensorboard / folder.name), "values": values})
        else:
            print(f"{tensorboard / folder.name}: {values} values")
            print(f"next: tensorboard --logdir {tensorboard}")
        return
    steps, numbers = read_metric(folder, key)
    if json:
        print_json({"run": folder.name, "key": key, "steps": steps.tolist(), "values": numbers.tolist()})
    else:
        lines = (f"{step} {number:.8g}" for step, number in zip(steps.tolist(), numbers.tolist(), strict=True))
        print("\n".join(lines))
