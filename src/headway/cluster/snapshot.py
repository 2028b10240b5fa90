"""The cluster at one instant: nodes, tenants, and jobs that wait or run. Kept as columns that are updated in place.

A Snapshot says nothing of how long a job will take: nobody knows. It has what is known: what a job asked for, when, for
how long at most, what it has done so far and when it last saved.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.columns import Columns
from headway.cluster.room import ANYWHERE, Placement, Room
from headway.cluster.tenants import NOBODY, Tenants
from headway.errors import UsageError

__all__ = ["DRAINING", "HEALTHY", "QUARANTINED", "SPARE", "Job", "Jobs", "Nodes", "Pool", "Snapshot"]

HEALTHY, DRAINING, QUARANTINED, SPARE = range(4)
STATES = ("healthy", "draining", "quarantined", "spare")
ANY_POOL = -1


@dataclass(frozen=True)
class Pool:
    """Nodes of one kind."""

    number: int
    chip: str
    size: int
    """GPUs of each node."""
    first: int
    end: int
    """Rows of its nodes."""


class Nodes(Columns):
    """Machines; those of a pool are neighbours."""

    if TYPE_CHECKING:
        gpus: NDArray[np.int32]
        free: NDArray[np.int32]
        state: NDArray[np.int8]

    def __init__(self) -> None:
        super().__init__({"gpus": (np.int32, 0), "free": (np.int32, 0), "state": (np.int8, HEALTHY)})
        self.pools: list[Pool] = []
        self.levels: tuple[str, ...] = ()
        """Of the network's domains, the smallest first."""
        self._domains: list[NDArray[np.int32]] = []
        self._domain_names: list[dict[str, list[str]]] = []
        self._largest: dict[int, int] = {}

    def join(
        self, chip: str, size: int, names: Iterable[str], domains: Mapping[str, Sequence[str]] | None = None
    ) -> Pool:
        """Add a pool of nodes; `domains` names, for each level from the smallest, the domain of each node."""
        if size < 1:
            raise UsageError(f"a node of {chip} has {size} GPUs", hint="at least one")
        first = len(self.names)
        for name in names:
            if name in self.rows:
                raise UsageError(f"node {name} is named twice")
            self.add(name, gpus=size, free=size)
        pool = Pool(len(self.pools), chip, size, first, len(self.names))
        domains = domains or {level: ["all"] * (pool.end - first) for level in self.levels}
        if self.pools and tuple(domains) != self.levels:
            raise UsageError(f"nodes of {chip} have levels {', '.join(domains)}", hint=f"not {', '.join(self.levels)}")
        self.levels = tuple(domains)
        self._domain_names.append({level: list(of) for level, of in domains.items()})
        numbers = [np.unique(np.array(of), return_inverse=True)[1] for of in domains.values()]
        self._domains.append(np.array(numbers, np.int32).reshape(len(domains), pool.end - first))
        self.pools.append(pool)
        self._largest.clear()
        return pool

    def domains(self, pool: int) -> dict[str, list[str]]:
        """Of each level, the domain of each node of a pool."""
        return self._domain_names[pool]

    def room(self, pool: Pool) -> Room:
        """What is free for new jobs in a pool."""
        rows = slice(pool.first, pool.end)
        free = np.where(self.state[rows] == HEALTHY, self.free[rows], 0).astype(np.int32)
        return Room(free, pool.size, self._domains[pool.number])

    def largest(self, within: int) -> int:
        """GPUs of the largest gang that would find a place, or one in a domain of a level, if nothing ran here."""
        if within not in self._largest:
            rooms = [Room(self.gpus[one.first : one.end], one.size, self._domains[one.number]) for one in self.pools]
            self._largest[within] = max((room.largest(within) for room in rooms), default=0)
        return self._largest[within]


@dataclass(frozen=True)
class Job:
    """What somebody asks for."""

    name: str
    tenant: str
    gpus: int
    submit_s: float = 0.0
    priority: int = 0
    preemptible: bool = False
    limit_s: float = math.inf
    """The longest it may run; whoever knows no better plans with it."""
    save_every_s: float = 1800.0
    """Seconds of work between its checkpoints."""
    restart_s: float = 120.0
    """Seconds from a start until it works again."""
    within: str | None = None
    """The level of the network that it must lie in one domain of; by default it lies as close as there is room."""


