"""When will a job start? Futures are drawn and lived through with the scheduler's own decisions; their starts are told.

In each future every job that runs or waits takes as long as is drawn for it, given how far it has come, and jobs go on
coming as they came of late: the future's arrivals are the past's, mirrored at a moment not long ago, so that a rush
that has lasted for an hour may well last for another. Nothing here sees how long a job will truly take, nor the limits
that users name.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.decision_log import apply_decisions
from headway.cluster.scheduler.history import JobArrival, JobHistory
from headway.cluster.scheduler.policy import Policy
from headway.cluster.scheduler.runtimes import JobClass, ObservedRuntime, RuntimeSampler
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.errors import UsageError

__all__ = ["FUTURES", "StartEstimate", "estimate_start", "quantile"]

FUTURES = 19
"""The tenth of them in order is P50, the eighteenth P90."""
CYCLE_S = 30.0
COARSER = 0.03
"""Of the time that has passed: cycles of a future come so much apart, if that is more than a live scheduler's."""
PATIENCE_S = 3600.0
MOST_CYCLES = 400
"""Of one future: about half a year."""
SOON_S, LATE_S = 60.0, 86400.0
"""Moments at which the past is mirrored lie so far back."""


@dataclass(frozen=True)
class StartEstimate:
    """Seconds from now until a job starts."""

    p50_s: float
    """As likely as not it has started by then; infinite: it may never."""
    p90_s: float
    futures: tuple[float, ...]
    """Of each future, the earliest first."""


def estimate_start(
    snapshot: ClusterSnapshot,
    name: str,
    now: float,
    policy: Policy,
    history: JobHistory,
    seed: int = 0,
    futures: int = FUTURES,
) -> StartEstimate:
    """When a job that waits may start; same input, same answer. The snapshot stays as it is."""
    row = snapshot.jobs.rows.get(name)
    if row is None or snapshot.jobs.running[row]:
        raise UsageError(f"job {name} does not wait at {now:.0f} s")
    active = snapshot.active
    worked = np.maximum(snapshot.worked_s(active, now), 0.0).tolist()
    kinds = history.kinds
    known = history.runtimes.beside(
        (kinds[snapshot.jobs.names[one]], ObservedRuntime(now - seconds, seconds, False))
        for one, seconds in zip(active.tolist(), worked, strict=True)
    )
    found = []
    for number in range(futures):
        chance = Random(f"{seed} {number} {name}")
        arrivals = mirrored(history, now, now - SOON_S * (LATE_S / SOON_S) ** chance.random(), name)
        found.append(_Future(snapshot.copy(), now, policy, RuntimeSampler(known, chance), arrivals, kinds).until(row))
    found.sort()
    return StartEstimate(quantile(found, 0.5), quantile(found, 0.9), tuple(found))


def mirrored(history: JobHistory, now: float, around: float, but: str) -> Iterator[JobArrival]:
    """Jobs that come: those of the past before a moment, backwards from it."""
    for job, kind in reversed(history.came):
        if job.submit_s <= around and job.name != but:
            later = now + (around - job.submit_s)
            yield JobArrival(replace(job, submit_s=later, deadline_s=job.deadline_s + later - job.submit_s), kind)


def quantile(found: list[float], share: float) -> float:
    """What this share of such futures does not exceed: the k-th of n in order stands for k / (n + 1)."""
    place = min(max(share * (len(found) + 1) - 1, 0.0), len(found) - 1.0)
    low = math.floor(place)
    high = min(low + 1, len(found) - 1)
    if math.isinf(found[high]):
        return found[low] if place == low else math.inf
    return found[low] + (place - low) * (found[high] - found[low])


class _Future:
    """One way that things may go."""

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        now: float,
        policy: Policy,
        lives: RuntimeSampler,
        arrivals: Iterator[JobArrival],
        kinds: dict[str, JobClass],
    ) -> None:
        self._snapshot, self._begin, self._policy = snapshot, now, policy
        self._lives, self._arrivals = lives, arrivals
        self._kinds = kinds.copy()
        self._takes: dict[int, float] = {}
        """Seconds of work of each job in all, drawn when they are first needed."""
        self._ends: list[tuple[float, int, int, str]] = []
        self._coming = next(arrivals, None)
        self._came = 0
        snapshot.advance(max(now, snapshot.now_s))
        worked = np.maximum(snapshot.worked_s(snapshot.active, now), 0.0).tolist()
        for row, seconds in zip(snapshot.active.tolist(), worked, strict=True):
            self._takes[row] = lives.draw(kinds[snapshot.jobs.names[row]], seconds)
            self._will_end(row)

    def until(self, row: int) -> float:
        """Seconds until a job starts."""
        snapshot, now, last = self._snapshot, self._begin, self._begin
        for _ in range(MOST_CYCLES):
            step = max(CYCLE_S, COARSER * (now - self._begin))
            event = min(self._next_s(), last + PATIENCE_S)
            now = max(now + step, event)
            self._pass(now)
            decisions = decide(snapshot, now, self._policy)
            apply_decisions(snapshot, decisions)
            for decision in decisions:
                if decision.kind == "start" and decision.job == row:
                    return now - self._begin
                if decision.kind in ("start", "resize"):
                    self._started(decision.job)
            last = now
        return math.inf

    def _next_s(self) -> float:
        comes = math.inf if self._coming is None else self._coming.job.submit_s
        return min(comes, self._ends[0][0] if self._ends else math.inf)

    def _pass(self, now: float) -> None:
        """Jobs end and come."""
        snapshot = self._snapshot
        while (at := self._next_s()) <= now:
            snapshot.advance(max(at, snapshot.now_s))
            if self._ends and self._ends[0][0] <= at:
                _, row, starts, name = heapq.heappop(self._ends)
                there = snapshot.jobs.rows.get(name) == row
                if there and snapshot.jobs.running[row] and snapshot.jobs.starts[row] == starts:
                    snapshot.end(row)
                    del self._takes[row]
            elif self._coming is not None:
                name = f"{self._coming.job.name} again {self._came}"
                snapshot.submit([replace(self._coming.job, name=name)])
                self._kinds[name] = self._coming.kind
                self._came += 1
                self._coming = next(self._arrivals, None)
        snapshot.advance(now)

    def _started(self, row: int) -> None:
        if row not in self._takes:
            jobs = self._snapshot.jobs
            self._takes[row] = self._lives.draw(self._kinds[jobs.names[row]], float(jobs.done_s[row]))
        self._will_end(row)

    def _will_end(self, row: int) -> None:
        snapshot, jobs = self._snapshot, self._snapshot.jobs
        late = float(jobs.restart_s[row]) if jobs.starts[row] > 1 else 0.0
        end = float(jobs.since_s[row] + late + (self._takes[row] - jobs.done_s[row]) / jobs.speed[row])
        heapq.heappush(self._ends, (max(end, snapshot.now_s), row, int(jobs.starts[row]), jobs.names[row]))
