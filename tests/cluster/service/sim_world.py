"""A whole cluster in one thread: the real control plane and node agents over fake clock, network, disks and processes.

Each tick does something at random: users submit and cancel, nodes talk to the service, cycles run, processes exit. Any
write may be the last of its process; messages are lost, late and repeated; nodes reboot, and are cut off until the
service gives them up; operators cordon and drain them; the clock jumps. After each tick, what really runs is compared
with what may run.
"""

import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from sqlalchemy import Row, event, select

from headway.cluster.engines.engine import OVER, LaunchRequest
from headway.cluster.engines.submissions import request_from_json
from headway.cluster.service.cycle import run_cycle
from headway.cluster.service.decider import InProcessDecider
from headway.cluster.service.faults import WritePoints
from headway.cluster.service.messages import ORDERS, NodeOrders, StartReport, WantedStart
from headway.cluster.service.node import ClusterNode, Starts
from headway.cluster.service.outcome import RankResult
from headway.cluster.service.plane import ControlPlane
from headway.cluster.service.store import ServiceStore, Superseded
from headway.cluster.service.tables import dependencies, jobs, open_database, ranks
from headway.errors import EngineError

NODES = [
    {"name": f"n{number}", "chip": "fake", "gpus": list("abcd"), "cpus": 8, "memory_bytes": 2**34}
    for number in range(3)
]
TENANTS = [{"name": "red", "guarantee": 6}, {"name": "blue", "guarantee": 6}]


GIVE_UP_S = 90.0


class Crash(Exception):
    """A process was killed."""


class CrashingPoints(WritePoints):
    """Crashes at some of the writes."""

    def __init__(self, rng: Random, rate: float) -> None:
        super().__init__()
        self.rng, self.rate = rng, rate

    def reach(self, place: str) -> None:
        super().reach(place)
        if self.rng.random() < self.rate * (10 if place == "node" else 1):
            raise Crash(place)


@dataclass
class Process:
    """A command on a node."""

    key: str
    node: str
    gpus: tuple[str, ...]
    request: LaunchRequest
    began: float
    ends: float
    status: int
    warned: float | None = None
    told: float | None = None
    sent: int = 0
    killed: float | None = None
    """When a SIGKILL takes effect."""
    result: RankResult | None = None
    abandoned: bool = False
    """Whether the service has given it up; it may still run on a node that is cut off."""
    speed: float = 1.0
    """Seconds of work per second, of an elastic job with the GPUs that it has."""

    @property
    def alive(self) -> bool:
        return self.result is None


class SimStarts(Starts):
    """Fake processes; `on_disk` survives the agent."""

    def __init__(self, world: "World", name: str, on_disk: dict[str, Process]) -> None:
        self.world, self.name, self.on_disk = world, name, on_disk

    def report(self) -> list[StartReport]:
        return [StartReport(key, "running" if p.alive else "exited", p.result) for key, p in self.on_disk.items()]

    def begin(self, wanted: WantedStart) -> None:
        self.world.points.reach("node")
        self.world.begun(self.name, wanted, self.on_disk)
        self.world.points.reach("node")

    def signal(self, key: str, numbers: tuple[int, ...]) -> None:
        process = self.on_disk.get(key)
        if process is not None and process.alive and process.sent < len(numbers):
            process.sent = len(numbers)
            self.world.warn(process)

    def end(self, key: str) -> None:
        process = self.on_disk[key]
        if process.told is None:
            process.told = self.world.time
            self.world.points.reach("node")
            self.world.warn(process)

    def kill(self, key: str) -> None:
        process = self.on_disk[key]
        if process.killed is None:  # what is killed may need a while to be gone
            process.killed = self.world.time + self.world.rng.choice((0.0, 5.0, 30.0))

    def forget(self, key: str) -> None:
        self.world.points.reach("node")
        del self.on_disk[key]

    def accept(self, epoch: int, cluster: str) -> bool:
        newest = self.world.epochs.get(self.name, 0)
        self.world.epochs[self.name] = max(newest, epoch)
        return epoch >= newest


