"""Starts an attempt for a verb: in this process with a live view, or in the background."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from headway.agent import Attempt, AttemptOutcome, run_launcher
from headway.agent.fd_store import FdEntry
from headway.cli.text import next_line, print_json
from headway.cli.view import open_view, plan_lines, tell
from headway.errors import RunError, WorkerError
from headway.track import (
    find_set_aside,
    has_stepped,
    lock_holder,
    read_plan,
    read_recipe,
    set_aside,
    summarize,
)
from headway.track.access import umask_of

DETACH_TIMEOUT_S = 120.0


def launch(attempt: Attempt, *, detach: bool, json: bool, keep_name: bool = False) -> None:
    """Run an attempt to its end and exit with its status, or leave it to a launcher in the background.

    A run that fails before its first step is set aside, except with `keep_name`.
    """
    name, plan = attempt.run.name, read_plan(attempt.folder)
    planned = None if plan is None else plan.model_dump()
    for line in plan_lines(plan) if plan else []:
        tell(line)
    if detach:
        for note in attempt.notes:
            tell(f"note: {note}")
        pid = wait_for_agent(attempt, start_launcher(attempt, keep_name=keep_name))
        if json:
            print_json({"run": name, "agent": pid, "plan": planned})
        else:
            print(name)
            run = attempt.folder
            follow_ups = [run.command("logs", "--follow"), run.command("report"), run.command("stop")]
            print(next_line(*follow_ups), file=sys.stderr)
        return
    with open_view(attempt, quiet=json) as view:
        outcome = run_launcher(attempt, view.tick, view.report_storage)
    if outcome.state == "failed":
        outcome = outcome if keep_name else _free_name(attempt, outcome)
        raise WorkerError(f"{name}: {outcome.reason}", hint=outcome.hint, usage=outcome.usage)
    if not attempt.folder.recipe_file.exists():  # the run stopped because its folder is gone
        print(f"{name}: {outcome.state}: {outcome.reason}", file=sys.stderr)
        sys.exit(outcome.exit_status)
    summary = summarize(attempt.folder)
    total = read_recipe(attempt.folder).train.steps
    if json:
        result = {"run": name, "state": outcome.state, "step": summary.step, "loss": summary.loss}
        print_json(result | {"plan": planned})
    else:
        print(f"{name}: {outcome.state} at step {summary.step} of {total}: {outcome.reason}")
        print(f"next: {attempt.folder.command('resume' if outcome.state == 'stopped' else 'report')}")
    sys.exit(outcome.exit_status)


def _free_name(attempt: Attempt, outcome: AttemptOutcome) -> AttemptOutcome:
    """Set a run aside if it failed before its first step; return the outcome with its new place."""
    run = attempt.folder
    submitted = (run.path / "jobs.jsonl").exists()
    vanished = not run.recipe_file.exists()  # another folder may be in its place
    if attempt.apart or submitted or vanished or lock_holder(run) is not None or has_stepped(run):
        return outcome
    try:
        aside = set_aside(run)
    except OSError:
        return outcome  # the error that ended the run matters more
    hint = "" if outcome.hint is None else outcome.hint.replace(str(run.path), str(aside.path)) + "; "
    return AttemptOutcome(
        outcome.state,
        outcome.reason.replace(str(run.path), str(aside.path)),
        f"{hint}no step was done, so the name {run.name} is free again: this run is now in {aside.path}",
        outcome.usage,
    )


def main() -> int:
    """Launcher without a terminal: run the attempt given as JSON on standard input, with what another agent left."""
    request = from_json(sys.stdin.read())
    attempt = Attempt.model_validate(request["attempt"])
    inherited = {name: FdEntry(fields) for name, fields in request["left"].items()}
    if request["door"] is not None:
        inherited["door"] = FdEntry({}, (request["door"],))
    with open_view(attempt, quiet=False) as view:
        outcome = run_launcher(attempt, view.tick, view.report_storage, inherited)
    if outcome.state == "failed" and not request["keep_name"]:
        outcome = _free_name(attempt, outcome)
    print(f"{outcome.state}: {outcome.reason}", file=sys.stderr)
    return outcome.exit_status


def start_launcher(
    attempt: Attempt,
    inherited: Mapping[str, Mapping[str, Any]] | None = None,
    door: int | None = None,
    shown: bool = False,
    keep_name: bool = True,
) -> subprocess.Popen[bytes]:
    """Start a launcher in its own session; it prints where this process does if `shown`, else into a log.

    `keep_name` as in `launch`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(umask_of(attempt.run))
        attempt.folder.logs.mkdir(exist_ok=True)
        output = None if shown else stack.enter_context(launcher_log(attempt).open("ab"))
        process = subprocess.Popen(
            [sys.executable, "-m", "headway.cli.launch"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=[] if door is None else [door],
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        request = {"attempt": attempt.model_dump(mode="json"), "left": dict(inherited or {}), "door": door}
        pipe.write(to_json(request | {"keep_name": keep_name}))
    return process


def launcher_log(attempt: Attempt) -> Path:
    """Return the log of what a terminal would show."""
    run = attempt.folder
    if not run.path.exists():
        run = find_set_aside(run.path.parent, run.name) or run
    return run.logs / f"{attempt.number:04d}-keeper.log"


def wait_for_agent(attempt: Attempt, launcher: subprocess.Popen[bytes]) -> int:
    """Return the process id of a launcher's agent once that holds the run's lock."""
    deadline = time.monotonic() + DETACH_TIMEOUT_S
    while (pid := lock_holder(attempt.folder)) is None:
        if launcher.poll() is not None or time.monotonic() > deadline:
            log = launcher_log(attempt)
            raise RunError(f"the agent of {attempt.run.name} did not start", hint=f"see its log: {log}")
        time.sleep(0.02)
    return pid


if __name__ == "__main__":
    sys.exit(main())
