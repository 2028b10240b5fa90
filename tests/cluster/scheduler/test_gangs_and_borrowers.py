"""Non-preemptible jobs beside a waiting gang: priority, guarantees and the budget decide whether they start."""

import numpy as np
import pytest

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.placement import Placement
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.wait_reasons import explain_wait

HOUR_S = 3600.0
NOW = 2 * HOUR_S
HEADWAY = POLICIES["headway"]


def cluster(budget_gpu_h: float | None = None) -> ClusterSnapshot:
    """Return four nodes of 8 GPUs, 28 guaranteed to one tenant and 4 to a borrower."""
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", 8, [f"n{number}" for number in range(4)])
    snapshot.tenants.add_tenant("owner", 28)
    snapshot.tenants.add_tenant("borrower", 4, budget_gpu_h=budget_gpu_h)
    return snapshot


def run(snapshot: ClusterSnapshot, job: Job, nodes: list[int], gpus: list[int]) -> None:
    (row,) = snapshot.submit([job])
    snapshot.start(row, 0, Placement(np.array(nodes, np.int32), np.array(gpus, np.int32)))


def decided(snapshot: ClusterSnapshot) -> dict[str, list[str]]:
    lines = dict[str, list[str]]()
    for decision in decide(snapshot, NOW, HEADWAY):
        assert decision.reason.sentence
        lines.setdefault(decision.kind, []).append(snapshot.jobs.names[decision.job])
    return lines


@pytest.mark.parametrize(
    ("priority", "budget_gpu_h", "limit_h", "gpus", "starts", "code"),
    [
        (5, 20.0, 24, 16, False, "limit-budget"),  # the reported case
        (5, None, 24, 16, False, "blocks"),  # no budget: priority and guarantee alone
        (0, 20.0, 24, 16, False, "limit-budget"),  # the budget alone
        (0, None, 24, 8, False, "kept"),  # equal priority: nodes are reserved for a large gang after an hour
        (0, None, 4, 8, True, "first"),  # equal priority, and short
        (5, None, 4, 8, False, "blocks"),  # short, but would borrow
        (5, None, 24, 4, False, "kept"),  # within its guarantee, but its limit ends too late
        (5, None, 4, 4, True, "first"),  # within its guarantee, and short
        (5, 20.0, 4, 4, True, "first"),  # 16 GPU-hours of 20
        (5, 20.0, 6, 4, False, "limit-budget"),  # 24 GPU-hours of 20
    ],
)
def test_non_preemptible_job_beside_a_waiting_gang(
    priority: int, budget_gpu_h: float | None, limit_h: float, gpus: int, starts: bool, code: str
) -> None:
    snapshot = cluster(budget_gpu_h)
    run(snapshot, Job("old", "owner", 4, limit_s=8 * HOUR_S), [0], [4])
    snapshot.submit([Job("gang", "owner", 32, 0.0, priority)])
    snapshot.advance(NOW)
    snapshot.submit([Job("late", "borrower", gpus, NOW, limit_s=limit_h * HOUR_S)])
    assert decided(snapshot).get("start", []) == (["late"] if starts else [])
    assert explain_wait(snapshot, NOW, HEADWAY, "late").reason.code == code
