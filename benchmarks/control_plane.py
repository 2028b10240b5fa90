"""How large a cluster one service can schedule: cycles, submissions, and node agents that report.

python benchmarks/control_plane.py [--only cycles,submits,agents,slurm] [--nodes N] [--queued N] [--out FILE]
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from headway.cluster.engines.engine import LaunchRequest
from headway.cluster.service.cycle import run_cycle
from headway.cluster.service.decider import DeciderProcess
from headway.cluster.service.messages import NodeReport, StartReport, start_key
from headway.cluster.service.new_jobs import NewJob
from headway.cluster.service.outcome import RankResult
from headway.cluster.service.plane import ControlPlane
from headway.cluster.service.store import ServiceStore
from headway.cluster.service.tables import open_database, sqlite_url

BATCH = 100
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
        self.store = ServiceStore(open_database(sqlite_url(folder / "control.db")))
        self.plane, self.decider = ControlPlane(self.store), DeciderProcess()
        self.specs = node_specs(nodes)
        tenants = [{"name": name, "guarantee": nodes * GPUS // len(TENANTS)} for name in TENANTS]
        self.plane.set_cluster(self.specs, tenants, "headway")
        for spec in self.specs:
            self.plane.sync(NodeReport(spec["name"]))

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
        running = cluster.answer()
        if not report.started:
            break
    seconds, started = list[float](), 0
    for _ in range(cycles):
        cluster.finish(rng, 10)
        plane.submit_all([NewJob(random_job(rng, number + offset)) for offset in range(20)])
        number += 20
        begin = time.perf_counter()
        report = run_cycle(plane, cluster.decider)
        seconds.append(time.perf_counter() - begin)
        started += report.started
        running = cluster.answer()
    with cluster.store.read() as connection:
        waiting = connection.exec_driver_sql("SELECT count(*) FROM jobs WHERE state = 'waiting'").scalar()
    cluster.close()
    return {"nodes": nodes, "running": running, "queued": waiting, "started": started} | spread(seconds)


def main() -> None:
    """Run the parts that are asked for, and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="cycles")
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--queued", type=int, default=50_000)
    parser.add_argument("--cycles", type=int, default=60)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    results: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as place:
        for part in words.only.split(","):
            folder = Path(place) / part
            folder.mkdir()
            if part == "cycles":
                results[part] = measure_cycles(folder, words.nodes, words.queued, words.cycles)
            print(part, json.dumps(results[part]), flush=True)
    if words.out is not None:
        words.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
