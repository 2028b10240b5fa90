"""`headway why`: explains why a job waits, from recorded scheduling decisions."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.options import Json, Runs
from headway.cli.service_jobs import gpus_of, state_of
from headway.cli.text import duration, print_json, wrap_lines
from headway.cluster.scheduler.decision_log import job_times, policies_in, record_of, state_at
from headway.cluster.scheduler.wait_reasons import explain_wait as answer
from headway.cluster.service.connection import connect, job_path
from headway.errors import UsageError
from headway.track import runs_root


def why(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.")],
    record: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Folder written by headway simulate --record, not the service."),
    ] = None,
    at: Annotated[
        float | None, typer.Option("--at", metavar="SECONDS", help="Time to explain (default: the end of the record).")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="NAME", help="Policy to explain (default: headway).")
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Explain why a job of the service, or of a recorded simulation, waits.

    It says what blocks it, who holds the GPUs, when it may start, and what would start it now.
    """
    if record is None:
        if at is not None or policy is not None:
            raise UsageError("--at and --policy are for recorded simulations", hint="--from DIR")
        _explain_live(runs_root(runs), job, json)
        return
    policies = policies_in(record)
    if policy is None and len(policies) > 1 and "headway" not in policies:
        raise UsageError(f"{record} has records of {', '.join(policies)}", hint="choose one with --policy")
    name = policy or ("headway" if "headway" in policies else policies[0])
    if name not in policies:
        raise UsageError(f"{record} has no record of {name}", hint=f"available: {', '.join(policies)}")
    snapshot, jobs, history, _ = state_at(record_of(record, name), math.inf if at is None else at)
    try:
        wait = answer(snapshot, snapshot.now_s if at is None else at, jobs, job, history)
    except UsageError as error:
        raise UsageError(error.message, hint=_lifetime(record_of(record, name), job)) from None
    if json:
        print_json(asdict(wait) | {"sentence": wait.reason.sentence, "policy": name})
        return
    print(f"{wait.job} {wait.state} ({name}): {wait.reason.sentence}")
    _print_wait(asdict(wait))


def _explain_live(root: Path, name: str, json: bool) -> None:
    """Explain a job of the service: by the scheduler if it waits there, else by what is recorded of it."""
    row = connect(root).get(job_path(name, "why"))
    if json:
        print_json(row)
        return
    wait, title = row["why"], f"job {row['id']} ({row['name']})"
    if wait is None:
        on = ", ".join(f"{place['node']} GPUs {','.join(place['gpus']) or '-'}" for place in row["placement"])
        reason = "held by a user; headway release lets it start" if row["held"] else row["reason"]
        size = f"{gpus_of(row)} GPUs" if row.get("sizes") else ""
        text = "; ".join(filter(None, (on, size, reason)))
        print("\n".join(wrap_lines(f"{title} is {state_of(row)}" + (f": {text}" if text else ""))))
        return
    print("\n".join(wrap_lines(f"{title} {wait['state']}: {wait['sentence']}")))
    _print_wait(wait)


def _print_wait(wait: dict[str, Any]) -> None:
    """Print who holds GPUs, when a job may start, and what would start it now."""
    if wait["holders"]:
        print("GPUs are held by")
    for holder in wait["holders"][:8]:
        kind, jobs = "job" if holder["jobs"] == 1 else "jobs", holder["jobs"]
        guarantee = f"{holder['guarantee']:,} guaranteed"
        print(f"  {holder['tenant']:20} {holder['gpus']:>7,} in {jobs:,} {kind}, {guarantee}")
    if wait["start"] is not None:
        print(_when(wait["start"]["p50_s"], wait["start"]["p90_s"]))
    for change in wait["instead"]:
        print(f"it would start now by {change['sentence']}")


def _when(p50_s: float, p90_s: float) -> str:
    """Return when a job may start, in words."""
    if math.isinf(p50_s):
        return "start time unknown: it never started in half of the simulated futures"
    p90 = "never" if math.isinf(p90_s) else f"within {duration(p90_s)}"
    return f"start within {duration(p50_s)} (50%), {p90} (90%)"


def _lifetime(record: Path, job: str) -> str:
    """Return when a job was in the record."""
    submitted_s, ended = job_times(record, job)
    if submitted_s is None:
        return "the record has no such job"
    until = "the end of the record" if ended is None else f"{ended:.0f} s"
    return f"it existed from {submitted_s:.0f} s to {until}: choose a time with --at"
