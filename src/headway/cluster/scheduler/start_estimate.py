"""Start time estimates: simulate possible futures with the scheduler's own decisions, and report when a job starts.

In each future, run times of running and waiting jobs are drawn given how far they have come, and jobs keep arriving as
they did recently: arrivals are those of the past, mirrored at a moment not long ago, so that a rush that has lasted an
hour may well last another. Neither true run times nor the time limits of users are used.
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

FUTURES = 19
"""In order, the tenth of them is P50, the eighteenth P90."""
CYCLE_S = 30.0
CYCLE_GROWTH = 0.03
"""Cycles are this share of the elapsed time apart, if that is more than CYCLE_S."""
MAX_CYCLE_GAP_S = 3600.0
MAX_CYCLES = 400
"""Per future: about half a year."""
MIRROR_MIN_S, MIRROR_MAX_S = 60.0, 86400.0
"""How far back arrivals are mirrored."""


@dataclass(frozen=True)
class StartEstimate:
    """Seconds from now until a job starts."""

    p50_s: float
    """Infinite if it may never start."""
    p90_s: float
    futures: tuple[float, ...]
    """Start in each future, the earliest first."""


def estimate_start(
    snapshot: ClusterSnapshot,
    name: str,
    now: float,
    policy: Policy,
    history: JobHistory,
    seed: int = 0,
    futures: int = FUTURES,
) -> StartEstimate:
    """Estimate when a waiting job starts. Deterministic; the snapshot does not change."""
    row = snapshot.jobs.rows.get(name)
    if row is None or snapshot.jobs.running[row]:
        raise UsageError(f"job {name} is not waiting at {now:.0f} s")
    active, classes = snapshot.active, history.classes
    worked = np.maximum(snapshot.worked_s(active, now), 0.0).tolist()
    known = history.runtimes.with_running(
        (classes[snapshot.jobs.names[running]], ObservedRuntime(now - seconds, seconds, False))
        for running, seconds in zip(active.tolist(), worked, strict=True)
    )
    starts = []
    for number in range(futures):
        rng = Random(f"{seed} {number} {name}")
        moment = now - MIRROR_MIN_S * (MIRROR_MAX_S / MIRROR_MIN_S) ** rng.random()
        arrivals = mirrored_arrivals(history, now, moment, name)
        future = _Future(snapshot.copy(), now, policy, RuntimeSampler(known, rng), arrivals, classes)
        starts.append(future.run_until_start(row))
    starts.sort()
    return StartEstimate(quantile(starts, 0.5), quantile(starts, 0.9), tuple(starts))


def mirrored_arrivals(history: JobHistory, now: float, moment: float, without: str) -> Iterator[JobArrival]:
    """Yield future arrivals: past ones before a moment, backwards from it."""
    for job, job_class in reversed(history.arrivals):
        if job.submit_s <= moment and job.name != without:
            later = now + (moment - job.submit_s)
            yield JobArrival(replace(job, submit_s=later, deadline_s=job.deadline_s + later - job.submit_s), job_class)


def quantile(values: list[float], share: float) -> float:
    """Return a quantile of sorted values: the k-th of n stands for k / (n + 1)."""
    index = min(max(share * (len(values) + 1) - 1, 0.0), len(values) - 1.0)
    low = math.floor(index)
    high = min(low + 1, len(values) - 1)
    if math.isinf(values[high]):
        return values[low] if index == low else math.inf
    return values[low] + (index - low) * (values[high] - values[low])


class _Future:
    """One possible future of a cluster."""

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        now: float,
        policy: Policy,
        sampler: RuntimeSampler,
        arrivals: Iterator[JobArrival],
        classes: dict[str, JobClass],
    ) -> None:
        self._snapshot, self._begin, self._policy = snapshot, now, policy
        self._sampler, self._arrivals = sampler, arrivals
        self._classes = classes.copy()
        self._durations: dict[int, float] = {}
        """Total seconds of work per job, drawn on first use."""
        self._ends: list[tuple[float, int, int, str]] = []
        self._next_arrival = next(arrivals, None)
        self._arrived = 0
        snapshot.advance(max(now, snapshot.now_s))
        worked = np.maximum(snapshot.worked_s(snapshot.active, now), 0.0).tolist()
        for row, seconds in zip(snapshot.active.tolist(), worked, strict=True):
            self._schedule_end(row, seconds)

    def run_until_start(self, row: int) -> float:
        """Return the seconds until a job starts; infinite if it does not within MAX_CYCLES."""
        snapshot, now, last = self._snapshot, self._begin, self._begin
        for _ in range(MAX_CYCLES):
            step = max(CYCLE_S, CYCLE_GROWTH * (now - self._begin))
            now = max(now + step, min(self._next_event_s(), last + MAX_CYCLE_GAP_S))
            self._advance(now)
            decisions = decide(snapshot, now, self._policy)
            apply_decisions(snapshot, decisions)
            for decision in decisions:
                if decision.kind == "start" and decision.job == row:
                    return now - self._begin
                if decision.kind in ("start", "resize"):
                    self._schedule_end(decision.job, float(snapshot.jobs.done_s[decision.job]))
            last = now
        return math.inf

    def _next_event_s(self) -> float:
        arrival_s = math.inf if self._next_arrival is None else self._next_arrival.job.submit_s
        return min(arrival_s, self._ends[0][0] if self._ends else math.inf)

    def _advance(self, now: float) -> None:
        """Let jobs end and arrive until a time."""
        snapshot = self._snapshot
        while (at := self._next_event_s()) <= now:
            snapshot.advance(max(at, snapshot.now_s))
            if self._ends and self._ends[0][0] <= at:
                _, row, starts, name = heapq.heappop(self._ends)
                exists = snapshot.jobs.rows.get(name) == row
                if exists and snapshot.jobs.running[row] and snapshot.jobs.starts[row] == starts:
                    snapshot.end(row)
                    del self._durations[row]
            elif self._next_arrival is not None:
                name = f"{self._next_arrival.job.name} again {self._arrived}"
                snapshot.submit([replace(self._next_arrival.job, name=name)])
                self._classes[name] = self._next_arrival.job_class
                self._arrived += 1
                self._next_arrival = next(self._arrivals, None)
        snapshot.advance(now)

    def _schedule_end(self, row: int, worked_s: float) -> None:
        """Schedule the end of a job that was started; its duration is drawn given `worked_s` on its first start."""
        snapshot, jobs = self._snapshot, self._snapshot.jobs
        if row not in self._durations:
            self._durations[row] = self._sampler.draw(self._classes[jobs.names[row]], worked_s)
        restart_s = float(jobs.restart_s[row]) if jobs.starts[row] > 1 else 0.0
        end = float(jobs.since_s[row] + restart_s + (self._durations[row] - jobs.done_s[row]) / jobs.speed[row])
        heapq.heappush(self._ends, (max(end, snapshot.now_s), row, int(jobs.starts[row]), jobs.names[row]))
