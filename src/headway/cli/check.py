"""`headway check`: whether a mesh computes what one process computes."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.mesh import parse_layout
from headway.cli.options import Json, Runs, Settings

if TYPE_CHECKING:
    from headway.recipe import Parallel, Recipe

__all__ = ["check"]

EXAMPLE = "--mesh shard=2,tensor=2"


def check(
    recipe: Annotated[Path, typer.Argument(help="A recipe in TOML.")],
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS=N,...",
            help="A mesh to check, like shard=2,tensor=2; may also have schedule=, chunks=, stages=1:3, "
            "keep_weights=, reduce_each=; repeatable (default: the recipe's own).",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps to compare.")] = 3,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the trials in this new folder: tensors, records, logs.")
    ] = None,
    runs: Runs = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Prove that a mesh computes what one process computes, or name the first thing that differs.

    The same steps from the same weights on the same data, in one process and on each mesh: losses, every gradient, and
    every parameter after an update are compared. On GPUs where there are enough, else on the CPU. Exit status 0 when
    all are equal, 1 when one is not or fails, 2 for a mesh that cannot run.

    Keys of --json: recipe, steps, dtype, device, tolerances, losses, equal, meshes; a mesh has mesh, parallel, workers,
    microbatch, seconds, equal, largest, first, error and hint; largest has forward, loss, gradient, parameter and
    adamw; each of these, and first, has kind, name, step, difference, tolerance and note.
    """
    from headway.agent.parity import check_parity as run_check
    from headway.cli.check_view import as_json, check_lines
    from headway.cli.text import print_json
    from headway.recipe import load_recipe
    from headway.track import runs_root

    wanted = load_recipe(recipe, settings or ())
    meshes = _meshes(wanted, mesh or ())
    with _progress() as tell:
        checked = run_check(wanted, meshes, runs_root(runs), steps=steps, keep=keep, report=tell)
    if json:
        print_json(as_json(checked))
    else:
        print("\n".join(check_lines(checked)))
        if keep is not None:
            print(f"kept: {keep}")
    if not checked.equal:
        raise typer.Exit(1)


def _meshes(recipe: "Recipe", texts: Sequence[str]) -> "list[Parallel]":
    from headway.errors import UsageError

    if texts:
        return [parse_layout(text, recipe.parallel) for text in texts]
    if recipe.parallel is None:
        raise UsageError("nothing to check: the recipe has no [parallel], and no mesh is given", hint=EXAMPLE)
    return [recipe.parallel]


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is being run: a line that goes on a terminal, lines that stay elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: print(f"running {text}", file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(f"running {text}")
