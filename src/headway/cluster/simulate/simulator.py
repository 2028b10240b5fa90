"""Event by event: jobs come, the scheduler decides, jobs end. Same input, same bytes out."""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.decide import decide, preemptible_from_s
from headway.cluster.scheduler.decision_log import DecisionRecorder, apply_decisions
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.nodes import HEALTHY, LEAD_S, SPARE
from headway.cluster.scheduler.placement import ANYWHERE
from headway.cluster.scheduler.policy import Policy
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.simulate.job_trace import JobTrace
from headway.cluster.simulate.metrics import Cause, SimulationMeter, SimulationResult
from headway.cluster.simulate.site import NodeMaintenance, Site, Tenant
from headway.errors import UsageError

__all__ = ["MaintenanceWindow", "SimulationSetup", "simulate"]

CYCLE_S = 30.0
"""Between two cycles of the scheduler at least."""
PATIENCE_S = 3600.0
"""After which jobs that wait are looked at again, though nothing has happened."""
LONGEST_LIMIT_S = 30 * 86400.0
DOUBLED = 1.8
"""How much faster an elastic job is with twice the GPUs."""


@dataclass(frozen=True)
class MaintenanceWindow:
    """Nodes that will be away for some time; their scheduler knows from the beginning."""

    first: int
    end: int
    """The first node, and the first that stays."""
    from_s: float
    to_s: float


@dataclass(frozen=True)
class SimulationSetup:
    """What jobs run on, and what a log does not say of them."""

    chip: str
    per_node: int
    nodes: int
    guarantees: dict[str, int] = field(default_factory=dict)
    """GPUs of each tenant; by default in proportion to its demand."""
    site: Site = field(default_factory=Site)
    """Its hosts, network and tenants, where they are known."""
    preemptible: float = 0.5
    """Share of the jobs that may be stopped and started again."""
    save_every_s: float = 1800.0
    restart_s: float = 120.0
    elastic: float = 0.0
    """Share of the jobs that can do with half of their GPUs, and use up to four times as many."""
    limits: tuple[float, float] | None = (2.0, 20.0)
    """Time limits are durations times a factor between these, as users guess; None gives all the longest."""
    node_days: float | None = None
    """Between failures of a node, on average; None: nodes never fail."""
    repair_s: float = 4 * 3600.0
    spares: int = 0
    """Of the nodes, those that wait to take the place of a failed one."""
    away: tuple[MaintenanceWindow, ...] = ()
    """When nodes are looked after."""
    budgets: dict[str, float] = field(default_factory=dict)
    """GPU-hours a month of tenants that have a budget."""
    seed: int = 0

    @property
    def gpus(self) -> int:
        """In all, but for spares."""
        return self.per_node * (self.nodes - self.spares)


def simulate(
    trace: JobTrace,
    setup: SimulationSetup,
    policy: Policy,
    progress: Callable[[int], None] = lambda _: None,
    record: Path | None = None,
) -> SimulationResult:
    """Run all jobs of a log; `progress` hears how many have ended, and `record` is a file to write decisions to."""
    story = _Story(trace, setup, policy, record)
    ended, cycle_s = 0, -math.inf
    while (event_s := min(story.next_s(), cycle_s + story.patience_s)) < math.inf:
        # 1 the next cycle: when something happens, or some have waited for long, and not too soon after the last
        cycle_s = max(event_s, cycle_s + CYCLE_S)
        # 2 what happens until then, in its order
        while (at := story.next_s()) <= cycle_s and at < math.inf:
            story.happen(at)
        # 3 decide, and do it
        story.decide(cycle_s)
        # 4 tell
        progress(story.ended - ended)
        ended = story.ended
    return story.outcome()


