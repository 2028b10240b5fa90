"""`headway fetch`: a run that other machines train, as its object store knows it."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.options import Json, Runs

if TYPE_CHECKING:
    from headway.track import RunFolder, RunSummary

__all__ = ["fetch"]

QUIET_S = 180.0
"""Records come to the store every minute: a run of which nothing is newer than that is trained by nobody."""


def fetch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run here, or its address: s3://bucket/prefix/RUN.")],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Bring a run's folder up to date from its object store: small files and records, no checkpoints.

    For runs whose machines see no common folder; what they recorded is there a minute later.
    """
    from headway.agent.remote.store_mirror import fetch_run, start_failures
    from headway.agent.saving.restore_points import need_store
    from headway.cli.text import print_json
    from headway.state.address import is_in_store
    from headway.track import find_run, read_recipe, runs_root, summarize

    root = runs_root(runs)
    if not is_in_store(run):
        there = find_run(root, run)
        run = need_store(read_recipe(there), there.name)
    folder = fetch_run(run, root)
    found = summarize(folder)
    how, over = _how_it_stands(folder, found, time.time())
    if json:
        told = {"run": found.name, "step": found.step, "attempts": found.attempts, "loss": found.loss}
        print_json(told | {"state": "running" if how == TRAINS else found.state})
        return
    print(f"{found.name}: step {found.step}, {found.attempts} attempt{'s' * (found.attempts != 1)}, {how}")
    for path in [] if how in (TRAINS, "finished") else start_failures(folder):
        print(f"  {path.read_text().strip()}")
    more = f"headway resume {found.name}" if over else f"headway fetch {found.name}"
    print(f"next: headway report {found.name}, headway logs {found.name}{'' if how == 'finished' else ', ' + more}")


TRAINS = "training"


def _how_it_stands(run: "RunFolder", found: "RunSummary", now: float) -> tuple[str, bool]:
    """In a few words, and whether it is worth resuming: nobody works for it any more, and it has not finished."""
    from headway.agent.supervise.outcome import recorded_exit_status
    from headway.cli.logs import is_alive
    from headway.cli.text import duration

    if recorded_exit_status(run) is not None:
        return found.state, found.state != "finished" and not is_alive(run)
    quiet_s = now - _heard(run)
    if found.attempts == 0:
        return "not begun", False
    if is_alive(run) or quiet_s < QUIET_S:
        return TRAINS, False
    return f"nothing heard of it for {duration(quiet_s)}", True


def _heard(run: "RunFolder") -> float:
    """When whoever leads it last wrote something, in Unix seconds, by its own clock."""
    from headway.track import read_ends

    ends = [read_ends(path) for path in sorted(run.events.glob("*-agent.jsonl"))[-1:]]
    return max((one.header.wall + event.get("t", 0) / 1e9 for one in ends for event in one.events), default=0.0)
