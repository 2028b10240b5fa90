"""The API of operation: events, usage, metrics."""

import math
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import FastAPI, Query, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_jsonable_python

from headway.cluster.engines.submissions import request_from_json
from headway.cluster.service.access_routes import Caller
from headway.cluster.service.api_document import plain_answer
from headway.cluster.service.demand import job_of
from headway.cluster.service.live_service import LiveService
from headway.cluster.service.ownership import own_request
from headway.cluster.service.roles import Principal, visible_tenants
from headway.cluster.service.usage import allocations_in, month_of, usage_of
from headway.cluster.service.views import name_jobs, own_events, own_names
from headway.cluster.service.visibility import OTHER_JOB, own_explanation
from headway.errors import UsageError

ADDED = "added"
"""Id of a job that is only tried."""
MOST_LINES = 10_000
"""Of the record, in one answer."""


class EventAnswer(BaseModel):
    """Something that happened."""

    seq: int
    at_s: float
    """Seconds of the scheduler's time."""
    kind: str
    sentence: str
    job: str | None
    node: str | None
    name: str | None
    tenant: str | None


class EventsAnswer(BaseModel):
    """What happened after some line of the record."""

    after: int
    """Ask for those after this line next."""
    events: list[EventAnswer]


class Trial(BaseModel):
    """A change to try."""

    model_config = ConfigDict(extra="forbid")
    request: dict[str, Any] | None = None
    """A job to add, as for a submission."""
    policy: str | None = Field(default=None, max_length=40)


class StartTimes(BaseModel):
    """Seconds of the scheduler's time until a job starts; null: it may never."""

    p50_s: float | None
    p90_s: float | None


class ComparedStart(BaseModel):
    """When a waiting job starts as things are, and after the change."""

    job: str
    name: str | None
    before: StartTimes
    after: StartTimes


class TrialAnswer(BaseModel):
    """What a change would do."""

    policy: str
    job: dict[str, Any] | None
    """The state of the added job, as an explanation."""
    stops: list[str]
    """Jobs that would be stopped or moved for it; those of other tenants without their ids."""
    waiting: list[ComparedStart]
    """The first of the queue."""


class UsageAnswer(BaseModel):
    """What a tenant used of one chip in a month."""

    tenant: str
    chip: str
    jobs: int
    gpu_hours: float
    cpu_hours: float


class MonthAnswer(BaseModel):
    """What tenants used in a month."""

    month: str
    usage: list[UsageAnswer]


def add_operation_routes(app: FastAPI, service: LiveService) -> None:
    """Add the routes."""
    plane, store = service.plane, service.store

    def tenants_of(caller: Principal) -> frozenset[str] | None:
        return visible_tenants(caller, plane.cluster.values["tenants"])

    @app.get("/api/v1/events", response_model=EventsAnswer)
    def events(
        caller: Caller,
        after: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_LINES)] = 1000,
    ) -> Response:
        after = min(max(after, plane.lines.first), len(plane.lines))
        lines = plane.lines[after : after + limit]
        with store.read() as connection:
            happened = name_jobs(connection, own_events(connection, after, lines, tenants_of(caller)))
        return plain_answer({"after": after + len(lines), "events": happened})

    @app.post("/api/v1/simulate")
    def simulate(trial: Trial, caller: Caller) -> TrialAnswer:
        tenants, job = tenants_of(caller), None
        if (trial.request is None) == (trial.policy is None):
            raise UsageError("a trial needs a request or a policy", hint="one of both")
        if trial.request is not None:
            request = own_request(request_from_json(trial.request), caller, tenants)
            job = job_of(request, ADDED, plane.now_s, plane.cluster.tenants)
            plane.cluster.check_job(job)
        answer = service.simulate(job, trial.policy)
        ids = [*answer["stops"], *(row["job"] for row in answer["waiting"])]
        with store.read() as connection:
            names = own_names(connection, ids, tenants)
        if answer["job"] is not None and tenants is not None:
            answer["job"] = own_explanation(answer["job"], tenants, {ADDED, *names})
        return TrialAnswer(
            policy=answer["policy"],
            job=None if answer["job"] is None else to_jsonable_python(answer["job"], inf_nan_mode="null"),
            stops=list(dict.fromkeys(name if name in names else OTHER_JOB for name in answer["stops"])),
            waiting=[
                ComparedStart(
                    job=row["job"], name=names[row["job"]], before=_finite(row["before"]), after=_finite(row["after"])
                )
                for row in answer["waiting"]
                if row["job"] in names
            ],
        )

    @app.get("/api/v1/usage")
    def usage(caller: Caller, month: Annotated[str | None, Query(max_length=10)] = None) -> MonthAnswer:
        now = plane.wall_s
        name = month or datetime.fromtimestamp(now, UTC).strftime("%Y-%m")
        begins, ends = month_of(name)
        with store.read() as connection:
            held = allocations_in(connection, begins, ends, tenants_of(caller))
        rows = [asdict(row) for row in usage_of(held, begins, ends, now, {}, plane.speed)]
        return MonthAnswer(month=name, usage=[UsageAnswer(**row) for row in rows])

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> PlainTextResponse:
        lines = plane.lines
        with store.read() as connection:
            text = service.metrics.text(connection, plane.wall_s, len(lines), len(lines) - lines.first)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _finite(estimate: dict[str, float]) -> StartTimes:
    known = {
        key: seconds if seconds is not None and math.isfinite(seconds) else None for key, seconds in estimate.items()
    }
    return StartTimes(**known)
