"""`headway why`: explains why a job waits, from recorded scheduling decisions."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json
from headway.cli.text import duration, print_json
from headway.cluster.scheduler.decision_log import job_times, policies_in, record_of, state_at
from headway.cluster.scheduler.wait_reasons import explain_wait as answer
from headway.errors import UsageError


def why(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.")],
    record: Annotated[Path, typer.Option("--from", metavar="DIR", help="Folder written by headway simulate --record.")],
    at: Annotated[
        float | None, typer.Option("--at", metavar="SECONDS", help="Time to explain (default: the end of the record).")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="NAME", help="Policy to explain (default: headway).")
    ] = None,
    json: Json = False,
) -> None:
    """Explain why a job waits: what blocks it, who holds the GPUs, when it may start, what would start it now."""
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
    if wait.holders:
        print("GPUs are held by")
        for holder in wait.holders[:8]:
            kind = "job" if holder.jobs == 1 else "jobs"
            print(f"  {holder.tenant:20} {holder.gpus:>7,} in {holder.jobs:,} {kind}, {holder.guarantee:,} guaranteed")
    if wait.start is not None:
        print(_when(wait.start.p50_s, wait.start.p90_s))
    for change in wait.instead:
        print(f"it would start now by {change.sentence}")


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