@dataclass
class World:
    """Everything, from one seed."""

    folder: Path
    seed: int
    url: str = ""
    """Of a database; SQLite by default."""
    faults: bool = True
    time: float = 1_000_000.0
    skew: float = 0.0
    """What the service's clock shows beyond the time."""
    disks: dict[str, dict[str, Process]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    submitted: list[str] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    ended: dict[str, float] = field(default_factory=dict)
    """When each process was found to have ended, at the latest."""
    saved_s: dict[str, float] = field(default_factory=dict)
    """Seconds of work that each elastic job has saved where its next start finds them."""
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.points = CrashingPoints(self.rng, 0.0)
        self.engine = open_database(self.url or f"sqlite:///{self.folder / f'{self.seed}.db'}")

        @event.listens_for(self.engine, "connect")
        def fast(connection: object, _: object) -> None:
            if not self.url:
                connection.execute("PRAGMA synchronous = OFF").close()  # type: ignore[attr-defined]

        self.engine.dispose()
        self.disks = {str(node["name"]): {} for node in NODES}
        self.agents: dict[str, ClusterNode | None] = dict.fromkeys(self.disks)
        self.late: dict[str, tuple[NodeOrders, float]] = {}
        """Orders on their way, and when the reports were sent that they answer."""
        self.cut: dict[str, float] = {}
        """Nodes that reach nobody, and until when."""
        self.heard = dict.fromkeys(self.disks, self.time)
        """When the newest service could last have heard of a node."""
        self.plane: ControlPlane | None = None
        self.zombie: ControlPlane | None = None

    # -- the service

    def start_service(self) -> None:
        store = ServiceStore(self.engine, self.points)
        self.plane = ControlPlane(
            store, lambda: self.time + self.skew, monotonic=lambda: self.time, give_up_after_s=GIVE_UP_S
        )
        self.decider = InProcessDecider()
        self.plane.set_cluster(NODES, TENANTS, "headway")
        self.heard = dict.fromkeys(self.disks, self.time)

    def serve(self, act: str) -> None:
        """Have the service do something; a crash ends it, and another one starts at some later tick."""
        try:
            if self.plane is None:
                self.start_service()
            elif act == "cycle":
                report = run_cycle(self.plane, self.decider)
                self.seen.update(started=report.started, preempted=report.stopped)
            else:
                getattr(self, act)(self.plane)
        except Crash:
            self.seen["service crashes"] += 1
            self.zombie, self.plane = (self.plane if self.rng.random() < 0.3 else None), None

    def submit(self, plane: ControlPlane) -> None:
        rng = self.rng
        machines, tenant = rng.choice((1, 1, 1, 2, 3)), rng.choice(("red", "blue"))
        gpus, preemptible = rng.choice((0, 1, 2, 4, 4)), rng.choice(("yes", "yes", "no"))
        elastic = gpus in (1, 2) and machines == 1 and preemptible == "yes" and rng.random() < 0.5
        sizes = {"sizes": f"{gpus}:1,{2 * gpus}:1.9"} if elastic else {}
        spread = elastic and rng.random() < 0.6
        if spread:  # a training run: over several nodes, and longer
            sizes = {"sizes": f"{gpus}:1,{4 + gpus}:3,11:5", "spread": "yes"}
        request = LaunchRequest(
            f"job-{len(self.submitted)}",
            ("run", str(8000.0 if spread else rng.choice((10.0, 100.0, 1000.0))), str(rng.choice((0, 0, 0, 0, 3)))),
            Path("/"),
            avoid=(rng.choice(list(self.disks)),) if machines < 3 and rng.random() < 0.1 else (),
            machines=machines,
            gpus=gpus,
            cpus=2 if spread else rng.choice((1, 2, 6)),
            memory_bytes=rng.choice((None, 2**33)),
            grace_s=rng.choice((0.0, 30.0)),
            array=rng.choice((None, None, None, 3)),
            at_once=rng.choice((None, 1)),
            site={
                "tenant": tenant,
                "priority": str(rng.choice((0, 0, 5))),
                "preemptible": preemptible,
                "after": self.some_job_of(tenant) or "",
                **sizes,
            },
        )
        key = request.name
        self.submitted.append(key)
        for _ in range(rng.choice((1, 1, 2))):  # a client that hears no answer asks again
            plane.submit(request, key=key)

    def some_job(self) -> str | None:
        with self.engine.connect() as connection:
            names = connection.execute(select(jobs.c.id).where(jobs.c.state.not_in(OVER))).scalars().all()
        return self.rng.choice(names) if names else None

    def some_job_of(self, tenant: str) -> str | None:
        """A dependency of a job of this tenant, for some jobs."""
        if self.rng.random() < 0.8:
            return None
        with self.engine.connect() as connection:
            names = connection.execute(select(jobs.c.id).where(jobs.c.tenant == tenant)).scalars().all()
        return f"{self.rng.choice(names)}:{self.rng.choice(('ok', 'any'))}" if names else None

    def set_priority(self, plane: ControlPlane) -> None:
        if (job := self.some_job()) is not None:
            plane.set_priority(job, self.rng.choice((-1, 0, 5, 9)))

    def cancel(self, plane: ControlPlane) -> None:
        if (job := self.some_job()) is not None:
            self.cancelled.add(job)
            plane.cancel(job)

    def hold(self, plane: ControlPlane) -> None:
        if (job := self.some_job()) is not None:
            plane.hold(job)

    def release(self, plane: ControlPlane) -> None:
        if (job := self.some_job()) is not None:
            plane.hold(job, held=False)

    def warn_job(self, plane: ControlPlane) -> None:
        if (job := self.some_job()) is not None:
            with suppress(EngineError):  # it waits
                plane.signal(job, 10)

    # -- operators

    def cordon(self, plane: ControlPlane) -> None:
        plane.fleet.cordon(self.rng.choice(list(self.disks)))

    def uncordon(self, plane: ControlPlane) -> None:
        plane.fleet.cordon(self.rng.choice(list(self.disks)), False)

    def drain(self, plane: ControlPlane) -> None:
        self.seen["drained"] += len(plane.fleet.drain(self.rng.choice(list(self.disks))))

    def maintain(self, plane: ControlPlane) -> None:
        """Short, and most of them far away: ten minutes before, a node is emptied."""
        begins = plane.wall_s + self.rng.choice((-5.0, 1000.0, 1000.0, 1000.0))
        plane.fleet.schedule_maintenance(self.rng.choice(list(self.disks)), begins, begins + 50)

    # -- nodes

    def talk(self, name: str) -> None:
        """A node reports and obeys: in one go, or with losses, delays and repeats."""
        agent = self.agents[name]
        if agent is None:
            self.agents[name] = agent = ClusterNode(name, SimStarts(self, name, self.disks[name]))
            self.late.pop(name, None)
        try:
            if self.cut.get(name, 0.0) > self.time:  # or it stands still, and obeys once it does not
                return
            if name in self.late:
                orders, sent = self.late.pop(name)
                agent.obey(orders, self.time - sent)
                return
            plane = self.zombie if self.zombie is not None and self.rng.random() < 0.3 else self.plane
            if plane is None or self._lossy(0.1):
                return
            try:
                report = agent.report()
                orders = plane.sync(report)
                if plane is self.plane:
                    self.heard[name] = self.time
            except Superseded:
                self.seen["superseded"] += 1
                return
            orders = ORDERS.validate_json(ORDERS.dump_json(orders))
            if self._lossy(0.1):
                return
            if self._lossy(0.1):
                self.late[name] = orders, self.time
                return
            for _ in range(2 if self._lossy(0.1) else 1):
                agent.obey(orders)
        except Crash as crash:
            if str(crash) == "node":
                self.seen["node crashes"] += 1
                self.agents[name] = None
                self.late.pop(name, None)
            else:
                self.seen["service crashes"] += 1
                self.plane = None

    def _lossy(self, rate: float) -> bool:
        return self.faults and self.rng.random() < rate

    def reboot(self, name: str) -> None:
        self.seen["reboots"] += 1
        self.agents[name] = None
        self.late.pop(name, None)
        for process in self.disks[name].values():
            if process.alive:
                process.result = RankResult(lost=True)

    # -- processes

    def begun(self, node: str, wanted: WantedStart, on_disk: dict[str, Process]) -> None:
        assert wanted.key not in {process.key for process in self.processes}, f"{wanted.key} started twice"
        request = request_from_json(wanted.request)
        length, status = float(request.command[1]), int(request.command[2])
        job, start, rank = wanted.key.split(":")
        left_s, speed = length, 1.0
        if "sizes" in request.site:
            sizes = dict(pair.split(":") for pair in request.site["sizes"].split(","))
            left_s, speed = length - self.saved_s.get(job, 0.0), float(sizes[str(sum(wanted.gpu_counts))])
            self.seen[f"{sum(wanted.gpu_counts)} GPUs on {len(wanted.machines)} nodes"] += 1
        assert wanted.gpu_counts[wanted.rank : wanted.rank + 1] == (len(wanted.gpus),), wanted
        assert node not in request.avoid, wanted
        ends = self.time + left_s / speed
        process = Process(wanted.key, node, wanted.gpus, request, self.time, ends, status, speed=speed)
        on_disk[wanted.key] = process
        self.processes.append(process)
        here = [other for other in self.processes if other.node == node and other.alive and other.abandoned]
        assert not here, f"{wanted.key} started beside what was given up: {here}"
        with self.engine.connect() as connection:
            mine = (ranks.c.job == job) & (ranks.c.start == int(start))
            states = dict(connection.execute(select(ranks.c.rank, ranks.c.state).where(mine)).all())
        assert "granted" not in states.values(), f"{wanted.key} started before the whole gang may"
        assert states.get(int(rank)) in ("issued", "running"), f"{wanted.key} started after it was given up: {states}"

    def warn(self, process: Process) -> None:
        if process.warned is None:
            process.warned = self.time
            if self.rng.random() < 0.7:
                process.ends, process.status = min(process.ends, self.time + 5), 75

    def run_processes(self) -> None:
        for process in self.processes:
            if not process.alive:
                self.ended.setdefault(process.key, self.time)
                continue
            after_s = None if process.warned is None else process.warned - process.began
            if process.killed is not None and self.time >= process.killed:
                process.result = RankResult()
            elif process.told is not None and self.time >= process.told + process.request.grace_s:
                process.result = RankResult(137, after_s)
            elif self.time >= process.ends:
                process.result = RankResult(process.status, after_s)
                job, _, rank = process.key.split(":")
                if process.status == 75 and rank == "0" and not process.abandoned:
                    worked_s = (process.ends - process.began) * process.speed
                    self.saved_s[job] = self.saved_s.get(job, 0.0) + worked_s

    def tick(self) -> None:
        rng = self.rng
        self.points.rate = 0.004 if self.faults else 0.0
        self.time += rng.choice((0.1, 1.0, 5.0, 20.0) if self.faults else (1.0, 25.0, 200.0))
        if self._lossy(0.01):
            self.skew += rng.choice((-100.0, 20.0, 3600.0))
        self.run_processes()
        acts = ("cycle",) * 10 + ("submit",) * 4 + ("cancel", "hold", "release", "warn_job", "set_priority")
        acts += ("cordon", "drain", "maintain") + ("uncordon",) * 6
        calm = ("cycle", "cycle", "cycle", "cycle", "release", "uncordon")
        self.serve(rng.choice(acts if self.faults else calm))
        self.note_abandoned()  # before nodes report: who was given up may come back at once
        for name in self.disks:
            if rng.random() < 0.6:
                self.talk(name)
        if self._lossy(0.01):
            self.reboot(rng.choice(list(self.disks)))
        if self._lossy(0.03):
            busy = sorted({process.node for process in self.processes if process.alive})
            self.cut[rng.choice(busy or list(self.disks))] = self.time + rng.choice((20.0, 300.0, 1000.0))
        self.check()

    # -- what must hold

    def check(self) -> None:
        alive = [process for process in self.processes if process.alive]
        for node in NODES:
            here = [process for process in alive if process.node == node["name"]]
            gpus = [gpu for process in here for gpu in process.gpus]
            assert len(gpus) == len(set(gpus)), f"GPUs of {node['name']} are given twice: {here}"
            assert sum(process.request.cpus for process in here) <= int(str(node["cpus"])), here
            assert sum(process.request.memory_bytes or 0 for process in here) <= int(str(node["memory_bytes"])), here
        self.note_abandoned()
        starts = {tuple(process.key.split(":")[:2]) for process in alive if not process.abandoned}
        assert len(starts) == len({job for job, _ in starts}), "a job runs twice"

    def note_abandoned(self) -> None:
        """What runs although the service counts it as exited is on a node that was silent for as long as it says."""
        with self.engine.connect() as connection:
            rows = connection.execute(select(ranks.c.job, ranks.c.start, ranks.c.rank, ranks.c.state)).all()
        wanted = {f"{row.job}:{row.start}:{row.rank}" for row in rows if row.state != "exited"}
        for process in self.processes:
            if process.alive and process.key not in wanted and not process.abandoned:
                silent_s = self.time - self.heard[process.node]
                assert silent_s > GIVE_UP_S, f"{process.key} was given up after {silent_s} s"
                process.abandoned = True
                self.seen["given up"] += 1

    def finish(self) -> None:
        """Without further faults, everything comes to an end."""
        self.faults, self.points.rate, self.zombie = False, 0.0, None
        self.cut.clear()
        for _ in range(5000):
            self.tick()
            if self.plane is not None and self.some_job() is None and not any(self.disks.values()):
                return
        with self.engine.connect() as connection:
            left = connection.execute(select(jobs.c.id, jobs.c.state, jobs.c.reason).where(jobs.c.state.not_in(OVER)))
            raise AssertionError(f"jobs never end: {left.all()}, on disk {self.disks}")

    def _check_dependencies(self, rows: "dict[str, Row[Any]]") -> None:
        """No job began before what it waits for was over, nor at all if that had to succeed and did not."""
        with self.engine.connect() as connection:
            pairs = connection.execute(select(dependencies)).all()
        for pair in pairs:
            needed = [row for row in rows.values() if pair.needs in (row.id, row.array)]
            began = [process.began for process in self.processes if process.key.split(":")[0] == pair.job]
            succeeded = all(row.state == "finished" for row in needed)
            assert needed
            assert not began or pair.condition == "any" or succeeded, pair
            self.seen["dependencies"] += 1
            for name in (row.id for row in needed):
                ends = [self.ended[process.key] for process in self.processes if process.key.split(":")[0] == name]
                assert not began or min(began) >= max(ends, default=0.0), pair

    def check_ends(self) -> None:
        """Every job that was ever accepted has ended once, as its command did."""
        with self.engine.connect() as connection:
            rows = connection.execute(select(jobs)).all()
        done = {(row.name, row.array is None) for row in rows}
        assert len({row.id for row in rows}) == len(rows)
        counts = Counter(row.name for row in rows)
        assert all(count == (json.loads(row.request)["array"] or 1) for row in rows for count in [counts[row.name]]), (
            done
        )
        self._check_dependencies({row.id: row for row in rows})
        for row in rows:
            mine = [process for process in self.processes if process.key.split(":")[0] == row.id]
            statuses = {process.result.status for process in mine if process.result is not None}
            assert not any(process.alive for process in mine)
            if row.state == "finished":
                assert 0 in statuses, (row, mine)
            elif row.state == "cancelled":
                assert row.id in self.cancelled or "which had to succeed first" in row.reason, row
            else:
                assert row.state == "failed", row
                assert statuses & {3, 138, 137, None}, (row, mine)
