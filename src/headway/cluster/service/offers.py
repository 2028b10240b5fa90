"""Which waiting jobs the scheduler is told of: their dependencies are over, and few enough of their array run."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select, union_all, update

from headway.cluster.engines.engine import OVER
from headway.cluster.service.store import Transaction
from headway.cluster.service.tables import JOB_IS_ALIVE, JOB_IS_NEW, dependencies, few_at_a_time, jobs


@dataclass(frozen=True)
class Offers:
    """What becomes of waiting jobs that the scheduler does not know."""

    offered: list[str]
    refused: dict[str, str]
    """Those that can never be offered, and why."""
    reasons: dict[str, str]
    """Those that wait for other jobs than before."""


def find_offers(connection: Connection) -> Offers | None:
    """Return what becomes of waiting jobs; None if nothing changes."""
    waiting = _unoffered(connection)
    if not waiting:
        return None
    unmet, refused = _unmet_dependencies(connection)
    limited = {row.array for row in waiting if row.array is not None and row.at_once is not None}
    offered = [row.id for row in _to_offer(waiting, _array_counts(connection, limited), {*unmet, *refused})]
    sentences = {row.id: _waits_for(unmet[row.id]) for row in waiting if row.id in unmet and row.id not in refused}
    reasons = {row.id: sentences[row.id] for row in waiting if sentences.get(row.id, row.reason) != row.reason}
    return Offers(offered, refused, reasons) if offered or refused or reasons else None


def record_offers(transaction: Transaction, offers: Offers, now_s: float, wall_s: float) -> list[str]:
    """Record what becomes of jobs that still wait, and return those that were refused."""
    refused = []
    for name, reason in offers.refused.items():
        values = {"state": "cancelled", "reason": reason, "ended": wall_s}
        if transaction.execute(update(jobs).where((jobs.c.id == name) & JOB_IS_NEW).values(values)).rowcount:
            refused.append(name)
    for name, reason in offers.reasons.items():
        transaction.execute(update(jobs).where((jobs.c.id == name) & JOB_IS_NEW).values(reason=reason))
    transaction.add_lines(_offer(transaction, offers.offered, now_s))
    return refused


def _unoffered(connection: Connection) -> Sequence[Row[Any]]:
    """Waiting jobs that the scheduler does not know, in order of submission."""
    columns = (jobs.c.id, jobs.c.array, jobs.c.at_once, jobs.c.held, jobs.c.demand, jobs.c.reason)
    query: Any = select(*columns).where(JOB_IS_NEW).order_by(jobs.c.number)
    rows: Sequence[Row[Any]] = connection.execute(query).all()
    return rows


def _array_counts(connection: Connection, arrays: Collection[str]) -> dict[str, int]:
    """How many tasks of each of these arrays the scheduler knows."""
    counted = dict[str, int]()
    for some in few_at_a_time(arrays):
        live = jobs.c.array.in_(some) & jobs.c.offered & JOB_IS_ALIVE
        counts = select(jobs.c.array, func.count().label("tasks")).where(live).group_by(jobs.c.array)
        counted |= {row.array: row.tasks for row in connection.execute(counts)}
    return counted


def _unmet_dependencies(connection: Connection) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return what jobs still wait for, and what became of those that can never be offered: sentences by job."""
    new = dependencies.c.job.in_(select(jobs.c.id).where(JOB_IS_NEW).correlate(None))
    columns = (dependencies.c.job, dependencies.c.needs, dependencies.c.condition, jobs.c.state)
    pairs = select(*columns).select_from(dependencies).where(new)
    rows = connection.execute(
        union_all(
            pairs.join(jobs, jobs.c.id == dependencies.c.needs),
            pairs.join(jobs, jobs.c.array == dependencies.c.needs),
        )
    )
    unmet, failed = dict[str, list[str]](), dict[str, str]()
    for row in rows:
        if row.state not in OVER:
            known = unmet.setdefault(row.job, [])
            known += [] if row.needs in known else [row.needs]
        elif row.condition == "ok" and row.state != "finished":
            failed[row.job] = f"job {row.needs}, which had to succeed first, is {row.state}"
    return unmet, failed


def _offer(transaction: Transaction, names: Sequence[str], now_s: float) -> list[dict[str, Any]]:
    """Note that the scheduler knows jobs, if they still wait; return the lines that tell it."""
    lines = list[dict[str, Any]]()
    for some in few_at_a_time(names):
        matching = jobs.c.id.in_(some) & JOB_IS_NEW
        query = select(jobs.c.id, jobs.c.demand, jobs.c.held).where(matching).order_by(jobs.c.number)
        rows = transaction.execute(query).all()
        transaction.execute(update(jobs).where(matching).values(offered=True, reason=""))
        for row in rows:
            lines.append({"at": now_s, "job": json.loads(row.demand)})
            lines += [{"at": now_s, "hold": row.id}] if row.held else []
    return lines


def _to_offer(waiting: Sequence[Row[Any]], active: dict[str, int], blocked: set[str]) -> list[Row[Any]]:
    """Return the jobs to offer: of an array at most as many as may run at a time."""
    active, offers = dict(active), []
    for row in waiting:
        if row.id in blocked:
            continue
        if row.array is not None and row.at_once is not None:
            if active.get(row.array, 0) >= row.at_once:
                continue
            active[row.array] = active.get(row.array, 0) + 1
        offers.append(row)
    return offers


def _waits_for(needs: Sequence[str]) -> str:
    """Return why a job is not offered yet."""
    listed = ", ".join(needs[:5]) + (f" and {len(needs) - 5} more" if len(needs) > 5 else "")
    return f"waits for {'job' if len(needs) == 1 else 'jobs'} {listed}"
