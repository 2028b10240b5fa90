"""Run times of jobs as distributions, learned from jobs that ended and from how long running jobs have run.

A job is compared with others of its own sweep first (see `history`), then of the same user, tenant, size and burst, of
the same tenant, size and burst, of the same tenant and size, of the same size, and with all. The fewer jobs of a group
are known, the more the wider group counts. A job that has worked for an hour is compared only with jobs that took
longer: what is drawn is its run time given its age. Running jobs that have worked longer count as well: if one is
drawn, the draw is repeated beyond its age. That is the Kaplan-Meier estimator in Efron's form ("redistribute to the
right"); without it long jobs, which end late, would be missing. Beyond the longest known run time, a job doubles its
age with a probability of one half.

How much of the past resembles the future is unknown too. So each sampler draws, per group, how many of the jobs that
began last it uses, and a pace per tenant and size. Jobs of one future are then alike, as real ones are, and futures
differ.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from random import Random
from typing import Any, NamedTuple

MAX_RECENT = 500
"""Jobs remembered per group, at most."""
MIN_RECENT = 32
"""Jobs of a group that a sampler uses, at least."""
PRIOR_WEIGHT = 2
"""Known jobs at which a group counts as much as the wider ones."""
PACE_SPREAD = 0.2
"""How much faster or slower than the past a future is (standard deviation of the logarithm): medians of consecutive
sweeps in the Philly trace differ by 0.09 for one tenant and by 0.47 for another."""
LONGEST_S = 60 * 86400.0
SHORTEST_S = 60.0
"""Below this age, nothing is concluded from a job's age alone."""

Group = tuple[str | int, ...]


class JobClass(NamedTuple):
    """The properties by which jobs are compared."""

    tenant: str
    user: str
    """Empty if unknown."""
    gpus: int
    burst: int = 0
    """How many similar jobs arrived shortly before it: one of a hundred differs from a single job."""
    sweep: int = 0
    """Number of its sweep; 0 if unknown."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups it belongs to, the narrowest first; sizes are equal up to a factor of 2, bursts up to 4."""
        size, burst = (self.gpus - 1).bit_length(), self.burst.bit_length() // 2
        wider: tuple[Group, ...] = ((self.tenant, size, burst), (self.tenant, size), (size,), ())
        wider = ((self.tenant, self.user, size, burst), *wider) if self.user else wider
        return (self.sweep_group, *wider) if self.sweep else wider

    @property
    def sweep_group(self) -> Group:
        """The group of its sweep alone."""
        return (self.sweep,) * 5


class ObservedRuntime(NamedTuple):
    """What is known of one job's run time."""

    began_s: float
    """When it would have begun, had it never been stopped."""
    worked_s: float
    ended: bool
    """Whether it has finished."""


class RuntimeHistory:
    """Run times of finished jobs; a job is added when it ends, never before."""

    def __init__(self) -> None:
        self._ended: dict[Group, deque[ObservedRuntime]] = {}

    def ended(self, job_class: JobClass, now: float, worked_s: float) -> None:
        """Record a job that finished after `worked_s` seconds of work."""
        runtime = ObservedRuntime(now - worked_s, worked_s, True)
        for group in job_class.groups:
            self._ended.setdefault(group, deque(maxlen=MAX_RECENT)).append(runtime)

    def forget(self, sweep: JobClass) -> None:
        """Drop a finished sweep's own group, which no later job belongs to."""
        self._ended.pop(sweep.sweep_group, None)

    def to_json(self) -> list[Any]:
        """Return the run times as JSON values for `from_json`."""
        return [[group, list(runtimes)] for group, runtimes in self._ended.items()]

    @classmethod
    def from_json(cls, values: Iterable[Any]) -> "RuntimeHistory":
        """Return the run times that `to_json` wrote."""
        history = cls()
        for group, runtimes in values:
            ended = (ObservedRuntime(*runtime) for runtime in runtimes)
            history._ended[tuple(group)] = deque(ended, maxlen=MAX_RECENT)
        return history

    def with_running(self, running: Iterable[tuple[JobClass, ObservedRuntime]]) -> dict[Group, list[ObservedRuntime]]:
        """Return all run times per group, with those of running jobs, in order of their begin."""
        runtimes: dict[Group, list[ObservedRuntime]] = {group: [*ended] for group, ended in self._ended.items()}
        for job_class, runtime in running:
            for group in job_class.groups:
                runtimes.setdefault(group, []).append(runtime)
        return {group: sorted(observed) for group, observed in runtimes.items()}


class RuntimeSampler:
    """Run time distributions as one future has them."""

    def __init__(
        self,
        known: dict[Group, list[ObservedRuntime]],
        rng: Random,
        pace_spread: float = PACE_SPREAD,
        min_recent: int = MIN_RECENT,
    ) -> None:
        self._known, self._rng, self._spread, self._min_recent = known, rng, pace_spread, min_recent
        self._paces: dict[Group, float] = {}
        self._samples: dict[Group, tuple[list[float], list[float]]] = {}
        """Sorted run times of finished and of running jobs, per group, drawn on first use."""

    def draw(self, job_class: JobClass, after_s: float = 0.0) -> float:
        """Draw the total run time of a job that has worked for `after_s`; always longer than that."""
        groups, reached_s = job_class.groups, after_s
        pace = self._pace(groups[-3])
        while True:
            longer = self._draw_longer(groups, reached_s)
            if longer is None:
                beyond = max(reached_s, SHORTEST_S) / (1.0 - self._rng.random())
                seconds, ended = max(min(beyond, LONGEST_S), reached_s * 1.01, reached_s + 1.0), True
            else:
                seconds, ended = longer
            if ended:
                return after_s + pace * (seconds - after_s)
            reached_s = seconds

    def _pace(self, group: Group) -> float:
        if group not in self._paces:
            self._paces[group] = self._rng.lognormvariate(0.0, self._spread)
        return self._paces[group]

    def _draw_longer(self, groups: Iterable[Group], after_s: float) -> tuple[float, bool] | None:
        """Draw a job that took longer, and whether it has ended; None if none is known, or by chance."""
        for group in groups:
            ended, worked = self._sample(group)
            first, second = bisect_right(ended, after_s), bisect_right(worked, after_s)
            known = len(ended) - first + len(worked) - second
            number = int(self._rng.random() * (known + PRIOR_WEIGHT))
            if number < len(ended) - first:
                return ended[first + number], True
            if number < known:
                return worked[second + number - (len(ended) - first)], False
        return None

    def _sample(self, group: Group) -> tuple[list[float], list[float]]:
        if group not in self._samples:
            count = int(self._min_recent * (MAX_RECENT / self._min_recent) ** self._rng.random())
            last = self._known.get(group, [])[-count:]
            ended, worked = (sorted(job.worked_s for job in last if job.ended == which) for which in (True, False))
            self._samples[group] = (ended, worked)
        return self._samples[group]
