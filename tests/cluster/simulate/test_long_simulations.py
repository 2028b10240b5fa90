"""Nobody evicts each other for ever, and nobody waits for ever: at length, and beside rules written down once more."""

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
    """Who goes before whom, lower first: written from the page that explains it, one job at a time."""
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
    if waited > (28 if left <= 0 else 7) * DAY_S:
        return -1, 0, 0
    return 0, -int(jobs.priority[row]), level


def some_jobs(random: Random, count: int, now: float = 0.0) -> list[Job]:
    found = []
    for number in range(count):
        gpus, grows = random.choice([1, 1, 2, 3, 4, 8]), random.random() < 0.3
        found.append(
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
    return found


def cluster(nodes: int = 3, size: int = 4) -> ClusterSnapshot:
    snapshot = ClusterSnapshot()
    snapshot.nodes.join("h100", size, [f"n{number}" for number in range(nodes)])
    snapshot.tenants.join("red", nodes * size // 2)
    snapshot.tenants.join("blue", nodes * size - nodes * size // 2)
    return snapshot


def evictions(seed: int, jobs: int, step_s: float, days: int) -> list[float]:
    """When somebody is stopped, of jobs that never end; each stop is by the rules."""
    random, snapshot = Random(seed), cluster()
    coming, stops, now = sorted(some_jobs(random, jobs), key=lambda job: job.submit_s), list[float](), 0.0
    while now < days * DAY_S:
        snapshot.advance(now)
        while coming and coming[0].submit_s <= now:
            snapshot.submit([coming.pop(0)])
        decisions, table = decide(snapshot, now, HEADWAY), snapshot.jobs
        used, seen, last = snapshot.tenants.used[:2].copy(), snapshot.tenants.used[:2].copy(), -1
        for one in decisions:
            if one.kind != "stop":
                before = snapshot.places[one.job][1].total if one.kind == "resize" else 0
                used[table.tenant[one.job]] += one.place.total - before
                continue
            stops.append(now)
            head = table.rows[str(dict(one.reason.numbers)["head"])]
            if head != last:  # whoever yields to one job is chosen at once, by what was used before
                seen, last = used.copy(), head
            mine, its = rank(snapshot, head, now), rank(snapshot, one.job, now)
            owed = table.tenant[head] != table.tenant[one.job] and now - table.waits_s[head] >= HOUR_S / 2
            owed &= seen[table.tenant[one.job]] > snapshot.tenants.guarantee[table.tenant[one.job]]
            assert its[0] != -1, "who is due is never stopped"
            assert table.preemptible[one.job]
            assert mine < its or owed, "who goes before yields to none behind it, unless it has borrowed"
            assert table.kind[one.job] != 2 or table.priority[head] > table.priority[one.job], "a service"
            used[table.tenant[one.job]] -= one.place.total
        apply_decisions(snapshot, decisions)
        now += step_s
    return stops


def settles(seed: int, jobs: int, step_s: float, days: int) -> int:
    """Jobs that never end: after so long as it takes all to be due at most, nobody is stopped any more."""
    stops = evictions(seed, jobs, step_s, days)
    assert not [at for at in stops if at > (days - 20) * DAY_S], "they evict each other for ever"
    return len(stops)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 3))])
def test_no_set_of_jobs_evicts_each_other_for_ever(seed: int) -> None:
    assert settles(seed, 9, DAY_S, 220) > 0, "jobs that stop nobody prove little"


def test_stops_in_quick_succession_are_by_the_rules() -> None:
    assert evictions(50, 14, 150.0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 30))])
def test_no_set_of_jobs_evicts_each_other_for_ever_at_length(seed: int) -> None:
    settles(1000 + seed, 8 + seed % 12, 12 * HOUR_S, 400)
    evictions(2000 + seed, 8 + seed % 12, 150.0, 4)


# -- nobody starves


def waits_for(seed: int, step_s: float, days: int, policy: Policy = HEADWAY) -> float:
    """How long one large job of low priority waits, beside an endless stream of others that want more than there is."""
    random, snapshot = Random(seed), cluster(3, 4)
    snapshot.submit([Job("marked", "red", random.choice([5, 8, 12]), 0.0, preemptible=random.random() < 0.5)])
    ends, count, now = dict[str, float](), 0, 0.0
    longest, can_stop = DAY_S, random.choice([0.0, 0.5, 1.0])
    while now < days * DAY_S:
        snapshot.advance(now)
        for name in [name for name, end in ends.items() if end <= now]:
            del ends[name]
            snapshot.end(snapshot.jobs.rows[name])
        # GPU-seconds that come in a step: half as much again as there are
        wanted = 1.5 * 12 * step_s
        while wanted > 0 and len(snapshot.queue) < 40:
            gpus, seconds = random.choice([1, 1, 2]), random.uniform(0.05, 1) * longest
            job = Job(f"s{count}", random.choice(["red", "blue"]), gpus, now, random.choice([0, 1]),
                      preemptible=random.random() < can_stop)  # fmt: skip
            snapshot.submit([job], [seconds])
            wanted -= gpus * seconds
            count += 1
        decisions = decide(snapshot, now, policy)
        apply_decisions(snapshot, decisions)
        for one in decisions:
            name = snapshot.jobs.names[one.job]
            if one.kind == "start" and name == "marked":
                return now
            if one.kind == "start":
                left = snapshot.jobs.known_s[one.job] - snapshot.jobs.done_s[one.job]
                ends[name] = now + float(left) + 120.0 * (snapshot.jobs.starts[one.job] > 1)
            if one.kind == "stop":
                ends.pop(name, None)
        now += step_s
    return math.inf


@pytest.mark.parametrize("seed", [5, 6])
def test_nobody_starves(seed: int) -> None:
    """The stream could fill every node for ever; after three weeks nodes are kept, and jobs of a day at most end."""
    assert waits_for(seed, 4 * HOUR_S, 40) < 34 * DAY_S


def test_without_nodes_kept_somebody_does() -> None:
    """What the test above would not see if it could not fail."""
    assert waits_for(6, 4 * HOUR_S, 40, replace(HEADWAY, overdue=None)) == math.inf


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_nobody_starves_at_length(seed: int) -> None:
    assert waits_for(seed, HOUR_S, 40) < 34 * DAY_S
