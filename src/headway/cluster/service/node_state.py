"""Which state a node is in, and for how long it has been silent: pure, but for a clock that is an argument."""

import math
from collections.abc import Callable, Iterable, Sequence

from headway.cluster.service.messages import NodeReport

LONGEST_LOOK_S = 15.0
"""Silence that one look may add: a service that was paused or busy longer could not have heard anybody."""


def node_state(*, reports: bool, fenced: bool, cordoned: bool, problems: Sequence[str]) -> str:
    """The state of a node, as the scheduler knows states: only a healthy one gets new jobs.

    `fenced`: something still runs there that was given up."""
    if not reports or fenced:
        return "draining"
    if problems:
        return "quarantined"
    return "draining" if cordoned else "healthy"


def node_reason(state: str, *, cordoned: bool, problems: Sequence[str]) -> str:
    """Why a node gets no new jobs, in a few words; empty if it gets some."""
    if state == "healthy":
        return ""
    if state == "quarantined":
        return "; ".join(problems)
    return "cordoned" if cordoned else "its agent does not report"


def unwanted_starts(report: NodeReport, wanted: Iterable[str]) -> list[str]:
    """What runs on a node although the service does not want it any more: until it has ended, nothing else starts."""
    known = set(wanted)
    return [start.key for start in report.starts if start.state == "running" and start.key not in known]


class NodeSilence:
    """How long nodes have not reported, by a clock that neither jumps nor goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looked = clock(), 0.0
        """When the service last looked, and how long it had been awake by then: replaced as a whole."""
        self._reported: dict[str, float] = {}
        """How long the service had been awake when each node last reported."""

    def hear(self, *names: str) -> None:
        """Note that nodes have reported, or are expected to from now on."""
        awake_s = self._awake_s()
        for name in names:
            self._reported[name] = awake_s

    def look(self) -> None:
        """Note that the service is awake: time beyond LONGEST_LOOK_S since the last look is no silence of any node."""
        self._looked = self._clock(), self._awake_s()

    def silent_for(self, seconds: float, names: Iterable[str]) -> set[str]:
        """The nodes that have not reported for longer."""
        since = self._awake_s() - seconds
        return {name for name in names if self._reported.get(name, -math.inf) < since}

    def _awake_s(self) -> float:
        looked, awake_s = self._looked
        return awake_s + min(self._clock() - looked, LONGEST_LOOK_S)
