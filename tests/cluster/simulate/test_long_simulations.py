"""Long runs: jobs do not preempt each other forever, none starves, and preemptions follow restated rules."""

import math
from dataclasses import replace
from random import Random

import pytest

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.decision_log import apply_decisions
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.policy import Policy
from headway.cluster.scheduler.snapshot import ClusterSnapshot

HOUR_S, DAY_S = 3600.0, 86400.0
HEADWAY = POLICIES["headway"]


def rank(snapshot: ClusterSnapshot, row: int, now: float) -> tuple[int, int, int]:
    """Return the rank of a job, lower first, by the documented rules."""
    jobs = snapshot.jobs
    running = float(now - jobs.since_s[row]) if jobs.running[row] else 0.0
    held = float(jobs.ran_s[row]) + running
    waited = now - float(jobs.submit_s[row]) - held
    left = float(jobs.deadline_s[row]) - now
    had = (held + 1800) * int(jobs.gpus[row]) + float(jobs.other_gpu_s[row])
    level = sum(had >= hours * HOUR_S for hours in (2, 8, 32, 128, 512, 2048))
    if max(held, 1800) < left < math.inf and level:
        level -= 1
    if left <= 0:
        level += 6
    if jobs.failed[row] or jobs.kind[row] == 2:
        level = 0
    gpus, node = int(jobs.gpus[row]), min(pool.size for pool in snapshot.nodes.pools)
    if gpus >= node and gpus > snapshot.gpus / 8 and left > 0 and waited >= max(held, DAY_S):
        level = -1  # a large gang has its turn
    if waited > (28 if left <= 0 else 7) * DAY_S:
        return -1, 0, 0
    return 0, -int(jobs.priority[row]), level


def random_jobs(random: Random, count: int, now: float = 0.0) -> list[Job]:
    jobs = []
    for number in range(count):
        gpus, grows = random.choice([1, 1, 2, 3, 4, 8]), random.random() < 0.3
        jobs.append(
            Job(
                f"j{number}",
                random.choice(["red", "blue"]),
                gpus,
                submit_s=now + random.uniform(0, 2 * DAY_S) * (random.random() < 0.5),
                priority=random.choice([0, 0, 0, 1]),
                preemptible=random.random() < 0.85,
                deadline_s=now + random.choice([math.inf, math.inf, 3 * DAY_S, 9 * DAY_S]),
                sizes=((gpus, 1.0), (2 * gpus, 1.7)) if grows else (),
                kind=random.choice(["batch", "batch", "batch", "interactive", "service"]),
            )
        )
    return jobs


def cluster(nodes: int = 3, size: int = 4) -> ClusterSnapshot:
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", size, [f"n{number}" for number in range(nodes)])
    snapshot.tenants.add_tenant("red", nodes * size // 2)
    snapshot.tenants.add_tenant("blue", nodes * size - nodes * size // 2)
    return snapshot


def evictions(seed: int, jobs: int, step_s: float, days: int) -> list[float]:
    """Return the times of preemptions among jobs that never end; check each by the rules."""
    random, snapshot = Random(seed), cluster()
    coming, stops, now = sorted(random_jobs(random, jobs), key=lambda job: job.submit_s), list[float](), 0.0
    while now < days * DAY_S:
        snapshot.advance(now)
        while coming and coming[0].submit_s <= now:
            snapshot.submit([coming.pop(0)])
        decisions, job_table = decide(snapshot, now, HEADWAY), snapshot.jobs
        used, used_before, last = snapshot.tenants.used[:2].copy(), snapshot.tenants.used[:2].copy(), -1
        counted = dict[int, int]()
        # A job that starts and grows in one cycle is decided twice, and listed once, at the end.
        grown = {d.job: int(dict(d.reason.numbers).get("before", 0)) for d in decisions if d.kind == "start"}
        for decision in decisions:
            if decision.kind != "stop":
                runs = decision.kind in ("resize", "move")
                before = snapshot.placements[decision.job][1].total if runs else counted.get(decision.job, 0)
                used[job_table.tenant[decision.job]] += decision.placement.total - before
                continue
            stops.append(now)
            head = job_table.rows[str(dict(decision.reason.numbers)["head"])]
            if head != last:  # victims of one job are chosen together, by the usage before
                if grown.get(last):
                    counted[last] = grown[last]
                    used[job_table.tenant[last]] += grown[last]
                used_before, last = used.copy(), head
            head_rank, victim_rank = rank(snapshot, head, now), rank(snapshot, decision.job, now)
            owed = (
                job_table.tenant[head] != job_table.tenant[decision.job] and now - job_table.waits_s[head] >= HOUR_S / 2
            )
            owed &= (
                used_before[job_table.tenant[decision.job]] > snapshot.tenants.guarantee[job_table.tenant[decision.job]]
            )
            assert victim_rank[0] != -1, "due jobs are never preempted"
            assert job_table.preemptible[decision.job]
            assert head_rank < victim_rank or owed, "no job yields to a lower-ranked one, unless it borrows"
            assert job_table.kind[decision.job] != 2 or job_table.priority[head] > job_table.priority[decision.job], (
                "a service"
            )
            used[job_table.tenant[decision.job]] -= decision.placement.total
        apply_decisions(snapshot, decisions)
        now += step_s
    return stops


def assert_evictions_end(seed: int, jobs: int, step_s: float, days: int) -> int:
    """Assert that among jobs that never end preemptions stop, at the latest once all are due."""
    stops = evictions(seed, jobs, step_s, days)
    assert not [at for at in stops if at > (days - 20) * DAY_S], "they preempt each other forever"
    return len(stops)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 3))])
