"""`headway kernels`: shows which kernel runs each operation, and why."""

import json
import subprocess
import sys
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Literal

import typer

from headway.cli.options import Json, Settings
from headway.cli.text import columns, print_json
from headway.errors import HeadwayError, UsageError
from headway.hardware import devices
from headway.recipe import Recipe, load_recipe


def kernels(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE]", help="Recipe whose precision and switches apply (default: bfloat16)."),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Kind of device to show.")
    ] = "auto",
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Show which kernel runs each operation, and why.

    train.plain = ["loss"] in a recipe uses plain PyTorch for an operation instead.
    """
    if settings and recipe is None:
        raise UsageError("--set needs a recipe", hint="headway kernels RECIPE --set ...")
    loaded = None if recipe is None else load_recipe(recipe, settings or [])
    requested = loaded.train.device if loaded is not None and device == "auto" else device
    kind = devices().kind if requested == "auto" else requested
    rows = _rows(loaded, kind)
    if json:
        print_json(rows)
        return
    print("\n".join(_lines(rows)))
    print("next: train.plain = [OPERATION, ...] in a recipe disables kernels")


def _rows(recipe: Recipe | None, kind: str) -> list[dict[str, str]]:
    request = {
        "device": kind,
        "dtype": "bfloat16" if recipe is None else recipe.train.dtype,
        "plain": [] if recipe is None else recipe.train.plain,
        "compiled": kind == "cuda" if recipe is None else recipe.compiles(kind),
        "exact": recipe is not None and recipe.train.deterministic,
    }
    command = [sys.executable, "-m", "headway.kernels.show"]
    result = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    if result.returncode:
        output = result.stderr.strip().splitlines() or ["no output"]
        raise HeadwayError(f"cannot read the dispatch table: {output[-1]}", hint="is torch installed here?")
    rows: list[dict[str, str]] = json.loads(result.stdout)
    return rows


def _lines(rows: list[dict[str, str]]) -> list[str]:
    names = [f"{row['operation']}, {row['case']}" if row["case"] else row["operation"] for row in rows]
    wide, kernel = max(map(len, names)), max(len(row["kernel"]) for row in rows)
    lines = [f"{'operation':{wide}}  {'kernel':{kernel}}  why"]
    for name, row in zip(names, rows, strict=True):
        first, *rest = wrap(row["why"], columns() - wide - kernel - 4)
        lines.append(f"{name:{wide}}  {row['kernel']:{kernel}}  {first}")
        lines += [" " * (wide + kernel + 4) + line for line in rest]
    return lines
