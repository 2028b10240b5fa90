"""Elastic sizes: idle GPUs go where they add most, and come back before any job is preempted."""

import gzip
import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from synthetic_trace import synthetic_trace

from headway.cluster.scheduler.decide import MIN_RUN_S, decide
from headway.cluster.scheduler.decision_log import apply_decisions, replay
from headway.cluster.scheduler.elastic import goodput, grown_sizes
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.policy import Policy
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.what_if import PAYBACK_S
from headway.cluster.simulate import SimulationSetup, simulate
from headway.errors import UsageError

HEADWAY = POLICIES["headway"]
CURVE = ((2, 1.0), (4, 1.8), (8, 3.0))


def concave(random: Random) -> tuple[tuple[int, float], ...]:
    """Return a curve with a step per GPU, each adding less than the one before."""
    gains = sorted((random.uniform(0.01, 1) for _ in range(random.randint(0, 4))), reverse=True)
    speeds = [max([1.0, *gains])]
    for gain in gains:
        speeds.append(speeds[-1] + gain)
    least = random.randint(1, 2)
    return tuple((least + number, speed) for number, speed in enumerate(speeds))


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 40))])
def test_growing_step_by_step_is_optimal_for_concave_curves(seed: int) -> None:
    """Against all ways to distribute the GPUs."""
    random = Random(seed)
    curves, free = {job: concave(random) for job in range(3)}, random.randint(0, 7)
    sizes = {job: curve[0][0] for job, curve in curves.items()}
    grown = grown_sizes(curves, sizes, free)
    assert sum(grown.values()) - sum(sizes.values()) <= free

    def total(shared: dict[int, int]) -> float:
        return sum(goodput(curves[job], gpus) for job, gpus in shared.items())

    choices = [
        dict(enumerate(sizes_of)) for sizes_of in product(*([size for size, _ in curves[job]] for job in range(3)))
    ]
    feasible = [sizes_of for sizes_of in choices if sum(sizes_of.values()) - sum(sizes.values()) <= free]
    assert total(grown) == pytest.approx(max(map(total, feasible)))


def cluster(nodes: int = 1, size: int = 8) -> ClusterSnapshot:
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", size, [f"n{number}" for number in range(nodes)])
    snapshot.tenants.add_tenant("all", nodes * size)
    return snapshot


def run_cycle(snapshot: ClusterSnapshot, now: float, policy: Policy = HEADWAY) -> list[str]:
    """Run a cycle, and return its decisions as text."""
    snapshot.advance(now)
    decisions = decide(snapshot, now, policy)
    assert all(decision.reason.sentence for decision in decisions)
    apply_decisions(snapshot, decisions)
    return [f"{decision.kind} {snapshot.jobs.names[decision.job]} {decision.placement.total}" for decision in decisions]


def test_elastic_job_grows_shrinks_and_grows_again() -> None:
    """Alone it gets all GPUs; it shrinks for another job, is not preempted, and grows again when that is worth it."""
    snapshot = cluster()
    snapshot.submit([Job("x", "all", 2, preemptible=True, sizes=CURVE)])
    assert run_cycle(snapshot, 0.0) == ["start x 8"]
    snapshot.submit([Job("new", "all", 4, submit_s=500.0)])
    assert run_cycle(snapshot, MIN_RUN_S) == ["resize x 2", "start new 4"]
    assert snapshot.jobs.done_s[snapshot.jobs.rows["x"]] == pytest.approx(3.0 * MIN_RUN_S), "it saved"
    snapshot.end(snapshot.jobs.rows["new"])
    assert run_cycle(snapshot, MIN_RUN_S + 60) == [], "not so soon"
    assert run_cycle(snapshot, MIN_RUN_S + PAYBACK_S) == ["resize x 8"]
    row = snapshot.jobs.rows["x"]
    had = 8 * MIN_RUN_S + 2 * PAYBACK_S
    assert snapshot.attained_gpu_s(np.array([row]), snapshot.now_s).tolist() == [had]
    snapshot.stop([row])
    assert snapshot.jobs.gpus[row] == 2
    assert snapshot.attained_gpu_s(np.array([row]), snapshot.now_s).tolist() == [had]
    assert snapshot.tenants.wanted[0] == 2
    assert snapshot.tenants.used[0] == 0


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "headway"])
def test_other_policies_leave_jobs_at_their_smallest_size(name: str) -> None:
    snapshot = cluster()
    snapshot.submit([Job("x", "all", 2, sizes=CURVE)], [100.0])
    assert run_cycle(snapshot, 0.0, POLICIES[name]) == ["start x 2"]
    assert run_cycle(snapshot, 1e5, POLICIES[name]) == []


