"""Discrete-event simulation of a job trace: jobs arrive, the scheduler decides, jobs end. Deterministic."""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.decide import decide, preemptible_from_s
from headway.cluster.scheduler.decision_log import DecisionRecorder, apply_decisions
from headway.cluster.scheduler.decisions import ReasonCode
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.nodes import DRAIN_LEAD_S, HEALTHY, SPARE
from headway.cluster.scheduler.placement import ANYWHERE
from headway.cluster.scheduler.policy import Policy
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.submission_checks import OversizedJobError
from headway.cluster.simulate.job_trace import JobTrace, apportion
from headway.cluster.simulate.metrics import Cause, SimulationMeter, SimulationResult
from headway.cluster.simulate.site import NodeMaintenance, Site, Tenant
from headway.errors import UsageError

CYCLE_S = 30.0
"""Minimum time between two scheduling cycles."""
MAX_CYCLE_GAP_S = 3600.0
"""Maximum time between two cycles while jobs wait."""
LONGEST_LIMIT_S = 30 * 86400.0
SPEEDUP = 1.8
"""Of an elastic job with twice the GPUs."""


@dataclass(frozen=True)
class MaintenanceWindow:
    """Maintenance of consecutive nodes, known to the scheduler from the beginning."""

    first: int
    end: int
    """The first node after the last."""
    from_s: float
    to_s: float


@dataclass(frozen=True)
class SimulationSetup:
    """The cluster, and what a trace does not say of its jobs."""

    chip: str
    per_node: int
    nodes: int
    guarantees: dict[str, int] = field(default_factory=dict)
    """GPUs per tenant; by default in proportion to its demand."""
    site: Site = field(default_factory=Site)
    """Its hosts, network and tenants, if known."""
    preemptible: float = 0.5
    """Share of jobs that are preemptible."""
    save_every_s: float = 1800.0
    restart_s: float = 120.0
    elastic: float = 0.0
    """Share of jobs that can run on half to four times their GPUs."""
    limits: tuple[float, float] | None = (2.0, 20.0)
    """Time limits are run times multiplied by a factor between these, as users guess; None: the longest for all."""
    node_days: float | None = None
    """Mean time between failures of a node, in days; None: nodes never fail."""
    repair_s: float = 4 * 3600.0
    spares: int = 0
    """Nodes held back to replace failed ones."""
    away: tuple[MaintenanceWindow, ...] = ()
    """Scheduled maintenance."""
    budgets: dict[str, float] = field(default_factory=dict)
    """GPU-hours per calendar month of tenants with a budget."""
    unix_zero_s: float = 0.0
    """Unix seconds at second 0 of the trace, by which months begin: 1 January 1970 unless it is known."""
    seed: int = 0

    @property
    def gpus(self) -> int:
        """GPUs of all nodes but spares."""
        return self.per_node * (self.nodes - self.spares)


def simulate(
    trace: JobTrace,
    setup: SimulationSetup,
    policy: Policy,
    progress: Callable[[int], None] = lambda _: None,
    record: Path | None = None,
) -> SimulationResult:
    """Run all jobs of a trace; `progress` receives how many more have ended, `record` is the decision log to write."""
    simulation = _Simulation(trace, setup, policy, record)
    for error in simulation.oversized_jobs().values():
        raise error
    ended, cycle_s = 0, -math.inf
    while (event_s := min(simulation.next_event_s(), cycle_s + simulation.max_gap_s)) < math.inf:
        # 1 find the time of the next cycle: after an event or the maximum gap, and not too soon after the last
        cycle_s = max(event_s, cycle_s + CYCLE_S)
        # 2 handle the events until then
        while (at := simulation.next_event_s()) <= cycle_s and at < math.inf:
            simulation.handle_event(at)
        # 3 decide, and apply the decisions
        simulation.run_cycle(cycle_s)
        # 4 report progress
        progress(simulation.ended - ended)
        ended = simulation.ended
    return simulation.result()


def skip_oversized(
    trace: JobTrace, setup: SimulationSetup, policies: Sequence[Policy]
) -> tuple[JobTrace, tuple[OversizedJobError, ...]]:
    """Return the jobs that could run under each of the policies, and why the others could not."""
    oversized = dict[int, OversizedJobError]()
    for policy in policies:
        oversized |= _Simulation(trace, setup, policy, None).oversized_jobs()
    if not oversized:
        return trace, ()
    kept = np.ones(len(trace), np.bool_)
    kept[list(oversized)] = False
    if not kept.any():
        error = oversized[0]
        raise UsageError(f"no job of the trace can run here; {error.message}", hint="choose a larger cluster")
    return trace.only(kept), tuple(oversized[job] for job in sorted(oversized))


