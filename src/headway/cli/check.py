"""`headway check`: verifies that a mesh computes what one process does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from headway.agent.parity import check_parity
from headway.cli.check_view import as_json, check_lines
from headway.cli.mesh import parse_layout
from headway.cli.options import Json, Runs, Settings
from headway.cli.progress import status_line
from headway.cli.text import print_json
from headway.errors import UsageError
from headway.recipe import Parallel, Recipe, load_recipe
from headway.track import runs_root

EXAMPLE = "--mesh shard=2,tensor=2"


def check(
    recipe: Annotated[Path, typer.Argument(help="A recipe in TOML.")],
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS=N,...",
            help="Mesh to check, e.g. shard=2,tensor=2; repeatable (default: the recipe's). Also takes schedule=, "
            "chunks=, stages=1:3, keep_weights=, reduce_each=.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps to compare.")] = 3,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep tensors, records and logs in this new folder.")
    ] = None,
    runs: Runs = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Verify that a mesh computes what one process does, or name the first difference.

    Runs the same steps from the same weights on the same data in one process and on each mesh, and compares losses,
    every gradient, and every parameter after an update. Uses GPUs if there are enough, else the CPU. Exits with 0 if
    all are equal, 1 if one differs or fails, 2 for a mesh that cannot run.

    Keys of --json: recipe, steps, dtype, device, tolerances, losses, equal, meshes; a mesh has mesh, parallel, workers,
    microbatch, seconds, equal, largest, first, error and hint; largest has forward, loss, gradient, parameter and
    adamw; each of these, and first, has kind, name, step, difference, tolerance and note.
    """
    loaded = load_recipe(recipe, settings or ())
    meshes = _meshes(loaded, mesh or ())
    with status_line() as report:
        result = check_parity(loaded, meshes, runs_root(runs), steps=steps, keep=keep, report=report)
    if json:
        print_json(as_json(result))
    else:
        print("\n".join(check_lines(result)))
        if keep is not None:
            print(f"kept: {keep}")
    if not result.equal:
        raise typer.Exit(1)


def _meshes(recipe: Recipe, texts: Sequence[str]) -> list[Parallel]:
    if texts:
        return [parse_layout(text, recipe.parallel) for text in texts]
    if recipe.parallel is None:
        raise UsageError("nothing to check: no --mesh, and the recipe has no [parallel]", hint=EXAMPLE)
    return [recipe.parallel]
