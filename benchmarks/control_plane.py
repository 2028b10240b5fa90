"""How large a cluster one service can schedule: cycles, submissions, and node agents that report.

python benchmarks/control_plane.py [--only cycles,start,submits,agents,slurm] [--nodes N] [--queued N] [--out FILE]

`cycles`: live cycles with everything in one process, but for the one that decides. `start`: from nothing to the first
cycle, with the record of the cycles and a fold of it. `submits`: over HTTP, by several clients at once. `agents`: nodes
that report over TLS with certificates of their own, and the API beside them, with a queue. `slurm`: such submissions to
a real slurmctld, if there is one. Where other work runs on the machine, CPU times say more than the clock; those of
cycles and starts include the process that decides, the others are of the process that answers.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import psutil
from sqlalchemy import event, insert, select, update

from headway.cluster.engines.engine import LaunchRequest
from headway.cluster.engines.submissions import request_to_json
from headway.cluster.service import tables
from headway.cluster.service.access_guard import GuardSettings
from headway.cluster.service.app import make_app
from headway.cluster.service.certificates import (
    Authority,
    certificate_pem,
    fingerprint_of,
    read_request,
    signing_request,
)
from headway.cluster.service.cycle import run_cycle
from headway.cluster.service.decider import DeciderProcess
from headway.cluster.service.folds import take_fold
from headway.cluster.service.live_service import LiveService
from headway.cluster.service.messages import PROTOCOL, NodeReport, StartReport, start_key
from headway.cluster.service.new_jobs import NewJob
from headway.cluster.service.outcome import RankResult
from headway.cluster.service.peer_certificate import PeerCertificateProtocol
from headway.cluster.service.plane import ControlPlane
from headway.cluster.service.store import ServiceStore
from headway.cluster.service.tables import open_database, sqlite_url
from headway.dashboard.server import serve as run_server
from headway.http_server import listen

ROOT = Path(__file__).parents[1]
BATCH = 100
USER_TOKEN, NODE_TOKEN = "u" * 40, "n" * 40
HEARTBEAT_S = 10.0
CONNECT_S = 30.0
"""Over which the agents come: after a restart of the service, they try again at random times."""
GPUS = 8
SIZES, WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128), (20, 10, 15, 25, 12, 10, 5, 3)
"""GPUs of jobs, and how many of each."""
TENANTS = [f"team-{number}" for number in range(10)]


def node_specs(count: int) -> list[dict[str, Any]]:
    """Nodes of eight GPUs."""
    gpus = list(map(str, range(GPUS)))
    return [
        {"name": f"n{number:05}", "chip": "fake", "gpus": gpus, "cpus": 128, "memory_bytes": 2**40}
        for number in range(count)
    ]


def random_job(rng: Random, number: int) -> LaunchRequest:
    """A job of a random size, tenant and priority."""
    gpus = rng.choices(SIZES, WEIGHTS)[0]
    machines = max(1, gpus // GPUS)
    return LaunchRequest(
        f"job-{number}",
        ("true",),
        Path("/tmp"),
        machines=machines,
        gpus=gpus // machines,
        cpus=4,
        limit_s=86400.0,
        site={
            "tenant": rng.choice(TENANTS),
            "priority": str(rng.choice((0, 0, 0, 1, 5))),
            "preemptible": rng.choice(("yes", "no")),
            "user": f"user-{rng.randrange(100)}",
        },
    )


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum of durations, in milliseconds."""
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "median_ms": round(1e3 * statistics.median(ordered), 2),
        "p99_ms": round(1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 2),
        "worst_ms": round(1e3 * ordered[-1], 2),
    }


