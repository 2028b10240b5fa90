"""The cluster at one instant: nodes, tenants, and waiting and running jobs, in tables that are updated in place.

A ClusterSnapshot does not know how long a job will take. It has what a scheduler knows: what a job requested, when, its
time limit, what it has done so far and when it last saved.
"""

import json
import math
from collections.abc import Iterable, Sequence
from copy import copy
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.jobs import INTERACTIVE_MIN_RUN_S, KINDS, Job, JobTable
from headway.cluster.scheduler.months import month_bounds
from headway.cluster.scheduler.nodes import HEALTHY, QUARANTINED, SPARE, STATES, NodeTable
from headway.cluster.scheduler.placement import ANYWHERE, Kept, Placement
from headway.cluster.scheduler.submission_checks import check_request, check_size
from headway.cluster.scheduler.tenants import NO_TENANT, UNLIMITED, TenantTable
from headway.errors import UsageError

Amount = float | NDArray[np.float64]
_AS_REQUESTED = tuple(key for key in Job.__dataclass_fields__ if key not in ("name", "tenant", "sizes", "avoid"))
"""Columns of a job's row that hold its request."""


class ClusterSnapshot:
    """Nodes, tenants and jobs; events such as `submit`, `start` and `fail` are methods that update it."""

    def __init__(self) -> None:
        self.nodes, self.tenants, self.jobs = NodeTable(), TenantTable(), JobTable()
        self.now_s = 0.0
        self.unix_zero_s = 0.0
        """Unix seconds at second 0, for calendar months: 1 January 1970 unless somebody knows better."""
        self._queue: NDArray[np.int64] = np.empty(0, np.int64)
        self._stale = False
        """Whether jobs of the queue have been started."""
        self._submitted = 0
        """Jobs submitted so far."""
        self.active: NDArray[np.int64] = np.empty(0, np.int64)
        """Rows of the running jobs, in order of their start."""
        self.placements: dict[int, tuple[int, Placement]] = {}
        """Pool and placement of each running job."""
        self.sizes: dict[int, tuple[tuple[int, float], ...]] = {}
        """Scaling curves of elastic jobs."""
        self.avoided: dict[int, tuple[str, ...]] = {}
        """Names of the nodes that some jobs must not get."""
        self.ending: dict[int, tuple[int, Kept]] = {}
        """Jobs that were told to stop, and what they hold until they have exited. What a job starting in their place
        will get is in its placement instead."""

    @property
    def settled(self) -> NDArray[np.int64]:
        """Rows of the running jobs whose nodes have confirmed that they run: others are not preempted or moved."""
        starting = self.jobs.starting[self.active]
        return self.active[~starting] if starting.any() else self.active

    @property
    def queue(self) -> NDArray[np.int64]:
        """Rows of the waiting jobs, in order of submission."""
        if self._stale:
            self._queue, self._stale = self._queue[~self.jobs.running[self._queue]], False
        return self._queue

    def copy(self) -> "ClusterSnapshot":
        """Return an independent copy."""
        snapshot = copy(self)
        snapshot.nodes, snapshot.tenants, snapshot.jobs = self.nodes.copy(), self.tenants.copy(), self.jobs.copy()
        snapshot.placements, snapshot.sizes = self.placements.copy(), self.sizes.copy()
        snapshot.ending, snapshot.avoided = self.ending.copy(), self.avoided.copy()
        return snapshot

    # -- events

    def advance(self, now_s: float) -> None:
        """Let time pass."""
        assert now_s >= self.now_s, "time does not go back"
        if now_s > self.now_s:
            self.tenants.advance(now_s - self.now_s, self.unix_zero_s + self.now_s)
            self.now_s = now_s

    def set_calendar(self, unix_s: float) -> None:
        """Say what time it is now, in Unix seconds; what was spent in another month does not count any more."""
        month = month_bounds(self.unix_zero_s + self.now_s)
        self.unix_zero_s = unix_s - self.now_s
        if not month[0] <= unix_s < month[1]:
            self.tenants.spent_gpu_s[:] = 0.0

    def submit(self, jobs: Iterable[Job], known_s: Iterable[float] = ()) -> list[int]:
        """Queue jobs, all or none: raise UsageError if one can never run."""
        jobs, seen = list(jobs), set[str]()
        for job in jobs:
            self.check_job(job)
            if job.name in seen:
                raise UsageError(f"duplicate job '{job.name}'")
            seen.add(job.name)
        known, rows = iter(known_s), []
        for job in jobs:
            values = {key: getattr(job, key) for key in _AS_REQUESTED}
            interactive = job.kind == "interactive" and not job.min_run_s
            min_run_s = INTERACTIVE_MIN_RUN_S if interactive else job.min_run_s
            values |= {"kind": KINDS.index(job.kind), "min_run_s": min_run_s, "within": self._level(job)}
            values |= {"least": job.gpus, "speed": job.sizes[0][1] if job.sizes else 1.0}
            values |= {"waits_s": job.submit_s, "known_s": next(known, math.nan), "number": self._submitted}
            rows.append(self.jobs.add(job.name, tenant=self.tenants.rows[job.tenant], **values))
            if job.sizes:
                self.sizes[rows[-1]] = tuple((int(gpus), float(speed)) for gpus, speed in job.sizes)
            if job.avoid:
                self.avoided[rows[-1]] = tuple(job.avoid)
            self.tenants.add_wanted(self.tenants.rows[job.tenant], job.gpus)
            self._submitted += 1
        last = self.queue[-1:].tolist()
        queue = np.concatenate((self.queue, np.array(rows, np.int64)))
        if any(self.jobs.submit_s[a] > self.jobs.submit_s[b] for a, b in pairwise((*last, *rows))):
            queue = self._in_order(queue)
        self._queue = queue
        return rows

    def _level(self, job: Job) -> int:
        return ANYWHERE if job.within is None else self.nodes.levels.index(job.within)

    def _in_order(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return jobs in order of submission."""
        return rows[np.lexsort((self.jobs.number[rows], self.jobs.submit_s[rows]))]

    def check_job(self, job: Job) -> None:
        """Raise UsageError for a job that can never run here; the hint names the nearest that could."""
        check_request(job, self.nodes, self.tenants, self.jobs.rows)
        check_size(job, self.nodes, self._level(job), self.allowance(self.tenants.rows[job.tenant]))

    def allowance(self, tenant: int) -> int:
        """Return the GPUs that a tenant may use if no other tenant uses any."""
        if self.tenants.unlimited:
            return self.gpus
        return int(self.tenants.headroom(self.gpus, np.zeros(len(self.tenants), np.int64))[tenant])

    def start(self, row: int, pool: int, placement: Placement) -> None:
        """Start a waiting job."""
        jobs = self.jobs
        assert not jobs.running[row], "a job starts once"
        assert placement.total == jobs.gpus[row] or placement.total in dict(self.sizes.get(row, ())), "all GPUs or none"
        self._hold(row, pool, placement)
        self.tenants.add_used(jobs.tenant[row], placement.total)
        self.tenants.add_wanted(jobs.tenant[row], -int(jobs.gpus[row]))
        self._set_size(row, placement.total)
        self.placements[row] = (pool, placement)
        jobs.running[row], jobs.since_s[row] = True, self.now_s
        jobs.starts[row] += 1
        jobs.failed[row] = False
        self._stale = True
        self.active = np.append(self.active, row)

    def resize(self, row: int, pool: int, placement: Placement) -> None:
        """Resize a running job, which saves first and restarts."""
        jobs, rows = self.jobs, np.array([row])
        assert placement.total in dict(self.sizes[row]), "not a size of this job"
        old_pool, old = self.placements[row]
        self._hold(row, old_pool, old, -1)
        self._hold(row, pool, placement)
        self.placements[row] = (pool, placement)
        self.tenants.add_used(jobs.tenant[row], placement.total - old.total)
        jobs.done_s[row] = self.worked_s(rows, self.now_s)[0]
        jobs.ran_s[row] += self.now_s - jobs.since_s[row]
        jobs.since_s[row] = self.now_s
        jobs.starts[row] += 1
        self._set_size(row, placement.total)

    def _set_size(self, row: int, gpus: int) -> None:
        """Set the GPUs that a job holds or waits for; what it has had stays counted."""
        jobs = self.jobs
        if gpus != jobs.gpus[row]:
            jobs.other_gpu_s[row] += float(self.held_s(np.array([row]), self.now_s)[0]) * (int(jobs.gpus[row]) - gpus)
            jobs.gpus[row], jobs.speed[row] = gpus, dict(self.sizes[row])[gpus]

    def end(self, row: int) -> None:
        """Remove a job that finished or was cancelled."""
        queue = self.queue  # read first, without started jobs: the row may be reused soon
        if self.jobs.running[row]:
            self._release(row)
        elif self.jobs.ending[row]:
            self._release_ending(row)
        elif not self.jobs.held[row]:
            self._queue = queue[queue != row]
            self.tenants.add_wanted(self.jobs.tenant[row], -int(self.jobs.gpus[row]))
        self.sizes.pop(row, None)
        self.avoided.pop(row, None)
        self.jobs.drop(row)

    def stop(self, stopped: Sequence[int], done_s: float | None = None) -> None:
        """Stop jobs, which wait again at their old places in the queue; by default they keep their last saved work."""
        jobs, queue, rows = self.jobs, self.queue, np.array(stopped, np.int64)  # the queue while they are not in it
        done = self.saved_s(rows, self.now_s) if done_s is None else done_s
        jobs.ran_s[rows] += self.now_s - jobs.since_s[rows]
        jobs.done_s[rows] = done
        for row in stopped:
            self._release(row)
            self.tenants.add_wanted(jobs.tenant[row], int(jobs.least[row]))
        jobs.running[rows], jobs.since_s[rows], jobs.waits_s[rows] = False, math.nan, self.now_s
        for row in stopped:
            self._set_size(row, int(jobs.least[row]))
        self._queue = self._in_order(np.concatenate((queue, rows)))

    def confirm(self, row: int) -> None:
        """The nodes of a starting job have confirmed that it runs: its time counts from now."""
        self.jobs.starting[row], self.jobs.since_s[row] = False, self.now_s

    def note_save(self, row: int, age_s: float | None) -> None:
        """A running job has reported that its newest save is so old; None: this start has not saved yet."""
        since_s = self.jobs.since_s[row]
        self.jobs.saved_at_s[row] = since_s if age_s is None else max(self.now_s - age_s, since_s)

    def tell_to_stop(self, row: int, kept: Kept | None = None) -> None:
        """A running job has been told to stop; until it has exited it holds what it had, or only the `kept` part."""
        jobs, (pool, held) = self.jobs, self.placements[row]
        self._queue, self._stale = self.queue, False  # while this job counts as running: it is not in the queue
        if kept is None:
            each = np.ones(len(held.nodes))
            kept = Kept(held, each * jobs.cpus[row], each * jobs.memory_bytes[row])
        self._release(row)
        self._hold_kept(row, pool, kept)
        self.ending[row] = pool, kept
        jobs.running[row], jobs.starting[row], jobs.ending[row] = False, False, True

    def exited(self, row: int, *, saved: bool) -> None:
        """A job that runs or was told to stop has exited, and waits again; it keeps its work if it has saved."""
        jobs, rows, ending = self.jobs, np.array([row]), self.jobs.ending[row]
        if not ending:
            self.stop([row], float(self.worked_s(rows, self.now_s)[0]) if saved else None)
            jobs.starting[row] = False
            return
        jobs.done_s[row] = (self.worked_s if saved else self.saved_s)(rows, self.now_s)[0]
        jobs.ran_s[row] += self.now_s - jobs.since_s[row]
        queue = self.queue
        self._release_ending(row)
        jobs.ending[row], jobs.since_s[row], jobs.waits_s[row] = False, math.nan, self.now_s
        self._set_size(row, int(jobs.least[row]))
        if not jobs.held[row]:
            self.tenants.add_wanted(jobs.tenant[row], int(jobs.least[row]))
            self._queue = self._in_order(np.append(queue, row))

    def hold(self, row: int) -> None:
        """Take a waiting job out of the queue."""
        assert not self.jobs.running[row], "a running job cannot be held"
        self.jobs.held[row] = True
        if not self.jobs.ending[row]:
            self._queue = self.queue[self.queue != row]
            self.tenants.add_wanted(self.jobs.tenant[row], -int(self.jobs.gpus[row]))

    def unhold(self, row: int) -> None:
        """Put a held job back at its old place in the queue."""
        self.jobs.held[row] = False
        if not self.jobs.ending[row]:
            self.tenants.add_wanted(self.jobs.tenant[row], int(self.jobs.gpus[row]))
            self._queue = self._in_order(np.append(self.queue, row))

    def _release_ending(self, row: int) -> None:
        self._hold_kept(row, *self.ending.pop(row), -1)

    def _hold_kept(self, row: int, pool: int, kept: Kept, sign: int = 1) -> None:
        self._count(row, pool, kept.placement, sign, sign * kept.cpus, sign * kept.memory_bytes)
        self.tenants.add_used(self.jobs.tenant[row], sign * kept.placement.total)

    def move(self, row: int) -> None:
        """Stop a job after it saved, for maintenance of its node; it counts as one whose node failed."""
        self.stop([row], float(self.worked_s(np.array([row]), self.now_s)[0]))
        self.jobs.failed[row] = True

    def fail(self, node: int) -> list[int]:
        """Quarantine a failed node, replace it by a spare of its pool, and stop its jobs; return their rows."""
        nodes = self.nodes
        pool = next(pool for pool in nodes.pools if pool.first <= node < pool.end)
        stopped = [row for row, (number, placement) in self.placements.items()
                   if number == pool.number and node - pool.first in placement.nodes]  # fmt: skip
        self.stop(stopped)
        self.jobs.failed[stopped] = True
        served, nodes.state[node] = nodes.state[node] == HEALTHY, QUARANTINED
        spares = np.flatnonzero(nodes.state[pool.first : pool.end] == SPARE)
        if served and len(spares):
            nodes.state[pool.first + spares[0]] = HEALTHY
        return stopped

    def repair(self, node: int, state: int = HEALTHY) -> None:
        """Return a node to service, or make it a spare."""
        self.nodes.state[node] = state

    def _hold(self, row: int, pool: int, placement: Placement, sign: int = 1) -> None:
        """Count a placement of a job as held, or with a sign of -1 as free."""
        jobs = self.jobs
        self._count(row, pool, placement, sign, sign * jobs.cpus[row], sign * jobs.memory_bytes[row])

    def _count(self, row: int, pool: int, placement: Placement, sign: int, cpus: Amount, memory_bytes: Amount) -> None:
        nodes = self.nodes
        rows, gpus = placement.nodes + nodes.pools[pool].first, sign * placement.gpus
        assert (nodes.free[rows] >= gpus).all(), "GPUs are never given twice"
        nodes.free[rows] -= gpus
        if not self.jobs.preemptible[row]:
            nodes.fixed[rows] += gpus
        if nodes.counted:
            assert (nodes.has_room(rows, cpus, memory_bytes)).all(), "CPUs and memory are never given twice"
            nodes.cpus_free[rows] -= cpus
            nodes.memory_free[rows] -= memory_bytes

    def _release(self, row: int) -> None:
        pool, placement = self.placements.pop(row)
        self._hold(row, pool, placement, -1)
        self.tenants.add_used(self.jobs.tenant[row], -placement.total)
        self.active = self.active[self.active != row]

    # -- derived values

    def usable_by(self, row: int, pool: int) -> NDArray[np.bool_]:
        """Return which nodes of a pool a job does not have to avoid."""
        nodes = self.nodes.pools[pool]
        usable = np.ones(nodes.end - nodes.first, np.bool_)
        avoided = (self.nodes.rows.get(name, -1) for name in self.avoided.get(row, ()))
        usable[[node - nodes.first for node in avoided if nodes.first <= node < nodes.end]] = False
        return usable

    @property
    def gpus(self) -> int:
        """GPUs of all nodes but spares."""
        return sum(pool.gpus for pool in self.nodes.pools)

    def held_s(self, rows: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Return the seconds that jobs have held their GPUs, over all starts."""
        jobs = self.jobs
        return jobs.ran_s[rows] + np.where(jobs.running[rows], now - jobs.since_s[rows], 0.0)

    def attained_gpu_s(self, rows: NDArray[np.int64], now: float, more_s: float = 0.0) -> NDArray[np.float64]:
        """Return the GPU-seconds that jobs have held, and `more_s` seconds at their current size."""
        return (self.held_s(rows, now) + more_s) * self.jobs.gpus[rows] + self.jobs.other_gpu_s[rows]

    def worked_s(self, rows: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Return the seconds of work that running jobs have done, saved or not."""
        jobs = self.jobs
        restart_s = np.where(jobs.starts[rows] > 1, jobs.restart_s[rows], 0.0)
        return jobs.done_s[rows] + np.maximum(now - jobs.since_s[rows] - restart_s, 0.0) * jobs.speed[rows]

    def saved_s(self, rows: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Return the seconds of work that running jobs have saved; each start saves every `save_every_s`,
        unless it reports its saves."""
        jobs = self.jobs
        here = (self.worked_s(rows, now) - jobs.done_s[rows]) / jobs.speed[rows]
        every = jobs.save_every_s[rows]
        saved: NDArray[np.float64] = np.floor(here / every) * np.where(np.isinf(every), 0.0, every)
        reported = jobs.saved_at_s[rows] >= jobs.since_s[rows]  # of this start: else it does not report
        if reported.any():
            restart_s = np.where(jobs.starts[rows] > 1, jobs.restart_s[rows], 0.0)
            known = np.maximum(jobs.saved_at_s[rows] - jobs.since_s[rows] - restart_s, 0.0)
            saved = np.where(reported, np.minimum(known, here), saved)
        return jobs.done_s[rows] + saved * jobs.speed[rows]

    def lost_gpu_s(self, rows: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Return what preempting running jobs would lose: unsaved work and a restart, times their GPUs."""
        jobs = self.jobs
        unsaved = (self.worked_s(rows, now) - self.saved_s(rows, now)) / jobs.speed[rows]
        return (unsaved + jobs.restart_s[rows]) * jobs.gpus[rows]

    # -- JSON

    def to_json(self, indent: int | None = 1) -> str:
        """Return the snapshot as JSON for `from_json`."""
        tenants = [self.tenants.record(row) for row in range(len(self.tenants))]
        for tenant in tenants:
            tenant["parent"] = None if tenant["parent"] == NO_TENANT else self.tenants.names[tenant["parent"]]
            tenant["budget_gpu_s"] = _plain(tenant["budget_gpu_s"])
        jobs = []
        held = sorted(set(self.jobs.rows.values()) - {*self.queue.tolist(), *self.active.tolist(), *self.ending})
        for row in (*self.queue.tolist(), *self.active.tolist(), *self.ending, *held):
            job = self.jobs.record(row) | {"tenant": self.tenants.names[self.jobs.tenant[row]]}
            if row in self.placements:
                pool, placement = self.placements[row]
                job["place"] = {"pool": pool, "nodes": placement.nodes.tolist(), "gpus": placement.gpus.tolist()}
            elif row in self.ending:
                pool, kept = self.ending[row]
                place = {"nodes": kept.placement.nodes.tolist(), "gpus": kept.placement.gpus.tolist()}
                job["kept"] = {"pool": pool, "cpus": kept.cpus.tolist(), "memory": kept.memory_bytes.tolist()} | place
            if row in self.sizes:
                job["sizes"] = self.sizes[row]
            if row in self.avoided:
                job["avoid"] = self.avoided[row]
            jobs.append({key: _plain(value) for key, value in job.items()})
        pools = [
            {"chip": pool.chip, "size": pool.size, "nodes": self.nodes.names[pool.first : pool.end],
             "domains": self.nodes.domains(number), "spares": pool.spares,
             "state": [STATES[state] for state in self.nodes.state[pool.first : pool.end]],
             "away": self.nodes.maintenance(pool)}
            | ({"limits": self.nodes.limits(pool)} if self.nodes.counted else {})
            for number, pool in enumerate(self.nodes.pools)
        ]  # fmt: skip
        calendar = {"unix_zero_s": self.unix_zero_s} if self.unix_zero_s else {}
        values = {"format": 1, "now_s": self.now_s, **calendar, "pools": pools, "tenants": tenants, "jobs": jobs}
        return json.dumps(values, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> "ClusterSnapshot":
        """Read what `to_json` wrote; raise UsageError for anything else."""
        try:
            return cls.from_values(json.loads(text))
        except ValueError as error:
            raise UsageError(f"not a cluster snapshot: {type(error).__name__}: {error}") from None

    @classmethod
    def from_values(cls, values: Any) -> "ClusterSnapshot":
        """Read the values of what `to_json` wrote; raise UsageError for anything else."""
        try:
            if not isinstance(values, dict) or values.get("format") != 1:
                raise UsageError("unknown snapshot format", hint="expected format 1")
            return cls._read(values)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"not a cluster snapshot: {type(error).__name__}: {error}") from None

    @classmethod
    def _read(cls, values: dict[str, Any]) -> "ClusterSnapshot":
        snapshot = cls()
        nodes, tenants, jobs = snapshot.nodes, snapshot.tenants, snapshot.jobs
        for pool in values["pools"]:
            added = nodes.add_pool(pool["chip"], pool["size"], pool["nodes"], pool["domains"], pool.get("spares", 0))
            nodes.state[added.first : added.end] = [STATES.index(state) for state in pool["state"]]
            for name, cpus, memory_bytes in pool.get("limits", ()):
                nodes.limit(name, float(cpus), float(memory_bytes))
            for name, away_s, back_s in pool.get("away", ()):
                nodes.schedule_maintenance([name], away_s, back_s)
        for tenant in values["tenants"]:
            budget = tenant.get("budget_gpu_s", "inf")
            row = tenants.add_tenant(
                **{key: tenant[key] for key in ("name", "guarantee", "parent")},
                borrow=None if tenant["borrow"] == UNLIMITED else tenant["borrow"],
                lend=None if tenant["lend"] == UNLIMITED else tenant["lend"],
                budget_gpu_h=None if budget == "inf" else budget / 3600,
            )
            tenants.spent_gpu_s[row] = tenant.get("spent_gpu_s", 0.0)
            tenants.recent[row], tenants.short[row] = tenant["recent"], tenant["short"]
        snapshot.now_s, snapshot.unix_zero_s = values["now_s"], values.get("unix_zero_s", 0.0)
        queue, active = list[int](), list[int]()
        for job in values["jobs"]:
            snapshot._read_job(dict(job), queue, active)
        snapshot._queue, snapshot.active = np.array(queue, np.int64), np.array(active, np.int64)
        snapshot._submitted = int(max((jobs.number[row] for row in jobs.rows.values()), default=-1)) + 1
        return snapshot

    def _read_job(self, job: dict[str, Any], queue: list[int], active: list[int]) -> None:
        """Add a job; to the rows of those that wait or run, if it does."""
        place, name, tenant = job.pop("place", None), job.pop("name"), job.pop("tenant")
        kept = job.pop("kept", None)
        if name in self.jobs.rows:
            raise UsageError(f"duplicate job '{name}'")
        sizes, avoided = tuple((gpus, speed) for gpus, speed in job.pop("sizes", ())), tuple(job.pop("avoid", ()))
        job.setdefault("least", job["gpus"])
        known = {key: math.inf if value == "inf" else value for key, value in job.items() if value is not None}
        row = self.jobs.add(name, tenant=self.tenants.rows[tenant], **known)
        if sizes:
            self.sizes[row] = sizes
        if avoided:
            self.avoided[row] = avoided
        if kept is not None:
            placement = Placement(np.array(kept["nodes"], np.int32), np.array(kept["gpus"], np.int32))
            amounts = (np.array(kept[key], np.float64) for key in ("cpus", "memory"))
            self.ending[row] = kept["pool"], Kept(placement, *amounts)
            self._hold_kept(row, *self.ending[row])
            return
        if place is None and self.jobs.held[row]:
            return
        if place is None:
            queue.append(row)
            self.tenants.add_wanted(self.jobs.tenant[row], int(self.jobs.gpus[row]))
            return
        gpus, nodes = np.array(place["gpus"], np.int32), np.array(place["nodes"], np.int32)
        rows = nodes + self.nodes.pools[place["pool"]].first
        if (self.nodes.free[rows] < gpus).any() or gpus.sum() != self.jobs.gpus[row]:
            raise UsageError(f"job {name} runs on GPUs that are not free, or not as many as it has")
        self.placements[row] = (place["pool"], Placement(nodes, gpus))
        self._hold(row, *self.placements[row])
        self.tenants.add_used(self.jobs.tenant[row], int(gpus.sum()))
        active.append(row)


def _plain(value: Any) -> Any:
    """Return a value as strict JSON allows: "inf" for infinity, null for NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else None
    return value
