"""Tenants: the tree of teams that share a cluster, their guarantees, and what each may still take.

A tenant gets its guarantee whenever it asks. It lends what it does not use, up to its lending limit, and borrows what
others do not use, up to its borrowing limit. Usage counts for all ancestors: what a team uses, its department uses too.
Guarantees of children add up to at most their parent's.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.columns import Columns, column
from headway.cluster.scheduler.months import month_bounds
from headway.errors import UsageError, plural

NO_TENANT = -1
"""Parent of a top-level tenant."""
UNLIMITED = 2**40
"""GPUs: more than any cluster has."""
HALF_LIFE_S = 7 * 86400.0
"""Half-life of recent usage."""
SHORT_HALF_LIFE_S = 30 * 86400.0
"""Half-life of a tenant's shortfall."""
LN2 = math.log(2.0)


class TenantTable(Columns):
    """All tenants, parents first."""

    parent = column(np.int32, NO_TENANT)
    guarantee = column(np.int64, 0)  # GPUs
    borrow = column(np.int64, UNLIMITED)  # GPUs above the guarantee, at most
    lend = column(np.int64, UNLIMITED)  # GPUs of the guarantee that others may use, at most
    used = column(np.int64, 0)  # GPUs now, with its children's
    wanted = column(np.int64, 0)  # GPUs that its jobs wait for, with its children's
    recent = column(np.float64, 0.0)  # GPU-seconds used, with a half-life
    short = column(np.float64, 0.0)  # GPU-seconds of its guarantee that it lacked, with a longer half-life
    budget_gpu_s = column(np.float64, math.inf)  # GPU-seconds per calendar month, at most
    spent_gpu_s = column(np.float64, 0.0)  # of it this month, with its children's

    def __init__(self) -> None:
        super().__init__()
        self._paths: list[NDArray[np.int32]] = []
        self._siblings: list[tuple[NDArray[np.int64], int]] = []
        """Rows of the children of each parent, and the parent; top-level tenants first."""
        self.unlimited = True
        """Whether no tenant has a lending or borrowing limit."""
        self.has_budgets = False
        self._month = (0.0, 0.0)
        """Unix seconds at which the month of the last update begins and ends."""
        self._unmet: NDArray[np.int64] | None = None
        """Cache of `unmet_gpus`, until usage or demand changes."""

    def add_tenant(
        self,
        name: str,
        guarantee: int = 0,
        parent: str | None = None,
        borrow: int | None = None,
        lend: int | None = None,
        budget_gpu_h: float | None = None,
    ) -> int:
        """Add a tenant below another, or at the top; `budget_gpu_h` is in GPU-hours per month."""
        if budget_gpu_h is not None and not 0 < budget_gpu_h < math.inf:
            raise UsageError(
                f"tenant {name}: budget is {budget_gpu_h} GPU-hours per month",
                hint="a number above 0; leave budget_gpu_h out for no budget",
            )
        for key, count in (("guarantee", guarantee), ("borrow", borrow), ("lend", lend)):
            if count is not None and (not math.isfinite(count) or count != int(count) or count < 0):
                raise UsageError(f"tenant {name}: {key} is {count}", hint="a whole number of GPUs, at least 0")
        if name in self.rows:
            raise UsageError(f"duplicate tenant '{name}'")
        if parent is not None and parent not in self.rows:
            raise UsageError(f"tenant {name}: unknown parent '{parent}'", hint="list parents before their children")
        limits = {key: value for key, value in (("borrow", borrow), ("lend", lend)) if value is not None}
        above = NO_TENANT if parent is None else self.rows[parent]
        row = self.add(name, guarantee=guarantee, parent=above, **limits)
        self.budget_gpu_s[row] = math.inf if budget_gpu_h is None else 3600 * budget_gpu_h
        self._paths.append(np.array([row, *(() if above == NO_TENANT else self._paths[above])], np.int32))
        self.unlimited &= not limits
        self.has_budgets |= budget_gpu_h is not None
        self._unmet = None
        parents = self.parent[: len(self)]
        ids = (NO_TENANT, *sorted({*parents.tolist()} - {NO_TENANT}))
        self._siblings = [(np.flatnonzero(parents == above), above) for above in ids]
        return row

    def check_guarantees(self, gpus: int) -> None:
        """Raise UsageError if guarantees exceed their parent's, or the GPUs of the cluster."""
        for children, above in self._siblings:
            promised = int(self.guarantee[children].sum())
            most = gpus if above == NO_TENANT else int(self.guarantee[above])
            if promised > most:
                owner = "the cluster" if above == NO_TENANT else self.names[above]
                each = ", ".join(f"{self.names[row]} {self.guarantee[row]}" for row in children)
                raise UsageError(
                    f"guarantees add up to {plural(promised, 'GPU')} ({each}); {owner} has {most}",
                    hint="lower the guarantees",
                )

    def path(self, row: int) -> NDArray[np.int32]:
        """Return a tenant and its ancestors, up to the top."""
        return self._paths[row]

    def add_used(self, row: int, gpus: int) -> None:
        """Count GPUs as used, or with a negative number as free again."""
        for tenant in self._paths[row].tolist():  # one or two: faster than an array
            self.used[tenant] += gpus
        self._unmet = None

    def add_wanted(self, row: int, gpus: int) -> None:
        """Count GPUs as waited for, or with a negative number no longer."""
        for tenant in self._paths[row].tolist():
            self.wanted[tenant] += gpus
        self._unmet = None

    def headroom(self, free: int, used: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Return how many of `free` GPUs each tenant may take now; `used` replaces the current usage."""
        count = len(self)
        if self.unlimited:
            return np.full(count, max(free, 0), np.int64)
        used = self.used[:count] if used is None else used
        unused = self.guarantee[:count] - used
        withheld = np.maximum(unused - self.lend[:count], 0)
        headroom = unused + self.borrow[:count]
        for children, above in self._siblings:
            available = free if above == NO_TENANT else int(headroom[above])
            total = int(withheld[children].sum())
            most = available - total + withheld[children]  # what siblings do not lend stays theirs
            if total > available:  # nodes are missing: the first to ask gets what it withheld
                most = np.maximum(most, np.minimum(withheld[children], available))
            headroom[children] = np.maximum(np.minimum(headroom[children], most), 0)
        return headroom

    def advance(self, seconds: float, since_unix_s: float = 0.0) -> None:
        """Let time pass: add current usage and shortfall to the decaying sums, and to the spending of the month."""
        count, until_unix_s = len(self), since_unix_s + seconds
        if not self._month[0] <= until_unix_s < self._month[1]:
            self._month = month_bounds(until_unix_s)
        month_s = until_unix_s - self._month[0]
        if month_s < seconds:
            self.spent_gpu_s[:count] = 0.0
        used, spent = self.used[:count], self.spent_gpu_s[:count]
        recent, short = self.recent[:count], self.short[:count]
        spent += min(month_s, seconds) * used
        for past, now, half_life in ((recent, used, HALF_LIFE_S), (short, self.unmet_gpus(), SHORT_HALF_LIFE_S)):
            faded = -math.expm1(-LN2 * seconds / half_life)  # expm1: 1 - x would lose digits over short spans
            past *= 1 - faded
            past += now * (half_life / LN2 * faded)

    def unmet_gpus(self) -> NDArray[np.int64]:
        """Return the GPUs that each tenant waits for within its guarantee; 0 if it is over budget."""
        if self._unmet is None:
            count = len(self)
            used = self.used[:count]
            self._unmet = np.maximum(np.minimum(self.guarantee[:count], used + self.wanted[:count]) - used, 0)
        return np.where(self.over_budget(), 0, self._unmet) if self.has_budgets else self._unmet

    def over_budget(self) -> NDArray[np.bool_]:
        """Return which tenants have spent this month's budget, or have an ancestor that has."""
        count = len(self)
        if not self.has_budgets:
            return np.zeros(count, np.bool_)
        over: NDArray[np.bool_] = self.spent_gpu_s[:count] >= self.budget_gpu_s[:count]
        for row in np.flatnonzero(self.parent[:count] != NO_TENANT).tolist() if over.any() else ():
            over[row] |= over[self.parent[row]]  # parents come first
        return over

    def shortfalls(self) -> NDArray[np.float64]:
        """Return what each tenant recently lacked, as a share of its guarantee."""
        count = len(self)
        return self.short[:count] / (np.maximum(self.guarantee[:count], 1) * (SHORT_HALF_LIFE_S / LN2))

    def usage_ratios(self) -> NDArray[np.float64]:
        """Return each tenant's recent usage relative to its share of all guarantees."""
        count = len(self)
        top = self.parent[:count] == NO_TENANT
        total, promised = float(self.recent[:count][top].sum()), float(self.guarantee[:count][top].sum())
        if total <= 0 or promised <= 0:
            return np.zeros(count)
        return (self.recent[:count] / total) / np.maximum(self.guarantee[:count] / promised, 1e-9)

    def leaves(self) -> Sequence[int]:
        """Return the tenants without children."""
        parents = set(self.parent[: len(self)].tolist())
        return [row for row in range(len(self)) if row not in parents]
