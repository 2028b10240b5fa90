"""The API of streams to ports of jobs: users open them and send, nodes connect and send back."""

import base64
import binascii
from typing import Annotated

from fastapi import FastAPI, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select

from headway.cluster.service.access_routes import Caller
from headway.cluster.service.audit import describe
from headway.cluster.service.messages import start_key
from headway.cluster.service.peer_certificate import PEER
from headway.cluster.service.plane import ControlPlane
from headway.cluster.service.port_streams import PART_BYTES, End, PortStream
from headway.cluster.service.store import ServiceStore
from headway.cluster.service.tables import jobs, node_conditions, ranks
from headway.errors import EngineError, UsageError

StreamName = Annotated[str, Path(min_length=1, max_length=40, description="Id of a stream.")]
Offset = Annotated[int, Query(ge=0, lt=2**62, description="Of the first byte that has not arrived.")]


class PortRequest(BaseModel):
    """A port to connect to, on the loopback address of a job's first rank."""

    model_config = ConfigDict(extra="forbid")
    port: Annotated[int, Field(ge=1, le=65535)]


class OpenedStream(BaseModel):
    """A stream that was opened."""

    stream: str
    node: str


class StreamPart(BaseModel):
    """Bytes of a stream."""

    model_config = ConfigDict(extra="forbid")
    offset: Annotated[int, Field(ge=0, lt=2**62)]
    data: Annotated[str, Field(max_length=4 * PART_BYTES // 3 + 4)] = ""
    """As base64."""
    ended: bool = False
    """Whether no more will come."""


class ReceivedPart(BaseModel):
    """Bytes that the other end has sent; none if it has not within two seconds."""

    data: str
    ended: bool


class NextOffset(BaseModel):
    """Where the next part begins: before the end of this one, if the other end is slow."""

    next: int


class StreamFailure(BaseModel):
    """Why a node could not connect."""

    model_config = ConfigDict(extra="forbid")
    reason: str | None = Field(default=None, max_length=400)


class ClosedStream(BaseModel):
    """Whether a stream is closed: it is not while the other end has not received everything, unless at once."""

    closed: bool = True


def add_stream_routes(app: FastAPI, plane: ControlPlane) -> None:
    """Add the routes of open streams, for users and for nodes."""
    streams = plane.streams

    @app.put("/api/v1/streams/{stream}")
    async def send(stream: StreamName, body: StreamPart, caller: Caller) -> NextOffset:
        return await _put(streams.of_user(stream, caller.user), "user", body)

    @app.get("/api/v1/streams/{stream}")
    async def receive(stream: StreamName, offset: Offset, caller: Caller) -> ReceivedPart:
        part = await _get(streams.of_user(stream, caller.user), "node", offset)
        streams.of_user(stream, caller.user)  # it may have failed meanwhile
        return part

    @app.delete("/api/v1/streams/{stream}")
    async def close(stream: StreamName, caller: Caller, *, at_once: bool = False) -> ClosedStream:
        mine = streams.of_user(stream, caller.user)
        sent = mine.sent["user"]
        if not at_once:
            await sent.wait(lambda: sent.delivered)
        if at_once or sent.delivered:
            streams.close(mine)
        return ClosedStream(closed=at_once or sent.delivered)

    @app.put("/api/v1/node-streams/{stream}")
    async def node_send(stream: StreamName, body: StreamPart, request: Request) -> NextOffset:
        return await _put(streams.of_node(stream, request.scope.get(PEER)), "node", body)

    @app.get("/api/v1/node-streams/{stream}")
    async def node_receive(stream: StreamName, offset: Offset, request: Request) -> ReceivedPart:
        return await _get(streams.of_node(stream, request.scope.get(PEER)), "user", offset)

    @app.post("/api/v1/node-streams/{stream}/failure")
    async def node_fail(stream: StreamName, body: StreamFailure, request: Request) -> ClosedStream:
        streams.close(streams.of_node(stream, request.scope.get(PEER)), body.reason)
        return ClosedStream()


async def open_stream(plane: ControlPlane, store: ServiceStore, user: str, job: str, port: int) -> OpenedStream:
    """Open a stream to a port of a running job's first rank; the caller may change the job."""
    start, node, peer = await run_in_threadpool(_first_rank, store, job, port)
    return OpenedStream(stream=plane.streams.open(user, node, peer, start, port).id, node=node)


def _first_rank(store: ServiceStore, job: str, port: int) -> tuple[str, str, str | None]:
    """The key of a running job's first rank, its node, and the fingerprint of that."""
    first = (ranks.c.job == jobs.c.id) & (ranks.c.start == jobs.c.starts) & (ranks.c.rank == 0)
    placed = jobs.outerjoin(ranks, first).outerjoin(node_conditions, node_conditions.c.name == ranks.c.node)
    columns = (jobs.c.state, jobs.c.starts, ranks.c.node, node_conditions.c.fingerprint)
    with store.write() as transaction:  # for the audit log
        describe(f"port {port} of job {job}")
        row = transaction.execute(select(*columns).select_from(placed).where(jobs.c.id == job)).first()
    if row is None:
        raise UsageError(f"'{job}' is an array: its tasks have ports of their own", hint=f"one task: {job}_0")
    if row.state != "running":
        raise EngineError(f"job {job} is {row.state}: only running jobs have ports")
    return start_key(job, row.starts, 0), row.node, row.fingerprint


async def _put(stream: PortStream, end: End, part: StreamPart) -> NextOffset:
    try:
        data = base64.b64decode(part.data, validate=True)
    except (binascii.Error, ValueError):
        raise UsageError("data of a stream is not base64") from None
    direction = stream.sent[end]
    await direction.wait(lambda: not direction.full or direction.ended)
    return NextOffset(next=direction.put(part.offset, data, part.ended))


async def _get(stream: PortStream, sender: End, offset: int) -> ReceivedPart:
    direction = stream.sent[sender]
    direction.get(offset)
    await direction.wait(lambda: direction.next > offset or direction.ended)
    data, ended = direction.get(offset)
    return ReceivedPart(data=base64.b64encode(data).decode(), ended=ended)
