"""`headway stop`: saves a running run and ends it."""

import os
import signal
import time
from typing import Annotated

import typer

from headway.cli.options import Json, Run, Runs
from headway.cli.text import print_json
from headway.errors import RunError
from headway.track import find_run, lock_holder, runs_root, summarize


def stop(
    run: Run,
    runs: Runs = None,
    now: Annotated[bool, typer.Option("--now", help="Stop at once, without saving.")] = False,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for the run to end.")] = 120.0,
    json: Json = False,
) -> None:
    """Save a running run and stop it.

    headway resume continues it.
    """
    folder = find_run(runs_root(runs), run)
    pid = lock_holder(folder)
    if pid is None:
        raise RunError(f"run {folder.path.name} is not running", hint="headway ps lists active runs")
    for number in (
        (signal.SIGTERM, signal.SIGINT) if now else (signal.SIGTERM,)
    ):  # the same signal twice would count once
        os.kill(pid, number)
        time.sleep(0.2)
    deadline = time.monotonic() + timeout_s
    while lock_holder(folder) in (pid, 0):  # 0: it is releasing the lock
        if time.monotonic() > deadline:
            raise RunError(
                f"run {folder.path.name} did not end within {timeout_s:g} s",
                hint=f"{folder.command('stop', '--now')} stops it without saving",
            )
        time.sleep(0.05)
    summary = summarize(folder)
    if json:
        print_json({"run": folder.path.name, "state": summary.state, "step": summary.step})
    else:
        print(f"{folder.path.name}: {summary.state} at step {summary.step}: {summary.reason}")
        print(f"next: {folder.command('resume')}")
