"""`headway metrics RUN`: one number over the steps of a run, or all of them for TensorBoard."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json, Run, Runs

__all__ = ["metrics"]


def metrics(
    run: Run,
    key: Annotated[str, typer.Option("--key", help="Which metric: loss, eval_loss, tokens_per_s, mfu, ...")] = "loss",
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", metavar="DIR", help="Export all metrics for TensorBoard instead.")
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Print a metric: the step and its value, one a line."""
    from headway.cli.run_lookup import find_up_to_date
    from headway.cli.text import print_json
    from headway.track import export_tensorboard, read_metric, runs_root

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
