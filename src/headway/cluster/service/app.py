"""The HTTP API of the service: each route checks its input and calls one function of the control plane."""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_jsonable_python

from headway import __version__
from headway.cluster.engines.submissions import request_from_json
from headway.cluster.service.access_guard import TokenGuard
from headway.cluster.service.demand import MOST_PRIORITY, job_of
from headway.cluster.service.event_sentences import events_of
from headway.cluster.service.live_service import LiveService
from headway.cluster.service.messages import REPORT
from headway.cluster.service.new_jobs import NewJob
from headway.cluster.service.views import find_jobs, list_jobs, list_nodes, name_jobs
from headway.errors import EngineError, EngineUnreachable, HeadwayError, UsageError

MOST_AT_ONCE = 100
"""Submissions of one batch."""
MOST_LINES = 10_000
"""Of the record, in one answer."""
POLL_S = 0.02
LONGEST_WAIT_S = 10.0


class JobSubmission(BaseModel):
    """A job to queue."""

    model_config = ConfigDict(extra="forbid")
    request: dict[str, Any]
    secrets: dict[str, str] = {}
    key: str | None = Field(default=None, min_length=1, max_length=200)
    dry: bool = False

    def new_job(self) -> NewJob:
        """What is to be queued."""
        return NewJob(request_from_json(self.request), self.secrets, self.key)


class JobBatch(BaseModel):
    """Jobs to queue together, all or none."""

    model_config = ConfigDict(extra="forbid")
    jobs: Annotated[list[JobSubmission], Field(min_length=1, max_length=MOST_AT_ONCE)]


class PriorityRequest(BaseModel):
    """A new priority."""

    model_config = ConfigDict(extra="forbid")
    priority: Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)]


class SignalRequest(BaseModel):
    """A signal to send."""

    model_config = ConfigDict(extra="forbid")
    number: Annotated[int, Field(ge=1, le=64)]


class NodeSync(BaseModel):
    """A node's report."""

    model_config = ConfigDict(extra="forbid")
    report: dict[str, Any]
    version: int | None = None
    """The version of its last orders: if they are still the same, the answer may wait."""
    wait_s: Annotated[float, Field(ge=0, le=LONGEST_WAIT_S)] = 0.0


def make_app(service: LiveService, user_token: str, node_token: str, host: str) -> FastAPI:
    """The application of a service."""
    app = FastAPI(title="Headway", version=__version__, docs_url=None, redoc_url=None)
    app.state.stopping = service.stopping
    app.add_middleware(TokenGuard, user_token=user_token, node_token=node_token, host=host)
    app.add_exception_handler(HeadwayError, _headway_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ValidationError, _invalid)
    _add_job_routes(app, service)
    _add_cluster_routes(app, service)
    return app


def _add_job_routes(app: FastAPI, service: LiveService) -> None:
    plane, store = service.plane, service.store

    def names_of(job: str) -> str:
        with store.read() as connection:
            names = find_jobs(connection, job)
        if not names:
            raise UsageError(f"no job '{job}'", hint="headway queue lists jobs")
        return names[0]

    def listed(name: str) -> list[dict[str, Any]]:
        with store.read() as connection:
            return list_jobs(connection, [name])

    @app.post("/api/v1/jobs")
    def submit(submission: JobSubmission) -> dict[str, Any]:
        new = submission.new_job()
        if submission.dry:
            plane.cluster.check_job(job_of(new.request, new.request.name, plane.now_s, plane.cluster.tenants))
            return {"id": None}
        return {"id": plane.submit_all([new])[0]}

    @app.post("/api/v1/jobs:batch")
    def submit_batch(batch: JobBatch) -> dict[str, Any]:
        if any(submission.dry for submission in batch.jobs):
            raise UsageError("a batch cannot be tried", hint="leave dry out")
        return {"ids": plane.submit_all([submission.new_job() for submission in batch.jobs])}

    @app.get("/api/v1/jobs")
    def jobs(
        job: Annotated[list[str] | None, Query(max_length=1000)] = None, over: bool = False
    ) -> list[dict[str, Any]]:
        with store.read() as connection:
            return list_jobs(connection, job or (), over=over)

    @app.get("/api/v1/jobs/{job}")
    def show(job: str) -> list[dict[str, Any]]:
        return listed(names_of(job))

    @app.get("/api/v1/jobs/{job}/why")
    def why(job: str) -> dict[str, Any]:
        return service.why(listed(names_of(job))[0])

    @app.post("/api/v1/jobs/{job}/signal")
    def send_signal(job: str, body: SignalRequest) -> list[dict[str, Any]]:
        plane.signal(names_of(job), body.number)
        return listed(names_of(job))

    @app.post("/api/v1/jobs/{job}/priority")
    def set_priority(job: str, body: PriorityRequest) -> dict[str, Any]:
        name = names_of(job)
        return {"changed": plane.set_priority(name, body.priority), "jobs": listed(name)}

    @app.post("/api/v1/jobs/{job}/{verb}")
    def change(job: str, verb: Literal["cancel", "hold", "release"]) -> dict[str, Any]:
        name, done = names_of(job), True
        if verb == "cancel":
            plane.cancel(name)
        else:
            done = plane.hold(name, verb == "hold")
        return {"changed": done, "jobs": listed(name)}


def _add_cluster_routes(app: FastAPI, service: LiveService) -> None:
    plane, store = service.plane, service.store

    @app.get("/health")
    def health() -> dict[str, bool]:
        return {"ok": True}

    @app.get("/api/v1/nodes")
    def nodes() -> list[dict[str, Any]]:
        with store.read() as connection:
            return list_nodes(connection)

    @app.get("/api/v1/record")
    def record(after: Annotated[int, Query(ge=0)] = 0, limit: Annotated[int, Query(ge=1, le=MOST_LINES)] = 1000) -> Any:
        return list(plane.lines[after : after + limit])

    @app.get("/api/v1/events")
    def events(
        after: Annotated[int, Query(ge=0)] = 0, limit: Annotated[int, Query(ge=1, le=MOST_LINES)] = 1000
    ) -> dict[str, Any]:
        lines = list(plane.lines[after : after + limit])
        happened = [event for number, line in enumerate(lines, after + 1) for event in events_of(number, line)]
        with store.read() as connection:
            return {"after": after + len(lines), "events": name_jobs(connection, happened)}

    @app.post("/api/v1/sync")
    async def sync(body: NodeSync, request: Request) -> Any:
        report = REPORT.validate_python(body.report)
        waited = 0.0
        while body.version == plane.changes and waited < body.wait_s and not service.stopping.is_set():
            await asyncio.sleep(POLL_S)
            waited += POLL_S
        del request
        version = plane.changes
        orders = await run_in_threadpool(plane.sync, report)
        return {"version": version, "orders": to_jsonable_python(orders)}


def _headway_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HeadwayError)
    status = 400 if error.usage else 503 if isinstance(error, EngineUnreachable) else 409
    kind = "usage" if error.usage else "engine" if isinstance(error, EngineError) else "other"
    return JSONResponse({"error": error.message, "hint": error.hint, "kind": kind}, status_code=status)


def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError | ValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return JSONResponse({"error": f"{where}: {first['msg']}", "hint": None, "kind": "usage"}, status_code=422)
