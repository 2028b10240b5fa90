"""`headway sweep`: one recipe with many settings, a run each, and a table of what came of them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.options import Apart, EngineName, Json, Runs, Settings

if TYPE_CHECKING:
    from headway.cluster.submit.sweep_results import SweepResult
    from headway.cluster.submit.sweep_sync import SweepSync
    from headway.cluster.submit.sweeps import Sweep, SweepRequest

__all__ = ["sweep"]


def sweep(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE|SWEEP", help="A recipe to sweep, or a sweep to look at again.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="KEY=A,B,...", help="Values of one key; repeatable: all combinations are run."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="CHIPxPERNODExNODES", help="What each run has (default here: one GPU or core)."),
    ] = None,
    engine: EngineName = "local",
    name: Annotated[str | None, typer.Option(help="The sweep's name (default: the recipe's and four digits).")] = None,
    at_once: Annotated[
        int | None, typer.Option("--at-once", min=1, metavar="N", help="So many runs at a time, and no more.")
    ] = None,
    apart: Apart = False,
    runs: Runs = None,
    settings: Settings = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return at once; the runs go on.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be sent, and send nothing.")] = False,
    json: Json = False,
) -> None:
    """Run a recipe with all combinations of some settings, as one job of an engine, and compare them.

    The same command again goes on waiting. Exits with 1 if a run failed. Without --grid, show a sweep that there is.
    """
    from headway.track import runs_root

    root = runs_root(runs)
    if not grid:
        _look(root, recipe, json)
        return
    wanted = _wanted(recipe, grid, settings or [], on, engine, name, at_once, shared=not apart)
    if dry_run:
        _describe(wanted, root, json)
        return
    from headway.cli.sweep_view import Counting
    from headway.cluster.submit.sweeps import start_sweep

    with Counting(f"{wanted.name}: runs are put into their stores") as counting:
        begun, new = start_sweep(wanted, root, counting.show)
    if detach:
        _told(begun, json)
        return
    sys.exit(_wait(root, begun, new, json))


def _wanted(
    recipe: str | None,
    grid: list[str],
    settings: list[str],
    on: str | None,
    engine: str,
    name: str | None,
    at_once: int | None,
    shared: bool,
) -> "SweepRequest":
    from headway.cluster.submit.grid import parse_grid
    from headway.cluster.submit.sweeps import request_sweep
    from headway.errors import UsageError
    from headway.hardware import parse_on

    if recipe is None:
        raise UsageError("no recipe is named", hint="headway sweep RECIPE --grid KEY=A,B")
    axes, cluster = parse_grid(grid, settings), parse_on(on) if on else None
    file = Path(recipe)
    return request_sweep(file, settings, axes, engine=engine, on=cluster, name=name, at_once=at_once, shared=shared)


def _look(root: Path, ref: str | None, json: bool) -> None:
    """A sweep as it stands now, or the list of all."""
    from headway.cli.sweep_view import Counting, document, sweep_lines, table
    from headway.cli.text import print_json
    from headway.cluster.submit.sweep_results import sweep_results
    from headway.cluster.submit.sweep_sync import SweepSync
    from headway.cluster.submit.sweeps import find_sweep, list_sweeps
    from headway.errors import UsageError

    if ref is None:
        found = list_sweeps(root)
        print_json([{"sweep": one.name, "runs": len(one.points)} for one in found]) if json else print(
            "\n".join(sweep_lines(root, found))
        )
        return
    if Path(ref).suffix == ".toml":
        raise UsageError("nothing to sweep over", hint=f"headway sweep {ref} --grid train.lr=1e-4,3e-4")
    sweep = find_sweep(root, ref)
    with Counting(f"{sweep.name}: records are brought from their stores") as counting:
        records = SweepSync(root, sweep, counting.show)
        outcome = sweep_results(root, sweep, records)
    _say_what_is_old(records)
    print_json(document(sweep, outcome, records.trouble)) if json else print("\n".join(table(sweep, outcome)))


def _describe(wanted: "SweepRequest", root: Path, json: bool) -> None:
    from headway.cli.text import print_json
    from headway.cluster.submit.sweeps import describe_sweep

    text = describe_sweep(wanted, root)
    points = [{"run": point.run, "settings": point.settings} for point in wanted.points]
    if json:
        print_json({"sweep": wanted.name, "engine": wanted.engine, "points": points, "would_send": text})
        return
    for index, point in enumerate(wanted.points):
        words = " ".join(f"{key}={value}" for key, value in point.settings.items())
        print(f"# {index}: {point.run}: {words}")
    print(text, end="")


def _told(sweep: "Sweep", json: bool) -> None:
    """That it is submitted."""
    from headway.cli.text import print_json

    if json:
        fields = {"sweep": sweep.name, "engine": sweep.engine, "job": sweep.job, "on": sweep.on}
        print_json(fields | {"runs": [point.run for point in sweep.points]})
        return
    print(f"{sweep.name}: {len(sweep.points)} runs, job {sweep.job} of {sweep.engine}")
    print(f"next: headway sweep {sweep.name}, headway jobs, headway cancel {sweep.name}")


def _wait(root: Path, sweep: "Sweep", new: bool, json: bool) -> int:
    """Until all runs are over; the exit status."""
    from headway.cli.sweep_view import SweepProgress, document, table
    from headway.cli.text import print_json
    from headway.cluster.submit.sweep_results import wait_for_sweep
    from headway.cluster.submit.sweep_sync import SweepSync

    progress = SweepProgress(sweep)
    records = SweepSync(root, sweep, progress.bringing)
    if not new:
        progress.say(f"{sweep.name} was submitted before, as job {sweep.job}: waiting for it")

    def show(rows: "Sequence[SweepResult]") -> None:
        progress.note(records.trouble)
        progress.show(rows)

    try:
        outcome = wait_for_sweep(root, sweep, records, show)
    except KeyboardInterrupt:
        progress.end()
        print("stopped waiting; the runs go on", file=sys.stderr)
        print(f"next: headway sweep {sweep.name}, headway cancel {sweep.name}", file=sys.stderr)
        return 130
    progress.end()
    _say_what_is_old(records)
    print_json(document(sweep, outcome, records.trouble)) if json else print("\n".join(table(sweep, outcome)))
    return 1 if any(row.state != "finished" for row in outcome) else 0


def _say_what_is_old(records: "SweepSync") -> None:
    if records.trouble:
        print(f"note: {records.trouble}; this is what is known here", file=sys.stderr)
