"""`headway fetch`: syncs a run that other machines train from its object store."""

import time
from typing import Annotated

import typer

from headway.agent.remote.store_mirror import fetch_run, start_failures
from headway.agent.saving.restore_points import need_store
from headway.agent.supervise.outcome import recorded_exit_status
from headway.cli.logs import is_alive
from headway.cli.options import Json, Runs, complete_run
from headway.cli.text import duration, next_line, plural, print_json
from headway.state.address import is_in_store
from headway.track import RunFolder, RunSummary, find_run, read_ends, read_recipe, runs_root, summarize

QUIET_S = 180.0
"""Records reach the store every minute: a run with nothing newer than this is not training."""


def fetch(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", autocompletion=complete_run, help="A run here, or its address: s3://bucket/prefix/RUN."
        ),
    ],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Sync a run's folder from its object store: small files and records, no checkpoints.

    For runs whose machines share no folder. Their records reach the store within a minute.
    """
    root = runs_root(runs)
    if not is_in_store(run):
        local = find_run(root, run)
        run = need_store(read_recipe(local), local.name)
    folder = fetch_run(run, root)
    summary = summarize(folder)
    state, over = _describe_state(folder, summary, time.time())
    if json:
        document = {"run": summary.name, "step": summary.step, "attempts": summary.attempts, "loss": summary.loss}
        print_json(document | {"state": "running" if state == TRAINS else summary.state})
        return
    print(f"{summary.name}: step {summary.step}, {plural(summary.attempts, 'attempt')}, {state}")
    for path in [] if state in (TRAINS, "finished") else start_failures(folder):
        print(f"  {path.read_text().strip()}")
    verbs = ["report", "logs", *([] if state == "finished" else ["resume" if over else "fetch"])]
    print(next_line(*(folder.command(verb) for verb in verbs)))


TRAINS = "training"


def _describe_state(run: RunFolder, summary: RunSummary, now: float) -> tuple[str, bool]:
    """Return the state in a few words, and whether to resume: the run has not finished, and nothing works for it."""
    if recorded_exit_status(run) is not None:
        return summary.state, summary.state != "finished" and not is_alive(run)
    quiet_s = now - _last_record(run)
    if summary.attempts == 0:
        return "not started", False
    if is_alive(run) or quiet_s < QUIET_S:
        return TRAINS, False
    return f"no records for {duration(quiet_s)}", True


def _last_record(run: RunFolder) -> float:
    """Return when the run's leader last wrote a record, in Unix seconds by its own clock."""
    ends = [read_ends(path) for path in sorted(run.events.glob("*-agent.jsonl"))[-1:]]
    return max(
        (record.header.wall + event.get("t", 0) / 1e9 for record in ends for event in record.events), default=0.0
    )