class Cluster:
    """A control plane with nodes that the benchmark plays."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.engine, self.durable = open_database(sqlite_url(folder / "control.db")), False

        @event.listens_for(self.engine, "connect")
        def prepare(connection: Any, _: Any) -> None:
            if not self.durable:  # only while the cluster is filled
                connection.execute("PRAGMA synchronous = OFF").close()

        self.engine.dispose()
        self.store = ServiceStore(self.engine)
        self.plane, self.decider = ControlPlane(self.store), DeciderProcess()
        self.specs = node_specs(nodes)
        tenants = [{"name": name, "guarantee": nodes * GPUS // len(TENANTS)} for name in TENANTS]
        filled = self.store.lines.cluster is not None
        self.plane.set_cluster(self.specs, tenants, "headway")
        if not filled:
            self._note_healthy()

    def _note_healthy(self) -> None:
        """What the first report of every node does, in one transaction."""
        with self.store.write() as transaction:
            transaction.execute(update(tables.nodes).values(state="healthy"))
            names = [spec["name"] for spec in self.specs]
            transaction.execute(insert(tables.node_conditions), [{"name": name} for name in names])
            lines = [{"at": self.plane.now_s, "node": name, "state": "healthy"} for name in names]
            transaction.add_lines(lines)

    def confirm_all(self) -> int:
        """What the reports of all nodes do once everything that was issued runs, in one transaction."""
        with self.store.write() as transaction:
            issued = select(tables.ranks.c.job).where(tables.ranks.c.state == "issued").distinct()
            names = list(transaction.execute(issued).scalars())
            transaction.execute(update(tables.ranks).where(tables.ranks.c.state == "issued").values(state="running"))
            starting = tables.jobs.c.state == "starting"
            transaction.execute(update(tables.jobs).where(starting).values(state="running", started=self.plane.wall_s))
            transaction.add_lines([{"at": self.plane.now_s, "running": name} for name in names])
        return len(names)

    def certify(self, folder: Path) -> Authority:
        """Give each node a certificate, as joining does; all have one key, which saves the time to make more."""
        authority, issued = Authority(folder), folder / "nodes"
        issued.mkdir()
        request = read_request(signing_request(issued / "key", "node"))
        with self.store.write() as transaction:
            for spec in self.specs:
                certificate = authority.sign_node(spec["name"], request)
                (issued / f"{spec['name']}.pem").write_text(certificate_pem(certificate))
                mine = tables.node_conditions.c.name == spec["name"]
                values = {"fingerprint": fingerprint_of(certificate)}
                transaction.execute(update(tables.node_conditions).where(mine).values(values))
        return authority

    def hear_all(self) -> None:
        """What the heartbeats of all nodes do."""
        self.plane.fleet.silence.hear(*(spec["name"] for spec in self.specs))

    def filled(self) -> None:
        """From now on, every commit reaches the disk."""
        self.durable = True
        self.engine.dispose()

    def answer(self) -> int:
        """Have every node confirm what it was asked to start; return how many jobs run."""
        with self.store.read() as connection:
            rows = connection.exec_driver_sql("SELECT job, start, rank, node FROM ranks WHERE state = 'issued'").all()
        reports: dict[str, list[StartReport]] = {}
        for job, start, rank, node in rows:
            reports.setdefault(node, []).append(StartReport(start_key(job, start, rank), "running"))
        for node, starts in reports.items():
            self.plane.sync(NodeReport(node, tuple(starts)))
        with self.store.read() as connection:
            return int(connection.exec_driver_sql("SELECT count(*) FROM jobs WHERE state = 'running'").scalar() or 0)

    def finish(self, rng: Random, count: int) -> None:
        """Have some running jobs end."""
        with self.store.read() as connection:
            names = connection.exec_driver_sql("SELECT id FROM jobs WHERE state = 'running' LIMIT 2000").scalars().all()
            chosen = rng.sample(list(names), min(count, len(names)))
            marks = ",".join("?" * len(chosen))
            rows = connection.exec_driver_sql(
                f"SELECT job, start, rank, node FROM ranks WHERE job IN ({marks})", tuple(chosen)
            ).all()
        for job, start, rank, node in rows:
            report = StartReport(start_key(job, start, rank), "exited", RankResult(0))
            self.plane.sync(NodeReport(node, (report,)))

    def cpu_s(self) -> float:
        """CPU time of this process and of the one that decides."""
        process = self.decider._process
        times = psutil.Process(process.pid).cpu_times() if process is not None else None
        return time.process_time() + (0.0 if times is None else times.user + times.system)

    def close(self) -> None:
        """End the decider and the database."""
        self.decider.close()
        self.store.close()


def measure_cycles(folder: Path, nodes: int, queued: int, cycles: int) -> dict[str, Any]:
    """Time live cycles of a full cluster with a long queue, while jobs end and arrive."""
    rng, cluster = Random(1), Cluster(folder, nodes)
    plane, number = cluster.plane, 0
    began = time.perf_counter()
    for _ in range(0, queued + nodes // 2, BATCH):
        plane.submit_all([NewJob(random_job(rng, number + offset)) for offset in range(BATCH)])
        number += BATCH
    print(f"  {number} jobs queued in {time.perf_counter() - began:.0f} s", flush=True)
    running = 0
    for _ in range(20):
        report = run_cycle(plane, cluster.decider)
        running += cluster.confirm_all()
        if not report.started:
            break
    cluster.filled()
    print(f"  {running} jobs run after {time.perf_counter() - began:.0f} s", flush=True)
    seconds, cpu_s, started = list[float](), list[float](), 0
    for _ in range(cycles):
        cluster.hear_all()
        cluster.finish(rng, 10)
        plane.submit_all([NewJob(random_job(rng, number + offset)) for offset in range(20)])
        number += 20
        begin, used = time.perf_counter(), cluster.cpu_s()
        report = run_cycle(plane, cluster.decider)
        seconds.append(time.perf_counter() - begin)
        cpu_s.append(cluster.cpu_s() - used)
        started += report.started
        running = cluster.answer()
    with cluster.store.read() as connection:
        waiting = connection.exec_driver_sql("SELECT count(*) FROM jobs WHERE state = 'waiting'").scalar()
    cluster.close()
    figures = {"nodes": nodes, "running": running, "queued": waiting, "started": started}
    return figures | {"cpu": spread(cpu_s)} | spread(seconds)


def measure_start(folder: Path, nodes: int) -> dict[str, Any]:
    """Time a start of the service, to the end of its first cycle: with the record of the cycles, and with a fold."""
    figures = dict[str, Any]()
    for name in ("record", "fold"):
        begin, used = time.perf_counter(), time.process_time()
        cluster = Cluster(folder, nodes)
        cluster.hear_all()
        opened_s, opened_cpu_s = time.perf_counter() - begin, time.process_time() - used
        lines = len(cluster.store.lines) - cluster.store.lines.first
        before = cluster.cpu_s()
        run_cycle(cluster.plane, cluster.decider)
        figures[name] = {
            "lines": lines,
            "open_s": round(opened_s, 2),
            "open_cpu_s": round(opened_cpu_s, 2),
            "first_cycle_s": round(time.perf_counter() - begin - opened_s, 2),
            "first_cycle_cpu_s": round(cluster.cpu_s() - before, 2),
        }
        if name == "record":
            fold = take_fold(cluster.store)
            figures["fold_mib"] = round(len(fold.state) / 2**20, 2) if fold is not None else None
        cluster.close()
    return figures


def serve(folder: Path, nodes: int, queued: int, *, secure: bool) -> None:
    """Be a service of so many nodes until standard input ends: what the other parts ask over HTTP."""
    cluster, rng = Cluster(folder, nodes), Random(3)
    for first in range(0, queued, BATCH):
        cluster.plane.submit_all([NewJob(random_job(rng, first + offset)) for offset in range(BATCH)])
    authority = cluster.certify(folder / "tls") if secure else None
    tls = {} if authority is None else authority.server(folder / "tls", ["127.0.0.1"]).options()
    cluster.hear_all()
    cluster.filled()
    service = LiveService(cluster.store, cluster.plane, print, cluster.decider)
    listener = listen("127.0.0.1", 0, backlog=4096)
    guard = GuardSettings(NODE_TOKEN, requests_per_s=1e6, requests_burst=1e6)
    app = make_app(service, USER_TOKEN, NODE_TOKEN, "127.0.0.1", guard=guard)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def listening() -> None:
        service.start()
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)

    run_server(app, listener, listening, http=PeerCertificateProtocol, **tls)
    service.close()


def _end_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def service_process(
    folder: Path, nodes: int, queued: int = 0, *, secure: bool = False
) -> Iterator[tuple[int, psutil.Process]]:
    """A service in a process of its own: its port, and the process."""
    command = [sys.executable, __file__, "--serve", str(folder), "--nodes", str(nodes), "--queued", str(queued)]
    command += ["--secure"] if secure else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = next(json.loads(line)["port"] for line in process.stdout if line.startswith("{"))
            yield port, psutil.Process(process.pid)
        finally:
            process.stdin.close()
            process.wait()


class Client:
    """One kept HTTP connection in an event loop."""

    def __init__(
        self, port: int, token: str, certificate: tuple[Path, Path] | None = None, *, secure: bool = False
    ) -> None:
        """`certificate` and its key are shown to the service, which is not checked: it is this program's."""
        self._port, self._token, self._certificate = port, token, certificate
        self._secure = secure or certificate is not None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def _tls(self) -> ssl.SSLContext | None:
        if not self._secure:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without authorities, which take 20 ms to read
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if self._certificate is not None:
            context.load_cert_chain(*self._certificate)
        return context

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The answer to a request; once more over a new connection, as agents do, if a kept one was closed."""
        text = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {self._token}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        try:
            kept = self._streams is not None
            status, answer = await self._exchange(head.encode() + text)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._streams = None
            if not kept:
                raise
            status, answer = await self._exchange(head.encode() + text)
        if " 200 " not in status:
            raise RuntimeError(f"{status}: {answer[:200]!r}")
        return json.loads(answer)

    async def _exchange(self, request: bytes) -> tuple[str, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._tls())
        reader, writer = self._streams
        writer.write(request)
        await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length"))
        return lines[0], await reader.readexactly(length)


def measure_submits(folder: Path, seconds: float) -> dict[str, Any]:
    """Submit batches, and then single jobs, by several clients at once, while the service schedules."""

    async def submit(port: int, path: str, count: int, clients: int) -> dict[str, Any]:
        rng, latencies, jobs = Random(2), list[float](), 0
        ends = time.perf_counter() + seconds

        async def one_client() -> None:
            nonlocal jobs
            client = Client(port, USER_TOKEN)
            while time.perf_counter() < ends:
                asked = [{"request": request_to_json(random_job(rng, jobs + offset))} for offset in range(count)]
                begin = time.perf_counter()
                await client.ask("POST", path, {"jobs": asked} if count > 1 else asked[0])
                latencies.append(time.perf_counter() - begin)
                jobs += count

        begin = time.perf_counter()
        await asyncio.gather(*(one_client() for _ in range(clients)))
        return {"jobs_per_s": round(jobs / (time.perf_counter() - begin), 1)} | spread(latencies)

    with service_process(folder, 1000) as (port, process):
        used = sum(process.cpu_times()[:2])
        batches = asyncio.run(submit(port, "/api/v1/jobs:batch", BATCH, 2))
        between = sum(process.cpu_times()[:2])
        single = asyncio.run(submit(port, "/api/v1/jobs", 1, 8))
        cpu_s = sum(process.cpu_times()[:2])
    batches["service_cpu_ms_per_job"] = round(1e3 * (between - used) / max(batches["count"] * BATCH, 1), 3)
    single["service_cpu_ms_per_job"] = round(1e3 * (cpu_s - between) / max(single["count"], 1), 3)
    return {"batches": batches, "single": single}


def measure_agents(folder: Path, agents: int, queued: int, seconds: float) -> dict[str, Any]:
    """Hold agents that report every ten seconds at least, each over a TLS connection with a certificate of its own, and
    ask the API beside. No agent starts anything, so that the queue stays."""
    issued, failures = folder / "tls" / "nodes", list[float]()

    async def agent(port: int, number: int, ends: float, heartbeats: list[float]) -> None:
        name, version = f"n{number:05}", None
        client = Client(port, NODE_TOKEN, (issued / f"{name}.pem", issued / "key"))
        await asyncio.sleep(CONNECT_S * number / agents)
        report = {"node": name}
        while time.perf_counter() < ends:
            begin = time.perf_counter()
            body = {"report": report, "version": version, "wait_s": 0 if version is None else HEARTBEAT_S}
            try:
                answer = await client.ask("POST", "/api/v1/sync", body | {"protocol": PROTOCOL})
            except (asyncio.IncompleteReadError, ConnectionError):  # it tries again, as agents do
                failures.append(time.perf_counter() - begin)
                await asyncio.sleep(1.0)
                continue
            version = answer["version"]
            heartbeats.append(time.perf_counter() - begin)

    async def user(port: int) -> dict[str, Any]:
        await asyncio.sleep(CONNECT_S + HEARTBEAT_S)  # until all agents have come
        command = [sys.executable, __file__, "--ask", str(port), "--seconds", str(seconds)]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        answer: dict[str, Any] = json.loads((await process.communicate())[0])
        return answer

    async def run(port: int) -> tuple[list[float], dict[str, Any]]:
        heartbeats = list[float]()
        ends = time.perf_counter() + CONNECT_S + HEARTBEAT_S + seconds
        tasks = [agent(port, number, ends, heartbeats) for number in range(agents)]
        latencies = (await asyncio.gather(user(port), *tasks))[0]
        return heartbeats, latencies

    with service_process(folder, agents, queued, secure=True) as (port, process):
        used, begin = sum(process.cpu_times()[:2]), time.perf_counter()
        heartbeats, latencies = asyncio.run(run(port))
        share = (sum(process.cpu_times()[:2]) - used) / (time.perf_counter() - begin)
        memory = process.memory_info().rss
    figures = {
        "agents": agents,
        "queued": queued,
        "syncs": len(heartbeats),
        "failed": len(failures),
        "service_cores": round(share, 3),
    }
    return figures | {"service_mib": memory // 2**20, "api": latencies}


async def ask_as_user(port: int, seconds: float) -> dict[str, Any]:
    """Latencies of what a user and the dashboard ask for, one after the other."""
    client, paths = Client(port, USER_TOKEN, secure=True), ("jobs", "events", "whoami", "jobs?over=true")
    latencies: dict[str, list[float]] = {path: [] for path in paths}
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        for path in paths:
            begin = time.perf_counter()
            await client.ask("GET", f"/api/v1/{path}")
            latencies[path].append(time.perf_counter() - begin)
            await asyncio.sleep(0.1)
    everything = [latency for some in latencies.values() for latency in some]
    return spread(everything) | {path: spread(some) for path, some in latencies.items()}


def measure_slurm(folder: Path, count: int) -> dict[str, Any]:
    """Submit short jobs to a real slurmctld with 8 clients at a time, one per command, and by arrays of a batch."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "cluster" / "engines")]
    from slurm_cluster import SlurmCluster, slurm_cluster

    def submit(cluster: SlurmCluster, words: Sequence[str], times: int) -> dict[str, Any]:
        daemon = psutil.Process(cluster.processes["slurmctld"].pid)
        command = ["sbatch", "--parsable", "--output=/dev/null", *words, "--wrap", "true"]

        def one(_: int) -> float:
            begin = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
            return time.perf_counter() - begin

        used, begin = sum(daemon.cpu_times()[:2]), time.perf_counter()
        with ThreadPoolExecutor(8) as clients:
            latencies = list(clients.map(one, range(times)))
        took_s, cpu_s = time.perf_counter() - begin, sum(daemon.cpu_times()[:2]) - used
        jobs = times * (BATCH if words else 1)
        figures = {"jobs_per_s": round(jobs / took_s, 1), "slurmctld_cpu_ms_per_job": round(1e3 * cpu_s / jobs, 3)}
        return figures | spread(latencies)

    with slurm_cluster(folder) as cluster:
        single = submit(cluster, (), count)
        return {"single": single, "arrays": submit(cluster, (f"--array=0-{BATCH - 1}",), max(count // BATCH, 1))}


def main() -> None:
    """Run the parts that are asked for, and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="cycles,start,submits,agents")
    parser.add_argument("--agents", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--secure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ask", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--agents-queued", type=int, default=5000)
    parser.add_argument("--slurm-jobs", type=int, default=400)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--queued", type=int, default=50_000)
    parser.add_argument("--cycles", type=int, default=60)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    if words.serve is not None:
        serve(words.serve, words.nodes, words.queued, secure=words.secure)
        return
    if words.ask is not None:
        print(json.dumps(asyncio.run(ask_as_user(words.ask, words.seconds))))
        return
    results: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "cycles": lambda folder: measure_cycles(folder, words.nodes, words.queued, words.cycles),
        "start": lambda folder: measure_start(folder, words.nodes),
        "submits": lambda folder: measure_submits(folder, words.seconds),
        "agents": lambda folder: measure_agents(folder, words.agents, words.agents_queued, words.seconds),
        "slurm": lambda folder: measure_slurm(folder, words.slurm_jobs),
    }
    with tempfile.TemporaryDirectory() as place:
        for part in words.only.split(","):
            folder = Path(place) / ("cycles" if part == "start" else part)
            folder.mkdir(exist_ok=part == "start")
            results[part] = parts[part](folder)
            print(part, json.dumps(results[part]), flush=True)
    if words.out is not None:
        words.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
