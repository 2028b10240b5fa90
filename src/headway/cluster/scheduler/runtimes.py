"""How long jobs take, as distributions: learnt from those that ended, and from how long those that run have run.

A job is likened to others of its own sweep first (`history` says what that is), then to those of the same user, tenant,
size and crowd, of the same tenant, size and crowd, of the same tenant and size, of its size, and to all. The fewer of a
group are known, the more the wider one counts. Of a job that has worked for an hour only those say something that took
longer: what is drawn is its life given that it has come so far. A job that still runs and has worked for longer is one
of them too. Where it is drawn, the draw is made again beyond what it has worked, which is the estimate of Kaplan and
Meier in the form of Efron ("redistribute to the right"): without it long jobs, which end late, would be missing. Beyond
everything that was ever seen a job is as likely as not to double its age.

How much of the past is like what comes nobody knows either. So each look ahead draws for each group how many of the
jobs that began last it goes by, and for each tenant and size a pace. Jobs of one future are then alike, as real ones
are, and futures differ.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from random import Random
from typing import NamedTuple

__all__ = ["JobClass", "ObservedRuntime", "RuntimeHistory", "RuntimeSampler"]

RECENT = 500
"""Jobs of a group that are remembered, at most."""
FEWEST = 32
"""Jobs of a group that a look ahead goes by, at least."""
FEW = 2
"""Known jobs at which a group counts as much as the wider ones."""
PACE = 0.2
"""By which a look ahead is faster or slower than the past (the spread of a logarithm): medians of sweeps that followed
one another in the Philly log differ by 0.09 for one tenant and by 0.47 for another."""
LONGEST_S = 60 * 86400.0
SHORTEST_S = 60.0
"""Age below which nothing is concluded from a job's age alone."""

Group = tuple[str | int, ...]


class JobClass(NamedTuple):
    """What jobs are likened by."""

    tenant: str
    user: str
    """Empty where nobody said."""
    gpus: int
    crowd: int = 0
    """How many like it came shortly before it: one of a hundred is unlike a job alone."""
    sweep: int = 0
    """The number of the sweep that it is of; 0 where that is not known."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """From the narrowest; sizes are alike up to a doubling, crowds up to four times."""
        size, crowd = (self.gpus - 1).bit_length(), self.crowd.bit_length() // 2
        wider: tuple[Group, ...] = ((self.tenant, size, crowd), (self.tenant, size), (size,), ())
        wider = ((self.tenant, self.user, size, crowd), *wider) if self.user else wider
        return (self.own, *wider) if self.sweep else wider

    @property
    def own(self) -> Group:
        """Of its sweep alone."""
        return (self.sweep,) * 5


class ObservedRuntime(NamedTuple):
    """What is known of one job."""

    began_s: float
    """When it would have begun to work, had it never been stopped."""
    worked_s: float
    ended: bool
    """Whether that was all of it."""


class RuntimeHistory:
    """What is known of jobs that ended. Told of each when it ends, and never before."""

    def __init__(self) -> None:
        self._ended: dict[Group, deque[ObservedRuntime]] = {}

    def ended(self, kind: JobClass, now: float, worked_s: float) -> None:
        """A job is done after so many seconds of work."""
        known = ObservedRuntime(now - worked_s, worked_s, True)
        for group in kind.groups:
            self._ended.setdefault(group, deque(maxlen=RECENT)).append(known)

    def forget(self, sweep: JobClass) -> None:
        """A sweep is over, and no other will be likened to it alone."""
        self._ended.pop(sweep.own, None)

    def beside(self, running: Iterable[tuple[JobClass, ObservedRuntime]]) -> dict[Group, list[ObservedRuntime]]:
        """All that is known of each group, with jobs that run; those that began last are last."""
        found: dict[Group, list[ObservedRuntime]] = {group: [*ended] for group, ended in self._ended.items()}
        for kind, known in running:
            for group in kind.groups:
                found.setdefault(group, []).append(known)
        return {group: sorted(known) for group, known in found.items()}


class RuntimeSampler:
    """Distributions of how long jobs take, as one look ahead has them."""

    def __init__(
        self, known: dict[Group, list[ObservedRuntime]], chance: Random, pace: float = PACE, fewest: int = FEWEST
    ) -> None:
        self._known, self._chance, self._spread, self._fewest = known, chance, pace, fewest
        self._paces: dict[Group, float] = {}
        self._chosen: dict[Group, tuple[list[float], list[float]]] = {}
        """Of groups that were asked for, sorted: seconds of those that ended, and of those that run so far."""

    def draw(self, kind: JobClass, after_s: float = 0.0) -> float:
        """Seconds that a job may take in all, given that it has worked for `after_s`; always more than that."""
        groups, reached_s = kind.groups, after_s
        pace = self._pace(groups[-3])
        while True:
            longer = self._longer(groups, reached_s)
            if longer is None:
                beyond = max(reached_s, SHORTEST_S) / (1.0 - self._chance.random())
                seconds, ended = max(min(beyond, LONGEST_S), reached_s * 1.01, reached_s + 1.0), True
            else:
                seconds, ended = longer
            if ended:
                return after_s + pace * (seconds - after_s)
            reached_s = seconds

    def _pace(self, group: Group) -> float:
        if group not in self._paces:
            self._paces[group] = self._chance.lognormvariate(0.0, self._spread)
        return self._paces[group]

    def _longer(self, groups: Iterable[Group], after_s: float) -> tuple[float, bool] | None:
        """Another job that took longer, and whether it has ended; None where none is known, or by chance."""
        for group in groups:
            ended, worked = self._of(group)
            first, second = bisect_right(ended, after_s), bisect_right(worked, after_s)
            known = len(ended) - first + len(worked) - second
            number = int(self._chance.random() * (known + FEW))
            if number < len(ended) - first:
                return ended[first + number], True
            if number < known:
                return worked[second + number - (len(ended) - first)], False
        return None

    def _of(self, group: Group) -> tuple[list[float], list[float]]:
        found = self._chosen.get(group)
        if found is None:
            count = int(self._fewest * (RECENT / self._fewest) ** self._chance.random())
            last = self._known.get(group, [])[-count:]
            ended, worked = (sorted(one.worked_s for one in last if one.ended == which) for which in (True, False))
            found = self._chosen[group] = (ended, worked)
        return found
