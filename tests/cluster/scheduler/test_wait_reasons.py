"""What would start a job now: against every change there is, tried on a cluster that was written and read again."""

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


def crowded(seed: int) -> ClusterSnapshot:
    """Two kinds of nodes, most of them taken, and jobs that ask for all sorts of things."""
    chance, snapshot = Random(seed), ClusterSnapshot()
    for chip in ("h100", "a100"):
        racks, blocks = ["r0", "r0", "r1", "r1", "r2", "r2"], ["b0"] * 4 + ["b1"] * 2
        snapshot.nodes.join(chip, 4, [f"{chip}-{number}" for number in range(6)], {"rack": racks, "block": blocks})
    snapshot.tenants.join("red", 24)
    snapshot.tenants.join("blue", 24, borrow=8)
    for number in range(40):
        gpus = chance.choice([1, 1, 2, 3, 4, 8, 12])
        within = chance.choice([None, *LEVELS]) if gpus <= 8 else None
        name, tenant = f"j{number}", chance.choice(["red", "blue"])
        job = Job(name, tenant, gpus, snapshot.now_s, preemptible=chance.random() < 0.4, within=within)
        (row,) = snapshot.submit([job])
        if gpus <= 8 and chance.random() < 0.5:
            snapshot.jobs.pools[row] = chance.choice([1, 2])
        apply_decisions(snapshot, decide(snapshot, snapshot.now_s, POLICIES["kueue"]))
        snapshot.advance(snapshot.now_s + chance.uniform(10, 2000))
        for row in snapshot.active.tolist():
            if chance.random() < 0.06:
                snapshot.end(row)
    return snapshot


def starts(snapshot: ClusterSnapshot, policy: str, name: str, **changed: object) -> bool:
    """Whether a job starts now in a cluster where it has asked for something else from the first."""
    found = json.loads(snapshot.to_json())
    (job,) = [one for one in found["jobs"] if one["name"] == name]
    job |= changed
    other = ClusterSnapshot.from_json(json.dumps(found))
    decisions = decide(other, other.now_s, POLICIES[policy])
    return any(one.kind == "start" and other.jobs.names[one.job] == name for one in decisions)


def by_trying(snapshot: ClusterSnapshot, policy: str, name: str) -> dict[str, object]:
    row = snapshot.jobs.rows[name]
    job = snapshot.jobs.record(row)
    found = dict[str, object]()
    if job["within"] >= 0:
        wider = [(level, f"within a {LEVELS[level]}") for level in range(job["within"] + 1, 2)] + [(-1, "anywhere")]
        works = [where for level, where in wider if starts(snapshot, policy, name, within=level)]
        found |= {"within": works[0]} if works else {}
    if not job["preemptible"] and starts(snapshot, policy, name, preemptible=True):
        found["preemptible"] = True
    if job["pools"] in (1, 2) and starts(snapshot, policy, name, pools=3):
        found["chip"] = "a100" if job["pools"] == 1 else "h100"
    fewer = [gpus for gpus in range(1, job["gpus"]) if starts(snapshot, policy, name, gpus=gpus, least=gpus)]
    return found | ({"gpus": max(fewer)} if fewer else {})


@pytest.mark.parametrize("policy", ["headway", "kueue", "fifo"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 3))])
def test_all_changes_that_start_a_job_are_told_and_no_others(policy: str, seed: int) -> None:
    snapshot, count = crowded(seed), 0
    before = snapshot.to_json()
    for row in snapshot.queue.tolist()[:5]:
        name = snapshot.jobs.names[row]
        told = explain_wait(snapshot, snapshot.now_s, POLICIES[policy], name)
        if told.state == "waits":
            count += 1
            assert {change.what: change.to for change in told.instead} == by_trying(snapshot, policy, name)
    assert count or policy == "headway"
    assert snapshot.to_json() == before, "a question changes nothing"


@pytest.mark.parametrize("policy", ["headway", "kueue", "fifo"])
def test_a_wider_part_of_the_network_is_told_first(policy: str) -> None:
    """Of each rack one node is taken: eight GPUs find no rack, and a block has them."""
    snapshot = ClusterSnapshot()
    racks = ["r0", "r0", "r1", "r1"]
    snapshot.nodes.join("h100", 4, ["a", "b", "c", "d"], {"rack": racks, "block": ["b0"] * 4})
    snapshot.tenants.join("red", 16)
    for number, node in enumerate((0, 2)):
        (row,) = snapshot.submit([Job(f"j{number}", "red", 4)])
        snapshot.start(row, 0, Placement(np.array([node], np.int32), np.array([4], np.int32)))
    snapshot.submit([Job("mine", "red", 8, preemptible=True, within="rack")])
    told = explain_wait(snapshot, 0.0, POLICIES[policy], "mine")
    assert told.instead[0].sentence == "lying within a block instead of within a rack"
    assert {change.what: change.to for change in told.instead} == by_trying(snapshot, policy, "mine")


def band() -> WaitExplanation:
    """Two nodes of 8; jobs that cannot be stopped hold 12, and one of 4 may not join them."""
    snapshot = ClusterSnapshot()
    snapshot.nodes.join("h100", 8, ["a", "b"])
    snapshot.tenants.join("red", 16)
    snapshot.submit([Job(f"j{number}", "red", 1) for number in range(12)])
    apply_decisions(snapshot, decide(snapshot, 0.0, POLICIES["headway"]))
    snapshot.submit([Job("mine", "red", 4)])
    return explain_wait(snapshot, 0.0, POLICIES["headway"], "mine")


def test_letting_itself_be_stopped_is_told_before_fewer_gpus() -> None:
    told = band()
    assert [change.what for change in told.instead] == ["preemptible", "gpus"]
    assert [change.sentence for change in told.instead] == [
        "letting itself be stopped and go on later",
        "asking for 2 GPUs instead of 4",
    ]
