"""`headway chaos`: injects faults into small runs and verifies that they recover exactly."""

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headway.chaos.cases import select_cases
from headway.chaos.driver import ChaosHarness
from headway.chaos.matrix import run_matrix, run_soak
from headway.chaos.process_tree import track_descendants
from headway.chaos.torchrun_baseline import run_torchrun
from headway.cli.chaos_view import long_lines, long_object, matrix_lines, matrix_object
from headway.cli.launch import start_launcher
from headway.cli.options import Json, Settings
from headway.cli.progress import status_line
from headway.cli.text import print_json
from headway.errors import UsageError
from headway.hardware import devices
from headway.recipe import Recipe, load_recipe
from headway.track import read_recipe

ON_CPU = 2
"""Workers without a GPU: most faults need more than one."""


def chaos(
    recipe: Annotated[
        Path, typer.Argument(help="A recipe of a run that takes seconds: recipes/chaos.toml, recipes/chaos-rl.toml.")
    ],
    faults: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Faults to inject: all (default), or some by name.")
    ] = None,
    random: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="One long run with N random faults instead."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="S", help="Seed of --random.")] = 1,
    repeat: Annotated[int, typer.Option(min=1, metavar="K", help="Tries of each fault; figures are medians.")] = 1,
    workers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Processes to train with (default: one per GPU, or two on CPU)."),
    ] = None,
    beside: Annotated[
        Literal["torchrun"] | None,
        typer.Option(metavar="torchrun", help="Also inject the faults into a plain training loop under torchrun."),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option("--runs", metavar="DIR", help="Keep the runs in this new folder (default: remove them)."),
    ] = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Inject faults into small runs of a recipe, and verify that each recovers exactly.

    A run without faults is the reference; then comes one run per fault. Each must end with the chain and digest of the
    reference, and leave no process, descriptor or memory behind. train.restarts is at least 3; --random sets
    train.steps. Exits with 0 if all do, 1 if one does not.

    Keys of --json: recipe, workers, steps, step_s, met, faults and beside; a fault has name, what, way, met (of its
    tries), noticed_s, stepping_s, redone, lost_s (medians) and tries. With --random: recipe, workers, seed, steps,
    attempts, met, kinds, faults, struck, lost_s, seconds, complaints and left.
    """
    if random is not None and (faults is not None or beside is not None or repeat > 1):
        raise UsageError("--random chooses its own faults", hint="leave out --faults, --repeat and --beside")
    loaded = load_recipe(recipe, settings or ())
    count = workers or _workers(loaded)
    if beside is not None and devices(loaded.train.device).kind == "cuda":
        raise UsageError("--beside torchrun trains on CPUs only", hint="--set train.device=cpu")
    rows = select_cases(faults or "all", count, policy=loaded.rl is not None)
    result: Any
    with _sigterm_interrupts(), _folder(runs) as root, track_descendants() as family, status_line() as report:
        harness = ChaosHarness(root, count, start_launcher, family, keep=runs is not None)
        if random is not None:
            result = run_soak(harness, loaded, random, seed, report)
            lines, document = long_lines(result), long_object(result, loaded.name, count)
        else:
            result = run_matrix(harness, loaded, rows, repeat, report)
            peers = run_torchrun(harness, read_recipe(result.reference), rows, repeat, report) if beside else []
            lines, document = matrix_lines(result, peers), matrix_object(result, peers)
    if json:
        print_json(document)
    else:
        print("\n".join(lines))
        inspect = "--runs DIR keeps the runs for inspection" if runs is None else f"headway runs --runs {runs}"
        soak = f"headway chaos {recipe} --random 200"
        print(f"next: {soak if result.met and random is None else inspect}")
    if not result.met:
        raise typer.Exit(1)


def _workers(recipe: Recipe) -> int:
    local = devices(recipe.train.device)
    return local.count if local.kind == "cuda" else ON_CPU


@contextmanager
def _folder(runs: Path | None) -> Iterator[Path]:
    """Yield the folder of the runs: the one given, or a temporary one."""
    if runs is None:
        with tempfile.TemporaryDirectory(prefix="headway-chaos-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
        return
    if runs.exists() and any(runs.iterdir()):
        raise UsageError(f"{runs} is not empty", hint="--runs takes a new folder")
    yield runs


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, which ends everything that was started."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