def test_jobs_do_not_preempt_each_other_forever(seed: int) -> None:
    assert assert_evictions_end(seed, 9, DAY_S, 220) > 0, "jobs without preemptions prove little"


def test_preemptions_in_quick_succession_follow_the_rules() -> None:
    assert evictions(50, 14, 150.0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 30))])
def test_jobs_do_not_preempt_each_other_forever_in_long_runs(seed: int) -> None:
    assert_evictions_end(1000 + seed, 8 + seed % 12, 12 * HOUR_S, 400)
    evictions(2000 + seed, 8 + seed % 12, 150.0, 4)


# -- starvation


def start_of_marked_job(seed: int, step_s: float, days: int, policy: Policy = HEADWAY) -> float:
    """Return how long a large job of low priority waits beside an endless stream of jobs that overload the cluster."""
    random, snapshot = Random(seed), cluster(3, 4)
    snapshot.submit([Job("marked", "red", random.choice([5, 8, 12]), 0.0, preemptible=random.random() < 0.5)])
    ends, count, now = dict[str, float](), 0, 0.0
    longest_s, preemptible_share = DAY_S, random.choice([0.0, 0.5, 1.0])
    while now < days * DAY_S:
        snapshot.advance(now)
        for name in [name for name, end in ends.items() if end <= now]:
            del ends[name]
            snapshot.end(snapshot.jobs.rows[name])
        # GPU-seconds that arrive per step: 1.5 times the capacity
        wanted = 1.5 * 12 * step_s
        while wanted > 0 and len(snapshot.queue) < 40:
            gpus, seconds = random.choice([1, 1, 2]), random.uniform(0.05, 1) * longest_s
            job = Job(f"s{count}", random.choice(["red", "blue"]), gpus, now, random.choice([0, 1]),
                      preemptible=random.random() < preemptible_share)  # fmt: skip
            snapshot.submit([job], [seconds])
            wanted -= gpus * seconds
            count += 1
        decisions = decide(snapshot, now, policy)
        apply_decisions(snapshot, decisions)
        for decision in decisions:
            name = snapshot.jobs.names[decision.job]
            if decision.kind == "start" and name == "marked":
                return now
            if decision.kind == "start":
                left = snapshot.jobs.known_s[decision.job] - snapshot.jobs.done_s[decision.job]
                ends[name] = now + float(left) + 120.0 * (snapshot.jobs.starts[decision.job] > 1)
            if decision.kind == "stop":
                ends.pop(name, None)
        now += step_s
    return math.inf


@pytest.mark.parametrize("seed", [5, 6])
def test_no_job_starves(seed: int) -> None:
    """The stream could fill every node forever; after three weeks nodes are reserved, and jobs end within a day."""
    assert start_of_marked_job(seed, 4 * HOUR_S, 40) < 34 * DAY_S


def test_a_job_starves_without_reserved_nodes() -> None:
    """Proof that the test above can fail."""
    assert start_of_marked_job(6, 4 * HOUR_S, 40, replace(HEADWAY, overdue=None, drains=None)) == math.inf


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_no_job_starves_in_long_runs(seed: int) -> None:
    assert start_of_marked_job(seed, HOUR_S, 40) < 34 * DAY_S
