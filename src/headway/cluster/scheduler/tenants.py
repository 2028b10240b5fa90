"""Tenants: a tree of those who share a cluster, what each is guaranteed, and what each may still take.

A tenant's guarantee is what it gets whenever it asks. What it does not use it lends, up to its lending limit; what
others do not use it borrows, up to its borrowing limit. A tenant below another counts in it: what a team uses, its
department uses too. Guarantees of children add up to at most their parent's.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.columns import Columns
from headway.errors import UsageError

__all__ = ["NOBODY", "TenantTable"]

NOBODY = -1
"""The parent of a tenant at the top."""
UNBOUNDED = 2**40
"""GPUs: more than there are."""
HALF_LIFE_S = 7 * 86400.0
"""After which past use counts half in shares."""
SHORT_HALF_LIFE_S = 30 * 86400.0
"""After which what a tenant lacked counts half."""
LN2 = math.log(2.0)
MONTH_S = 30 * 86400.0
"""After which budgets begin anew, from second 0 on."""


class TenantTable(Columns):
    """Who shares the cluster."""

    if TYPE_CHECKING:
        parent: NDArray[np.int32]
        guarantee: NDArray[np.int64]
        borrow: NDArray[np.int64]
        lend: NDArray[np.int64]
        used: NDArray[np.int64]
        wanted: NDArray[np.int64]
        recent: NDArray[np.float64]
        short: NDArray[np.float64]
        budget_gpu_s: NDArray[np.float64]
        spent_gpu_s: NDArray[np.float64]

    def __init__(self) -> None:
        super().__init__(
            {
                "parent": (np.int32, NOBODY),
                "guarantee": (np.int64, 0),  # GPUs
                "borrow": (np.int64, UNBOUNDED),  # GPUs above the guarantee, at most
                "lend": (np.int64, UNBOUNDED),  # GPUs of the guarantee that others may use, at most
                "used": (np.int64, 0),  # GPUs now, its children's too
                "wanted": (np.int64, 0),  # GPUs that its jobs wait for, its children's too
                "recent": (np.float64, 0.0),  # GPU-seconds used, with a half-life
                "short": (np.float64, 0.0),  # GPU-seconds it lacked of its guarantee, with a longer one
                "budget_gpu_s": (np.float64, math.inf),  # GPU-seconds a month, at most
                "spent_gpu_s": (np.float64, 0.0),  # of it this month, its children's too
            }
        )
        self._paths: list[NDArray[np.int32]] = []
        self._groups: list[tuple[NDArray[np.int64], int]] = []
        """Tenants that belong to the same one, or to nobody; parents come first."""
        self.boundless = True
        """Whether all lend and borrow without a limit."""
        self.budgets = False
        """Whether anybody has a budget."""
        self._lacks: NDArray[np.int64] | None = None
        """What each lacks, until somebody takes or wants something."""

    def join(
        self,
        name: str,
        guarantee: int = 0,
        parent: str | None = None,
        borrow: int | None = None,
        lend: int | None = None,
        budget_gpu_h: float | None = None,
    ) -> int:
        """Add a tenant below another, or at the top; `budget_gpu_h` are GPU-hours a month."""
        if budget_gpu_h is not None and not 0 < budget_gpu_h < math.inf:
            raise UsageError(
                f"tenant {name}: budget is {budget_gpu_h} GPU-hours a month",
                hint="more than none; without the key there is no budget",
            )
        for what, count in (("guarantee", guarantee), ("borrow", borrow), ("lend", lend)):
            if count is not None and (not math.isfinite(count) or count != int(count) or count < 0):
                raise UsageError(f"tenant {name}: {what} is {count}", hint="GPUs are counted in whole numbers")
        if name in self.rows:
            raise UsageError(f"tenant {name} is named twice")
        if parent is not None and parent not in self.rows:
            raise UsageError(f"tenant {name}: unknown parent '{parent}'", hint="name parents first")
        limits = {key: value for key, value in (("borrow", borrow), ("lend", lend)) if value is not None}
        above = NOBODY if parent is None else self.rows[parent]
        row = self.add(name, guarantee=guarantee, parent=above, **limits)
        self.budget_gpu_s[row] = math.inf if budget_gpu_h is None else 3600 * budget_gpu_h
        self._paths.append(np.array([row, *(() if above == NOBODY else self._paths[above])], np.int32))
        self.boundless &= not limits
        self.budgets |= budget_gpu_h is not None
        self._lacks = None
        parents = self.parent[: len(self)]
        self._groups = [
            (np.flatnonzero(parents == one), one) for one in (NOBODY, *sorted({*parents.tolist()} - {NOBODY}))
        ]
        return row

    def check(self, gpus: int) -> None:
        """UsageError unless the guarantees can be kept together by a cluster of so many GPUs."""
        count = len(self)
        for above in (NOBODY, *range(count)):
            below = [row for row in range(count) if self.parent[row] == above]
            promised = int(self.guarantee[below].sum()) if below else 0
            most = gpus if above == NOBODY else int(self.guarantee[above])
            if promised > most:
                whose = "the cluster has" if above == NOBODY else f"{self.names[above]} has"
                who = ", ".join(f"{self.names[row]} {self.guarantee[row]}" for row in below)
                raise UsageError(
                    f"guarantees add up to {promised} GPUs ({who}), and {whose} {most}", hint="guarantee less"
                )

    def path(self, row: int) -> NDArray[np.int32]:
        """A tenant and those it belongs to, up to the top."""
        return self._paths[row]

    def take(self, row: int, gpus: int) -> None:
        """Count GPUs as used, or with a negative number as free again."""
        for one in self._paths[row].tolist():  # one or two: quicker than as an array
            self.used[one] += gpus
        self._lacks = None

    def want(self, row: int, gpus: int) -> None:
        """Count GPUs as waited for, or with a negative number no longer."""
        for one in self._paths[row].tolist():
            self.wanted[one] += gpus
        self._lacks = None

    def room(self, free: int, used: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """GPUs that each tenant may take now, of `free` ones; `used` in place of what is used."""
        count = len(self)
        if self.boundless:
            return np.full(count, max(free, 0), np.int64)
        used = self.used[:count] if used is None else used
        unused = self.guarantee[:count] - used
        kept = np.maximum(unused - self.lend[:count], 0)
        room = unused + self.borrow[:count]
        for group, above in self._groups:
            there = free if above == NOBODY else int(room[above])
            promised = int(kept[group].sum())
            most = there - promised + kept[group]  # what others do not lend is not theirs
            if promised > there:  # nodes are away: then whoever asks first has what it kept
                most = np.maximum(most, np.minimum(kept[group], there))
            room[group] = np.maximum(np.minimum(room[group], most), 0)
        return room

    def age(self, seconds: float, since_s: float = 0.0) -> None:
        """Let time pass: what is used, and what is lacked, is added to what was, and what was counts less."""
        count = len(self)
        month_s = (since_s + seconds) % MONTH_S
        if month_s < seconds:
            self.spent_gpu_s[:count] = 0.0
        used, spent = self.used[:count], self.spent_gpu_s[:count]
        recent, short = self.recent[:count], self.short[:count]
        spent += min(month_s, seconds) * used
        for past, now, half_life in ((recent, used, HALF_LIFE_S), (short, self.lacks(), SHORT_HALF_LIFE_S)):
            faded = -math.expm1(-LN2 * seconds / half_life)  # exact for moments too, of which 1 - x would lose digits
            past *= 1 - faded
            past += now * (half_life / LN2 * faded)

    def lacks(self) -> NDArray[np.int64]:
        """GPUs that each waits for within its guarantee, unless it has spent its budget."""
        if self._lacks is None:
            count = len(self)
            used = self.used[:count]
            self._lacks = np.maximum(np.minimum(self.guarantee[:count], used + self.wanted[:count]) - used, 0)
        return np.where(self.over_budget(), 0, self._lacks) if self.budgets else self._lacks

    def over_budget(self) -> NDArray[np.bool_]:
        """Which have spent their budget of the month, or belong to one that has."""
        count = len(self)
        if not self.budgets:
            return np.zeros(count, np.bool_)
        broke: NDArray[np.bool_] = self.spent_gpu_s[:count] >= self.budget_gpu_s[:count]
        for row in np.flatnonzero(self.parent[:count] != NOBODY).tolist() if broke.any() else ():
            broke[row] |= broke[self.parent[row]]  # parents come first
        return broke

    def shortfalls(self) -> NDArray[np.float64]:
        """What each has lacked of late, as a share of what it is guaranteed."""
        count = len(self)
        return self.short[:count] / (np.maximum(self.guarantee[:count], 1) * (SHORT_HALF_LIFE_S / LN2))

    def shares(self) -> NDArray[np.float64]:
        """Recent use of each beside its share of all guarantees: one where it has used just that."""
        count = len(self)
        top = self.parent[:count] == NOBODY
        total, promised = float(self.recent[:count][top].sum()), float(self.guarantee[:count][top].sum())
        if total <= 0 or promised <= 0:
            return np.zeros(count)
        return (self.recent[:count] / total) / np.maximum(self.guarantee[:count] / promised, 1e-9)

    def leaves(self) -> Sequence[int]:
        """Those that have nobody below them."""
        above = set(self.parent[: len(self)].tolist())
        return [row for row in range(len(self)) if row not in above]
