"""The cluster at one instant: nodes, tenants, and jobs that wait or run. Kept as columns that are updated in place.

A Snapshot says nothing of how long a job will take: nobody knows. It has what is known: what a job asked for, when, for
how long at most, what it has done so far and when it last saved.
"""

import json
import math
from collections.abc import Iterable, Sequence
from copy import copy
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.jobs import KINDS, STAYS_S, Job, JobTable, check_sizes
from headway.cluster.scheduler.nodes import HEALTHY, QUARANTINED, SPARE, STATES, NodeTable
from headway.cluster.scheduler.placement import ANYWHERE, Placement
from headway.cluster.scheduler.tenants import NOBODY, TenantTable
from headway.errors import UsageError

__all__ = ["ClusterSnapshot"]


_AS_ASKED = tuple(key for key in Job.__dataclass_fields__ if key not in ("name", "tenant", "sizes"))
"""What a job's row has as somebody asked for it."""


class ClusterSnapshot:
    """All of it. The methods are how the world tells it what happened."""

    def __init__(self) -> None:
        self.nodes, self.tenants, self.jobs = NodeTable(), TenantTable(), JobTable()
        self.now_s = 0.0
        self._queue: NDArray[np.int64] = np.empty(0, np.int64)
        self._stale = False
        """Whether jobs of the queue have been started."""
        self._told = 0
        """Jobs so far."""
        self.active: NDArray[np.int64] = np.empty(0, np.int64)
        """Rows of the jobs that run, in the order they started."""
        self.places: dict[int, tuple[int, Placement]] = {}
        """Of each that runs its pool, and its nodes there."""
        self.sizes: dict[int, tuple[tuple[int, float], ...]] = {}
        """Scaling curves of elastic jobs."""

    @property
    def queue(self) -> NDArray[np.int64]:
        """Rows of the jobs that wait, in the order they came."""
        if self._stale:
            self._queue, self._stale = self._queue[~self.jobs.running[self._queue]], False
        return self._queue

    def copy(self) -> "ClusterSnapshot":
        """Another, to look ahead with: what happens to it does not happen here."""
        made = copy(self)
        made.nodes, made.tenants, made.jobs = self.nodes.copy(), self.tenants.copy(), self.jobs.copy()
        made.places, made.sizes = self.places.copy(), self.sizes.copy()
        return made

    # -- what happens

    def advance(self, now_s: float) -> None:
        """Let time pass."""
        assert now_s >= self.now_s, "time goes on"
        if now_s > self.now_s:
            self.tenants.age(now_s - self.now_s, self.now_s)
            self.now_s = now_s

    def submit(self, jobs: Iterable[Job], known_s: Iterable[float] = ()) -> list[int]:
        """Jobs join the queue, all or, where one can never run, none: UsageError."""
        jobs, seen = list(jobs), set[str]()
        for job in jobs:
            self.check(job)
            if job.name in seen:
                raise UsageError(f"job {job.name} is named twice")
            seen.add(job.name)
        known, rows = iter(known_s), []
        for job in jobs:
            values = {key: getattr(job, key) for key in _AS_ASKED}
            stays_s = STAYS_S if job.kind == "interactive" and not job.min_run_s else job.min_run_s
            values |= {"kind": KINDS.index(job.kind), "min_run_s": stays_s}
            values |= {"least": job.gpus, "speed": job.sizes[0][1] if job.sizes else 1.0}
            values |= {"waits_s": job.submit_s, "known_s": next(known, math.nan), "number": self._told}
            values["within"] = ANYWHERE if job.within is None else self.nodes.levels.index(job.within)
            rows.append(self.jobs.add(job.name, tenant=self.tenants.rows[job.tenant], **values))
            if job.sizes:
                self.sizes[rows[-1]] = tuple((int(gpus), float(speed)) for gpus, speed in job.sizes)
            self.tenants.want(self.tenants.rows[job.tenant], job.gpus)
            self._told += 1
        last = self.queue[-1:].tolist()
        queue = np.concatenate((self.queue, np.array(rows, np.int64)))
        if any(self.jobs.submit_s[a] > self.jobs.submit_s[b] for a, b in pairwise((*last, *rows))):
            queue = queue[np.lexsort((self.jobs.number[queue], self.jobs.submit_s[queue]))]
        self._queue = queue
        return rows

    def check(self, job: Job) -> None:
        """UsageError for a job that can never run here, with the nearest that could."""
        if not math.isfinite(job.gpus) or job.gpus != int(job.gpus) or job.gpus < 1:
            raise UsageError(f"job {job.name} asks for {job.gpus} GPUs", hint="GPUs are counted in whole numbers")
        if job.tenant not in self.tenants.rows:
            known = ", ".join(self.tenants.names) or "nobody"
            raise UsageError(f"job {job.name}: unknown tenant '{job.tenant}'", hint=f"there are {known}")
        if job.name in self.jobs.rows:
            raise UsageError(f"job {job.name} is there already")
        if job.within is not None and job.within not in self.nodes.levels:
            levels = ", ".join(self.nodes.levels) or "none"
            raise UsageError(f"job {job.name} must lie within a {job.within}", hint=f"levels here: {levels}")
        for key, least in (("submit_s", -math.inf), ("limit_s", 0.0), ("save_every_s", 0.0)):
            if not getattr(job, key) > least:
                raise UsageError(f"job {job.name}: {key} is {getattr(job, key)}", hint="seconds, more than none")
        if job.kind not in KINDS:
            raise UsageError(f"job {job.name}: kind is {job.kind!r}", hint=f"there are {', '.join(KINDS)}")
        if not 0 <= job.min_run_s < math.inf:
            raise UsageError(f"job {job.name}: min_run_s is {job.min_run_s}", hint="seconds")
        if job.sizes:
            check_sizes(job)
        if not job.deadline_s > job.submit_s:
            raise UsageError(f"job {job.name}: deadline_s is {job.deadline_s}, and it comes at {job.submit_s}")
        if not 0 <= job.restart_s < math.inf or math.isinf(job.submit_s):
            raise UsageError(f"job {job.name}: submit_s is {job.submit_s}, restart_s {job.restart_s}", hint="seconds")
        largest = self.nodes.largest(ANYWHERE if job.within is None else self.nodes.levels.index(job.within))
        allowed = int(self.allowance(self.tenants.rows[job.tenant]))
        if job.gpus > min(largest, allowed):
            where = f" within one {job.within}" if job.within else ""
            what = f"and there are {largest}{where}" if largest <= allowed else f"and {job.tenant} may use {allowed}"
            raise UsageError(
                f"job {job.name} asks for {job.gpus} GPUs{where}, {what}", hint=f"{min(largest, allowed)} at most"
            )

    def allowance(self, tenant: int) -> int:
        """GPUs that a tenant may use at most, if nobody else uses any."""
        if self.tenants.boundless:
            return self.gpus
        return int(self.tenants.room(self.gpus, np.zeros(len(self.tenants), np.int64))[tenant])

    def start(self, row: int, pool: int, place: Placement) -> None:
        """A job that waits has its nodes."""
        jobs = self.jobs
        assert not jobs.running[row], "a job runs once"
        assert place.total == jobs.gpus[row] or place.total in dict(self.sizes.get(row, ())), "all of a gang or nothing"
        self._occupy(row, pool, place)
        self.tenants.take(jobs.tenant[row], place.total)
        self.tenants.want(jobs.tenant[row], -int(jobs.gpus[row]))
        self._size(row, place.total)
        self.places[row] = (pool, place)
        jobs.running[row], jobs.since_s[row] = True, self.now_s
        jobs.starts[row] += 1
        jobs.failed[row] = False
        self._stale = True
        self.active = np.append(self.active, row)

    def resize(self, row: int, pool: int, place: Placement) -> None:
        """A job that runs was asked to save, and goes on after a restart with more GPUs or fewer."""
        jobs, rows = self.jobs, np.array([row])
        assert place.total in dict(self.sizes[row]), "a size that the job can have"
        before, old = self.places[row]
        self._occupy(row, before, old, -1)
        self._occupy(row, pool, place)
        self.places[row] = (pool, place)
        self.tenants.take(jobs.tenant[row], place.total - old.total)
        jobs.done_s[row] = self.worked_s(rows, self.now_s)[0]
        jobs.ran_s[row] += self.now_s - jobs.since_s[row]
        jobs.since_s[row] = self.now_s
        jobs.starts[row] += 1
        self._size(row, place.total)

    def _size(self, row: int, gpus: int) -> None:
        """A job has, or waits for, another number of GPUs; what it has had stays."""
        jobs = self.jobs
        if gpus != jobs.gpus[row]:
            jobs.other_gpu_s[row] += float(self.held_s(np.array([row]), self.now_s)[0]) * (int(jobs.gpus[row]) - gpus)
            jobs.gpus[row], jobs.speed[row] = gpus, dict(self.sizes[row])[gpus]

    def end(self, row: int) -> None:
        """A job is done, or was taken back by who sent it."""
        queue = self.queue  # without those that were started: the row may be another's soon
        if self.jobs.running[row]:
            self._release(row)
        else:
            self._queue = queue[queue != row]
            self.tenants.want(self.jobs.tenant[row], -int(self.jobs.gpus[row]))
        self.sizes.pop(row, None)
        self.jobs.drop(row)

    def stop(self, row: int, done_s: float | None = None) -> None:
        """A job has lost its nodes and waits again, at its old place; what it saved last of its work stays done."""
        rows = np.array([row])
        self._stop(rows, self.saved_s(rows, self.now_s) if done_s is None else np.array([done_s]))

    def move(self, row: int) -> None:
        """A job whose node goes away was asked to save, and waits as one whose node failed: all its work is kept."""
        self.stop(row, float(self.worked_s(np.array([row]), self.now_s)[0]))
        self.jobs.failed[row] = True

    def stop_all(self, rows: Sequence[int]) -> None:
        """Several have, at once."""
        some = np.array(rows, np.int64)
        self._stop(some, self.saved_s(some, self.now_s))

    def _stop(self, rows: NDArray[np.int64], done_s: NDArray[np.float64]) -> None:
        jobs, queue = self.jobs, self.queue  # while the jobs are none of it
        jobs.ran_s[rows] += self.now_s - jobs.since_s[rows]
        jobs.done_s[rows] = done_s
        for row in rows.tolist():
            self._release(row)
            self.tenants.want(jobs.tenant[row], int(jobs.least[row]))
        jobs.running[rows], jobs.since_s[rows], jobs.waits_s[rows] = False, math.nan, self.now_s
        for row in rows.tolist():
            self._size(row, int(jobs.least[row]))
        queue = np.concatenate((queue, rows))
        self._queue = queue[np.lexsort((jobs.number[queue], jobs.submit_s[queue]))]

    def fail(self, node: int) -> list[int]:
        """A node is lost, with what its jobs had not saved; they wait again, and a spare of its pool replaces it."""
        nodes = self.nodes
        pool = next(pool for pool in nodes.pools if pool.first <= node < pool.end)
        hit = [row for row, (number, place) in self.places.items()
               if number == pool.number and node - pool.first in place.nodes]  # fmt: skip
        self.stop_all(hit)
        self.jobs.failed[hit] = True
        served, nodes.state[node] = nodes.state[node] == HEALTHY, QUARANTINED
        spares = np.flatnonzero(nodes.state[pool.first : pool.end] == SPARE)
        if served and len(spares):
            nodes.state[pool.first + spares[0]] = HEALTHY
        return hit

    def mend(self, node: int, state: int = HEALTHY) -> None:
        """A node is well again, to be used or as a spare."""
        self.nodes.state[node] = state

    def _occupy(self, row: int, pool: int, place: Placement, sign: int = 1) -> None:
        """A job holds a place, or with a sign of -1 no longer."""
        nodes = self.nodes
        rows, gpus = place.nodes + nodes.pools[pool].first, sign * place.gpus
        assert (nodes.free[rows] >= gpus).all(), "nodes are never given twice"
        nodes.free[rows] -= gpus
        if not self.jobs.preemptible[row]:
            nodes.fixed[rows] += gpus

    def _release(self, row: int) -> None:
        pool, place = self.places.pop(row)
        self._occupy(row, pool, place, -1)
        self.tenants.take(self.jobs.tenant[row], -place.total)
        self.active = self.active[self.active != row]

    # -- what follows from it

    @property
    def gpus(self) -> int:
        """Of all nodes but spares."""
        return sum(pool.gpus for pool in self.nodes.pools)

    def held_s(self, rows: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Seconds that jobs have held their GPUs so far, in all starts."""
        jobs = self.jobs
        return jobs.ran_s[rows] + np.where(jobs.running[rows], now - jobs.since_s[rows], 0.0)

    def had_gpu_s(self, rows: NDArray[np.int64], now: float, more_s: float = 0.0) -> NDArray[np.float64]:
        """GPU-seconds that jobs have held so far; `more_s` counts as had at their size."""
        return (self.held_s(rows, now) + more_s) * self.jobs.gpus[rows] + self.jobs.other_gpu_s[rows]

    def worked_s(self, rows: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Seconds of work that jobs that run have done, what is not saved too."""
        jobs = self.jobs
        late = np.where(jobs.starts[rows] > 1, jobs.restart_s[rows], 0.0)
        return jobs.done_s[rows] + np.maximum(now - jobs.since_s[rows] - late, 0.0) * jobs.speed[rows]

    def saved_s(self, rows: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Of that, what is saved: jobs save after each so many seconds that they work in one start."""
        jobs = self.jobs
        here = (self.worked_s(rows, now) - jobs.done_s[rows]) / jobs.speed[rows]
        every = jobs.save_every_s[rows]
        saved: NDArray[np.float64] = np.floor(here / every) * np.where(np.isinf(every), 0.0, every)
        return jobs.done_s[rows] + saved * jobs.speed[rows]

    def lost_gpu_s(self, rows: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """What stopping jobs that run would lose: the work they have not saved, and a restart, times their GPUs."""
        jobs = self.jobs
        unsaved = (self.worked_s(rows, now) - self.saved_s(rows, now)) / jobs.speed[rows]
        return (unsaved + jobs.restart_s[rows]) * jobs.gpus[rows]

    # -- on disk

    def to_json(self) -> str:
        """All of it, to be read back by `from_json`."""
        tenants = self.tenants.records(range(len(self.tenants)))
        for tenant in tenants:
            tenant["parent"] = None if tenant["parent"] == NOBODY else self.tenants.names[tenant["parent"]]
            tenant["budget_gpu_s"] = _plain(tenant["budget_gpu_s"])
        jobs = []
        for row in (*self.queue.tolist(), *self.active.tolist()):
            job = self.jobs.record(row) | {"tenant": self.tenants.names[self.jobs.tenant[row]]}
            if row in self.places:
                pool, place = self.places[row]
                job["place"] = {"pool": pool, "nodes": place.nodes.tolist(), "gpus": place.gpus.tolist()}
            if row in self.sizes:
                job["sizes"] = self.sizes[row]
            jobs.append({key: _plain(value) for key, value in job.items()})
        pools = [
            {"chip": pool.chip, "size": pool.size, "nodes": self.nodes.names[pool.first : pool.end],
             "domains": self.nodes.domains(number), "spares": pool.spares,
             "state": [STATES[state] for state in self.nodes.state[pool.first : pool.end]],
             "away": self.nodes.windows(pool)}
            for number, pool in enumerate(self.nodes.pools)
        ]  # fmt: skip
        found = {"format": 1, "now_s": self.now_s, "pools": pools, "tenants": tenants, "jobs": jobs}
        return json.dumps(found, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ClusterSnapshot":
        """What `to_json` wrote; UsageError for anything else."""
        try:
            found = json.loads(text)
            if not isinstance(found, dict) or found.get("format") != 1:
                raise UsageError("this is no snapshot that is known here", hint="its format is 1")
            return cls._read(found)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"this is no snapshot: {type(error).__name__}: {error}") from None

    @classmethod
    def _read(cls, found: dict[str, Any]) -> "ClusterSnapshot":
        made = cls()
        for pool in found["pools"]:
            there = made.nodes.join(pool["chip"], pool["size"], pool["nodes"], pool["domains"], pool.get("spares", 0))
            made.nodes.state[there.first : there.end] = [STATES.index(state) for state in pool["state"]]
            for name, away_s, back_s in pool.get("away", ()):
                made.nodes.announce([name], away_s, back_s)
        for one in found["tenants"]:
            budget = one.get("budget_gpu_s", "inf")
            hours = None if budget == "inf" else budget / 3600
            row = made.tenants.join(one["name"], one["guarantee"], one["parent"], one["borrow"], one["lend"], hours)
            made.tenants.spent_gpu_s[row] = one.get("spent_gpu_s", 0.0)
            made.tenants.recent[row], made.tenants.short[row] = one["recent"], one["short"]
        made.now_s = found["now_s"]
        for job in found["jobs"]:
            made._read_job(dict(job))
        made._told = int(max((made.jobs.number[row] for row in made.jobs.rows.values()), default=-1)) + 1
        return made

    def _read_job(self, job: dict[str, Any]) -> None:
        place, name, tenant = job.pop("place", None), job.pop("name"), job.pop("tenant")
        if name in self.jobs.rows:
            raise UsageError(f"job {name} is named twice")
        sizes = tuple((gpus, speed) for gpus, speed in job.pop("sizes", ()))
        job.setdefault("least", job["gpus"])
        known = {key: math.inf if value == "inf" else value for key, value in job.items() if value is not None}
        row = self.jobs.add(name, tenant=self.tenants.rows[tenant], **known)
        if sizes:
            self.sizes[row] = sizes
        if place is None:
            self._queue = np.append(self._queue, row)
            self.tenants.want(self.jobs.tenant[row], int(self.jobs.gpus[row]))
            return
        gpus, nodes = np.array(place["gpus"], np.int32), np.array(place["nodes"], np.int32)
        rows = nodes + self.nodes.pools[place["pool"]].first
        if (self.nodes.free[rows] < gpus).any() or gpus.sum() != self.jobs.gpus[row]:
            raise UsageError(f"job {name} runs on GPUs that it cannot have")
        self.places[row] = (place["pool"], Placement(nodes, gpus))
        self._occupy(row, *self.places[row])
        self.tenants.take(self.jobs.tenant[row], int(gpus.sum()))
        self.active = np.append(self.active, row)


def _plain(value: Any) -> Any:
    """A value as strict JSON has it: nothing for no number."""
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else None
    return value