def test_job_does_not_grow_if_the_restart_costs_more() -> None:
    snapshot = cluster()
    snapshot.submit(
        [Job("y", "all", 6, preemptible=True), Job("x", "all", 2, restart_s=1000.0, sizes=((2, 1.0), (8, 2.0)))]
    )
    assert sorted(run_cycle(snapshot, 0.0)) == ["start x 2", "start y 6"]
    snapshot.end(snapshot.jobs.rows["y"])
    assert run_cycle(snapshot, 5000.0) == [], "half an hour gains 1,800 s of work, but the restart costs 2,000 s"


def test_the_job_that_loses_least_shrinks_and_no_more_than_needed() -> None:
    snapshot = cluster(3)
    good, bad = ((4, 1.0), (8, 1.9)), ((4, 1.0), (8, 1.1))
    snapshot.submit([Job("a", "all", 4, sizes=good), Job("b", "all", 4, sizes=bad), Job("c", "all", 4, sizes=bad)])
    assert sorted(run_cycle(snapshot, 0.0)) == ["start a 8", "start b 8", "start c 8"]
    snapshot.submit([Job("new", "all", 3, submit_s=0.0)])
    assert run_cycle(snapshot, 1000.0) == ["resize b 4", "start new 3"]


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 30))])
def test_no_job_is_preempted_if_shrinking_suffices_and_a_resize_loses_less(seed: int) -> None:
    random, snapshot = Random(seed), cluster(3, 4)
    for number in range(5):
        least, grows = random.choice([1, 2, 4]), random.random() < 0.6
        sizes = ((least, 1.0), (2 * least, random.uniform(1.1, 2))) if grows else ()
        snapshot.submit([Job(f"j{number}", "all", least, preemptible=random.random() < 0.7, sizes=sizes)])
    run_cycle(snapshot, 0.0)
    snapshot.advance(random.choice([200.0, 5000.0, 50_000.0]))
    gpus = random.choice([1, 2, 4, 8])
    snapshot.submit([Job("new", "all", gpus, submit_s=snapshot.now_s)])
    rows = snapshot.active.copy()
    lost = dict(zip(rows.tolist(), snapshot.lost_gpu_s(rows, snapshot.now_s).tolist(), strict=True))
    decisions = decide(snapshot, snapshot.now_s, HEADWAY)
    for decision in decisions:
        if decision.kind == "resize":
            assert decision.placement.total in dict(snapshot.sizes[decision.job])
            if decision.placement.total < snapshot.jobs.gpus[decision.job]:
                assert snapshot.jobs.restart_s[decision.job] * decision.placement.total < lost[decision.job]
    if any(decision.kind == "stop" for decision in decisions):
        free_gpus = snapshot.nodes.free_gpus(snapshot.nodes.pools[0])
        for row in rows.tolist():  # release all that shrinking could, on the nodes where it is held
            _, placement = snapshot.placements[row]
            beyond = placement.total - int(snapshot.jobs.least[row])
            if beyond and len(placement.nodes) == 1:
                free_gpus.release(type(placement)(placement.nodes, np.array([beyond], np.int32)))
        assert free_gpus.find(gpus) is None, "a job was preempted although shrinking sufficed"
    apply_decisions(snapshot, decisions)


