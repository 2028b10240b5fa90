"""`headway why`: why a job waits, from a record of decisions."""

import math
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json

__all__ = ["why"]


def why(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")],
    record: Annotated[Path, typer.Option("--from", metavar="DIR", help="What headway simulate --record wrote.")],
    at: Annotated[
        float | None, typer.Option("--at", metavar="SECONDS", help="When; by default at the end of the record.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="NAME", help="Whose decisions; by default headway's.")
    ] = None,
    json: Json = False,
) -> None:
    """Say why a job waits: what binds it, who holds what it waits for, when it may start, what would start it."""
    from dataclasses import asdict

    from headway.cli.text import print_json
    from headway.cluster.scheduler.decision_log import policies_in, record_of, state_at
    from headway.cluster.scheduler.wait_reasons import explain_wait as answer
    from headway.errors import UsageError

    there = policies_in(record)
    if policy is None and len(there) > 1 and "headway" not in there:
        raise UsageError(f"{record} has records of {', '.join(there)}", hint="--policy names one")
    name = policy or ("headway" if "headway" in there else there[0])
    if name not in there:
        raise UsageError(f"{record} has no record of {name}", hint=f"there are {', '.join(there)}")
    snapshot, found, history, _ = state_at(record_of(record, name), math.inf if at is None else at)
    try:
        told = answer(snapshot, snapshot.now_s if at is None else at, found, job, history)
    except UsageError as error:
        raise UsageError(error.message, hint=_life(record_of(record, name), job)) from None
    if json:
        print_json(asdict(told) | {"sentence": told.reason.sentence, "policy": name})
        return
    print(f"{told.job} {told.state} ({name}): {told.reason.sentence}")
    if told.holders:
        print("GPUs are held by")
        for holder in told.holders[:8]:
            kind = "job" if holder.jobs == 1 else "jobs"
            print(f"  {holder.tenant:20} {holder.gpus:>7,} in {holder.jobs:,} {kind}, {holder.guarantee:,} guaranteed")
    if told.start is not None:
        print(_when(told.start.p50_s, told.start.p90_s))
    for change in told.instead:
        print(f"it would start now by {change.sentence}")


def _when(p50_s: float, p90_s: float) -> str:
    """When it may start, in words."""
    from headway.cli.text import duration

    if math.isinf(p50_s):
        return "nobody can say when it starts: in half of the futures that were drawn it never did"
    surely = "never for sure" if math.isinf(p90_s) else f"in nine futures of ten within {duration(p90_s)}"
    return f"it starts within {duration(p50_s)} as likely as not, {surely}"


def _life(record: Path, job: str) -> str:
    """When a job was there."""
    from headway.cluster.scheduler.decision_log import job_times

    came, ended = job_times(record, job)
    if came is None:
        return "the record has no such job"
    until = "the end of the record" if ended is None else f"{ended:.0f} s"
    return f"it was there from {came:.0f} s to {until}: --at names a time"
