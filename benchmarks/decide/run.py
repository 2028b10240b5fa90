"""Cycles of the scheduler under a heavy load: how long each takes, and how many jobs a second it admits.

    python benchmarks/decide/run.py [--policy headway] [--json FILE]

The load is in load.toml and the bounds in bounds.toml beside this file; where one is exceeded the exit status is 1.
"""

import argparse
import json
import statistics
import sys
import time
import tomllib
from pathlib import Path

import numpy as np

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.decision_log import apply_decisions
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.snapshot import ClusterSnapshot

HERE = Path(__file__).parent


class Load:
    """Makes the cluster, and what happens to it."""

    def __init__(self, values: dict) -> None:
        self.values = values
        self.chance = np.random.default_rng(values["seed"])
        self.made = 0

    def cluster(self) -> ClusterSnapshot:
        """All nodes, no jobs."""
        load, snapshot = self.values, ClusterSnapshot()
        numbers = range(load["nodes"])
        racks = [f"rack-{number // load['nodes_per_rack']}" for number in numbers]
        blocks = [f"block-{number // load['nodes_per_rack'] // load['racks_per_block']}" for number in numbers]
        names = (f"node-{number}" for number in numbers)
        snapshot.nodes.add_pool("h100", load["gpus_per_node"], names, {"rack": racks, "block": blocks})
        for number in range(load["tenants"]):
            snapshot.tenants.add_tenant(f"tenant-{number}", load["nodes"] * load["gpus_per_node"] // load["tenants"])
        return snapshot

    def jobs(self, count: int, now: float, sizes: tuple[int, ...] = ()) -> list[Job]:
        """New ones."""
        load = self.values
        shares = np.array(load["shares"]) / sum(load["shares"])
        gpus = self.chance.choice(sizes, count) if sizes else self.chance.choice(load["sizes"], count, p=shares)
        found = []
        for size in gpus.tolist():
            narrow = load["gpus_per_node"] < size <= load["gpus_per_node"] * load["nodes_per_rack"]
            found.append(
                Job(
                    f"job-{self.made}",
                    f"tenant-{self.chance.integers(load['tenants'])}",
                    size,
                    submit_s=now,
                    preemptible=bool(self.chance.random() < load["preemptible"]),
                    limit_s=float(self.chance.uniform(600, 864000)),
                    within="rack" if narrow and self.chance.random() < load["within_rack"] else None,
                )
            )
            self.made += 1
        return found


def full(load: Load) -> ClusterSnapshot:
    """A cluster without a free GPU, and as many jobs waiting as the load says."""
    snapshot, now = load.cluster(), 0.0
    while free := int(snapshot.nodes.free[: len(snapshot.nodes)].sum()):
        snapshot.submit(load.jobs(500, now, () if free > 2000 else (1, 2, 4)))
        apply_decisions(snapshot, decide(snapshot, now, POLICIES["kueue"]))
        now += 600.0
        snapshot.advance(now)
    snapshot.submit(load.jobs(load.values["queued"] - len(snapshot.queue), now))
    snapshot.advance(now + 7200.0)
    return snapshot


def cycles(load: Load, snapshot: ClusterSnapshot, policy: str) -> tuple[list[float], int, int]:
    """Seconds of each cycle, with what happened before it told to the snapshot; starts and stops."""
    times, starts, stops = [], 0, 0
    for _ in range(load.values["cycles"]):
        now = snapshot.now_s + load.values["cycle_s"]
        gone = load.chance.choice(snapshot.active, load.values["ends_per_cycle"], replace=False).tolist()
        coming = load.jobs(load.values["comes_per_cycle"], now)
        begin = time.perf_counter()
        snapshot.advance(now)
        for row in gone:
            snapshot.end(row)
        snapshot.submit(coming)
        decisions = decide(snapshot, now, POLICIES[policy])
        apply_decisions(snapshot, decisions)
        times.append(time.perf_counter() - begin)
        starts += sum(one.kind == "start" for one in decisions)
        stops += sum(one.kind == "stop" for one in decisions)
    return times, starts, stops


def admissions(load: Load, policy: str) -> float:
    """Jobs a second that an empty cluster takes in, from submission to a place."""
    snapshot, count = load.cluster(), load.values["storm"]
    jobs = load.jobs(count, 0.0)
    begin = time.perf_counter()
    snapshot.submit(jobs)
    decisions = decide(snapshot, 0.0, POLICIES[policy])
    apply_decisions(snapshot, decisions)
    return len(decisions) / (time.perf_counter() - begin)


def main() -> None:
    """Time it, and hold it against the bounds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--policy", choices=sorted(POLICIES), default="headway")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    values, bounds = (tomllib.loads((HERE / name).read_text()) for name in ("load.toml", "bounds.toml"))
    load = Load(values)
    snapshot = full(load)
    waiting, running = len(snapshot.queue), len(snapshot.active)
    times, starts, stops = cycles(load, snapshot, options.policy)
    found = {
        "median_cycle_s": statistics.median(times),
        "worst_cycle_s": max(times),
        "admissions_per_s": admissions(load, options.policy),
    }
    print(f"{values['nodes']:,} nodes, {waiting:,} jobs wait, {running:,} run; {starts:,} starts, {stops:,} stops")
    met = True
    for name, value in found.items():
        good = value >= bounds[name] if name.endswith("_per_s") else value <= bounds[name]
        met &= good
        print(f"{name:18} {value:10.3f}   bound {bounds[name]:8}   {'met' if good else 'MISSED'}")
    if options.json:
        context = {"policy": options.policy, "waiting": waiting, "running": running, "starts": starts, "stops": stops}
        options.json.write_text(json.dumps(context | found | {"cycles_s": times}, indent=1) + "\n")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
