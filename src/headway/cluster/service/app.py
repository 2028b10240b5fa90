"""The HTTP API of the service: each route checks its input and calls one function of the control plane."""

import time
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from headway import __version__
from headway.cluster.engines.submissions import request_from_json
from headway.cluster.service.access_guard import AccessGuard, GuardSettings
from headway.cluster.service.access_routes import Caller, add_access_routes
from headway.cluster.service.accounts import Accounts
from headway.cluster.service.api_document import (
    ERROR_ANSWERS,
    complete_document,
    no_such_route,
    plain_answer,
    sentence_of,
)
from headway.cluster.service.audit import current_action
from headway.cluster.service.certificates import Authority
from headway.cluster.service.connection import UNKNOWN_NODE
from headway.cluster.service.demand import MOST_PRIORITY, job_of
from headway.cluster.service.live_service import LiveService
from headway.cluster.service.new_jobs import NewJob
from headway.cluster.service.node_routes import add_code_routes, add_node_routes
from headway.cluster.service.operation_routes import MOST_LINES, add_operation_routes
from headway.cluster.service.ownership import own_key, own_request
from headway.cluster.service.roles import Principal, may_change_job, visible_tenants
from headway.cluster.service.secret_keys import SecretKeys
from headway.cluster.service.stream_routes import (
    JobLog,
    LogRequest,
    OpenedStream,
    PortRequest,
    add_stream_routes,
    list_job_logs,
    open_log,
    open_port,
)
from headway.cluster.service.tenant_routes import add_tenant_routes
from headway.cluster.service.uploaded_code import CodeStore
from headway.cluster.service.views import find_jobs, list_jobs, list_nodes, tenant_jobs
from headway.cluster.service.visibility import own_explanation, own_node
from headway.errors import EngineError, EngineUnreachable, Forbidden, HeadwayError, UnknownNode, UsageError

MOST_AT_ONCE = 100
"""Submissions of one batch."""
JobName = Annotated[str, Path(min_length=1, max_length=200, description="Id, array, or name of the newest such job.")]


class JobSubmission(BaseModel):
    """A job to queue."""

    model_config = ConfigDict(extra="forbid")
    request: dict[str, Any]
    secrets: dict[str, str] = {}
    key: str | None = Field(default=None, min_length=1, max_length=200)
    dry: bool = False

    def new_job(self, caller: Principal, tenants: frozenset[str] | None) -> NewJob:
        """What is to be queued for a caller who sees these tenants."""
        request = own_request(request_from_json(self.request), caller, tenants)
        return NewJob(request, self.secrets, own_key(self.key, caller))


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


def make_app(
    service: LiveService,
    user_token: str,
    node_token: str,
    host: str,
    *,
    accounts: Accounts | None = None,
    guard: GuardSettings | None = None,
    authority: Authority | None = None,
    code: CodeStore | None = None,
    secret_keys: SecretKeys | None = None,
) -> FastAPI:
    """The application of a service; `user_token` acts for the first admin."""
    accounts = accounts or Accounts(service.store, time.time)
    accounts.admit_first(user_token)
    app = FastAPI(title="Headway", version=__version__, docs_url=None, redoc_url=None, responses=ERROR_ANSWERS)
    complete_document(app)
    app.state.stopping = service.stopping
    app.add_middleware(AccessGuard, accounts=accounts, settings=guard or GuardSettings(node_token, host))
    app.add_exception_handler(HeadwayError, _headway_error)
    app.add_exception_handler(Forbidden, partial(_forbidden, accounts))  # the nearest class counts
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ValidationError, _invalid)
    app.add_exception_handler(HTTPException, no_such_route)
    _add_job_routes(app, service)
    _add_cluster_routes(app, service)
    add_operation_routes(app, service)
    add_stream_routes(app, service.plane)
    add_node_routes(app, service, authority)
    add_code_routes(app, service, code)
    add_access_routes(app, service, accounts)
    add_tenant_routes(app, service, accounts, secret_keys)
    return app


