"""`headway kernels`: which kernel does each operation here, and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headway.cli.options import Json, Settings

if TYPE_CHECKING:
    from headway.recipe import Recipe

__all__ = ["kernels"]


def kernels(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE]", help="Whose precision and switches count (default: bfloat16)."),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="What it would be on another kind of device.")
    ] = "auto",
    settings: Settings = None,
    json: Json = False,
) -> None:
    """List the operations that have kernels of their own, and which one runs here and why.

    A recipe's train.plain = ["loss"] has plain PyTorch do an operation instead.
    """
    from headway.cli.text import print_json
    from headway.errors import UsageError
    from headway.hardware import devices
    from headway.recipe import load_recipe

    if settings and recipe is None:
        raise UsageError("--set changes a recipe, and none is named", hint="headway kernels RECIPE --set ...")
    made = None if recipe is None else load_recipe(recipe, settings or [])
    asked = made.train.device if made is not None and device == "auto" else device
    kind = devices().kind if asked == "auto" else asked
    found = _rows(made, kind)
    if json:
        print_json(found)
        return
    print("\n".join(_lines(found)))
    print("next: train.plain = [OPERATION, ...] in a recipe switches kernels off")


def _rows(recipe: "Recipe | None", kind: str) -> list[dict[str, str]]:
    import json
    import subprocess
    import sys

    from headway.errors import HeadwayError

    asked = {
        "device": kind,
        "dtype": "bfloat16" if recipe is None else recipe.train.dtype,
        "plain": [] if recipe is None else recipe.train.plain,
        "compiled": kind == "cuda" if recipe is None else recipe.compiles(kind),
        "exact": recipe is not None and recipe.train.deterministic,
    }
    words = [sys.executable, "-m", "headway.kernels.show"]
    done = subprocess.run(words, input=json.dumps(asked), capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it ended without a word"]
        raise HeadwayError(f"the table of kernels could not be read: {said[-1]}", hint="is torch installed here?")
    found: list[dict[str, str]] = json.loads(done.stdout)
    return found


def _lines(found: list[dict[str, str]]) -> list[str]:
    from textwrap import wrap

    names = [f"{row['operation']}, {row['case']}" if row["case"] else row["operation"] for row in found]
    wide, kernel = max(map(len, names)), max(len(row["kernel"]) for row in found)
    lines = [f"{'operation':{wide}}  {'kernel':{kernel}}  why"]
    for name, row in zip(names, found, strict=True):
        first, *more = wrap(row["why"], 80 - wide - kernel - 4)
        lines.append(f"{name:{wide}}  {row['kernel']:{kernel}}  {first}")
        lines += [" " * (wide + kernel + 4) + line for line in more]
    return lines
