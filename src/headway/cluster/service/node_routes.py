"""The API of nodes: joining, reports, and what operators ask of them."""

from typing import Annotated, Any, Literal

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Path, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from headway.cluster.service.api_document import plain_answer
from headway.cluster.service.certificates import Authority
from headway.cluster.service.join import (
    JoinRequest,
    Name,
    check_protocol,
    join,
    make_join_token,
    remove_node,
)
from headway.cluster.service.live_service import LiveService
from headway.cluster.service.messages import PROTOCOL, REPORT
from headway.cluster.service.node_reports import check_code
from headway.cluster.service.peer_certificate import PEER
from headway.cluster.service.uploaded_code import CodeStore
from headway.errors import EngineError

LONGEST_WAIT_S = 10.0
REPORT_THREADS = 16
"""For reports with news: users' requests have other threads, and need not wait until all nodes have come back."""
Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="SHA-256 of an archive of code.")]
_ARCHIVE = {
    "requestBody": {
        "required": True,
        "content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}},
    }
}
NodeName = Annotated[str, Path(min_length=1, max_length=200, description="Name of a node.")]


class NodeSync(BaseModel):
    """A node's report."""

    model_config = ConfigDict(extra="forbid")
    report: dict[str, Any]
    version: int | None = None
    """The version of its last orders: if they are still the same, the answer may wait."""
    wait_s: Annotated[float, Field(ge=0, le=LONGEST_WAIT_S)] = 0.0
    protocol: int = PROTOCOL


class JoinTokenRequest(BaseModel):
    """A join token to make."""

    model_config = ConfigDict(extra="forbid")
    replace: Name | None = None
    """A node that may get another certificate."""


class JoinToken(BaseModel):
    """A join token; its text is told this once."""

    token: str
    expires: float


class Joined(BaseModel):
    """What a node needs to report."""

    name: str
    certificate: str
    cluster: str
    tenants: list[str]
    """Whose jobs it runs."""


class NodeChange(BaseModel):
    """What an operator's request has changed."""

    changed: bool
    jobs: list[str]
    """Asked to save and stop."""


class Maintenance(BaseModel):
    """When a node is to be empty."""

    model_config = ConfigDict(extra="forbid")
    begins: Annotated[float, Field(ge=0, le=1e12)]
    """Unix seconds."""
    ends: Annotated[float, Field(ge=0, le=1e12)]


def add_node_routes(app: FastAPI, service: LiveService, authority: Authority | None) -> None:
    """Add the routes; without an authority no node can join."""
    plane, store, threads = service.plane, service.store, CapacityLimiter(REPORT_THREADS)

    @app.post("/api/v1/sync", response_model=Any)
    async def sync(body: NodeSync, request: Request) -> Response:
        report = REPORT.validate_python(body.report)
        check_protocol(report.node, body.protocol, "")
        changes = plane.node_changes
        if body.version is not None:
            await changes.wait(report.node, body.version, body.wait_s)
        version = changes.version(report.node)
        peer = request.scope.get(PEER)
        orders = plane.reports.repeated(report, peer)
        orders = orders or await to_thread.run_sync(plane.sync, report, peer, limiter=threads)
        return plain_answer({"version": version, "orders": orders})

    @app.post("/api/v1/join")
    def join_cluster(asked: JoinRequest) -> Joined:
        return Joined(**join(plane, store, _authority(authority), asked))

    @app.post("/api/v1/join-tokens")
    def join_token(body: JoinTokenRequest) -> JoinToken:
        _authority(authority)
        token, expires = make_join_token(store, plane.wall_s, body.replace)
        return JoinToken(token=token, expires=expires)

    @app.delete("/api/v1/nodes/{node}")
    def remove(node: NodeName) -> NodeChange:
        remove_node(plane, store, node)
        return NodeChange(changed=True, jobs=[])

    @app.put("/api/v1/nodes/{node}/maintenance")
    def maintain(node: NodeName, body: Maintenance) -> NodeChange:
        plane.fleet.schedule_maintenance(node, body.begins, body.ends)
        return NodeChange(changed=True, jobs=[])

    @app.delete("/api/v1/nodes/{node}/maintenance")
    def cancel_maintenance(node: NodeName) -> NodeChange:
        return NodeChange(changed=plane.fleet.cancel_maintenance(node), jobs=[])

    @app.post("/api/v1/nodes/{node}/{verb}")
    def change(node: NodeName, verb: Literal["cordon", "uncordon", "drain"]) -> NodeChange:
        if verb == "drain":
            return NodeChange(changed=True, jobs=plane.fleet.drain(node))
        return NodeChange(changed=plane.fleet.cordon(node, verb == "cordon"), jobs=[])


def add_code_routes(app: FastAPI, service: LiveService, code: CodeStore | None) -> None:
    """Add the routes by which code comes from users, and goes to the nodes that run it; without a store none does."""

    def store() -> CodeStore:
        if code is None:
            raise EngineError("this service keeps no uploaded code", hint="headway up does")
        return code

    @app.put("/api/v1/code/{digest}", openapi_extra=_ARCHIVE)
    async def put_code(digest: Digest, request: Request) -> dict[str, str]:
        data = await request.body()
        await run_in_threadpool(store().put, digest, data)
        return {"digest": digest}

    @app.get("/api/v1/code/{digest}", response_class=Response)
    def get_code(digest: Digest, request: Request) -> Response:
        check_code(service.store, digest, request.scope.get(PEER))
        return Response(store().get(digest), media_type="application/gzip")


def _authority(authority: Authority | None) -> Authority:
    if authority is None:
        raise EngineError(
            "nodes join over TLS, and this service has none", hint="headway up --host ADDRESS, or --tls on loopback"
        )
    return authority
