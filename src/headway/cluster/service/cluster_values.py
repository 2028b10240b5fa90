"""Nodes, tenants and policy of a cluster, as its database and record have them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import delete, func, insert, select, update

from headway.cluster.service.demand import EmptyCluster
from headway.cluster.service.fleet import is_elsewhere
from headway.cluster.service.store import Transaction
from headway.cluster.service.tables import JOB_IS_ALIVE, jobs, nodes, ranks, tenant_secrets
from headway.errors import UsageError


def record_specs(
    transaction: Transaction, specs: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Record nodes of this machine; return all nodes, and the names of those that stay as they were: jobs are on
    them."""
    unchanged = list[str]()
    known: dict[str, dict[str, Any]] = {row.name: json.loads(row.spec) for row in transaction.execute(select(nodes))}
    for spec in specs:
        if is_elsewhere(transaction, spec["name"]):
            raise UsageError(
                f"node '{spec['name']}' has joined from elsewhere, and this machine has the same name",
                hint="--no-local-node, or headway node rm it",
            )
        if spec["name"] not in known:
            values = {"name": spec["name"], "spec": json.dumps(spec), "state": "draining"}
            transaction.execute(insert(nodes).values(values))
        elif spec != known[spec["name"]] and not _change_node(transaction, spec):
            unchanged.append(spec["name"])
            continue
        known[spec["name"]] = dict(spec)
    return list(known.values()), unchanged


def _change_node(transaction: Transaction, spec: Mapping[str, Any]) -> bool:
    """Record what a node has now; False if jobs are on it."""
    busy = (ranks.c.node == spec["name"]) & (ranks.c.state != "exited")
    if transaction.execute(select(func.count()).select_from(ranks).where(busy)).scalar_one():
        return False
    transaction.execute(update(nodes).where(nodes.c.name == spec["name"]).values(spec=json.dumps(spec)))
    return True


def record_cluster(
    transaction: Transaction,
    values: Mapping[str, Any],
    recorded: Mapping[str, Any] | None,
    now_s: float,
    *,
    whole: bool = True,
) -> EmptyCluster:
    """Record nodes, tenants and policy if they are not those that are `recorded`; UsageError if they do not fit
    together."""
    used = set(transaction.execute(select(jobs.c.tenant).where(JOB_IS_ALIVE).distinct()).scalars())
    gone = used - {tenant["name"] for tenant in values["tenants"]}
    if gone:
        raise UsageError(f"tenant {min(gone)} has jobs and is not listed any more", hint="list it until they are over")
    cluster = EmptyCluster(values, whole=whole)
    transaction.execute(delete(tenant_secrets).where(tenant_secrets.c.tenant.not_in(cluster.tenants)))
    if cluster.values != recorded:
        transaction.add_lines([{"at": now_s, "cluster": cluster.values}])
    return cluster
