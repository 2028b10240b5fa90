"""Event by event: jobs come, the scheduler decides, jobs end. Same input, same bytes out."""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.cluster.decide import decide
from headway.cluster.policies import Policy
from headway.cluster.simulate.outcome import Meter, Outcome
from headway.cluster.simulate.trace import Trace
from headway.cluster.snapshot import Job, Snapshot
from headway.errors import UsageError

__all__ = ["Setup", "simulate"]

CYCLE_S = 30.0
"""Between two cycles of the scheduler at least."""
LONGEST_LIMIT_S = 30 * 86400.0


@dataclass(frozen=True)
class Setup:
    """What jobs run on, and what a log does not say of them."""

    chip: str
    per_node: int
    nodes: int
    guarantees: dict[str, int] = field(default_factory=dict)
    """GPUs of each tenant; by default in proportion to its demand."""
    preemptible: float = 0.5
    """Share of the jobs that may be stopped and started again."""
    save_every_s: float = 1800.0
    restart_s: float = 120.0
    limits: tuple[float, float] | None = (2.0, 20.0)
    """Time limits are durations times a factor between these, as users guess; None gives all the longest."""
    seed: int = 0

    @property
    def gpus(self) -> int:
        """In all."""
        return self.per_node * self.nodes


def simulate(trace: Trace, setup: Setup, policy: Policy, progress: Callable[[int], None] = lambda _: None) -> Outcome:
    """Run all jobs of a log; `progress` hears how many have ended."""
    chance = np.random.default_rng(setup.seed)
    can_stop = chance.random(len(trace)) < setup.preemptible
    limits = _limits(trace, setup, chance)
    snapshot = _empty(trace, setup)
    meter = Meter(trace, snapshot)
    coming, ends = 0, list[tuple[float, int, int]]()
    row_of = np.full(len(trace), -1)
    job_of = dict[int, int]()
    cycle_s, count = -math.inf, len(trace)
    while coming < count or ends:
        # 1 the next cycle: when something happens, and not before the last is long enough ago
        event_s = min(trace.submit_s[coming] if coming < count else math.inf, ends[0][0] if ends else math.inf)
        now = max(event_s, cycle_s + CYCLE_S)
        # 2 what happens until then, in its order
        while True:
            comes = trace.submit_s[coming] if coming < count else math.inf
            gone = ends[0][0] if ends else math.inf
            at = min(comes, gone)
            if at > now or at == math.inf:
                break
            meter.advance(at)
            snapshot.advance(at)
            if gone <= comes:
                _, job, starts = heapq.heappop(ends)
                row = int(row_of[job])
                if row < 0 or snapshot.jobs.starts[row] != starts or not snapshot.jobs.running[row]:
                    continue  # that start was stopped
                snapshot.end(row)
                meter.ended(job, at)
                row_of[job] = -1
                del job_of[row]
                progress(1)
            else:
                known = (float(trace.duration_s[coming]),) if policy.oracle else ()
                (row,) = snapshot.submit([_job(trace, coming, setup, bool(can_stop[coming]), limits)], known)
                row_of[coming] = row
                job_of[row] = coming
                meter.came(coming)
                coming += 1
        meter.advance(now)
        snapshot.advance(now)
        cycle_s = now
        # 3 decide, and do it
        if not len(snapshot.queue):
            continue
        for decision in decide(snapshot, now, policy):
            if decision.kind == "reserve":
                continue
            job = job_of[decision.job]
            if decision.kind == "stop":
                rows = np.array([decision.job])
                worked, saved = (
                    float(seconds[0]) for seconds in (snapshot.worked_s(rows, now), snapshot.saved_s(rows, now))
                )
                snapshot.stop(decision.job, saved)
                meter.stopped(job, worked - saved + setup.restart_s)
                continue
            snapshot.start(decision.job, decision.pool, decision.place)
            meter.started(job, now)
            starts = int(snapshot.jobs.starts[decision.job])
            late = setup.restart_s if starts > 1 else 0.0
            left = float(trace.duration_s[job] - snapshot.jobs.done_s[decision.job])
            heapq.heappush(ends, (now + late + left, job, starts))
        meter.cycle()
    return meter.outcome()


def _empty(trace: Trace, setup: Setup) -> Snapshot:
    snapshot = Snapshot()
    snapshot.nodes.join(setup.chip, setup.per_node, (f"node-{number:04}" for number in range(setup.nodes)))
    guarantees = setup.guarantees or _proportional(trace, setup.gpus)
    unknown = [name for name in trace.tenants if name not in guarantees]
    if unknown:
        raise UsageError(f"tenant {unknown[0]} has jobs and no guarantee", hint="name it, with 0 GPUs at least")
    for name, gpus in guarantees.items():
        snapshot.tenants.join(name, gpus)
    snapshot.tenants.check(setup.gpus)
    return snapshot


def _proportional(trace: Trace, gpus: int) -> dict[str, int]:
    """All GPUs, by demand; what is left by rounding goes to who lost most."""
    demand = trace.demand()
    exact = demand / max(demand.sum(), 1e-9) * gpus
    whole = np.floor(exact).astype(int)
    for row in np.argsort(whole - exact, kind="stable")[: gpus - int(whole.sum())]:
        whole[row] += 1
    return dict(zip(trace.tenants, whole.tolist(), strict=True))


def _limits(trace: Trace, setup: Setup, chance: np.random.Generator) -> NDArray[np.float64]:
    """What users would have said: their log's limits, or guesses."""
    if setup.limits is None:
        guessed = np.full(len(trace), LONGEST_LIMIT_S)
    else:
        low, high = np.log(setup.limits)
        guessed = trace.duration_s * np.exp(chance.uniform(low, high, len(trace)))
    guessed = np.maximum(np.minimum(guessed, LONGEST_LIMIT_S), trace.duration_s)
    return np.where(np.isnan(trace.limit_s), guessed, trace.limit_s)


def _job(trace: Trace, number: int, setup: Setup, preemptible: bool, limits: NDArray[np.float64]) -> Job:
    return Job(
        trace.names[number],
        trace.tenants[trace.tenant[number]],
        int(trace.gpus[number]),
        submit_s=float(trace.submit_s[number]),
        preemptible=preemptible,
        limit_s=float(limits[number]),
        save_every_s=setup.save_every_s,
        restart_s=setup.restart_s,
    )
