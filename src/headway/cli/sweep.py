"""`headway sweep`: runs a grid of settings as one job, one run each, and ranks them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import EngineName, Json, NoSharedFolder, Runs, Settings
from headway.cli.progress import Counting
from headway.cli.sweep_view import SweepProgress, document, sweep_lines, table
from headway.cli.text import next_line, plural, print_json
from headway.cluster.submit.grid import parse_grid
from headway.cluster.submit.sweep_request import SweepRequest, request_sweep
from headway.cluster.submit.sweep_results import SweepResult, sweep_results, wait_for_sweep
from headway.cluster.submit.sweep_start import describe_sweep, start_sweep
from headway.cluster.submit.sweep_sync import SweepSync
from headway.cluster.submit.sweeps import Sweep, find_sweep, list_sweeps
from headway.errors import INTERRUPTED, UsageError
from headway.hardware import parse_on
from headway.track import command, runs_root


def sweep(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE|SWEEP", help="A recipe to sweep, or the name of a sweep to show.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="KEY=A,B,...", help="Values of one key; repeatable, for all combinations."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="CHIPxPERNODExNODES", help="Resources of each run (default: one GPU or core)."),
    ] = None,
    engine: EngineName = "local",
    name: Annotated[
        str | None, typer.Option(help="Name of the sweep (default: the recipe's name and four digits).")
    ] = None,
    at_once: Annotated[
        int | None, typer.Option("--at-once", min=1, metavar="N", help="Run at most N at a time.")
    ] = None,
    no_shared_folder: NoSharedFolder = False,
    runs: Runs = None,
    settings: Settings = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit and return at once.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be submitted, and submit nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Run all combinations of some settings as one job, and rank the runs.

    The same command again resumes waiting. Exits with 1 if a run failed. Without --grid, show an existing sweep.
    """
    root = runs_root(runs)
    if not grid:
        _show(root, recipe, json)
        return
    request = _request(recipe, grid, settings or [], on, engine, name, at_once, shared=not no_shared_folder)
    if dry_run:
        _describe(request, root, json)
        return
    with Counting(f"{request.name}: uploading runs") as counting:
        submitted, new = start_sweep(request, root, counting.show)
    if detach:
        _print_submitted(root, submitted, json)
        return
    sys.exit(_wait(root, submitted, new, json))


def _request(
    recipe: str | None,
    grid: list[str],
    settings: list[str],
    on: str | None,
    engine: str,
    name: str | None,
    at_once: int | None,
    shared: bool,
) -> SweepRequest:
    if recipe is None:
        raise UsageError("no recipe given", hint="headway sweep RECIPE --grid KEY=A,B")
    axes, cluster = parse_grid(grid, settings), parse_on(on) if on else None
    file = Path(recipe)
    return request_sweep(file, settings, axes, engine=engine, on=cluster, name=name, at_once=at_once, shared=shared)


def _show(root: Path, ref: str | None, json: bool) -> None:
    """Print the state of a sweep, or the list of all."""
    if ref is None:
        sweeps = list_sweeps(root)
        print_json([{"sweep": listed.name, "runs": len(listed.points)} for listed in sweeps]) if json else print(
            "\n".join(sweep_lines(root, sweeps))
        )
        return
    if Path(ref).suffix == ".toml":
        raise UsageError("nothing to sweep over", hint=command(root, "sweep", ref, "--grid train.lr=1e-4,3e-4"))
    sweep = find_sweep(root, ref)
    with Counting(f"{sweep.name}: syncing records") as counting:
        records = SweepSync(root, sweep, counting.show)
        outcome = sweep_results(root, sweep, records)
    _warn_if_outdated(records)
    print_json(document(sweep, outcome, records.trouble)) if json else print("\n".join(table(root, sweep, outcome)))


def _describe(request: SweepRequest, root: Path, json: bool) -> None:
    text = describe_sweep(request, root)
    points = [{"run": point.run, "settings": point.settings} for point in request.points]
    if json:
        print_json({"sweep": request.name, "engine": request.engine, "points": points, "would_send": text})
        return
    for index, point in enumerate(request.points):
        settings = " ".join(f"{key}={value}" for key, value in point.settings.items())
        print(f"# {index}: {point.run}: {settings}")
    print(text, end="")


def _print_submitted(root: Path, sweep: Sweep, json: bool) -> None:
    """Print that a sweep was submitted."""
    if json:
        fields = {"sweep": sweep.name, "engine": sweep.engine, "job": sweep.job, "on": sweep.on}
        print_json(fields | {"runs": [point.run for point in sweep.points]})
        return
    print(f"{sweep.name}: {plural(len(sweep.points), 'run')}, job {sweep.job} of {sweep.engine}")
    follow_ups = [command(root, words) for words in (f"sweep {sweep.name}", "jobs", f"cancel {sweep.name}")]
    print(next_line(*follow_ups))


def _wait(root: Path, sweep: Sweep, new: bool, json: bool) -> int:
    """Wait until all runs have ended; return the exit status."""
    progress = SweepProgress(sweep)
    records = SweepSync(root, sweep, progress.syncing)
    if not new:
        progress.say(f"{sweep.name} is already submitted as job {sweep.job}; waiting")

    def show(rows: Sequence[SweepResult]) -> None:
        progress.note(records.trouble)
        progress.show(rows)

    try:
        outcome = wait_for_sweep(root, sweep, records, show)
    except KeyboardInterrupt:
        progress.end()
        print("stopped waiting; the runs continue", file=sys.stderr)
        follow_ups = [command(root, verb, sweep.name) for verb in ("sweep", "cancel")]
        print(next_line(*follow_ups), file=sys.stderr)
        return INTERRUPTED
    progress.end()
    _warn_if_outdated(records)
    print_json(document(sweep, outcome, records.trouble)) if json else print("\n".join(table(root, sweep, outcome)))
    return 1 if any(row.state != "finished" for row in outcome) else 0


def _warn_if_outdated(records: SweepSync) -> None:
    if records.trouble:
        print(f"note: {records.trouble}; showing what is known here", file=sys.stderr)
