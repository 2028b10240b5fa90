"""What tenants have used in a month: GPU-hours, CPU-hours and their price, by tenant and chip."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, or_, select

from headway.cluster.scheduler.months import month_bounds
from headway.cluster.service.tables import allocations
from headway.errors import UsageError

_MONTH = re.compile(r"([0-9]{4})-(0[1-9]|1[0-2])")


@dataclass(frozen=True)
class Allocation:
    """What one start of a job held, and when."""

    job: str
    tenant: str
    chip: str
    gpus: int
    cpus: float
    began: float
    ended: float | None
    """None: it still does."""


@dataclass(frozen=True)
class Usage:
    """What a tenant used of one chip."""

    tenant: str
    chip: str
    jobs: int
    gpu_hours: float
    cpu_hours: float
    price: float | None
    """None without a price of that chip."""


def month_of(text: str) -> tuple[float, float]:
    """Return the Unix seconds at which a month such as 2026-11 (UTC) begins and ends."""
    match = _MONTH.fullmatch(text)
    if match is None or int(match[1]) < 1970:
        raise UsageError(f"month is {text!r}", hint="YEAR-MONTH, such as 2026-11")
    return month_bounds(datetime(int(match[1]), int(match[2]), 1, tzinfo=UTC).timestamp())


def allocations_in(
    connection: Connection, begins: float, ends: float, tenants: Collection[str] | None
) -> list[Allocation]:
    """Return what was held at some time between two; None: of all tenants."""
    query = select(allocations).where(
        (allocations.c.began < ends) & or_(allocations.c.ended.is_(None), allocations.c.ended > begins)
    )
    if tenants is not None:
        query = query.where(allocations.c.tenant.in_(tenants))
    return [
        Allocation(row.job, row.tenant, row.chip, row.gpus, row.cpus, row.began, row.ended)
        for row in connection.execute(query)
    ]


def usage_of(
    held: Iterable[Allocation], begins: float, ends: float, now: float, prices: Mapping[str, float], speed: float = 1.0
) -> list[Usage]:
    """Return what was used between two times; `prices` are per GPU-hour of a chip.

    Hours are those of the scheduler's clock, in which budgets are: it runs `speed` times as fast.
    """
    gpu_s, cpu_s = dict[tuple[str, str], float](), dict[tuple[str, str], float]()
    jobs = dict[tuple[str, str], set[str]]()
    for allocation in held:
        until = now if allocation.ended is None else allocation.ended
        seconds = speed * max(min(until, ends) - max(allocation.began, begins), 0.0)
        key = allocation.tenant, allocation.chip
        gpu_s[key] = gpu_s.get(key, 0.0) + seconds * allocation.gpus
        cpu_s[key] = cpu_s.get(key, 0.0) + seconds * allocation.cpus
        jobs.setdefault(key, set()).add(allocation.job)
    return [
        Usage(
            tenant,
            chip,
            len(jobs[tenant, chip]),
            gpu_s[tenant, chip] / 3600,
            cpu_s[tenant, chip] / 3600,
            prices[chip] * gpu_s[tenant, chip] / 3600 if chip in prices else None,
        )
        for tenant, chip in sorted(gpu_s)
    ]
