"""What the service answers about jobs and nodes: plain values, read from the database."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from pydantic_core import from_json
from sqlalchemy import ColumnElement, Connection, Row, or_, select, true

from headway.cluster.service.event_sentences import ClusterEvent, events_of
from headway.cluster.service.job_sizes import sizes_of
from headway.cluster.service.node_state import node_reason
from headway.cluster.service.tables import (
    JOB_IS_ALIVE,
    JOB_IS_OVER,
    RANK_IS_ALIVE,
    jobs,
    maintenance,
    node_conditions,
    nodes,
    ranks,
)

MOST_JOBS = 1000
"""Jobs of one answer."""
MOST_KNOWN = 10_000
"""Jobs whose demands are remembered."""
_COLUMNS: tuple[str, ...] = (
    "id",
    "number",
    "name",
    "tenant",
    "state",
    "reason",
    "held",
    "offered",
    "starts",
    "exit_status",
)
_COLUMNS += ("submitted", "started", "ended", "array")
_LISTED: Any = select(*jobs.c[_COLUMNS], jobs.c.demand, jobs.c.request)
Tenants = Collection[str] | None
"""Whose jobs: None for all."""


def list_jobs(
    connection: Connection, names: Sequence[str] = (), *, over: bool = False, tenants: Tenants = None
) -> list[dict[str, Any]]:
    """Jobs of some tenants (None: all): by id or array, or all that are not over; with `over` the newest that are."""
    where = or_(jobs.c.id.in_(names), jobs.c.array.in_(names))
    if not names:
        where = JOB_IS_OVER if over else JOB_IS_ALIVE
    order = jobs.c.number.desc() if over else jobs.c.number
    rows = connection.execute(_LISTED.where(where, _of(tenants)).order_by(order).limit(MOST_JOBS)).all()
    grants = _grants(connection, [row.id for row in rows if row.starts])
    return [_job(row, grants.get(row.id, [])) for row in rows]


def find_jobs(connection: Connection, name: str, tenants: Tenants = None) -> list[str]:
    """The ids that a user may mean: an id or array, else the newest job of that name; of some tenants (None: all)."""
    by_id, mine = or_(jobs.c.id == name, jobs.c.array == name), _of(tenants)
    if connection.execute(select(jobs.c.id).where(by_id, mine).limit(1)).first():
        return [name]
    newest = select(jobs.c.id, jobs.c.array).where(jobs.c.name == name, mine).order_by(jobs.c.number.desc()).limit(1)
    row = connection.execute(newest).first()
    return [] if row is None else [row.array or row.id]


def own_names(connection: Connection, ids: Collection[str], tenants: Tenants) -> dict[str, str]:
    """The names of those of some jobs that are of some tenants, by id."""
    rows = connection.execute(select(jobs.c.id, jobs.c.name).where(jobs.c.id.in_(ids), _of(tenants)))
    return {row.id: row.name for row in rows}


def own_events(
    connection: Connection, after: int, lines: Sequence[Mapping[str, Any]], tenants: Tenants
) -> list[ClusterEvent]:
    """The events of lines of the record, for a caller who may see some tenants: those of their jobs, and of nodes."""

    def told(mine: Collection[str] | None) -> list[ClusterEvent]:
        return [event for seq, line in enumerate(lines, after + 1) for event in events_of(seq, line, mine)]

    if tenants is None:
        return told(None)
    ids = sorted({event.job for event in told(None) if event.job is not None})
    mine = set[str]()
    for first in range(0, len(ids), MOST_JOBS):
        matching = jobs.c.id.in_(ids[first : first + MOST_JOBS]) & _of(tenants)
        mine.update(connection.execute(select(jobs.c.id).where(matching)).scalars())
    return [event for event in told(mine) if event.node is not None or event.job in mine]


def name_jobs(connection: Connection, events: Iterable[ClusterEvent]) -> list[dict[str, Any]]:
    """Events with the names and tenants of their jobs."""
    rows = [vars(event) for event in events]
    ids = sorted({row["job"] for row in rows if row["job"] is not None})
    known = {
        job.id: {"name": job.name, "tenant": job.tenant}
        for first in range(0, len(ids), MOST_JOBS)
        for job in connection.execute(
            select(jobs.c.id, jobs.c.name, jobs.c.tenant).where(jobs.c.id.in_(ids[first : first + MOST_JOBS]))
        )
    }
    return [row | known.get(row["job"], {"name": None, "tenant": None}) for row in rows]


def tenant_jobs(connection: Connection, tenants: Tenants) -> set[str]:
    """The ids of the jobs of some tenants (None: all) that are not over."""
    return set(connection.execute(select(jobs.c.id).where(JOB_IS_ALIVE, _of(tenants))).scalars())


def _of(tenants: Tenants) -> ColumnElement[bool]:
    """The condition that a job is of some tenants."""
    return true() if tenants is None else jobs.c.tenant.in_(tenants)


def list_nodes(connection: Connection) -> list[dict[str, Any]]:
    """All nodes, and what is occupied on each: of jobs that end, too."""
    alive = (
        select(ranks.c.node, ranks.c.gpus, ranks.c.job, jobs.c.request)
        .join(jobs, jobs.c.id == ranks.c.job)
        .where(RANK_IS_ALIVE)
        .order_by(ranks.c.job)
    )
    held = dict[str, list[tuple[str, list[str], float]]]()
    for job, rows in groupby(connection.execute(alive), key=lambda row: row.job):
        cpus = None
        for row in rows:
            cpus = from_json(row.request)["cpus"] if cpus is None else cpus  # once per job, of a thousand ranks perhaps
            held.setdefault(row.node, []).append((job, from_json(row.gpus), cpus))
    answer = []
    conditions = {row.name: row for row in connection.execute(select(node_conditions))}
    windows = {row.node: [row.begins, row.ends] for row in connection.execute(select(maintenance))}
    for node in connection.execute(select(nodes).order_by(nodes.c.name)):
        spec, here = from_json(node.spec), held.get(node.name, [])
        taken = {gpu for _, gpus, _ in here for gpu in gpus}
        cpus = sum(cpus for _, _, cpus in here)
        fields = {"state": node.state, "gpus_free": len(set(spec["gpus"]) - taken), "cpus_free": spec["cpus"] - cpus}
        known = conditions.get(node.name)
        cordoned, problems = (known.cordoned, from_json(known.problems)) if known else (False, [])
        fields |= {"cordoned": cordoned, "problems": problems, "maintenance": windows.get(node.name)}
        fields["reason"] = node_reason(node.state, cordoned=cordoned, problems=problems)
        answer.append(spec | fields | {"jobs": sorted({job for job, _, _ in here})})
    return answer


def _grants(connection: Connection, names: list[str]) -> dict[str, list[tuple[str, list[str]]]]:
    grants: dict[str, list[tuple[str, list[str]]]] = {}
    if not names:
        return grants
    for row in connection.execute(select(ranks).where(ranks.c.job.in_(names)).order_by(ranks.c.job, ranks.c.rank)):
        grants.setdefault(row.job, []).append((row.node, from_json(row.gpus)))
    return grants


def _job(row: Row[Any], grant: list[tuple[str, list[str]]]) -> dict[str, Any]:
    return {
        **dict(zip(_COLUMNS, row, strict=False)),  # which has two columns more
        **_asked(row.demand, row.request),
        "placement": [{"node": node, "gpus": gpus} for node, gpus in grant],
    }


@lru_cache(MOST_KNOWN)
def _asked(demand_json: str, request_json: str) -> dict[str, Any]:
    """What a job asks for. Remembered by its texts: reading those of a thousand jobs takes longer than all else."""
    demand, request = from_json(demand_json), from_json(request_json)
    return {
        "gpus": demand["gpus"],
        "sizes": sizes_of(demand),
        "machines": request["machines"],
        "cpus": request["cpus"],
        "priority": demand.get("priority", 0),
        "preemptible": demand.get("preemptible", False),
        "user": demand.get("user", ""),
        "folder": request["folder"],
    }
