"""Decisions of the simple policies as a table: a cluster, its tenants, jobs, and the expected decisions.

A cluster is a text: a line per pool, a word per node, a letter per GPU that a running job of that name holds and a dot
per free GPU; a node with a leading ~ is draining. `left` gives the seconds until a running job reaches its limit.
Waiting jobs are submitted one second after another.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import itemgetter
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.nodes import DRAINING
from headway.cluster.scheduler.placement import FreeGpus, Placement
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.policy import Policy
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from thinned import examples

NOW = 1000.0
ALL = "all 99"


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    policy: str
    cluster: str
    waits: str
    want: str
    runs: str = ""
    tenants: str = ALL


def parse_lines(text: str) -> Iterable[tuple[list[str], dict[str, str]]]:
    """Yield the words of each line, and its key=value pairs."""
    for line in filter(None, map(str.strip, text.replace(",", "\n").splitlines())):
        split = line.split()
        named = dict(word.split("=") for word in split if "=" in word)
        yield [word for word in split if "=" not in word], named


def build_cluster(case: Case) -> ClusterSnapshot:
    snapshot, held = ClusterSnapshot(), dict[str, tuple[int, dict[int, int]]]()
    for pool, ((chip, *nodes), _) in enumerate(parse_lines(case.cluster)):
        added = snapshot.nodes.add_pool(
            chip, len(nodes[0].strip("~")), [f"{chip}-{number}" for number in range(len(nodes))]
        )
        for number, node in enumerate(nodes):
            if node.startswith("~"):
                snapshot.nodes.state[added.first + number] = DRAINING
            for letter in node.strip("~.").replace(".", ""):
                on = held.setdefault(letter, (pool, {}))[1]
                on[number] = on.get(number, 0) + 1
    for (name, guarantee, *above), limits in parse_lines(case.tenants):
        snapshot.tenants.add_tenant(name, int(guarantee), *above, **{key: int(value) for key, value in limits.items()})
    options = {name: more for (name,), more in parse_lines(case.runs)}
    for letter, (pool, on) in sorted(held.items()):
        more = options.get(letter, {})
        of, left = more.get("of", snapshot.tenants.names[0]), float(more.get("left", math.inf))
        (row,) = snapshot.submit([Job(letter, of, sum(on.values()), limit_s=NOW + left)])
        snapshot.start(row, pool, Placement(*(np.array([*ends], np.int32) for ends in (on.keys(), on.values()))))
    snapshot.advance(NOW)
    for number, ((name, gpus), more) in enumerate(parse_lines(case.waits)):
        of, at = more.get("of", snapshot.tenants.names[0]), float(more.get("at", 1 + number))
        limit, priority = float(more.get("limit", math.inf)), int(more.get("priority", 0))
        (row,) = snapshot.submit([Job(name, of, int(gpus), at, priority, limit_s=limit)])
        chips = [pool.chip for pool in snapshot.nodes.pools]
        if "on" in more:
            snapshot.jobs.pools[row] = 1 << chips.index(more["on"])
    return snapshot


def decide_lines(snapshot: ClusterSnapshot, now: float, policy: Policy) -> list[str]:
    """Return decisions as text; `decide` must not change the snapshot."""
    before = snapshot.to_json()
    decisions = decide(snapshot, now, policy)
    assert snapshot.to_json() == before
    lines = []
    for decision in decisions:
        assert decision.reason.sentence
        assert decision.placement.total == snapshot.jobs.gpus[decision.job]
        later = f" +{decision.at_s - now:.0f}" if decision.kind == "reserve" else ""
        lines.append(f"{decision.kind} {snapshot.jobs.names[decision.job]}{later}")
    return lines


def apply(snapshot: ClusterSnapshot, policy: Policy) -> list[str]:
    """Apply the decisions; the snapshot asserts that no GPU is given twice."""
    started = []
    for decision in decide(snapshot, snapshot.now_s, policy):
        if decision.kind == "stop":
            snapshot.stop([decision.job], 0.0)
        if decision.kind == "start":
            rows = decision.placement.nodes + snapshot.nodes.pools[decision.pool].first
            assert (snapshot.nodes.state[rows] != DRAINING).all(), "nothing starts on a draining node"
            assert snapshot.jobs.pools[decision.job] >> decision.pool & 1, "nothing starts where it cannot run"
            snapshot.start(decision.job, decision.pool, decision.placement)
            started.append(snapshot.jobs.names[decision.job])
    return started


TENANTS = "red 4, blue 4"
TABLE = [
    # -- first come, first served
    Case("empty queue", "fifo", "h100 ........", "", ""),
    Case("all fit", "fifo", "h100 ........", "x 4, y 4", "start x, start y"),
    Case("the first blocks", "fifo", "h100 aaaaaa..", "x 4, y 2", ""),
    Case("a later job blocks", "fifo", "h100 ........", "x 4, y 6, z 2", "start x"),
    Case("priority first", "fifo", "h100 ....", "x 4, y 4 priority=1", "start y"),
    Case("of equals the first submitted", "fifo", "h100 ....", "x 4 priority=1, y 4 priority=1", "start x"),
    Case("a higher-ranked job blocks", "fifo", "h100 aa..", "x 2, y 4 priority=1", ""),
    Case("gangs of several nodes", "fifo", "h100 .... .... ....", "x 8, y 4", "start x, start y"),
    Case("no node is empty", "fifo", "h100 a... b...", "x 5, y 1", ""),
    Case("quotas do not count", "fifo", "h100 ........", "x 8 of=red", "start x", tenants="red 4 borrow=4, blue 4"),
    Case("a draining node has no free GPUs", "fifo", "h100 ~.... aaa.", "x 4, y 1", ""),
    Case("the other chip", "fifo", "h100 aaaa\na100 ....", "x 4", "start x"),
    Case("not on the other chip", "fifo", "h100 aaaa\na100 ....", "x 4 on=h100, y 4", ""),
    # -- jobs pass blocked ones, within quotas
    Case("passes", "kueue", "h100 aaaaaa..", "x 4, y 2, z 1", "start y"),
    Case("passes more than once", "kueue", "h100 aaaa....", "x 5, y 2, z 3, w 2", "start y, start w"),
    Case("priority first, and others pass", "kueue", "h100 aa..", "x 1, y 1, z 4 priority=1", "start x, start y"),
    Case("borrows", "kueue", "h100 ........", "x 8 of=red", "start x", tenants=TENANTS),
    Case("borrows in addition to what it has", "kueue", "h100 aaaa....", "x 4 of=red", "start x", "a of=red", TENANTS),
    Case("borrows to its limit", "kueue", "h100 aaaa....",
         "x 3 of=red, y 2 of=red", "start y", "a of=red", "red 4 borrow=2, blue 4"),
    Case("its limit counts in one cycle", "kueue", "h100 ........",
         "x 4 of=red, y 2 of=red, z 1 of=red", "start x, start y", tenants="red 4 borrow=2, blue 4"),
    Case("no more than is lent", "kueue", "h100 ........",
         "x 4 of=red, y 2 of=red, z 1 of=red", "start x, start z", tenants="red 4, blue 4 lend=1"),
    Case("what is not lent stays its owner's", "kueue", "h100 aaaa....",
         "x 1 of=red, y 4 of=blue", "start y", "a of=red", "red 4, blue 4 lend=0"),
    Case("a department's limit is shared by its teams", "kueue", "h100 ........",
         "x 3 of=s, y 2 of=t, z 1 of=t", "start x, start z", tenants="d 4 borrow=0, s 2 d, t 2 d"),
    Case("a job without quota does not block", "kueue", "h100 aaaa....",
         "x 2 of=red priority=9, y 2 of=blue", "start y", "a of=red", "red 4 borrow=0, blue 4"),
    # -- backfill by time limits
    Case("fits before the head", "slurm", "h100 aaaaaa..",
         "x 8, y 2 limit=50", "reserve x +100, start y", "a left=100"),
    Case("ends just in time", "slurm", "h100 aaaaaa..", "x 8, y 2 limit=100", "reserve x +100, start y", "a left=100"),
    Case("would delay the head", "slurm", "h100 aaaaaa..", "x 8, y 2 limit=101", "reserve x +100", "a left=100"),
    Case("fits beside the reservation", "slurm", "h100 aaaa....", "x 6, y 2", "reserve x +100, start y", "a left=100"),
    Case("no more than fits beside it", "slurm", "h100 aaaa....",
         "x 6, y 2, z 2", "reserve x +100, start y", "a left=100"),
    Case("short jobs take nothing from those beside", "slurm", "h100 aaaa....",
         "x 6, y 2 limit=9, z 2", "reserve x +100, start y, start z", "a left=100"),
    Case("the earliest of several ends", "slurm", "h100 aabb....",
         "x 6, y 4 limit=51", "reserve x +50", "a left=50, b left=70"),
    Case("several ends are needed", "slurm", "h100 aabb....",
         "x 8, y 4 limit=70", "reserve x +70, start y", "a left=50, b left=70"),
    Case("nodes count, not totals", "slurm", "h100 aa.. bb..",
         "x 4, y 2", "reserve x +50, start y", "a left=50, b left=70"),
    Case("over its limit: soon", "slurm", "h100 aaaaaa..", "x 8, y 2 limit=1", "reserve x +0", "a left=-5"),
    Case("no limit: no reservation", "slurm", "h100 aaaaaa..", "x 8, y 2 limit=1", ""),
    Case("reserves by priority", "slurm", "h100 aaaaaa..", "y 2, x 8 priority=1", "reserve x +100", "a left=100"),
    Case("in another pool", "slurm", "h100 aaaa\na100 bb..",
         "x 4 on=h100, y 2", "reserve x +100, start y", "a left=100"),
    Case("the pool that is free first", "slurm", "h100 aaaa\na100 bbbb",
         "x 4", "reserve x +50", "a left=100, b left=50"),
    Case("beside it, and only where it can run", "slurm", "h100 aa..\na100 bbb.",
         "x 3 on=h100, y 1 on=a100", "reserve x +100, start y", "a left=100"),
    Case("beside it in the second pool", "slurm", "h100 aaa.\na100 bb..",
         "x 3 on=a100, y 1 on=h100", "reserve x +90, start y", "b left=90"),
    Case("fits elsewhere though the first pool is reserved", "slurm", "h100 aa..\na100 bb..",
         "x 4 on=h100, y 2", "reserve x +100, start y", "a left=100"),
    Case("no reservation on a draining node", "slurm", "h100 ~aaaa bbbb",
         "x 4", "reserve x +90", "a left=20, b left=90"),
    Case("jobs just started count", "slurm", "h100 aaaa........",
         "w 4 limit=10 priority=2, x 8 priority=1, y 4 limit=900", "start w, reserve x +10", "a left=1000"),
    Case("only jobs just started", "slurm", "h100 ........",
         "w 4 limit=100 priority=2, x 8 priority=1, y 4 limit=50", "start w, reserve x +100, start y"),
]  # fmt: skip


@pytest.mark.parametrize("case", TABLE, ids=lambda case: f"{case.policy}: {case.name}")
def test_table(case):
    snapshot = build_cluster(case)
    assert ", ".join(decide_lines(snapshot, NOW, POLICIES[case.policy])) == case.want
    apply(snapshot, POLICIES[case.policy])


# -- orders of a multifactor priority


@pytest.mark.parametrize(
    ("name", "waits", "recent", "want"),
    [
        ("the older", "x 4 at=500, y 4 at=100", [0, 0], "start y"),
        ("of equal age the larger", "x 2 at=5, y 4 at=5", [0, 0], "start y"),
        ("used less of its share", "x 4 at=1 of=red, y 4 at=900 of=blue", [1e6, 1e3], "start y"),
        ("priority above all", "x 4 at=900 of=red priority=1, y 4 at=1 of=blue", [1e9, 0], "start x"),
    ],
    ids=lambda value: value if isinstance(value, str) and " of" not in value and "=" not in value else "",
)
def test_multifactor(name, waits, recent, want):
    snapshot = build_cluster(Case("", "slurm", "h100 ....", waits, want, tenants=TENANTS))
    snapshot.tenants.recent[:2] = recent
    assert next(line for line in decide_lines(snapshot, NOW, POLICIES["slurm"]) if line.startswith("start")) == want


# -- properties


clusters = st.lists(
    st.sampled_from(["....", "a...", "bb..", "cccc", "ddd.", "~....", "~e..."]), min_size=1, max_size=3, unique=True
)
queues = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from(["red", "blue"]), st.integers(0, 2), st.sampled_from([20, 60, 500])),
    min_size=1,
    max_size=7,
)  # fmt: skip
LEFT = "a left=50, b left=70, c left=90, d left=110, e left=30"


def queue(jobs: list[tuple[int, str, int, int]], size: int) -> list[str]:
    return [
        f"j{number} {min(gpus, size)} of={of} priority={priority} limit={limit} at={1 + number}"
        for number, (gpus, of, priority, limit) in enumerate(jobs)
    ]


@pytest.mark.parametrize("policy", ["fifo", "kueue", "slurm", "headway"])
@settings(max_examples=examples(30), deadline=None)
@given(nodes=clusters, jobs=queues, random=st.randoms(use_true_random=False))
def test_order_in_which_jobs_are_submitted_does_not_matter(policy, nodes, jobs, random):
    lines = queue(jobs, 4 * len(nodes))
    shuffled = random.sample(lines, len(lines))
    case = Case("", policy, f"h100 {' '.join(nodes)}", "", "", LEFT, TENANTS)
    ordered, reordered = (build_cluster(replace(case, waits="\n".join(order))) for order in (lines, shuffled))
    assert decide_lines(ordered, NOW, POLICIES[policy]) == decide_lines(reordered, NOW, POLICIES[policy])


@pytest.mark.parametrize("policy", ["fifo", "kueue", "slurm", "headway"])
@settings(max_examples=examples(20), deadline=None)
@given(nodes=clusters, jobs=queues, random=st.randoms(use_true_random=False))
def test_rows_of_jobs_do_not_matter(policy, nodes, jobs, random):
    case = Case("", policy, f"h100 {' '.join(nodes)}", "", "", LEFT, TENANTS)
    original = build_cluster(replace(case, waits="\n".join(queue(jobs, 4 * len(nodes)))))
    moved = build_cluster(case)
    dropped = moved.submit([Job(f"ended-{number}", "red", 1, 0.5) for number in range(9)])
    random.shuffle(dropped)
    for row in dropped:
        moved.end(row)
    for row in original.queue.tolist():
        record: dict[str, Any] = original.jobs.record(row)
        job = {key: record[key] for key in ("name", "gpus", "submit_s", "priority", "limit_s")}
        moved.submit([Job(tenant=original.tenants.names[record["tenant"]], **job)])
    assert decide_lines(original, NOW, POLICIES[policy]) == decide_lines(moved, NOW, POLICIES[policy])
    restored = ClusterSnapshot.from_json(original.to_json())
    assert decide_lines(restored, NOW, POLICIES[policy]) == decide_lines(original, NOW, POLICIES[policy])


@pytest.mark.parametrize("policy", ["fifo", "kueue", "slurm", "headway"])
@settings(max_examples=examples(20), deadline=None)
@given(nodes=clusters, jobs=queues, borrow=st.integers(2, 6), lend=st.integers(2, 4))
def test_decisions_can_be_applied_and_no_further_job_could_start(policy, nodes, jobs, borrow, lend):
    tenants = f"red {2 * len(nodes)} borrow={borrow} lend={lend}, blue {2 * len(nodes)} lend={lend}"
    empty = build_cluster(Case("", policy, f"h100 {' '.join(nodes)}", "", "", LEFT, tenants))
    most = min(empty.allowance(0), empty.allowance(1))  # larger ones can never run and are rejected
    lines = queue(jobs, min(4 * len(nodes), most)) if most else []
    snapshot = build_cluster(Case("", policy, f"h100 {' '.join(nodes)}", "\n".join(lines), "", LEFT, tenants))
    before = snapshot.tenants.used[:2].copy()
    apply(snapshot, POLICIES[policy])
    free_gpus = snapshot.nodes.free_gpus(snapshot.nodes.pools[0])
    allowed = snapshot.tenants.headroom(free_gpus.total)
    if policy in ("kueue", "headway"):
        most = snapshot.tenants.guarantee[:2] + snapshot.tenants.borrow[:2]
        assert (snapshot.tenants.used[:2] <= np.maximum(most, before)).all(), "above a quota"
        bound = POLICIES[policy].cap
        held = int(snapshot.jobs.gpus[snapshot.active].sum())
        for row in snapshot.queue.tolist():
            gpus = int(snapshot.jobs.gpus[row])
            if bound is not None and held + gpus > bound(snapshot, np.array([row]), NOW)[0]:
                continue  # all these jobs are non-preemptible
            waiting = snapshot.jobs.priority[snapshot.queue]
            if policy == "headway" and snapshot.jobs.priority[row] < waiting.max():
                continue  # GPUs may be kept for a job of higher priority
            assert gpus > allowed[snapshot.jobs.tenant[row]] or free_gpus.find(gpus) is None, (
                "waits although GPUs are free"
            )
    elif policy == "fifo" and len(snapshot.queue):
        head = POLICIES["fifo"].order(snapshot, NOW)[0]
        assert free_gpus.find(int(snapshot.jobs.gpus[head])) is None


@dataclass(frozen=True)
class TraceJob:
    """A job with a time limit equal to its run time."""

    name: str
    at: int
    gpus: int
    seconds: int


def random_trace(seed: int) -> tuple[int, list[tuple[int, int, int]]]:
    """Return nodes, and jobs as submit time, GPUs and seconds: few distinct numbers, so that many events coincide."""
    random = Random(seed)
    times, gpus, seconds = (0, 3, 3, 3, 8, 40), (1, 1, 2, 2, 3, 4, 5, 8, 9), (1, 2, 5, 10, 40, 100)
    jobs = [(random.choice(times), random.choice(gpus), random.choice(seconds)) for _ in range(random.randint(2, 9))]
    return random.randint(1, 3), sorted(jobs, key=itemgetter(0))


def earliest_start(snapshot: ClusterSnapshot, gpus: int) -> float:
    """Return when a gang fits if all running jobs end by their limits and nothing else starts."""
    pool, now = snapshot.nodes.pools[0], snapshot.now_s
    ends = {row: float(snapshot.jobs.since_s[row] + snapshot.jobs.limit_s[row]) for row in snapshot.active.tolist()}
    for at in sorted({now, *ends.values()}):
        free_gpus = FreeGpus(snapshot.nodes.free[pool.first : pool.end], pool.size)
        for row, end in ends.items():
            if end <= at:
                free_gpus.release(snapshot.placements[row][1])
        if free_gpus.find(gpus) is not None:
            return at
    raise AssertionError("a gang fits into an empty cluster")


def run_backfill(
    nodes: int, trace: list[tuple[int, int, int]]
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return starts under backfill in submit order; for heads also the first reservation and the earliest start."""
    policy = replace(POLICIES["slurm"], order=POLICIES["fifo"].order)
    snapshot = build_cluster(Case("", "slurm", "h100 " + " ".join(["...."] * nodes), "", ""))
    snapshot.now_s = 0.0
    coming = [TraceJob(f"j{n}", at, min(gpus, 4 * nodes), s) for n, (at, gpus, s) in enumerate(trace)]
    starts, reserved, possible, ends = dict[str, float](), dict[str, float](), dict[str, float](), dict[str, float]()
    while coming or ends:
        now = min([*(float(job.at) for job in coming), *ends.values()])
        snapshot.advance(now)
        for name in [name for name, end in ends.items() if end <= now]:
            snapshot.end(snapshot.jobs.rows[name])
            del ends[name]
        while coming and coming[0].at <= now:
            job = coming.pop(0)
            snapshot.submit([Job(job.name, "all", job.gpus, float(job.at), limit_s=float(job.seconds))])
        decisions = decide(snapshot, now, policy)
        started = [decision for decision in decisions if decision.kind == "start"]
        waiting = snapshot.queue.tolist()
        front = next((i for i, row in enumerate(waiting) if row not in [d.job for d in started]), len(waiting))
        for decision in decisions:
            name = snapshot.jobs.names[decision.job]
            if decision.kind == "reserve":
                assert decision.job == waiting[front], "the reservation is for the first job that has to wait"
                reserved.setdefault(name, decision.at_s)
                assert decision.at_s <= reserved[name], "a reservation moved although all limits held"
        for decision in sorted(started, key=lambda decision: waiting.index(decision.job) > front):
            if waiting.index(decision.job) > front and front < len(waiting):
                head = waiting[front]
                possible.setdefault(snapshot.jobs.names[head], earliest_start(snapshot, int(snapshot.jobs.gpus[head])))
            snapshot.start(decision.job, decision.pool, decision.placement)
            name = snapshot.jobs.names[decision.job]
            starts[name], ends[name] = now, now + float(snapshot.jobs.limit_s[decision.job])
    return starts, reserved, possible


def test_with_exact_limits_the_head_starts_no_later_than_reserved():
    for seed in range(500):
        nodes, trace = random_trace(seed)
        starts, reserved, _ = run_backfill(nodes, trace)
        assert len(starts) == len(trace), (nodes, trace)
        assert all(starts[name] <= at for name, at in reserved.items()), (nodes, trace, starts, reserved)


def test_with_exact_limits_the_head_starts_no_later_than_without_backfill():
    for seed in range(500):
        nodes, trace = random_trace(seed)
        starts, _, possible = run_backfill(nodes, trace)
        assert all(starts[name] <= at for name, at in possible.items()), (nodes, trace, starts, possible)
