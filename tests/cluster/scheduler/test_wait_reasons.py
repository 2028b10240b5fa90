"""Alternatives of a waiting job against every possible change, tried on a snapshot restored from JSON."""

import json
from random import Random

import numpy as np
import pytest

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.decision_log import apply_decisions
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.placement import Placement
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.wait_reasons import WaitExplanation, explain_wait

LEVELS = ("rack", "block")


def busy_cluster(seed: int) -> ClusterSnapshot:
    """Return a mostly used cluster of two chips, with jobs of various requests."""
    rng, snapshot = Random(seed), ClusterSnapshot()
    for chip in ("h100", "a100"):
        racks, blocks = ["r0", "r0", "r1", "r1", "r2", "r2"], ["b0"] * 4 + ["b1"] * 2
        snapshot.nodes.add_pool(chip, 4, [f"{chip}-{number}" for number in range(6)], {"rack": racks, "block": blocks})
    snapshot.tenants.add_tenant("red", 24)
    snapshot.tenants.add_tenant("blue", 24, borrow=8)
    for number in range(40):
        gpus = rng.choice([1, 1, 2, 3, 4, 8, 12])
        within = rng.choice([None, *LEVELS]) if gpus <= 8 else None
        name, tenant = f"j{number}", rng.choice(["red", "blue"])
        job = Job(name, tenant, gpus, snapshot.now_s, preemptible=rng.random() < 0.4, within=within)
        (row,) = snapshot.submit([job])
        if gpus <= 8 and rng.random() < 0.5:
            snapshot.jobs.pools[row] = rng.choice([1, 2])
        apply_decisions(snapshot, decide(snapshot, snapshot.now_s, POLICIES["kueue"]))
        snapshot.advance(snapshot.now_s + rng.uniform(10, 2000))
        for row in snapshot.active.tolist():
            if rng.random() < 0.06:
                snapshot.end(row)
    return snapshot


def starts(snapshot: ClusterSnapshot, policy: str, name: str, **changed: object) -> bool:
    """Return whether a job would start now had it been submitted with another request."""
    values = json.loads(snapshot.to_json())
    (job,) = [job for job in values["jobs"] if job["name"] == name]
    job |= changed
    other = ClusterSnapshot.from_json(json.dumps(values))
    decisions = decide(other, other.now_s, POLICIES[policy])
    return any(decision.kind == "start" and other.jobs.names[decision.job] == name for decision in decisions)


def by_trying(snapshot: ClusterSnapshot, policy: str, name: str) -> dict[str, object]:
    row = snapshot.jobs.rows[name]
    job = snapshot.jobs.record(row)
    alternatives = dict[str, object]()
    if job["within"] >= 0:
        wider = [(level, f"within a {LEVELS[level]}") for level in range(job["within"] + 1, 2)] + [(-1, "anywhere")]
        works = [where for level, where in wider if starts(snapshot, policy, name, within=level)]
        alternatives |= {"within": works[0]} if works else {}
    if not job["preemptible"] and starts(snapshot, policy, name, preemptible=True):
        alternatives["preemptible"] = True
    if job["pools"] in (1, 2) and starts(snapshot, policy, name, pools=3):
        alternatives["chip"] = "a100" if job["pools"] == 1 else "h100"
    fewer = [gpus for gpus in range(1, job["gpus"]) if starts(snapshot, policy, name, gpus=gpus, least=gpus)]
    return alternatives | ({"gpus": max(fewer)} if fewer else {})


@pytest.mark.parametrize("policy", ["headway", "kueue", "fifo"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 3))])
def test_alternatives_are_exactly_the_changes_that_start_a_job(policy: str, seed: int) -> None:
    snapshot, count = busy_cluster(seed), 0
    before = snapshot.to_json()
    for row in snapshot.queue.tolist()[:5]:
        name = snapshot.jobs.names[row]
        explanation = explain_wait(snapshot, snapshot.now_s, POLICIES[policy], name)
        if explanation.state == "waits":
            count += 1
            assert {change.what: change.to for change in explanation.instead} == by_trying(snapshot, policy, name)
    assert count or policy == "headway"
    assert snapshot.to_json() == before, "an explanation changes nothing"


@pytest.mark.parametrize("policy", ["headway", "kueue", "fifo"])
def test_wider_network_level_is_the_first_alternative(policy: str) -> None:
    """One node of each rack is used: eight GPUs fit no rack, but a block."""
    snapshot = ClusterSnapshot()
    racks = ["r0", "r0", "r1", "r1"]
    snapshot.nodes.add_pool("h100", 4, ["a", "b", "c", "d"], {"rack": racks, "block": ["b0"] * 4})
    snapshot.tenants.add_tenant("red", 16)
    for number, node in enumerate((0, 2)):
        (row,) = snapshot.submit([Job(f"j{number}", "red", 4)])
        snapshot.start(row, 0, Placement(np.array([node], np.int32), np.array([4], np.int32)))
    snapshot.submit([Job("mine", "red", 8, preemptible=True, within="rack")])
    explanation = explain_wait(snapshot, 0.0, POLICIES[policy], "mine")
    assert explanation.instead[0].sentence == "running within a block instead of within a rack"
    assert {change.what: change.to for change in explanation.instead} == by_trying(snapshot, policy, "mine")


@pytest.mark.parametrize(("held", "fewer"), [((2, 3), [2]), ((1, 1), [6]), ((4, 0), [])])
def test_fewer_gpus_are_as_many_on_each_machine(held: tuple[int, int], fewer: list[int]) -> None:
    """Two nodes of four, some GPUs of which jobs hold that cannot be preempted, and a gang of two machines of four."""
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", 4, ["a", "b"])
    snapshot.tenants.add_tenant("red", 8)
    for node, gpus in enumerate(held):
        if gpus:
            (row,) = snapshot.submit([Job(f"j{node}", "red", gpus)])
            snapshot.start(row, 0, Placement(np.array([node], np.int32), np.array([gpus], np.int32)))
    snapshot.submit([Job("mine", "red", 8, preemptible=True, machines=2)])
    explanation = explain_wait(snapshot, 0.0, POLICIES["fifo"], "mine")
    assert [change.to for change in explanation.instead if change.what == "gpus"] == fewer


def explain_capped_gang() -> WaitExplanation:
    """Two nodes of 8; non-preemptible jobs hold 12, and a gang of 4 exceeds the limit."""
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", 8, ["a", "b"])
    snapshot.tenants.add_tenant("red", 16)
    snapshot.submit([Job(f"j{number}", "red", 1) for number in range(12)])
    apply_decisions(snapshot, decide(snapshot, 0.0, POLICIES["headway"]))
    snapshot.submit([Job("mine", "red", 4)])
    return explain_wait(snapshot, 0.0, POLICIES["headway"], "mine")


def test_being_preemptible_is_listed_before_fewer_gpus() -> None:
    explanation = explain_capped_gang()
    assert [change.what for change in explanation.instead] == ["preemptible", "gpus"]
    assert [change.sentence for change in explanation.instead] == [
        "being preemptible",
        "requesting 2 GPUs instead of 4",
    ]
