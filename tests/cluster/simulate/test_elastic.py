"""Elastic sizes: idle GPUs go where they do most, and come back before anybody is stopped."""

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
from synthetic_log import log

from headway.cluster.scheduler.decide import MIN_RUN_S, decide
from headway.cluster.scheduler.decision_log import apply_decisions, replay
from headway.cluster.scheduler.elastic import goodput, grown_sizes
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.policy import Policy
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.what_if import WORTH_S
from headway.cluster.simulate import SimulationSetup, simulate
from headway.errors import UsageError

HEADWAY = POLICIES["headway"]
CURVE = ((2, 1.0), (4, 1.8), (8, 3.0))


def concave(random: Random) -> tuple[tuple[int, float], ...]:
    """A curve with a step for each GPU, each of which adds less than the one before."""
    gains = sorted((random.uniform(0.01, 1) for _ in range(random.randint(0, 4))), reverse=True)
    speeds = [max([1.0, *gains])]
    for gain in gains:
        speeds.append(speeds[-1] + gain)
    least = random.randint(1, 2)
    return tuple((least + number, speed) for number, speed in enumerate(speeds))


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 40))])
def test_step_by_step_is_the_best_there_is_for_concave_curves(seed: int) -> None:
    """Beside all ways to share out the GPUs."""
    random = Random(seed)
    curves, free = {job: concave(random) for job in range(3)}, random.randint(0, 7)
    sizes = {job: curve[0][0] for job, curve in curves.items()}
    found = grown_sizes(curves, sizes, free)
    assert sum(found.values()) - sum(sizes.values()) <= free

    def total(shared: dict[int, int]) -> float:
        return sum(goodput(curves[job], gpus) for job, gpus in shared.items())

    ways = [dict(enumerate(way)) for way in product(*([size for size, _ in curves[job]] for job in range(3)))]
    able = [way for way in ways if sum(way.values()) - sum(sizes.values()) <= free]
    assert total(found) == pytest.approx(max(map(total, able)))


def cluster(nodes: int = 1, size: int = 8) -> ClusterSnapshot:
    snapshot = ClusterSnapshot()
    snapshot.nodes.join("h100", size, [f"n{number}" for number in range(nodes)])
    snapshot.tenants.join("all", nodes * size)
    return snapshot


def act(snapshot: ClusterSnapshot, now: float, policy: Policy = HEADWAY) -> list[str]:
    """What is decided, and done, in words."""
    snapshot.advance(now)
    decisions = decide(snapshot, now, policy)
    assert all(decision.reason.sentence for decision in decisions)
    apply_decisions(snapshot, decisions)
    return [f"{one.kind} {snapshot.jobs.names[one.job]} {one.place.total}" for one in decisions]


def test_a_life() -> None:
    """Alone it has all; it gives back what another needs; it is not stopped; it grows again when that is worth it."""
    snapshot = cluster()
    snapshot.submit([Job("x", "all", 2, preemptible=True, sizes=CURVE)])
    assert act(snapshot, 0.0) == ["start x 8"]
    snapshot.submit([Job("new", "all", 4, submit_s=500.0)])
    assert act(snapshot, MIN_RUN_S) == ["resize x 2", "start new 4"]
    assert snapshot.jobs.done_s[snapshot.jobs.rows["x"]] == pytest.approx(3.0 * MIN_RUN_S), "it saved"
    snapshot.end(snapshot.jobs.rows["new"])
    assert act(snapshot, MIN_RUN_S + 60) == [], "not so soon"
    assert act(snapshot, MIN_RUN_S + WORTH_S) == ["resize x 8"]
    row = snapshot.jobs.rows["x"]
    had = 8 * MIN_RUN_S + 2 * WORTH_S
    assert snapshot.had_gpu_s(np.array([row]), snapshot.now_s).tolist() == [had]
    snapshot.stop(row)
    assert snapshot.jobs.gpus[row] == 2
    assert snapshot.had_gpu_s(np.array([row]), snapshot.now_s).tolist() == [had]
    assert snapshot.tenants.wanted[0] == 2
    assert snapshot.tenants.used[0] == 0


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "headway"])
def test_others_leave_jobs_at_their_least_size(name: str) -> None:
    snapshot = cluster()
    snapshot.submit([Job("x", "all", 2, sizes=CURVE)], [100.0])
    assert act(snapshot, 0.0, POLICIES[name]) == ["start x 2"]
    assert act(snapshot, 1e5, POLICIES[name]) == []


def test_a_restart_that_is_not_worth_it_is_not_made() -> None:
    snapshot = cluster()
    snapshot.submit(
        [Job("y", "all", 6, preemptible=True), Job("x", "all", 2, restart_s=1000.0, sizes=((2, 1.0), (8, 2.0)))]
    )
    assert sorted(act(snapshot, 0.0)) == ["start x 2", "start y 6"]
    snapshot.end(snapshot.jobs.rows["y"])
    assert act(snapshot, 5000.0) == [], "half an hour gains 1,800 s of work, and the restart takes 2,000 of it"