class _Story:
    """A simulation under way."""

    def __init__(self, trace: JobTrace, setup: SimulationSetup, policy: Policy, record: Path | None) -> None:
        chance = np.random.default_rng(setup.seed)
        self._trace, self._setup, self._policy = trace, setup, policy
        self._can_stop = chance.random(len(trace)) < setup.preemptible
        self._limits = _limits(trace, setup, chance)
        self._elastic = np.random.default_rng((setup.seed, 2)).random(len(trace)) < setup.elastic
        self._snapshot = _empty(trace, setup)
        self._check()
        self._meter = SimulationMeter(trace, self._snapshot)
        self._recorder = None if record is None else DecisionRecorder(record, self._snapshot, policy)
        self._coming = 0
        self._ends: list[tuple[float, int, int]] = []
        """When a start of a job would end: time, job, number of the start."""
        self._wear: list[tuple[float, int, bool]] = []
        """When a node fails, or (true) is well again: time, node, which."""
        if setup.node_days is not None:
            self._chance = np.random.default_rng((setup.seed, 1))
            self._wear = [(self._lasts_s(), node, False) for node in range(setup.nodes)]
            heapq.heapify(self._wear)
        away: tuple[MaintenanceWindow | NodeMaintenance, ...] = (*setup.away, *setup.site.away)
        self._tides = sorted({time for one in away for time in (max(one.from_s - LEAD_S, 0.0), one.to_s)}, reverse=True)
        """When nodes go away or are back, the next last."""
        self._row_of: dict[int, int] = {}
        self._job_of: dict[int, int] = {}
        self._causes: tuple[tuple[str, Cause, Callable[[NDArray[np.int64], float], NDArray[np.float64]]], ...] = (
            ("stop", "preemption", self._lost_gpu_s),
            ("move", "maintenance", self._late_gpu_s),
            ("resize", "resize", self._late_gpu_s),
        )
        """Of decisions that take GPUs from a job: what they count as, and what they lose."""
        self._moved = False
        self.ended = 0

    def _check(self) -> None:
        """UsageError for the first job that can never run, before any does."""
        trace, snapshot = self._trace, self._snapshot
        largest = snapshot.nodes.largest(ANYWHERE)
        most = np.array([min(largest, snapshot.allowance(snapshot.tenants.rows[name])) for name in trace.tenants])
        doubtful = trace.gpus > most[trace.tenant]
        if trace.asked:
            doubtful |= np.array(["within" in asked for asked in trace.asked])
        for job in np.flatnonzero(doubtful).tolist():
            snapshot.check(self._asked(job))

    @property
    def patience_s(self) -> float:
        """How long after a cycle the next one is at the latest: soon where jobs were moved, which wait since, and when
        the next that runs may be stopped."""
        if self._moved:
            return CYCLE_S
        if not self.waiting:
            return math.inf
        snapshot = self._snapshot
        if self._policy.stops is None or not len(snapshot.queue):
            return PATIENCE_S
        settles = preemptible_from_s(snapshot, snapshot.active[snapshot.jobs.preemptible[snapshot.active]])
        return float(min(PATIENCE_S, settles[settles > snapshot.now_s].min(initial=math.inf) - snapshot.now_s))

    @property
    def waiting(self) -> int:
        """Jobs that wait, or may have more."""
        return len(self._snapshot.queue) + len(self._snapshot.sizes)

    def next_s(self) -> float:
        """When something happens next; never again once all jobs are done."""
        if self.ended == len(self._trace):
            return math.inf
        worn = self._wear[0][0] if self._wear else math.inf
        return min(self._comes_s(), self._ends_s(), worn, self._tides[-1] if self._tides else math.inf)

    def _comes_s(self) -> float:
        return float(self._trace.submit_s[self._coming]) if self._coming < len(self._trace) else math.inf

    def _ends_s(self) -> float:
        return self._ends[0][0] if self._ends else math.inf

    def _lasts_s(self) -> float:
        """How long a node will last."""
        assert self._setup.node_days is not None
        return float(self._chance.exponential(self._setup.node_days * 86400))

    def happen(self, at: float) -> None:
        """A job ends, or else a node fails or is mended, or else a job comes."""
        self._pass(at)
        if self._tides and self._tides[-1] <= at:
            self._tides.pop()
        elif self._ends_s() <= at:
            self._end(at)
        elif self._wear and self._wear[0][0] <= at:
            self._wear_out(at)
        else:
            self._come(at)

    def _wear_out(self, at: float) -> None:
        _, node, mends = heapq.heappop(self._wear)
        snapshot, name = self._snapshot, self._snapshot.nodes.names[node]
        if mends:
            serving = int(np.count_nonzero(snapshot.nodes.state[: self._setup.nodes] == HEALTHY))
            state = HEALTHY if serving < self._setup.nodes - self._setup.spares else SPARE
            snapshot.mend(node, state)
            if self._recorder:
                self._recorder.mended(at, name, state)
            heapq.heappush(self._wear, (at + self._lasts_s(), node, False))
            return
        active = snapshot.active
        lost = dict(zip(active.tolist(), self._lost_gpu_s(active, at).tolist(), strict=True))
        for row in snapshot.fail(node):
            self._meter.stopped(self._job_of[row], lost[row], "failure")
        if self._recorder:
            self._recorder.failed(at, name)
        heapq.heappush(self._wear, (at + self._setup.repair_s, node, True))

    def _pass(self, now: float) -> None:
        self._meter.advance(now)
        self._snapshot.advance(now)

    def _end(self, at: float) -> None:
        _, job, starts = heapq.heappop(self._ends)
        row, jobs = self._row_of.get(job), self._snapshot.jobs
        if row is None or jobs.starts[row] != starts or not jobs.running[row]:
            return  # that start was stopped, or went on at another size
        late = float(jobs.restart_s[row]) * float(jobs.gpus[row]) if starts > 1 else 0.0
        self._snapshot.end(row)
        self._meter.ended(job, at, late)
        if self._recorder:
            self._recorder.ended(at, self._trace.names[job])
        del self._job_of[row], self._row_of[job]
        self.ended += 1

    def _asked(self, job: int) -> Job:
        """A job as its user submits it."""
        trace, setup = self._trace, self._setup
        more: dict[str, Any] = {
            "preemptible": bool(self._can_stop[job]),
            "save_every_s": setup.save_every_s,
            "restart_s": setup.restart_s,
            "sizes": _sizes(int(trace.gpus[job]), setup.gpus) if self._elastic[job] else (),
        }
        if trace.asked:
            more |= trace.asked[job]
        if not self._policy.elastic:
            more["sizes"] = ()  # it runs as it was submitted
        return Job(
            trace.names[job],
            trace.tenants[trace.tenant[job]],
            more["sizes"][0][0] if more["sizes"] else int(trace.gpus[job]),
            submit_s=float(trace.submit_s[job]),
            limit_s=float(self._limits[job]),
            deadline_s=math.inf if math.isnan(trace.deadline_s[job]) else float(trace.deadline_s[job]),
            user=trace.users[job] if trace.users else "",
            **more,
        )

    def _come(self, at: float) -> None:
        job = self._coming
        asked = self._asked(job)
        known = float(self._trace.duration_s[job]) if self._policy.oracle else math.nan
        (row,) = self._snapshot.submit([asked], [known])
        self._row_of[job], self._job_of[row] = row, job
        if self._recorder:
            self._recorder.came(at, asked, known)
        self._coming += 1

    def decide(self, now: float) -> None:
        """One cycle of the scheduler."""
        self._pass(now)
        snapshot = self._snapshot
        self._moved = False
        if not self.waiting and not snapshot.nodes.leaving(now).any():
            return
        decisions = decide(snapshot, now, self._policy)
        if self._recorder:
            self._recorder.decided(now, snapshot, decisions)
        for kind, cause, lost_gpu_s in self._causes if any(one.kind != "start" for one in decisions) else ():
            rows = np.array([decision.job for decision in decisions if decision.kind == kind], np.int64)
            for row, lost in zip(rows.tolist(), lost_gpu_s(rows, now).tolist() if len(rows) else (), strict=True):
                self._meter.stopped(self._job_of[row], lost, cause)
        apply_decisions(snapshot, decisions)
        self._moved = any(one.kind == "move" for one in decisions)
        for decision in decisions:
            if decision.kind == "start":
                self._meter.started(self._job_of[decision.job], now)
            if decision.kind in ("start", "resize"):
                self._goes_on(decision.job, now)
        self._meter.cycle()

    def _lost_gpu_s(self, rows: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """What jobs have held their GPUs for in this start for nothing, if they are stopped now."""
        jobs = self._snapshot.jobs
        saved_s = (self._snapshot.saved_s(rows, now) - jobs.done_s[rows]) / jobs.speed[rows]
        return ((now - jobs.since_s[rows]) - saved_s) * jobs.gpus[rows]

    def _late_gpu_s(self, rows: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """What jobs have held their GPUs for in this start before they worked."""
        jobs = self._snapshot.jobs
        worked_s = (self._snapshot.worked_s(rows, now) - jobs.done_s[rows]) / jobs.speed[rows]
        return ((now - jobs.since_s[rows]) - worked_s) * jobs.gpus[rows]

    def _goes_on(self, row: int, now: float) -> None:
        """A job has its GPUs, for the first time or again: when it will be done with them."""
        job, jobs = self._job_of[row], self._snapshot.jobs
        starts = int(jobs.starts[row])
        late = float(jobs.restart_s[row]) if starts > 1 else 0.0
        left = float(self._trace.duration_s[job] - jobs.done_s[row]) / float(jobs.speed[row])
        heapq.heappush(self._ends, (now + late + left, job, starts))

    def outcome(self) -> SimulationResult:
        """At the end."""
        if self._recorder:
            self._recorder.close()
        return self._meter.outcome()


def _sizes(gpus: int, most: int) -> tuple[tuple[int, float], ...]:
    """What an elastic job can have: half of what it asks for, where that is whole, up to four times as much."""
    found = [(gpus * 2**power / 2, DOUBLED ** (power - 1)) for power in range(4)]
    return tuple((int(size), speed) for size, speed in found if size == int(size) and (size <= most or size <= gpus))


def _empty(trace: JobTrace, setup: SimulationSetup) -> ClusterSnapshot:
    snapshot, site = ClusterSnapshot(), setup.site
    site.join_nodes(snapshot, setup.chip, setup.per_node, setup.nodes, setup.spares)
    for window in site.away:
        snapshot.nodes.announce([window.node], window.from_s, window.to_s)
    if not site.tenants:
        guarantees = setup.guarantees or _proportional(trace, setup.gpus)
        site = Site(
            tenants=tuple(Tenant(name, gpus, budget_gpu_h=setup.budgets.get(name)) for name, gpus in guarantees.items())
        )
    site.join_tenants(snapshot)
    unknown = [name for name in trace.tenants if name not in snapshot.tenants.rows]
    if unknown:
        raise UsageError(f"tenant {unknown[0]} has jobs and no guarantee", hint="name it, with 0 GPUs at least")
    for name in setup.budgets:
        if name not in snapshot.tenants.rows:
            there = ", ".join(snapshot.tenants.names)
            raise UsageError(f"tenant {name} has a budget and no guarantee", hint=f"there are {there}")
    for one in setup.away:
        if not 0 <= one.first < one.end <= setup.nodes:
            raise UsageError(f"nodes {one.first} to {one.end} are to be away, and there are {setup.nodes}")
        snapshot.nodes.announce(snapshot.nodes.names[one.first : one.end], one.from_s, one.to_s)
    snapshot.tenants.check(setup.gpus)
    return snapshot


def _proportional(trace: JobTrace, gpus: int) -> dict[str, int]:
    """All GPUs, by demand; what is left by rounding goes to who lost most."""
    demand = trace.demand()
    exact = demand / max(demand.sum(), 1e-9) * gpus
    whole = np.floor(exact).astype(int)
    for row in np.argsort(whole - exact, kind="stable")[: gpus - int(whole.sum())]:
        whole[row] += 1
    return dict(zip(trace.tenants, whole.tolist(), strict=True))


def _limits(trace: JobTrace, setup: SimulationSetup, chance: np.random.Generator) -> NDArray[np.float64]:
    """What users would have said: their log's limits, or guesses."""
    if setup.limits is None:
        guessed = np.full(len(trace), LONGEST_LIMIT_S)
    else:
        low, high = np.log(setup.limits)
        guessed = trace.duration_s * np.exp(chance.uniform(low, high, len(trace)))
    guessed = np.maximum(np.minimum(guessed, LONGEST_LIMIT_S), np.maximum(trace.duration_s, 1.0))
    return np.where(np.isnan(trace.limit_s), guessed, trace.limit_s)
