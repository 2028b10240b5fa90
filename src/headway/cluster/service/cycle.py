"""The scheduling cycle of a live cluster, and when the next one is due."""

from dataclasses import dataclass
from typing import Protocol

from headway.cluster.service.grants import STOPS, LiveDecision
from headway.cluster.service.plane import ControlPlane
from headway.cluster.service.record_lines import RecordLines

MAX_GAP_S = 5.0
"""Between cycles while jobs wait: time alone lets a scheduler decide differently."""


class Decider(Protocol):
    """What decides, in this process or another."""

    def decide(self, lines: RecordLines, now_s: float) -> list[LiveDecision]:
        """Return the decisions for the state that a record leads to."""
        ...


@dataclass(frozen=True)
class CycleReport:
    """What a cycle did."""

    started: int = 0
    stopped: int = 0
    issued: int = 0
    """Jobs whose nodes were asked to start them."""
    outdated: bool = False
    """Whether nodes or users changed something meanwhile, so that the decisions were dropped: run another cycle."""


def run_cycle(plane: ControlPlane, decider: Decider) -> CycleReport:
    """Run one cycle. A crash between any two phases loses nothing: each is one transaction, and 5 can be repeated."""
    # 1 events: offer new jobs to the scheduler, note nodes that have fallen silent
    plane.take_events()
    # 2 snapshot: the record up to here is the state of the cluster
    lines, now_s = plane.lines, plane.now_s
    seen = len(lines)
    # 3 decide, in a process of its own
    decisions = decider.decide(lines, now_s) if plane.waits() else []
    # 4 record the decisions, with their placements, in one transaction
    current = plane.record_decisions(decisions, seen, now_s)
    # 5 apply: have nodes start what nothing stands in the way of
    issued = plane.apply()
    # 6 report
    if not current:
        return CycleReport(issued=issued, outdated=True)
    kinds = [decision.kind for decision in decisions]
    return CycleReport(kinds.count("start"), sum(kinds.count(kind) for kind in STOPS), issued)
