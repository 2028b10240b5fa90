"""The API of operation: events, usage, metrics."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

from fastapi import FastAPI, Query
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from headway.cluster.service.access_routes import Caller
from headway.cluster.service.live_service import LiveService
from headway.cluster.service.roles import Principal, visible_tenants
from headway.cluster.service.usage import allocations_in, month_of, usage_of
from headway.cluster.service.views import name_jobs, own_events

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

    @app.get("/api/v1/events")
    def events(
        caller: Caller,
        after: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_LINES)] = 1000,
    ) -> EventsAnswer:
        after = min(max(after, plane.lines.first), len(plane.lines))
        lines = plane.lines[after : after + limit]
        with store.read() as connection:
            happened = name_jobs(connection, own_events(connection, after, lines, tenants_of(caller)))
        return EventsAnswer(after=after + len(lines), events=[EventAnswer(**event) for event in happened])

    @app.get("/api/v1/usage")
    def usage(caller: Caller, month: Annotated[str | None, Query(max_length=10)] = None) -> MonthAnswer:
        now = plane.wall_s
        name = month or datetime.fromtimestamp(now, UTC).strftime("%Y-%m")
        begins, ends = month_of(name)
        with store.read() as connection:
            held = allocations_in(connection, begins, ends, tenants_of(caller))
        rows = [asdict(row) for row in usage_of(held, begins, ends, now, {})]
        return MonthAnswer(month=name, usage=[UsageAnswer(**row) for row in rows])

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> PlainTextResponse:
        lines = plane.lines
        with store.read() as connection:
            text = service.metrics.text(connection, plane.wall_s, len(lines), len(lines) - lines.first)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")
