"""The sizes of elastic jobs: what each has now, and whether one could have more."""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, select

from headway.cluster.service.tables import allocations, jobs

_ELASTIC: Any = (
    select(jobs.c.demand, allocations.c.gpus)
    .join(allocations, (allocations.c.job == jobs.c.id) & (allocations.c.start == jobs.c.starts))
    .where(allocations.c.ended.is_(None) & (jobs.c.state == "running") & jobs.c.demand.contains('"sizes": ['))
)
"""Demand and GPUs of the elastic jobs that run."""


def may_grow(connection: Connection) -> bool:
    """Whether a running job is smaller than its largest size."""
    return any(row.gpus < max(sizes_of(json.loads(row.demand))) for row in connection.execute(_ELASTIC))


def sizes_of(demand: Mapping[str, Any]) -> list[int]:
    """The sizes of an elastic job, the smallest first; empty for any other."""
    return [int(gpus) for gpus, _ in demand.get("sizes", ())]