class Jobs(Columns):
    """Jobs that wait or run."""

    if TYPE_CHECKING:
        tenant: NDArray[np.int32]
        gpus: NDArray[np.int32]
        priority: NDArray[np.int32]
        preemptible: NDArray[np.bool_]
        pools: NDArray[np.int64]
        submit_s: NDArray[np.float64]
        limit_s: NDArray[np.float64]
        save_every_s: NDArray[np.float64]
        restart_s: NDArray[np.float64]
        within: NDArray[np.int8]
        running: NDArray[np.bool_]
        since_s: NDArray[np.float64]
        done_s: NDArray[np.float64]
        ran_s: NDArray[np.float64]
        waits_s: NDArray[np.float64]
        starts: NDArray[np.int32]
        failed: NDArray[np.bool_]
        known_s: NDArray[np.float64]

    def __init__(self) -> None:
        super().__init__(
            {
                "tenant": (np.int32, NOBODY),
                "gpus": (np.int32, 0),
                "priority": (np.int32, 0),
                "preemptible": (np.bool_, False),
                "pools": (np.int64, ANY_POOL),  # a bit for each pool that it can use
                "submit_s": (np.float64, 0.0),
                "limit_s": (np.float64, math.inf),
                "save_every_s": (np.float64, 1800.0),
                "restart_s": (np.float64, 120.0),
                "within": (np.int8, ANYWHERE),  # the level of the domain that it must lie in
                "running": (np.bool_, False),
                "since_s": (np.float64, math.nan),  # when it was started last
                "done_s": (np.float64, 0.0),  # seconds of work that earlier starts left behind
                "ran_s": (np.float64, 0.0),  # seconds that earlier starts held their GPUs
                "waits_s": (np.float64, 0.0),  # since when it waits, or waited last
                "starts": (np.int32, 0),
                "failed": (np.bool_, False),  # waits since a node of its failed
                "known_s": (np.float64, math.nan),  # seconds of work in all: oracles alone are told
            },
            room=1024,
        )