def checked_order(snapshot: ClusterSnapshot, now: float) -> Any:
    """Headway's order, after a check of all sizes."""
    jobs = snapshot.jobs
    for row in snapshot.jobs.rows.values():
        sizes = dict(snapshot.sizes.get(row, ((int(jobs.least[row]), 1.0),)))
        assert jobs.gpus[row] in sizes, "not a size of this job"
        assert jobs.speed[row] == sizes[int(jobs.gpus[row])]
        assert not jobs.running[row] or snapshot.placements[row][1].total == jobs.gpus[row]
    used = sum(placement.total for _, placement in snapshot.placements.values())
    assert used == snapshot.tenants.used[: len(snapshot.tenants)].sum() <= snapshot.gpus
    return HEADWAY.order(snapshot, now)


SETUP = SimulationSetup("a100", 8, 2, preemptible=0.0, elastic=0.6, restart_s=100.0)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 3))])
def test_work_follows_the_scaling_curve(seed: int, tmp_path: Path) -> None:
    """Without preemption, the seconds at each size, less restarts, times its speed add up to a job's work."""
    trace, path = synthetic_trace(seed, 60_000), tmp_path / "log.jsonl.gz"
    result = simulate(trace, SETUP, replace(HEADWAY, order=checked_order), record=path)
    assert result.stops["resize"] > 5
    assert result.stops["preemption"] == 0
    assert (result.end_s - trace.submit_s < trace.duration_s).any(), "some are faster than at the requested size"
    sizes, curves, held, changes = dict[str, list[tuple[float, int]]](), dict[str, Any](), 0.0, 0
    with gzip.open(path, "rt") as file:
        for line in map(json.loads, file):
            if "job" in line:
                curves[line["job"]["name"]] = dict(line["job"]["sizes"]) or {line["job"]["gpus"]: 1.0}
            for kind, name, (_, _, gpus), *_ in line.get("decided", ()):
                if kind != "reserve":
                    sizes.setdefault(name, []).append((line["at"], sum(gpus)))
    for job, name in enumerate(trace.names):
        ends = [at for at, _ in sizes[name][1:]] + [float(result.end_s[job])]
        late = [0.0] + [SETUP.restart_s] * (len(ends) - 1)
        spans = [(end - at, gpus) for (at, gpus), end in zip(sizes[name], ends, strict=True)]
        work = sum(max(s - less, 0) * curves[name][gpus] for (s, gpus), less in zip(spans, late, strict=True))
        assert work == pytest.approx(float(trace.duration_s[job]))
        held += sum(seconds * gpus for seconds, gpus in spans)
        changes += len(spans) - 1
    assert result.used_gpu_s == pytest.approx(held)
    assert result.stops["resize"] == changes


def test_decision_log_and_snapshot_keep_sizes(tmp_path: Path) -> None:
    path = tmp_path / "headway.jsonl.gz"
    simulate(synthetic_trace(1, 60_000), replace(SETUP, preemptible=0.5, node_days=1.0), HEADWAY, record=path)
    mismatches = list(replay(path))
    assert len(mismatches) > 50
    assert mismatches == [None] * len(mismatches)
    snapshot = cluster()
    snapshot.submit([Job("x", "all", 2, sizes=CURVE), Job("y", "all", 2, sizes=CURVE)])
    run_cycle(snapshot, 0.0)
    snapshot.submit([Job("z", "all", 8, submit_s=1.0, sizes=((8, 2.0),))])
    restored = ClusterSnapshot.from_json(snapshot.to_json())
    assert restored.to_json() == snapshot.to_json()
    assert run_cycle(restored, 4000.0) == run_cycle(snapshot, 4000.0)


@pytest.mark.parametrize(
    "sizes",
    [
        ((4, 1.0), (8, 2.0)),
        ((2, 1.0), (2, 2.0)),
        ((2, 1.0), (1, 2.0)),
        ((2, 1.0), (3.5, 2.0)),
        ((2, 1.0), (4, 0.9)),
        ((2, 0.0), (4, 1.0)),
        ((2, 1.0), (4, math.inf)),
    ],
    ids=["other first size", "duplicate size", "decreasing", "half a GPU", "slower", "speed 0", "infinite speed"],
)
def test_invalid_scaling_curve_is_rejected(sizes: Any) -> None:
    with pytest.raises(UsageError, match="job x: sizes are ") as error:
        cluster().submit([Job("x", "all", 2, sizes=sizes)])
    assert "\n" not in error.value.message
