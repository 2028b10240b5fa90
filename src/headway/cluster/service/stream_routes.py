"""The API of streams between users and jobs: to ports, where both ends send, and from logs, where the node does."""

import base64
import binascii
from typing import Annotated

from fastapi import FastAPI, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, select

from headway.cluster.service.access_routes import Caller
from headway.cluster.service.audit import describe
from headway.cluster.service.fleet import AWAY_S
from headway.cluster.service.job_streams import PART_BYTES, End, JobStream
from headway.cluster.service.messages import start_key
from headway.cluster.service.plane import ControlPlane
from headway.cluster.service.store import ServiceStore
from headway.cluster.service.tables import former_ranks, jobs, node_conditions, nodes, ranks
from headway.errors import EngineError, UsageError

StreamName = Annotated[str, Path(min_length=1, max_length=40, description="Id of a stream.")]
Offset = Annotated[int, Query(ge=0, lt=2**62, description="Of the first byte that has not arrived.")]


class PortRequest(BaseModel):
    """A port to connect to, on the loopback address of a rank of a job."""

    model_config = ConfigDict(extra="forbid")
    port: Annotated[int, Field(ge=1, le=65535)]
    rank: Annotated[int, Field(ge=0, lt=2**31)] = 0


class LogRequest(BaseModel):
    """A log to receive: what one rank of a start printed."""

    model_config = ConfigDict(extra="forbid")
    start: Annotated[int, Field(ge=1, lt=2**31)]
    rank: Annotated[int, Field(ge=0, lt=2**31)] = 0
    follow: bool = False
    """Whether to go on until the start has ended."""


class JobLog(BaseModel):
    """A log of a job, and the node that has it if the job's folder does not."""

    start: int
    rank: int
    node: str


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
    """Why a node cannot carry a stream."""

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
        return await _put(streams.of_node(stream, plane.certificates.shown(request.scope)), "node", body)

    @app.get("/api/v1/node-streams/{stream}")
    async def node_receive(stream: StreamName, offset: Offset, request: Request) -> ReceivedPart:
        return await _get(streams.of_node(stream, plane.certificates.shown(request.scope)), "user", offset)

    @app.post("/api/v1/node-streams/{stream}/failure")
    async def node_fail(stream: StreamName, body: StreamFailure, request: Request) -> ClosedStream:
        streams.close(streams.of_node(stream, plane.certificates.shown(request.scope)), body.reason)
        return ClosedStream()


async def open_port(plane: ControlPlane, store: ServiceStore, user: str, job: str, asked: PortRequest) -> OpenedStream:
    """Open a stream to a port of a rank of a running job; the caller may change the job."""
    start, node, peer = await run_in_threadpool(_running_rank, store, job, asked)
    return OpenedStream(stream=plane.streams.open_port(user, node, peer, start, asked.port).id, node=node)


async def open_log(plane: ControlPlane, store: ServiceStore, user: str, job: str, asked: LogRequest) -> OpenedStream:
    """Open a stream from a log of a job, which the caller may see."""
    node, peer = await run_in_threadpool(_log_place, plane, store, job, asked)
    start = start_key(job, asked.start, asked.rank)
    return OpenedStream(stream=plane.streams.open_log(user, node, peer, start, follow=asked.follow).id, node=node)


def list_job_logs(connection: Connection, job: str) -> list[JobLog]:
    """The logs of a job, of its earlier starts too."""
    exited = (ranks.c.state == "exited") & ranks.c.result.is_not(None)  # else it never began
    begun = (ranks.c.job == job) & ((ranks.c.state == "running") | exited)
    places = [
        *connection.execute(select(former_ranks).where(former_ranks.c.job == job)),
        *connection.execute(select(ranks).where(begun)),
    ]
    logs = [JobLog(start=row.start, rank=row.rank, node=row.node) for row in places]
    return sorted(logs, key=lambda log: (log.start, log.rank))


def _log_place(plane: ControlPlane, store: ServiceStore, job: str, asked: LogRequest) -> tuple[str, str | None]:
    """The node that has a log, and its fingerprint; EngineError if it cannot be asked."""
    what = f"the log of start {asked.start} of job {job}, rank {asked.rank},"
    with store.read() as connection:
        logs = list_job_logs(connection, job)
        if not logs:
            raise EngineError(f"job {job} has no logs: nothing of it has started yet", hint=f"headway why {job}")
        place = next((log.node for log in logs if (log.start, log.rank) == (asked.start, asked.rank)), None)
        if place is None:
            raise UsageError(
                f"job {job} has no start {asked.start} with rank {asked.rank}",
                hint=f"the newest is start {logs[-1].start}, with ranks 0 to {logs[-1].rank}",
            )
        joined = nodes.outerjoin(node_conditions, node_conditions.c.name == nodes.c.name)
        columns = select(nodes.c.name, node_conditions.c.fingerprint).select_from(joined)
        node = connection.execute(columns.where(nodes.c.name == place)).first()
    if node is None:
        raise EngineError(f"{what} was on node {place}, which was removed")
    if plane.fleet.silence.silent_for(AWAY_S, [place]):
        raise EngineError(f"{what} is on node {place}, whose agent does not report", hint="headway nodes")
    return node.name, node.fingerprint


def _running_rank(store: ServiceStore, job: str, asked: PortRequest) -> tuple[str, str, str | None]:
    """The key of a rank of a running job, its node, and the fingerprint of that."""
    mine = (ranks.c.job == jobs.c.id) & (ranks.c.start == jobs.c.starts) & (ranks.c.rank == asked.rank)
    placed = jobs.outerjoin(ranks, mine).outerjoin(node_conditions, node_conditions.c.name == ranks.c.node)
    columns = (jobs.c.state, jobs.c.starts, ranks.c.node, node_conditions.c.fingerprint)
    with store.write() as transaction:  # for the audit log
        describe(f"port {asked.port} of job {job}" + (f", rank {asked.rank}" if asked.rank else ""))
        row = transaction.execute(select(*columns).select_from(placed).where(jobs.c.id == job)).first()
    if row is None:
        raise UsageError(f"'{job}' is an array: its tasks have ports of their own", hint=f"one task: {job}_0")
    if row.state != "running":
        raise EngineError(f"job {job} is {row.state}: only running jobs have ports")
    if row.node is None:
        raise UsageError(
            f"job {job} has no rank {asked.rank}", hint="headway queue shows its machines; ranks count from 0"
        )
    return start_key(job, row.starts, asked.rank), row.node, row.fingerprint


async def _put(stream: JobStream, end: End, part: StreamPart) -> NextOffset:
    try:
        data = base64.b64decode(part.data, validate=True)
    except (binascii.Error, ValueError):
        raise UsageError("data of a stream is not base64") from None
    direction = stream.sent[end]
    await direction.wait(lambda: not direction.full or direction.ended)
    return NextOffset(next=direction.put(part.offset, data, part.ended))


async def _get(stream: JobStream, sender: End, offset: int) -> ReceivedPart:
    direction = stream.sent[sender]
    direction.get(offset)
    await direction.wait(lambda: direction.next > offset or direction.ended)
    data, ended = direction.get(offset)
    return ReceivedPart(data=base64.b64encode(data).decode(), ended=ended)
