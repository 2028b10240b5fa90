"""The end of a job's start: once all of its commands have exited, the job is over or waits again."""

import json
from typing import Any

from sqlalchemy import select, update

from headway.cluster.service.outcome import RankResult, outcome_of
from headway.cluster.service.secret_store import drop_job_secrets
from headway.cluster.service.store import Transaction
from headway.cluster.service.tables import allocations, jobs, ranks


def finish_if_exited(transaction: Transaction, name: str, now_s: float, wall_s: float) -> None:
    """Record what becomes of a job if all commands of its newest start have exited."""
    job = transaction.execute(select(jobs).where(jobs.c.id == name)).one()
    own = (ranks.c.job == name) & (ranks.c.start == job.starts)
    rows = transaction.execute(select(ranks).where(own).order_by(ranks.c.rank)).all()
    if any(row.state != "exited" for row in rows):
        return
    results = [RankResult(**json.loads(row.result or "{}")) for row in rows]
    outcome = outcome_of(results, job.stop, json.loads(job.request)["limit_s"])
    again = outcome.state == "waiting"
    values = {
        "state": outcome.state,
        "reason": outcome.reason,
        "exit_status": outcome.exit_status,
        "stop": "",
        "ended": None if again else wall_s,
    }
    transaction.execute(update(jobs).where(jobs.c.id == name).values(values))
    held = (allocations.c.job == name) & (allocations.c.start == job.starts)
    transaction.execute(update(allocations).where(held).values(ended=wall_s))
    line: dict[str, Any] = {"at": now_s, "exited": name}
    fate = {"again": True, "saved": outcome.saved} if again else {"state": outcome.state}
    transaction.add_lines([line | fate])
    if not again:
        drop_job_secrets(transaction, name)
