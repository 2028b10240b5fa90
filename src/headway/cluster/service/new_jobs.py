"""Jobs as they are queued: the rows of a submission, and of the jobs that must be over before it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from sqlalchemy import insert, or_, select

from headway.cluster.engines.engine import LaunchRequest
from headway.cluster.engines.submissions import request_from_json, request_to_json
from headway.cluster.scheduler.jobs import job_to_json
from headway.cluster.service.demand import job_of, tenant_of
from headway.cluster.service.store import Transaction
from headway.cluster.service.tables import dependencies, jobs
from headway.errors import UsageError

MOST_DEPENDENCIES = 100
"""Of one job."""
Condition = Literal["ok", "any"]
_PER_SUBMISSION = frozenset({"folder", "environment"})
"""What may differ in a repeated request: the folder for its logs is new, and variables are those of a terminal."""
CONDITIONS: tuple[Condition, ...] = ("ok", "any")


@dataclass(frozen=True)
class NewJob:
    """A submission: a job, or the tasks of an array."""

    request: LaunchRequest
    secrets: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    """Of the submission: a tenant that repeats it gets the same job."""


@dataclass(frozen=True)
class Queued:
    """What became of submissions."""

    ids: list[str]
    """In their order; of a repeated one, of the job that it queued first."""
    added: list[tuple[NewJob, list[str]]]
    """The others, and the ids of their jobs."""


def queue_jobs(
    transaction: Transaction,
    submissions: Sequence[NewJob],
    number: int,
    now_s: float,
    wall_s: float,
    tenants: list[str],
) -> Queued:
    """Queue jobs; the first that is new gets this number."""
    keys = [f"{tenant_of(new.request, tenants)}:{new.key}" for new in submissions if new.key is not None]
    known = _queued_before(transaction, keys) if keys else {}
    queued, rows, needs = Queued([], []), list[dict[str, Any]](), list[dict[str, Any]]()
    for new in submissions:
        of_job = job_rows(new, number + len(rows), now_s, wall_s, tenants)
        key, names = of_job[0]["key"], [row["id"] for row in of_job]
        if key not in known:
            needs += dependency_rows(transaction, new.request, of_job[0]["tenant"], names)
            queued.added.append((new, names))
            rows += of_job
        else:
            _check_same(new, known[key])
        before = known.get(key, _Submitted(str(of_job[0]["number"]), new.request.name, of_job[0]["request"]))
        queued.ids.append(before.job)
        known |= {key: before} if key is not None else {}
    for table, values in ((jobs, rows), (dependencies, needs)):
        if values:
            transaction.execute(insert(table), values)
    transaction.add_lines([{"at": now_s, "job": json.loads(row["demand"])} for row in rows if row["offered"]])
    return queued


@dataclass(frozen=True)
class _Submitted:
    """What a key was used for first: the id of a job or array, its name, and its request as JSON."""

    job: str
    name: str
    request: str


def _queued_before(transaction: Transaction, keys: Sequence[str]) -> dict[str | None, _Submitted]:
    """Return the jobs of keys that were used before."""
    columns = jobs.c["key", "id", "array", "name", "request"]
    rows = transaction.execute(select(*columns).where(jobs.c.key.in_(keys)))
    return {row.key: _Submitted(row.array or row.id, row.name, row.request) for row in rows}


def _check_same(new: NewJob, before: _Submitted) -> None:
    """Raise UsageError if a key is used again for something else; where it runs and logs may differ."""
    first, again = request_from_json(json.loads(before.request)), new.request
    compared = {field.name for field in fields(again)} - _PER_SUBMISSION
    differing = sorted(name for name in compared if getattr(again, name) != getattr(first, name))
    if differing:
        raise UsageError(
            f"job {before.job} ({before.name}) has the same key and another {', '.join(differing)}",
            hint="choose another key for another job, or repeat the command as it was",
        )


def job_rows(new: NewJob, number: int, now_s: float, wall_s: float, tenants: list[str]) -> list[dict[str, Any]]:
    """Return the rows of a submission: one, or one per task of an array; the first has this number."""
    request = new.request
    names = [f"{number}_{task}" for task in range(request.array)] if request.array else [str(number)]
    text = json.dumps(request_to_json(request))
    limited = request.array is not None and request.at_once is not None
    offered = not limited and not requested_dependencies(request)  # else offers.py looks when its turn has come
    rows = []
    for task, name in enumerate(names):
        job = job_of(request, name, now_s, tenants)
        rows.append(
            {
                "id": name,
                "number": number + task,
                "name": request.name,
                "tenant": job.tenant,
                "request": text,
                "demand": json.dumps(job_to_json(job)),
                "state": "waiting",
                "offered": offered,
                "submitted": wall_s,
                "array": str(number) if request.array else None,
                "at_once": request.at_once,
                "key": f"{job.tenant}:{new.key}" if task == 0 and new.key else None,
            }
        )
    return rows


def requested_dependencies(request: LaunchRequest) -> list[tuple[str, Condition]]:
    """Return the jobs that a request waits for, as it names them; UsageError for a condition that does not exist."""
    dependencies = list[tuple[str, Condition]]()
    for text in filter(None, request.site.get("after", "").split(",")):
        name, _, stated = (text if ":" in text else f"{text}:ok").strip().rpartition(":")
        condition = next((known for known in CONDITIONS if known == stated), None)
        if not name or condition is None:
            raise UsageError(
                f"job {request.name}: --after {text.strip()!r}",
                hint="JOB (must succeed), or JOB:any (must be over)",
            )
        dependencies.append((name, condition))
    if len(dependencies) > MOST_DEPENDENCIES:
        raise UsageError(
            f"job {request.name} waits for {len(dependencies)} jobs", hint=f"at most {MOST_DEPENDENCIES}; use an array"
        )
    return dependencies


def dependency_rows(
    transaction: Transaction, request: LaunchRequest, tenant: str, names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the rows of the dependencies of new jobs, on jobs of their tenant: an id or array, else a name."""
    rows = list[dict[str, Any]]()
    for name, condition in requested_dependencies(request):
        known = (jobs.c.tenant == tenant) & or_(jobs.c.id == name, jobs.c.array == name)
        needs: str | None = name
        if transaction.execute(select(jobs.c.id).where(known).limit(1)).first() is None:
            named = (jobs.c.tenant == tenant) & (jobs.c.name == name)
            newest = select(jobs.c.id, jobs.c.array).where(named).order_by(jobs.c.number.desc()).limit(1)
            row = transaction.execute(newest).first()
            needs = None if row is None else row.array or row.id
        if needs is None:
            raise UsageError(f"job {request.name}: no job '{name}' of tenant {tenant} to wait for")
        rows += [{"job": job, "needs": needs, "condition": condition} for job in dict.fromkeys(names)]
    return list({(row["job"], row["needs"], row["condition"]): row for row in rows}.values())