def test_what_is_given_back_loses_least_and_no_more_than_is_needed() -> None:
    snapshot = cluster(3)
    good, bad = ((4, 1.0), (8, 1.9)), ((4, 1.0), (8, 1.1))
    snapshot.submit([Job("a", "all", 4, sizes=good), Job("b", "all", 4, sizes=bad), Job("c", "all", 4, sizes=bad)])
    assert sorted(act(snapshot, 0.0)) == ["start a 8", "start b 8", "start c 8"]
    snapshot.submit([Job("new", "all", 3, submit_s=0.0)])
    assert act(snapshot, 1000.0) == ["resize b 4", "start new 3"]


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 30))])
def test_nobody_is_stopped_where_giving_back_would_do_and_a_resize_loses_less_than_a_stop(seed: int) -> None:
    random, snapshot = Random(seed), cluster(3, 4)
    for number in range(5):
        least, grows = random.choice([1, 2, 4]), random.random() < 0.6
        sizes = ((least, 1.0), (2 * least, random.uniform(1.1, 2))) if grows else ()
        snapshot.submit([Job(f"j{number}", "all", least, preemptible=random.random() < 0.7, sizes=sizes)])
    act(snapshot, 0.0)
    snapshot.advance(random.choice([200.0, 5000.0, 50_000.0]))
    gpus = random.choice([1, 2, 4, 8])
    snapshot.submit([Job("new", "all", gpus, submit_s=snapshot.now_s)])
    rows = snapshot.active.copy()
    lost = dict(zip(rows.tolist(), snapshot.lost_gpu_s(rows, snapshot.now_s).tolist(), strict=True))
    decisions = decide(snapshot, snapshot.now_s, HEADWAY)
    for one in decisions:
        if one.kind == "resize":
            assert one.place.total in dict(snapshot.sizes[one.job])
            if one.place.total < snapshot.jobs.gpus[one.job]:
                assert snapshot.jobs.restart_s[one.job] * one.place.total < lost[one.job]
    if any(one.kind == "stop" for one in decisions):
        room = snapshot.nodes.room(snapshot.nodes.pools[0])
        for row in rows.tolist():  # all that could be given back, on the nodes where it lies
            _, place = snapshot.places[row]
            beyond = place.total - int(snapshot.jobs.least[row])
            if beyond and len(place.nodes) == 1:
                room.give(type(place)(place.nodes, np.array([beyond], np.int32)))
        assert room.find(gpus) is None, "somebody was stopped for what idled"
    apply_decisions(snapshot, decisions)


def watched(snapshot: ClusterSnapshot, now: float) -> Any:
    """Headway's order, once the sizes of all jobs were looked at."""
    jobs = snapshot.jobs
    for row in snapshot.jobs.rows.values():
        sizes = dict(snapshot.sizes.get(row, ((int(jobs.least[row]), 1.0),)))
        assert jobs.gpus[row] in sizes, "below the least size, above the most, or between two"
        assert jobs.speed[row] == sizes[int(jobs.gpus[row])]
        assert not jobs.running[row] or snapshot.places[row][1].total == jobs.gpus[row]
    used = sum(place.total for _, place in snapshot.places.values())
    assert used == snapshot.tenants.used[: len(snapshot.tenants)].sum() <= snapshot.gpus
    return HEADWAY.order(snapshot, now)


SETUP = SimulationSetup("a100", 8, 2, preemptible=0.0, elastic=0.6, restart_s=100.0)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 3))])
def test_work_follows_the_curve(seed: int, tmp_path: Path) -> None:
    """Where nobody is stopped, the seconds at each size times its speed, less restarts, add up to a job's work."""
    trace, path = log(seed, 60_000), tmp_path / "kept.jsonl.gz"
    outcome = simulate(trace, SETUP, replace(HEADWAY, order=watched), record=path)
    assert outcome.stops["resize"] > 5
    assert outcome.stops["preemption"] == 0
    assert (outcome.end_s - trace.submit_s < trace.duration_s).any(), "some are faster than at the size they asked for"
    sizes, curves, held, changes = dict[str, list[tuple[float, int]]](), dict[str, Any](), 0.0, 0
    with gzip.open(path, "rt") as file:
        for line in map(json.loads, file):
            if "job" in line:
                curves[line["job"]["name"]] = dict(line["job"]["sizes"]) or {line["job"]["gpus"]: 1.0}
            for _, name, (_, _, gpus), *_ in line.get("decided", ()):
                sizes.setdefault(name, []).append((line["at"], sum(gpus)))
    for job, name in enumerate(trace.names):
        ends = [at for at, _ in sizes[name][1:]] + [float(outcome.end_s[job])]
        late = [0.0] + [SETUP.restart_s] * (len(ends) - 1)
        spans = [(end - at, gpus) for (at, gpus), end in zip(sizes[name], ends, strict=True)]
        work = sum(max(s - less, 0) * curves[name][gpus] for (s, gpus), less in zip(spans, late, strict=True))
        assert work == pytest.approx(float(trace.duration_s[job]))
        held += sum(seconds * gpus for seconds, gpus in spans)
        changes += len(spans) - 1
    assert outcome.used_gpu_s == pytest.approx(held)
    assert outcome.stops["resize"] == changes


def test_a_record_has_sizes_and_a_snapshot_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "headway.jsonl.gz"
    simulate(log(1, 60_000), replace(SETUP, preemptible=0.5, node_days=1.0), HEADWAY, record=path)
    told = list(replay(path))
    assert len(told) > 50
    assert told == [None] * len(told)
    snapshot = cluster()
    snapshot.submit([Job("x", "all", 2, sizes=CURVE), Job("y", "all", 2, sizes=CURVE)])
    act(snapshot, 0.0)
    snapshot.submit([Job("z", "all", 8, submit_s=1.0, sizes=((8, 2.0),))])
    again = ClusterSnapshot.from_json(snapshot.to_json())
    assert again.to_json() == snapshot.to_json()
    assert act(again, 4000.0) == act(snapshot, 4000.0)


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
    ids=["not from its GPUs", "twice", "downwards", "half a GPU", "slower", "stands still", "at once"],
)
def test_curves_that_are_none(sizes: Any) -> None:
    with pytest.raises(UsageError, match="job x: sizes are ") as error:
        cluster().submit([Job("x", "all", 2, sizes=sizes)])
    assert "\n" not in error.value.message