class _Simulation:
    """State of a simulation."""

    def __init__(self, trace: JobTrace, setup: SimulationSetup, policy: Policy, record: Path | None) -> None:
        rng = np.random.default_rng(setup.seed)
        self._trace, self._setup, self._policy = trace, setup, policy
        self._preemptible = rng.random(len(trace)) < setup.preemptible
        self._limits = _limits(trace, setup, rng)
        self._elastic = np.random.default_rng((setup.seed, 2)).random(len(trace)) < setup.elastic
        self._snapshot = _empty_cluster(trace, setup)
        self._meter = SimulationMeter(trace, self._snapshot)
        self._recorder = None if record is None else DecisionRecorder(record, self._snapshot, policy)
        self._arrived = 0
        self._ends: list[tuple[float, int, int]] = []
        """Heap of job ends: time, job, number of the start."""
        self._node_events: list[tuple[float, int, bool]] = []
        """Heap of failures and repairs: time, node, whether it is repaired."""
        if setup.node_days is not None:
            self._node_rng = np.random.default_rng((setup.seed, 1))
            self._node_events = [(self._draw_lifetime_s(), node, False) for node in range(setup.nodes)]
            heapq.heapify(self._node_events)
        away: tuple[MaintenanceWindow | NodeMaintenance, ...] = (*setup.away, *setup.site.away)
        times = {time for window in away for time in (max(window.from_s - DRAIN_LEAD_S, 0.0), window.to_s)}
        self._maintenance = sorted(times, reverse=True)
        """When nodes leave for maintenance or return, the next last."""
        self._row_of: dict[int, int] = {}
        self._job_of: dict[int, int] = {}
        self._causes: tuple[tuple[str, Cause, Callable[[NDArray[np.int64], float], NDArray[np.float64]]], ...] = (
            ("stop", "preemption", self._lost_gpu_s),
            ("move", "maintenance", self._restart_gpu_s),
            ("resize", "resize", self._restart_gpu_s),
        )
        """Decisions that stop a job: their kind, cause, and what they lose."""
        self._moved = False
        self.ended = 0

    def oversized_jobs(self) -> dict[int, OversizedJobError]:
        """Return the jobs that request more GPUs than they can ever have here; raise UsageError for other mistakes."""
        trace, snapshot = self._trace, self._snapshot
        largest = snapshot.nodes.largest_gang(ANYWHERE)
        most = np.array([min(largest, snapshot.allowance(snapshot.tenants.rows[name])) for name in trace.tenants])
        doubtful = trace.gpus > most[trace.tenant]
        if trace.extra:
            doubtful |= np.array(["within" in extra for extra in trace.extra])
        oversized = dict[int, OversizedJobError]()
        for job in np.flatnonzero(doubtful).tolist():
            try:
                snapshot.check_job(self._request(job))
            except OversizedJobError as error:
                oversized[job] = error
        return oversized

    @property
    def max_gap_s(self) -> float:
        """Maximum time until the next cycle: short after jobs were moved, and until the next job is preemptible."""
        if self._moved:
            return CYCLE_S
        if not self.waiting:
            return math.inf
        snapshot = self._snapshot
        if self._policy.preemption is None or not len(snapshot.queue):
            return MAX_CYCLE_GAP_S
        active = snapshot.active[snapshot.jobs.preemptible[snapshot.active]]
        from_s = preemptible_from_s(snapshot, active, self._policy)
        return float(min(MAX_CYCLE_GAP_S, from_s[from_s > snapshot.now_s].min(initial=math.inf) - snapshot.now_s))

    @property
    def waiting(self) -> int:
        """Jobs that wait, or may grow."""
        return len(self._snapshot.queue) + len(self._snapshot.sizes)

    def next_event_s(self) -> float:
        """Time of the next event; infinite once all jobs have ended."""
        if self.ended == len(self._trace):
            return math.inf
        arrival = float(self._trace.submit_s[self._arrived]) if self._arrived < len(self._trace) else math.inf
        node = self._node_events[0][0] if self._node_events else math.inf
        return min(arrival, self._next_end_s(), node, self._maintenance[-1] if self._maintenance else math.inf)

    def _next_end_s(self) -> float:
        return self._ends[0][0] if self._ends else math.inf

    def _draw_lifetime_s(self) -> float:
        """Draw how long a node lasts."""
        assert self._setup.node_days is not None
        return float(self._node_rng.exponential(self._setup.node_days * 86400))

    def handle_event(self, at: float) -> None:
        """Handle the next event: maintenance, then the end of a job, then a node event, then an arrival."""
        self._advance(at)
        if self._maintenance and self._maintenance[-1] <= at:
            self._maintenance.pop()
        elif self._next_end_s() <= at:
            self._end_job(at)
        elif self._node_events and self._node_events[0][0] <= at:
            self._fail_or_repair(at)
        else:
            self._submit_job(at)

    def _fail_or_repair(self, at: float) -> None:
        _, node, repaired = heapq.heappop(self._node_events)
        snapshot, name = self._snapshot, self._snapshot.nodes.names[node]
        if repaired:
            serving = int(np.count_nonzero(snapshot.nodes.state[: self._setup.nodes] == HEALTHY))
            state = HEALTHY if serving < self._setup.nodes - self._setup.spares else SPARE
            snapshot.repair(node, state)
            if self._recorder:
                self._recorder.repaired(at, name, state)
            heapq.heappush(self._node_events, (at + self._draw_lifetime_s(), node, False))
            return
        active = snapshot.active
        lost = dict(zip(active.tolist(), self._lost_gpu_s(active, at).tolist(), strict=True))
        for row in snapshot.fail(node):
            self._meter.stopped(self._job_of[row], lost[row], "failure")
        if self._recorder:
            self._recorder.failed(at, name)
        heapq.heappush(self._node_events, (at + self._setup.repair_s, node, True))

    def _advance(self, now: float) -> None:
        self._meter.advance(now)
        self._snapshot.advance(now)

    def _end_job(self, at: float) -> None:
        _, job, starts = heapq.heappop(self._ends)
        row, jobs = self._row_of.get(job), self._snapshot.jobs
        if row is None or jobs.starts[row] != starts or not jobs.running[row]:
            return  # that start was stopped or resized
        restart_gpu_s = float(jobs.restart_s[row]) * float(jobs.gpus[row]) if starts > 1 else 0.0
        self._snapshot.end(row)
        self._meter.ended(job, at, restart_gpu_s)
        if self._recorder:
            self._recorder.ended(at, self._trace.names[job])
        del self._job_of[row], self._row_of[job]
        self.ended += 1

    def _request(self, job: int) -> Job:
        """Return a job as its user submits it."""
        trace, setup = self._trace, self._setup
        extra: dict[str, Any] = {
            "preemptible": bool(self._preemptible[job]),
            "save_every_s": setup.save_every_s,
            "restart_s": setup.restart_s,
            "sizes": _sizes(int(trace.gpus[job]), setup.gpus) if self._elastic[job] else (),
        }
        if trace.extra:
            extra |= trace.extra[job]
        if not self._policy.elastic:
            extra["sizes"] = ()  # it runs as it was submitted
        return Job(
            trace.names[job],
            trace.tenants[trace.tenant[job]],
            extra["sizes"][0][0] if extra["sizes"] else int(trace.gpus[job]),
            submit_s=float(trace.submit_s[job]),
            limit_s=float(self._limits[job]),
            deadline_s=math.inf if math.isnan(trace.deadline_s[job]) else float(trace.deadline_s[job]),
            user=trace.users[job] if trace.users else "",
            **extra,
        )

    def _submit_job(self, at: float) -> None:
        job = self._arrived
        request = self._request(job)
        known = float(self._trace.duration_s[job]) if self._policy.oracle else math.nan
        (row,) = self._snapshot.submit([request], [known])
        self._row_of[job], self._job_of[row] = row, job
        if self._recorder:
            self._recorder.submitted(at, request, known)
        self._arrived += 1

    def run_cycle(self, now: float) -> None:
        """Run one scheduling cycle."""
        self._advance(now)
        snapshot = self._snapshot
        self._moved = False
        if not self.waiting and not snapshot.nodes.leaving(now).any():
            return
        decisions = decide(snapshot, now, self._policy)
        if self._recorder:
            self._recorder.decided(now, snapshot, decisions)
        stops = any(decision.kind != "start" for decision in decisions)
        moved = {decision.job for decision in decisions if decision.reason.code == ReasonCode.COMPACTS}
        for kind, cause, lost_gpu_s in self._causes if stops else ():
            rows = [decision.job for decision in decisions if decision.kind == kind]
            for row, lost in zip(rows, lost_gpu_s(np.array(rows, np.int64), now).tolist() if rows else (), strict=True):
                compacted = kind == "move" and row in moved
                self._meter.stopped(self._job_of[row], lost, "compaction" if compacted else cause)
        apply_decisions(snapshot, decisions)
        self._moved = any(decision.kind == "move" for decision in decisions)
        for decision in decisions:
            if decision.kind == "start":
                self._meter.started(self._job_of[decision.job], now)
            if decision.kind in ("start", "resize"):
                self._schedule_end(decision.job, now)
        self._meter.cycle()

    def _lost_gpu_s(self, rows: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Return the GPU-seconds that the current starts of jobs lose if they are stopped now."""
        jobs = self._snapshot.jobs
        saved_s = (self._snapshot.saved_s(rows, now) - jobs.done_s[rows]) / jobs.speed[rows]
        return ((now - jobs.since_s[rows]) - saved_s) * jobs.gpus[rows]

    def _restart_gpu_s(self, rows: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Return the GPU-seconds that the current starts of jobs held before they worked."""
        jobs = self._snapshot.jobs
        worked_s = (self._snapshot.worked_s(rows, now) - jobs.done_s[rows]) / jobs.speed[rows]
        return ((now - jobs.since_s[rows]) - worked_s) * jobs.gpus[rows]

    def _schedule_end(self, row: int, now: float) -> None:
        """Schedule the end of a job that was started or resized."""
        job, jobs = self._job_of[row], self._snapshot.jobs
        starts = int(jobs.starts[row])
        restart_s = float(jobs.restart_s[row]) if starts > 1 else 0.0
        left = float(self._trace.duration_s[job] - jobs.done_s[row]) / float(jobs.speed[row])
        heapq.heappush(self._ends, (now + restart_s + left, job, starts))

    def result(self) -> SimulationResult:
        """Close the decision log, and return the result."""
        if self._recorder:
            self._recorder.close()
        return self._meter.result()


def _sizes(gpus: int, most: int) -> tuple[tuple[int, float], ...]:
    """Return the sizes of an elastic job: from half its GPUs, if that is a whole number, to four times as many."""
    sizes = [(gpus * 2**power / 2, SPEEDUP ** (power - 1)) for power in range(4)]
    return tuple((int(size), speed) for size, speed in sizes if size == int(size) and (size <= most or size <= gpus))


def _empty_cluster(trace: JobTrace, setup: SimulationSetup) -> ClusterSnapshot:
    snapshot, site = ClusterSnapshot(), setup.site
    snapshot.set_calendar(setup.unix_zero_s)
    site.add_nodes(snapshot, setup.chip, setup.per_node, setup.nodes, setup.spares)
    for maintenance in site.away:
        snapshot.nodes.schedule_maintenance([maintenance.node], maintenance.from_s, maintenance.to_s)
    if not site.tenants:
        guarantees = setup.guarantees or _proportional(trace, setup.gpus)
        site = Site(
            tenants=tuple(Tenant(name, gpus, budget_gpu_h=setup.budgets.get(name)) for name, gpus in guarantees.items())
        )
    site.add_tenants(snapshot)
    for names, what in ((trace.tenants, "jobs"), (setup.budgets, "a budget")):
        for name in names:
            if name not in snapshot.tenants.rows:
                known = ", ".join(snapshot.tenants.names)
                raise UsageError(f"tenant {name} has {what} but no guarantee", hint=f"known tenants: {known}")
    for window in setup.away:
        if not 0 <= window.first < window.end <= setup.nodes:
            raise UsageError(f"maintenance of nodes {window.first} to {window.end}; the cluster has {setup.nodes}")
        nodes = snapshot.nodes.names[window.first : window.end]
        snapshot.nodes.schedule_maintenance(nodes, window.from_s, window.to_s)
    snapshot.tenants.check_guarantees(setup.gpus)
    return snapshot


def _proportional(trace: JobTrace, gpus: int) -> dict[str, int]:
    """Share all GPUs among the tenants of a trace by demand."""
    demand = trace.demand()
    shares = apportion(demand / max(demand.sum(), 1e-9) * gpus, gpus)
    return dict(zip(trace.tenants, shares.tolist(), strict=True))


def _limits(trace: JobTrace, setup: SimulationSetup, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the time limits of the trace, or such as users would guess."""
    if setup.limits is None:
        guessed = np.full(len(trace), LONGEST_LIMIT_S)
    else:
        low, high = np.log(setup.limits)
        guessed = trace.duration_s * np.exp(rng.uniform(low, high, len(trace)))
    guessed = np.maximum(np.minimum(guessed, LONGEST_LIMIT_S), np.maximum(trace.duration_s, 1.0))
    return np.where(np.isnan(trace.limit_s), guessed, trace.limit_s)
