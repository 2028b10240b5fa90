"""Which waiting jobs the scheduler is told of: their dependencies are over, and few enough of their array run."""

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, func, select, union_all, update

from headway.cluster.engines.engine import OVER
from headway.cluster.service.store import Transaction
from headway.cluster.service.tables import dependencies, jobs, nodes

MOST_VALUES = 500
"""Of one IN: databases limit the variables of a statement."""


def unoffered(connection: Connection) -> Sequence[Row[Any]]:
    """Waiting jobs that the scheduler does not know, in order of submission."""
    waiting = (jobs.c.state == "waiting") & ~jobs.c.offered
    columns = (jobs.c.id, jobs.c.array, jobs.c.at_once, jobs.c.held, jobs.c.demand, jobs.c.reason)
    query: Any = select(*columns).where(waiting).order_by(jobs.c.number)
    rows: Sequence[Row[Any]] = connection.execute(query).all()
    return rows


def still_healthy(connection: Connection, silent: Sequence[str]) -> list[str]:
    """Return which nodes that do not report are still thought to."""
    healthy = list[str]()
    for first in range(0, len(silent), MOST_VALUES):
        theirs = nodes.c.name.in_(silent[first : first + MOST_VALUES]) & (nodes.c.state == "healthy")
        healthy += connection.execute(select(nodes.c.name).where(theirs)).scalars()
    return healthy


def array_counts(connection: Connection) -> dict[str, int]:
    """How many tasks of each limited array the scheduler knows."""
    live = jobs.c.offered & jobs.c.at_once.is_not(None) & jobs.c.state.not_in(OVER)
    counts = select(jobs.c.array, func.count().label("tasks")).where(live).group_by(jobs.c.array)
    return {row.array: row.tasks for row in connection.execute(counts)}


def unmet_dependencies(connection: Connection) -> tuple[dict[str, list[str]], dict[str, str]]:
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


def offer(transaction: Transaction, names: Sequence[str], now_s: float) -> list[dict[str, Any]]:
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


def to_offer(waiting: Sequence[Row[Any]], active: dict[str, int], blocked: set[str]) -> list[Row[Any]]:
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


def waits_for(needs: Sequence[str]) -> str:
    """Return why a job is not offered yet."""
    listed = ", ".join(needs[:5]) + (f" and {len(needs) - 5} more" if len(needs) > 5 else "")
    return f"waits for {'job' if len(needs) == 1 else 'jobs'} {listed}"
