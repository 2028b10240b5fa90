"""Which waiting jobs the scheduler is told of: their dependencies are over, and few enough of their array run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select, union_all, update

from headway.cluster.engines.engine import OVER
from headway.cluster.service.store import Transaction
from headway.cluster.service.tables import dependencies, jobs

MOST_VALUES = 500
"""Of one IN: databases limit the variables of a statement."""


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
    offered = [row.id for row in _to_offer(waiting, _array_counts(connection), {*unmet, *refused})]
    sentences = {row.id: _waits_for(unmet[row.id]) for row in waiting if row.id in unmet and row.id not in refused}
    reasons = {row.id: sentences[row.id] for row in waiting if sentences.get(row.id, row.reason) != row.reason}
    return Offers(offered, refused, reasons) if offered or refused or reasons else None


def record_offers(transaction: Transaction, offers: Offers, now_s: float, wall_s: float) -> list[str]:
    """Record what becomes of jobs that still wait, and return those that were refused."""
    waits = (jobs.c.state == "waiting") & ~jobs.c.offered
    refused = []
    for name, reason in offers.refused.items():
        values = {"state": "cancelled", "reason": reason, "ended": wall_s}
        if transaction.execute(update(jobs).where((jobs.c.id == name) & waits).values(values)).rowcount:
            refused.append(name)
    for name, reason in offers.reasons.items():
        transaction.execute(update(jobs).where((jobs.c.id == name) & waits).values(reason=reason))
    transaction.add_lines(_offer(transaction, offers.offered, now_s))
    return refused


def _unoffered(connection: Connection) -> Sequence[Row[Any]]:
    """Waiting jobs that the scheduler does not know, in order of submission."""
    waiting = (jobs.c.state == "waiting") & ~jobs.c.offered
    columns = (jobs.c.id, jobs.c.array, jobs.c.at_once, jobs.c.held, jobs.c.demand, jobs.c.reason)
    query: Any = select(*columns).where(waiting).order_by(jobs.c.number)
    rows: Sequence[Row[Any]] = connection.execute(query).all()
    return rows


def _array_counts(connection: Connection) -> dict[str, int]:
    """How many tasks of each limited array the scheduler knows."""
    live = jobs.c.offered & jobs.c.at_once.is_not(None) & jobs.c.state.not_in(OVER)
    counts = select(jobs.c.array, func.count().label("tasks")).where(live).group_by(jobs.c.array)
    return {row.array: row.tasks for row in connection.execute(counts)}


def _unmet_dependencies(connection: Connection) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return what jobs still wait for, and what became of those that can never be offered: sentences by job."""
    waiting = jobs.alias("waiting")
    theirs = (dependencies.c.job == waiting.c.id) & (waiting.c.state == "waiting") & ~waiting.c.offered
    columns = (dependencies.c.job, dependencies.c.needs, dependencies.c.condition, jobs.c.state)
    pairs = select(*columns).select_from(dependencies.join(waiting, theirs))
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
    for first in range(0, len(names), MOST_VALUES):
        theirs = jobs.c.id.in_(names[first : first + MOST_VALUES]) & (jobs.c.state == "waiting") & ~jobs.c.offered
        query = select(jobs.c.id, jobs.c.demand, jobs.c.held).where(theirs).order_by(jobs.c.number)
        rows = transaction.execute(query).all()
        transaction.execute(update(jobs).where(theirs).values(offered=True, reason=""))
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
        if row.at_once is not None:
            if active.get(row.array, 0) >= row.at_once:
                continue
            active[row.array] = active.get(row.array, 0) + 1
        offers.append(row)
    return offers


def _waits_for(needs: Sequence[str]) -> str:
    """Return why a job is not offered yet."""
    listed = ", ".join(needs[:5]) + (f" and {len(needs) - 5} more" if len(needs) > 5 else "")
    return f"waits for {'job' if len(needs) == 1 else 'jobs'} {listed}"
