"""`headway chaos`: small real runs of a recipe, broken on purpose, and whether they end as if nothing had happened."""

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headway.cli.options import Json, Settings

if TYPE_CHECKING:
    from headway.recipe import Recipe

__all__ = ["chaos"]

ON_CPU = 2
"""Workers where there is no GPU: most faults are more than one worker's."""


def chaos(
    recipe: Annotated[Path, typer.Argument(help="A recipe in TOML, of a run that takes seconds: recipes/chaos.toml.")],
    faults: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Which faults: all (default), or some by name.")
    ] = None,
    random: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Instead: one long run that so many faults strike, drawn from --seed."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="S", help="Which faults --random draws.")] = 1,
    repeat: Annotated[int, typer.Option(min=1, metavar="K", help="Tries of each fault; figures are medians.")] = 1,
    workers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Processes to train with (default: one a GPU; two on CPU)."),
    ] = None,
    beside: Annotated[
        Literal["torchrun"] | None,
        typer.Option(
            metavar="torchrun", help="Also strike a plain training loop under torchrun where it has an answer."
        ),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option("--runs", metavar="DIR", help="Keep the runs in this new folder (default: they are removed)."),
    ] = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Break small runs of a recipe on purpose, and prove that they end as if nothing had happened.

    An unfaulted run of the recipe is the truth; then comes one run for each fault. Every run must end with the chain
    and digest of the unfaulted one, and leave no process, descriptor or memory behind. train.restarts is at least 3;
    --random sets train.steps. Exit status 0 when all do, 1 when one does not.

    Keys of --json: recipe, workers, steps, step_s, met, faults and beside; a fault has name, what, way, met (of its
    tries), noticed_s, stepping_s, redone, lost_s (medians) and tries. With --random: recipe, workers, seed, steps,
    attempts, met, kinds, faults, struck, lost_s, seconds, complaints and left.
    """
    from headway.chaos.cases import select_cases
    from headway.chaos.driver import ChaosHarness
    from headway.chaos.matrix import run_matrix, run_soak
    from headway.chaos.process_tree import track_descendants
    from headway.chaos.torchrun_baseline import run_torchrun
    from headway.cli.chaos_view import long_lines, long_object, matrix_lines, matrix_object
    from headway.cli.launch import start_launcher
    from headway.errors import UsageError
    from headway.hardware import devices
    from headway.recipe import load_recipe
    from headway.track import read_recipe

    if random is not None and (faults is not None or beside is not None or repeat > 1):
        raise UsageError("--random draws its own faults", hint="leave --faults, --repeat and --beside out")
    wanted = load_recipe(recipe, settings or ())
    count = workers or _workers(wanted)
    if beside is not None and devices(wanted.train.device).kind == "cuda":
        raise UsageError("the loop under torchrun trains on CPUs", hint="--set train.device=cpu")
    rows = select_cases(faults or "all", count)
    result: Any
    with _ended_politely(), _folder(runs) as root, track_descendants() as family, _progress() as tell:
        stage = ChaosHarness(root, count, start_launcher, family, keep=runs is not None)
        if random is not None:
            result = run_soak(stage, wanted, random, seed, tell)
            lines, document = long_lines(result), long_object(result, wanted.name, count)
        else:
            result = run_matrix(stage, wanted, rows, repeat, tell)
            peers = run_torchrun(stage, read_recipe(result.reference), rows, repeat, tell) if beside else []
            lines, document = matrix_lines(result, peers), matrix_object(result, peers)
    if json:
        from headway.cli.text import print_json

        print_json(document)
    else:
        print("\n".join(lines))
        look = "--runs DIR keeps the runs, to look at" if runs is None else f"headway runs --runs {runs}"
        on = f"headway chaos {recipe} --random 200"
        print(f"next: {on if result.met and random is None else look}")
    if not result.met:
        raise typer.Exit(1)


def _workers(recipe: "Recipe") -> int:
    from headway.hardware import devices

    found = devices(recipe.train.device)
    return found.count if found.kind == "cuda" else ON_CPU


@contextmanager
def _folder(runs: Path | None) -> Iterator[Path]:
    """Where runs live: a folder that is kept, or one that is gone afterwards."""
    from headway.errors import UsageError

    if runs is None:
        with tempfile.TemporaryDirectory(prefix="headway-chaos-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
        return
    if runs.exists() and any(runs.iterdir()):
        raise UsageError(f"{runs} has something in it", hint="--runs names a new folder; without it none is kept")
    yield runs


@contextmanager
def _ended_politely() -> Iterator[None]:
    """SIGTERM ends this as Ctrl-C does: with everything that was started."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is being run: a line that goes on a terminal, lines that stay elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: print(f"running {text}", file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(f"running {text}")