def _add_job_routes(app: FastAPI, service: LiveService) -> None:
    plane, store = service.plane, service.store

    def tenants_of(caller: Principal) -> frozenset[str] | None:
        return visible_tenants(caller, plane.cluster.values["tenants"])

    def listed(job: str, caller: Principal) -> list[dict[str, Any]]:
        """The jobs of an id, array or name that the caller may see: others do not exist for it."""
        tenants = tenants_of(caller)
        with store.read() as connection:
            names = find_jobs(connection, job, tenants)
            if not names:
                unknown = UsageError if tenants is None else Forbidden  # it may be another tenant's
                raise unknown(f"no job '{job}'", hint="headway queue lists jobs")
            rows = list_jobs(connection, names, tenants=tenants)
        return [row | {"progress": plane.reports.progress.get(row["id"])} for row in rows]

    def to_change(job: str, caller: Principal) -> str:
        """The id or array of jobs that the caller may change."""
        rows = listed(job, caller)
        if not all(may_change_job(caller, row["user"]) for row in rows):
            raise Forbidden(f"job '{job}' is of user {rows[0]['user'] or 'unknown'}", hint="ask a tenant-admin")
        return str(rows[0]["array"] if job not in {row["id"] for row in rows} and rows[0]["array"] else rows[0]["id"])

    @app.post("/api/v1/jobs")
    def submit(submission: JobSubmission, caller: Caller) -> dict[str, Any]:
        new = submission.new_job(caller, tenants_of(caller))
        if submission.dry:
            plane.cluster.check_job(job_of(new.request, new.request.name, plane.now_s, plane.cluster.tenants))
            return {"id": None}
        return {"id": plane.submit_all([new])[0]}

    @app.post("/api/v1/jobs:batch")
    def submit_batch(batch: JobBatch, caller: Caller) -> dict[str, Any]:
        if any(submission.dry for submission in batch.jobs):
            raise UsageError("a batch cannot be tried", hint="leave dry out")
        tenants = tenants_of(caller)
        return {"ids": plane.submit_all([submission.new_job(caller, tenants) for submission in batch.jobs])}

    @app.get("/api/v1/jobs", response_model=list[dict[str, Any]])
    def jobs(
        caller: Caller, job: Annotated[list[str] | None, Query(max_length=1000)] = None, over: bool = False
    ) -> Response:
        with store.read() as connection:
            return plain_answer(list_jobs(connection, job or (), over=over, tenants=tenants_of(caller)))

    @app.get("/api/v1/jobs/{job}")
    def show(job: JobName, caller: Caller) -> list[dict[str, Any]]:
        return listed(job, caller)

    @app.get("/api/v1/jobs/{job}/why")
    def why(job: JobName, caller: Caller) -> dict[str, Any]:
        answer, tenants = service.why(listed(job, caller)[0]), tenants_of(caller)
        if tenants is None or answer["why"] is None:
            return answer
        with store.read() as connection:
            mine = tenant_jobs(connection, tenants)
        return answer | {"why": own_explanation(answer["why"], tenants, mine)}

    @app.post("/api/v1/jobs/{job}/signal")
    def send_signal(job: JobName, body: SignalRequest, caller: Caller) -> list[dict[str, Any]]:
        plane.signal(to_change(job, caller), body.number)
        return listed(job, caller)

    @app.post("/api/v1/jobs/{job}/priority")
    def set_priority(job: JobName, body: PriorityRequest, caller: Caller) -> dict[str, Any]:
        changed = plane.set_priority(to_change(job, caller), body.priority)
        return {"changed": changed, "jobs": listed(job, caller)}

    @app.post("/api/v1/jobs/{job}/streams")
    async def connect(job: JobName, body: PortRequest, caller: Caller) -> OpenedStream:
        name = await run_in_threadpool(to_change, job, caller)
        return await open_port(plane, store, caller.user, name, body)

    @app.get("/api/v1/jobs/{job}/logs")
    def logs(job: JobName, caller: Caller) -> list[JobLog]:
        name = listed(job, caller)[0]["id"]
        with store.read() as connection:
            return list_job_logs(connection, name)

    @app.post("/api/v1/jobs/{job}/logs")
    async def receive_log(job: JobName, body: LogRequest, caller: Caller) -> OpenedStream:
        rows = await run_in_threadpool(listed, job, caller)
        return await open_log(plane, store, caller.user, rows[0]["id"], body)

    @app.post("/api/v1/jobs/{job}/{verb}")
    def change(job: JobName, verb: Literal["cancel", "hold", "release"], caller: Caller) -> dict[str, Any]:
        name, done = to_change(job, caller), True
        if verb == "cancel":
            plane.cancel(name)
        else:
            done = plane.hold(name, verb == "hold")
        return {"changed": done, "jobs": listed(name, caller)}


def _add_cluster_routes(app: FastAPI, service: LiveService) -> None:
    plane, store = service.plane, service.store

    @app.get("/health")
    def health() -> dict[str, bool]:
        return {"ok": True}

    @app.get("/api/v1/nodes", response_model=list[dict[str, Any]])
    def nodes(caller: Caller) -> Response:
        tenants = visible_tenants(caller, plane.cluster.values["tenants"])
        with store.read() as connection:
            listed = list_nodes(connection)
            mine = None if tenants is None else tenant_jobs(connection, tenants)
        return plain_answer(listed if mine is None else [own_node(node, mine) for node in listed])

    @app.get("/api/v1/record")
    def record(after: Annotated[int, Query(ge=0)] = 0, limit: Annotated[int, Query(ge=1, le=MOST_LINES)] = 1000) -> Any:
        return plane.lines[max(after, plane.lines.first) :][:limit]


def _headway_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HeadwayError)
    status = 400 if error.usage else 503 if isinstance(error, EngineUnreachable) else 409
    usage = UNKNOWN_NODE if isinstance(error, UnknownNode) else "usage"
    kind = usage if error.usage else "engine" if isinstance(error, EngineError) else "other"
    return JSONResponse({"error": error.message, "hint": error.hint, "kind": kind}, status_code=status)


def _forbidden(accounts: Accounts, request: Request, error: Exception) -> JSONResponse:
    """The same answer as to any mistake, noted before it is given. Reading changes nothing and is not noted."""
    action = current_action()
    if action is not None:
        action.detail, action.recorded = str(error), True
        accounts.note_refusal(action)
    return _headway_error(request, error)


def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError | ValidationError)
    sentence = sentence_of(error.errors()[0])
    return JSONResponse({"error": sentence, "hint": None, "kind": "usage"}, status_code=422)