class Snapshot:
    """All of it. The methods are how the world tells it what happened."""

    def __init__(self) -> None:
        self.nodes, self.tenants, self.jobs = Nodes(), Tenants(), Jobs()
        self.now_s = 0.0
        self._queue: NDArray[np.int64] = np.empty(0, np.int64)
        self._stale = False
        """Whether jobs of the queue have been started."""
        self.active: NDArray[np.int64] = np.empty(0, np.int64)
        """Rows of the jobs that run, in the order they started."""
        self.places: dict[int, tuple[int, Placement]] = {}
        """Of each that runs its pool, and its nodes there."""

    @property
    def queue(self) -> NDArray[np.int64]:
        """Rows of the jobs that wait, in the order they came."""
        if self._stale:
            self._queue, self._stale = self._queue[~self.jobs.running[self._queue]], False
        return self._queue

    # -- what happens

    def advance(self, now_s: float) -> None:
        """Let time pass."""
        assert now_s >= self.now_s, "time goes on"
        if now_s > self.now_s:
            self.tenants.age(now_s - self.now_s)
            self.now_s = now_s

    def submit(self, jobs: Iterable[Job], known_s: Iterable[float] = ()) -> list[int]:
        """Jobs join the queue; UsageError for one that can never run."""
        known = iter(known_s)
        rows = []
        for job in jobs:
            self.check(job)
            values = {key: getattr(job, key) for key in Job.__dataclass_fields__ if key not in ("name", "tenant")}
            tenant = self.tenants.rows[job.tenant]
            values |= {"waits_s": job.submit_s, "known_s": next(known, math.nan)}
            values["within"] = ANYWHERE if job.within is None else self.nodes.levels.index(job.within)
            rows.append(self.jobs.add(job.name, tenant=tenant, **values))
        self._queue = np.concatenate((self.queue, np.array(rows, np.int64)))
        return rows

    def check(self, job: Job) -> None:
        """UsageError for a job that can never run here, with the nearest that could."""
        if job.gpus != int(job.gpus) or job.gpus < 1:
            raise UsageError(f"job {job.name} asks for {job.gpus} GPUs", hint="GPUs are counted in whole numbers")
        if job.tenant not in self.tenants.rows:
            known = ", ".join(self.tenants.names) or "nobody"
            raise UsageError(f"job {job.name} is of {job.tenant}, whom nobody has named", hint=f"there are {known}")
        if job.name in self.jobs.rows:
            raise UsageError(f"job {job.name} is there already")
        if job.within is not None and job.within not in self.nodes.levels:
            levels = ", ".join(self.nodes.levels) or "none"
            raise UsageError(f"job {job.name} must lie within a {job.within}", hint=f"levels here: {levels}")
        largest = self.nodes.largest(ANYWHERE if job.within is None else self.nodes.levels.index(job.within))
        if job.gpus > largest:
            where = f" within one {job.within}" if job.within else ""
            raise UsageError(
                f"job {job.name} asks for {job.gpus} GPUs{where}, and there are {largest}", hint=f"{largest} at most"
            )
        allowed = int(self.allowance(self.tenants.rows[job.tenant]))
        if job.gpus > allowed:
            raise UsageError(
                f"job {job.name} asks for {job.gpus} GPUs, and {job.tenant} may use {allowed} together",
                hint=f"{allowed} at most, or a higher borrowing limit",
            )

    def allowance(self, tenant: int) -> int:
        """GPUs that a tenant may use at most, if nobody else uses any."""
        tenants = self.tenants
        return min(int(tenants.guarantee[row] + min(tenants.borrow[row], self.gpus)) for row in tenants.path(tenant))

    def start(self, row: int, pool: int, place: Placement) -> None:
        """A job that waits has its nodes."""
        jobs, nodes = self.jobs, self.nodes
        rows = place.nodes + nodes.pools[pool].first
        assert (nodes.free[rows] >= place.gpus).all(), "nodes are never given twice"
        assert place.total == jobs.gpus[row], "all of a gang or nothing"
        nodes.free[rows] -= place.gpus
        self.tenants.take(jobs.tenant[row], place.total)
        self.places[row] = (pool, place)
        jobs.running[row], jobs.since_s[row] = True, self.now_s
        jobs.starts[row] += 1
        jobs.failed[row] = False
        self._stale = True
        self.active = np.append(self.active, row)

    def end(self, row: int) -> None:
        """A job is done, or was taken back by who sent it."""
        queue = self.queue  # without those that were started: the row may be another's soon
        if self.jobs.running[row]:
            self._release(row)
        else:
            self._queue = queue[queue != row]
        self.jobs.drop(row)

    def stop(self, row: int, done_s: float | None = None) -> None:
        """A job has lost its nodes and waits again, at its old place; what it saved last of its work stays done."""
        jobs = self.jobs
        if done_s is None:
            done_s = float(self.saved_s(np.array([row]), self.now_s)[0])
        jobs.ran_s[row] += self.now_s - jobs.since_s[row]
        jobs.done_s[row] = done_s
        queue = self.queue  # while the job is none of it
        self._release(row)
        jobs.running[row], jobs.since_s[row], jobs.waits_s[row] = False, math.nan, self.now_s
        at = int(np.searchsorted(jobs.submit_s[queue], jobs.submit_s[row], side="left"))
        self._queue = np.insert(queue, at, row)

    def fail(self, node: int) -> list[int]:
        """A node is lost, with what its jobs had not saved; they wait again, and a spare of its pool replaces it."""
        nodes = self.nodes
        pool = next(pool for pool in nodes.pools if pool.first <= node < pool.end)
        hit = [row for row, (number, place) in self.places.items()
               if number == pool.number and node - pool.first in place.nodes]  # fmt: skip
        for row in hit:
            self.stop(row)
            self.jobs.failed[row] = True
        served, nodes.state[node] = nodes.state[node] == HEALTHY, QUARANTINED
        spares = np.flatnonzero(nodes.state[pool.first : pool.end] == SPARE)
        if served and len(spares):
            nodes.state[pool.first + spares[0]] = HEALTHY
        return hit

    def mend(self, node: int, state: int = HEALTHY) -> None:
        """A node is well again, to be used or as a spare."""
        self.nodes.state[node] = state

    def _release(self, row: int) -> None:
        pool, place = self.places.pop(row)
        self.nodes.free[place.nodes + self.nodes.pools[pool].first] += place.gpus
        self.tenants.take(self.jobs.tenant[row], -place.total)
        self.active = self.active[self.active != row]

    # -- what follows from it

    @property
    def gpus(self) -> int:
        """Of all nodes."""
        return sum(pool.size * (pool.end - pool.first) for pool in self.nodes.pools)

    def held_s(self, rows: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Seconds that jobs have held their GPUs so far, in all starts."""
        jobs = self.jobs
        return jobs.ran_s[rows] + np.where(jobs.running[rows], now - np.nan_to_num(jobs.since_s[rows]), 0.0)

    def worked_s(self, rows: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Seconds of work that jobs that run have done, what is not saved too."""
        jobs = self.jobs
        late = np.where(jobs.starts[rows] > 1, jobs.restart_s[rows], 0.0)
        return jobs.done_s[rows] + np.maximum(now - jobs.since_s[rows] - late, 0.0)

    def saved_s(self, rows: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Of that, what is saved: jobs save after each so many seconds of work in one start."""
        jobs = self.jobs
        here = self.worked_s(rows, now) - jobs.done_s[rows]
        return jobs.done_s[rows] + np.floor(here / jobs.save_every_s[rows]) * jobs.save_every_s[rows]

    # -- on disk

    def to_json(self) -> str:
        """All of it, to be read back by `from_json`."""
        tenants = self.tenants.records(range(len(self.tenants)))
        for tenant in tenants:
            tenant["parent"] = None if tenant["parent"] == NOBODY else self.tenants.names[tenant["parent"]]
        jobs = []
        for row in (*self.queue.tolist(), *self.active.tolist()):
            job = self.jobs.record(row) | {"tenant": self.tenants.names[self.jobs.tenant[row]]}
            if row in self.places:
                pool, place = self.places[row]
                job["place"] = {"pool": pool, "nodes": place.nodes.tolist(), "gpus": place.gpus.tolist()}
            jobs.append(
                {key: None if value in (math.inf, None) or value != value else value for key, value in job.items()}
            )
        pools = [
            {"chip": pool.chip, "size": pool.size, "nodes": self.nodes.names[pool.first : pool.end],
             "domains": self.nodes.domains(number),
             "state": [STATES[state] for state in self.nodes.state[pool.first : pool.end]]}
            for number, pool in enumerate(self.nodes.pools)
        ]  # fmt: skip
        found = {"format": 1, "now_s": self.now_s, "pools": pools, "tenants": tenants, "jobs": jobs}
        return json.dumps(found, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Snapshot":
        """What `to_json` wrote."""
        found: dict[str, Any] = json.loads(text)
        if found.get("format") != 1:
            raise UsageError(f"this is no snapshot that is known here (format {found.get('format')})")
        made = cls()
        for pool in found["pools"]:
            there = made.nodes.join(pool["chip"], pool["size"], pool["nodes"], pool["domains"])
            made.nodes.state[there.first : there.end] = [STATES.index(state) for state in pool["state"]]
        for tenant in found["tenants"]:
            row = made.tenants.join(
                tenant["name"], tenant["guarantee"], tenant["parent"], tenant["borrow"], tenant["lend"]
            )
            made.tenants.recent[row] = tenant["recent"]
        made.now_s = found["now_s"]
        for job in found["jobs"]:
            place = job.pop("place", None)
            known = {key: value for key, value in job.items() if value is not None and key not in ("name", "tenant")}
            row = made.jobs.add(job["name"], tenant=made.tenants.rows[job["tenant"]], **known)
            if place is None:
                made._queue = np.append(made._queue, row)
                continue
            gpus, nodes = np.array(place["gpus"], np.int32), np.array(place["nodes"], np.int32)
            made.places[row] = (place["pool"], Placement(nodes, gpus))
            made.nodes.free[nodes + made.nodes.pools[place["pool"]].first] -= gpus
            made.tenants.take(made.jobs.tenant[row], int(gpus.sum()))
            made.active = np.append(made.active, row)
        return made
