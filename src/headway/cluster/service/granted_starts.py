"""The starts that a cycle has decided, in the database: all of a cycle in a few statements."""

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import bindparam, delete, insert, select, update

from headway.cluster.service.grants import LiveDecision
from headway.cluster.service.store import Transaction
from headway.cluster.service.tables import allocations, few_at_a_time, former_ranks, jobs, nodes, ranks

_PLACES = ("job", "start", "rank", "node")
_STARTING = (
    update(jobs)
    .where(jobs.c.id == bindparam("job"))
    .values(state="starting", stop="", exit_status=None, starts=bindparam("start"), reason=bindparam("why"))
)


def grant_starts(transaction: Transaction, decisions: Sequence[LiveDecision], wall_s: float) -> None:
    """Record what each start holds, and that nothing of it has been asked of a node yet."""
    if not decisions:
        return
    own = [decision.job for decision in decisions]
    known = _read(transaction, jobs.c.id, {*own, *(job for decision in decisions for job in decision.after)})
    specs = _read(transaction, nodes.c.name, {decision.grant[0][0] for decision in decisions})
    for some in few_at_a_time(own):
        mine = ranks.c.job.in_(some)
        transaction.execute(insert(former_ranks).from_select(_PLACES, select(*ranks.c[_PLACES]).where(mine)))
        transaction.execute(delete(ranks).where(mine))
    starting, held, granted = [], [], []
    for decision in decisions:
        job = known[decision.job]
        start = {"job": decision.job, "start": job.starts + 1}
        starting.append(start | {"why": _reason(decision)})
        held.append(
            start
            | {
                "tenant": job.tenant,
                "chip": json.loads(specs[decision.grant[0][0]].spec)["chip"],
                "gpus": sum(len(ids) for _, ids in decision.grant),
                "cpus": len(decision.grant) * json.loads(job.demand).get("cpus", 0.0),
                "began": wall_s,
            }
        )
        fields = start | {
            "state": "granted",
            "machines": json.dumps([node for node, _ in decision.grant]),
            "after": json.dumps(sorted((name, known[name].starts) for name in decision.after)),
        }
        granted += [
            fields | {"rank": rank, "node": node, "gpus": json.dumps(ids)}
            for rank, (node, ids) in enumerate(decision.grant)
        ]
    transaction.execute(_STARTING, starting)
    transaction.execute(insert(allocations), held)
    transaction.execute(insert(ranks), granted)


def _read(transaction: Transaction, column: Any, names: set[str]) -> dict[str, Any]:
    """Return rows of a table by name."""
    rows = dict[str, Any]()
    columns = (jobs.c.starts, jobs.c.tenant, jobs.c.demand) if column.table is jobs else (nodes.c.spec,)
    for some in few_at_a_time(names):
        rows |= {row[0]: row for row in transaction.execute(select(column, *columns).where(column.in_(some)))}
    return rows


def _reason(decision: LiveDecision) -> str:
    on = ", ".join(node for node, _ in decision.grant)
    return f"starting on {on}" + (" once what runs there has exited" if decision.after else "")
