"""Which waiting jobs the scheduler is told of: their dependencies are over, and few enough of their array run."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, func, select, union_all

from headway.cluster.engines.engine import OVER
from headway.cluster.service.tables import dependencies, jobs


def unoffered(connection: Connection) -> Sequence[Row[Any]]:
    """Waiting jobs that the scheduler does not know, in order of submission."""
    waiting = (jobs.c.state == "waiting") & ~jobs.c.offered
    columns = (jobs.c.id, jobs.c.array, jobs.c.at_once, jobs.c.held, jobs.c.demand, jobs.c.reason)
    query: Any = select(*columns).where(waiting).order_by(jobs.c.number)
    rows: Sequence[Row[Any]] = connection.execute(query).all()
    return rows


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
