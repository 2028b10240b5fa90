"""Starts an attempt from a verb: in this process with a live view, or in the background."""

import subprocess
import sys
import time

from headway.agent import Attempt, supervise
from headway.cli.text import print_json
from headway.cli.view import open_view, plan_lines, tell
from headway.errors import RunError, WorkerError
from headway.track import holder, read_plan, read_recipe, summarize

__all__ = ["launch"]

DETACH_TIMEOUT_S = 20.0


def launch(attempt: Attempt, *, detach: bool, json: bool) -> None:
    """Supervise an attempt to its end and exit with its status, or hand it to an agent of its own."""
    name, plan = attempt.run.name, read_plan(attempt.folder)
    planned = None if plan is None else plan.model_dump()
    for line in plan_lines(plan) if plan else []:
        tell(line)
    if detach:
        for note in attempt.notes:
            tell(f"note: {note}")
        pid = start_agent(attempt)
        if json:
            print_json({"run": name, "agent": pid, "plan": planned})
        else:
            print(name)
            print(
                f"next: headway logs {name} --follow, headway report {name}, headway stop {name}",
                file=sys.stderr,
            )
        return
    with open_view(attempt, quiet=json) as view:
        outcome = supervise(attempt, on_tick=view.tick)
    if outcome.state == "failed":
        raise WorkerError(f"{name}: {outcome.reason}", hint=outcome.hint)
    summary = summarize(attempt.folder)
    total = read_recipe(attempt.folder).train.steps
    if json:
        result = {"run": name, "state": outcome.state, "step": summary.step, "loss": summary.loss}
        print_json(result | {"plan": planned})
    else:
        print(f"{name}: {outcome.state} at step {summary.step} of {total}: {outcome.reason}")
        follow_up = f"headway resume {name}" if outcome.state == "stopped" else f"headway report {name}"
        print(f"next: {follow_up}")
    sys.exit(outcome.exit_status)


def main() -> int:
    """The agent as a process of its own: supervises the attempt given as JSON on standard input."""
    attempt = Attempt.model_validate_json(sys.stdin.read())
    with open_view(attempt, quiet=False) as view:
        outcome = supervise(attempt, on_tick=view.tick)
    print(f"{outcome.state}: {outcome.reason}", file=sys.stderr)
    return outcome.exit_status


def start_agent(attempt: Attempt) -> int:
    """An agent in a session of its own; returns its process id once it holds the run."""
    attempt.folder.logs.mkdir(exist_ok=True)
    log = attempt.folder.logs / f"{attempt.number:04d}-agent.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "headway.cli.launch"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(attempt.model_dump_json().encode())
    deadline = time.monotonic() + DETACH_TIMEOUT_S
    while holder(attempt.folder) != process.pid:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RunError(f"the agent of {attempt.run.name} did not start", hint=f"its log is {log}")
        time.sleep(0.02)
    return process.pid


if __name__ == "__main__":
    sys.exit(main())
