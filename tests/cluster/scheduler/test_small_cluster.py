"""A small cluster of single-GPU jobs and few gangs: nodes stay empty, become empty, and no job starves."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headway.cluster.scheduler.decide import decide, next_preemption_s
from headway.cluster.scheduler.decisions import Decision
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.packing import packing_scores
from headway.cluster.scheduler.placement import Placement
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.wait_reasons import explain_wait
from headway.cluster.simulate import JobTrace, SimulationSetup, simulate

HOUR_S, DAY_S = 3600.0, 86400.0
NOW = 2 * HOUR_S
HEADWAY = POLICIES["headway"]


def cluster(nodes: str, limits_h: Sequence[float] = ()) -> ClusterSnapshot:
    """Return nodes of 8 GPUs with running single-GPU jobs: N is non-preemptible, P is preemptible.

    `limits_h`: time limits of all N, in order."""
    snapshot, limits = ClusterSnapshot(), iter(limits_h)
    snapshot.nodes.add_pool("h100", 8, [f"n{number}" for number in range(len(nodes.split()))])
    snapshot.tenants.add_tenant("all", 8 * len(nodes.split()))
    for node, letters in enumerate(nodes.split()):
        for letter in letters.strip("."):
            limit_s = next(limits, math.inf) * HOUR_S if letter == "N" else math.inf
            job = Job(f"{letter}{len(snapshot.jobs)}", "all", 1, preemptible=letter == "P", limit_s=limit_s)
            (row,) = snapshot.submit([job])
            snapshot.start(row, 0, Placement(np.array([node], np.int32), np.array([1], np.int32)))
    return snapshot


def decided(snapshot: ClusterSnapshot, kind: str, now: float = NOW) -> list[Decision]:
    decisions = decide(snapshot, now, HEADWAY)
    assert all(decision.reason.sentence for decision in decisions)
    return [decision for decision in decisions if decision.kind == kind]


@pytest.mark.parametrize(
    ("nodes", "limits_h", "limit_h", "node"),
    [
        ("NN...... N....... ........ ........", (9, 9, 50), 5, 0),  # no node is in use for longer: most such jobs
        ("NN...... N....... ........ ........", (9, 9, 50), 40, 1),  # the first node would be in use for longer
        ("NN...... N....... ........ ........", (9, 9, 50), 90, 1),  # 40 h longer instead of 81
        ("NN...... N....... ........ ........", (9, 9, 50), math.inf, 0),  # no limit: most such jobs
        ("NNNNNNNN PP...... ........ ........", (9,) * 8, 5, 1),  # no room there: beside the preemptible ones
    ],
)
def test_non_preemptible_job_keeps_other_nodes_empty(
    nodes: str, limits_h: Sequence[float], limit_h: float, node: int
) -> None:
    snapshot = cluster(nodes, limits_h)
    snapshot.submit([Job("late", "all", 1, 0.0, limit_s=limit_h * HOUR_S)])
    (start,) = decided(snapshot, "start", 0.0)
    assert start.placement.nodes.tolist() == [node]


def test_packing_scores_equal_the_additional_time_by_brute_force() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        held = rng.integers(0, 8, 5).astype(np.int32)
        until_s = rng.integers(0, 1000, 5) * HOUR_S
        end_s = float(rng.integers(0, 1000)) * HOUR_S
        best = int(packing_scores(held, until_s, end_s).argmax())
        longer = [max(until, end_s) - until for until in until_s.tolist()]
        assert longer[best] == min(longer)
        assert held[best] == max(
            gpus for gpus, seconds in zip(held.tolist(), longer, strict=True) if seconds == min(longer)
        )


@pytest.mark.parametrize(
    ("nodes", "waited_h", "moves", "stops"),
    [
        ("NNNN.... PP...... PP...... PP......", 0, 2, 0),  # at once: enough GPUs are free, but no node is
        ("NNNNNNNN NNNNNNNN PPPPPPPP PPPPPPPP", 0, 0, 0),  # the others would have to stop
        ("NNNNNNNN NNNNNNNN PPPPPPPP PPPPPPPP", 23, 0, 0),
        ("NNNNNNNN NNNNNNNN PPPPPPPP PPPPPPPP", 24, 0, 8),  # its turn
        ("NNNNNNNN NNNNNN.. NPPPPPPP PPPPPPPP", 24, 2, 6),  # those that fit elsewhere move, the others stop
    ],
)
def test_preemptible_jobs_move_away_for_a_gang(nodes: str, waited_h: float, moves: int, stops: int) -> None:
    snapshot = cluster(nodes)
    now = NOW + waited_h * HOUR_S
    snapshot.submit([Job("gang", "all", 8, NOW)])
    snapshot.advance(now)
    snapshot.jobs.since_s[snapshot.active] = now - HOUR_S  # less served than the gang will soon be
    decisions = decide(snapshot, now, HEADWAY)
    kinds = [decision.kind for decision in decisions if snapshot.jobs.names[decision.job] != "gang"]
    assert (kinds.count("move"), kinds.count("stop")) == (moves, stops)
    assert all(snapshot.jobs.preemptible[decision.job] for decision in decisions if decision.kind in ("move", "stop"))
    (own,) = [decision.kind for decision in decisions if snapshot.jobs.names[decision.job] == "gang"] or ["waits"]
    assert own == ("start" if moves + stops else "waits")


@pytest.mark.parametrize(
    ("waited_h", "limit_h", "code"),
    [
        (0.5, 90, "first"),  # not yet
        (1, 90, "kept"),  # nodes are reserved
        (1, 4, "first"),  # ends before the nodes are free
    ],
)
def test_nodes_are_reserved_for_a_large_gang_after_an_hour(waited_h: float, limit_h: float, code: str) -> None:
    snapshot = cluster("NNNNNNNN N....... N....... N.......", (99,) * 8 + (50, 50, 50))
    now = NOW + waited_h * HOUR_S
    snapshot.submit([Job("gang", "all", 24, NOW, preemptible=True)])
    snapshot.advance(now)
    snapshot.submit([Job("late", "all", 1, now, limit_s=limit_h * HOUR_S)])
    assert explain_wait(snapshot, now, HEADWAY, "late").reason.code == code


def test_job_that_was_started_often_runs_until_it_has_saved() -> None:
    """All GPUs are in use, and one job is preemptible; it saves half an hour after a restart of two minutes."""
    for starts, minutes, stopped in ((4, 3, True), (5, 3, False), (5, 31, False), (5, 32, True)):
        snapshot = cluster("NNNNNNNN NNNNNNNN NNNNNNNN NNNNNNNP")
        row = snapshot.jobs.rows["P31"]
        snapshot.jobs.starts[row], snapshot.jobs.ran_s[row] = starts, 9 * HOUR_S
        snapshot.submit([Job("new", "all", 1, 0.0)])
        snapshot.advance(60.0 * minutes)
        assert bool(decided(snapshot, "stop", 60.0 * minutes)) == stopped, (starts, minutes)


@pytest.mark.parametrize(
    ("starts", "ran_min", "waited_min", "changes", "stops"),
    [
        (1, 12, 0, {}, True),  # not preempted before
        (2, 12, 11.9, {}, False),  # it would lose a restart of two minutes and ten of work
        (2, 12, 12, {}, True),
        (2, 33, 2.9, {}, False),  # it saved half an hour after its restart, a minute ago
        (2, 33, 3, {}, True),
        (2, 12, 0, {"priority": 1}, True),
        (2, 12, 0, {"kind": "interactive"}, True),
    ],
)
@pytest.mark.parametrize("nodes", [4, 8])
def test_job_waits_for_as_long_as_one_that_was_preempted_before_would_lose(
    nodes: int, starts: int, ran_min: float, waited_min: float, changes: dict[str, Any], stops: bool
) -> None:
    snapshot = cluster("NNNNNNNN " * (nodes - 1) + "NNNNNNNP")
    row = len(snapshot.jobs) - 1
    snapshot.jobs.starts[row], snapshot.jobs.ran_s[row] = starts, 9 * HOUR_S
    snapshot.jobs.since_s[row] = NOW - 60 * ran_min
    snapshot.submit([Job("new", "all", 1, NOW - 60 * waited_min, **changes)])
    snapshot.advance(NOW)
    assert bool(decided(snapshot, "stop")) == (stops or nodes == 8)  # of eight nodes, none is more than an eighth


def test_next_preemption_is_when_a_minimum_run_ends_or_a_job_saves_by_brute_force() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        snapshot = cluster("PPP..... P....... ........ ........")
        rows, now = snapshot.active, 2 * HOUR_S
        snapshot.advance(now)
        snapshot.jobs.since_s[rows] = now - rng.integers(1, 7000, len(rows))
        snapshot.jobs.starts[rows] = rng.integers(1, 4, len(rows))
        saved_s = snapshot.saved_s(rows, now)
        ended = snapshot.jobs.since_s[rows] + 120 <= now
        changes = (
            at
            for at in np.arange(now + 1, now + HOUR_S)
            if (snapshot.saved_s(rows, at) > saved_s).any()
            or ((snapshot.jobs.since_s[rows] + 120 <= at) & ~ended).any()
        )
        expected = next(changes, math.inf)
        assert next_preemption_s(snapshot, HEADWAY) == expected


def trace_of(jobs: list[tuple[float, float, int, bool]]) -> JobTrace:
    """Return a trace of jobs: submit and run time in hours, GPUs, whether it is preemptible."""
    submit_h, run_h, gpus, preemptible = zip(*sorted(jobs), strict=True)
    unknown = np.full(len(jobs), math.nan)
    return JobTrace(
        tuple(f"job-{number}" for number in range(len(jobs))),
        np.array(submit_h) * HOUR_S,
        np.array(run_h) * HOUR_S,
        np.array(gpus, np.int64),
        np.zeros(len(jobs), np.int64),
        ("all",),
        unknown,
        unknown.copy(),
        extra=tuple({"preemptible": flag} for flag in preemptible),
    )


def test_gang_and_singles_wait_for_a_bounded_time() -> None:
    """Jobs of 12 hours, half of them non-preemptible, hold 24 of 32 GPUs; gangs of two nodes for four hours come daily.

    A gang has its turn after a day. By then no other non-preemptible job has entered its nodes for 23 hours, and those
    that ran there have ended: it starts at once, or after the gang before it."""
    singles = [(number / 2, 12.0, 1, number % 2 == 0) for number in range(200)]
    gangs = [(24.0 * day + 6, 4.0, 16, day % 2 == 0) for day in range(1, 4)]
    trace = trace_of(singles + gangs)
    result = simulate(trace, SimulationSetup("a100", 8, 4, limits=(1.0, 1.0)), HEADWAY)
    gang = trace.gpus > 1
    assert result.delay_s[gang].max() <= (24 + 4 + 1) * HOUR_S
    assert result.delay_s[~gang].max() <= 2 * 4 * HOUR_S  # as long as two gangs run
