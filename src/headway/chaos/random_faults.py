"""Draws many faults for one run from a seed: pure.

The same seed gives the same faults. Each fires once, a few steps after the run has recovered from the one before.
Faults after which the run must be resumed by hand (agent and launcher both killed) are excluded.
"""

import random
from collections import Counter
from dataclasses import dataclass

from headway.chaos.cases import next_multiple
from headway.recipe import Fault, FaultPlan
from headway.recipe.faults import AGENT, Action, Point

FIRST, LAST = 8, 12
"""Steps before the first fault, from which timeouts are learned, and after the last."""
INTERVAL = (4, 9)
"""Fewest and most steps to the next fault."""
REST = 4
"""Other faults between two deaths of agents: a launcher gives up after many in a few seconds."""


@dataclass(frozen=True)
class _Kind:
    """A kind of fault: how often it is drawn, how long it lasts, and where it can fire."""

    name: str
    weight: float
    action: Action
    point: Point
    all_workers: bool = False
    agent: bool = False
    lasts: int = 0
    """Steps that the run makes meanwhile: workers of a dead or stopped agent continue."""
    at: str = "any"
    """Steps in which it can fire: any, those saved, those saved to disk."""
    replicas: bool = False
    """Whether only meshes with replicas detect it."""
    rests: bool = False
    """Whether REST other faults come before the next of its kind."""

    def make(self, step: int, rank: int | None) -> Fault:
        """Make the fault of a step and a rank."""
        return Fault(action=self.action, point=self.point, step=step, rank=rank, attempt=None)


KINDS = (
    _Kind("kill a worker at a step's start", 10, "kill", "start"),
    _Kind("kill a worker in the forward pass", 10, "kill", "compute"),
    _Kind("kill a worker before the update", 10, "kill", "optimizer"),
    _Kind("kill all workers", 10, "kill", "start", all_workers=True),
    _Kind("kill the agent", 10, "kill", "watch", agent=True, lasts=50, rests=True),
    _Kind("stop a worker", 4, "stop", "compute"),
    _Kind("stop the agent", 2, "stop", "watch", agent=True, lasts=120),
    _Kind("an exception", 12, "raise", "compute"),
    _Kind("leave in a save", 12, "exit", "saved", at="saved"),
    _Kind("leave before a save", 6, "exit", "save", at="saved"),
    _Kind("hang in the data loader", 1, "hang", "data"),
    _Kind("hang in a collective", 1, "hang", "collective"),
    _Kind("hang in the optimizer", 1, "hang", "optimizer"),
    _Kind("a full disk", 5, "full-disk", "write", agent=True, at="disk"),
    _Kind("a loss that is no number", 10, "nan", "collective"),
    _Kind("a flipped bit", 10, "flip", "start", replicas=True),
)


def draw_fault_plan(
    seed: int, count: int, workers: int, *, saved_every: int, disk_every: int, replicas: bool = False
) -> FaultPlan:
    """Draw `count` faults, one after the other; states are saved every `saved_every` steps, to disk every `disk_every`
    (0: never)."""
    rng = random.Random(f"headway chaos {seed}")
    intervals = {"any": 1, "saved": saved_every, "disk": disk_every}
    possible = [kind for kind in KINDS if intervals[kind.at] and (replicas or not kind.replicas)]
    drawn, faults, step = list[_Kind](), list[Fault](), FIRST
    for _ in range(count):
        candidates = [kind for kind in possible if not (kind.rests and kind in drawn[-REST:])]
        kind = rng.choices(candidates, [kind.weight for kind in candidates])[0]
        drawn.append(kind)
        step = next_multiple(step + rng.randint(*INTERVAL), intervals[kind.at])
        rank = AGENT if kind.agent else None if kind.all_workers else rng.randrange(workers)
        faults.append(kind.make(step, rank))
        step += kind.lasts
    return FaultPlan(faults=tuple(faults))


def steps_needed(plan: FaultPlan) -> int:
    """Return the steps that a run needs for all faults to fire, and to continue for a while."""
    last = max((fault.step or 0 for fault in plan.faults), default=FIRST)
    return last + LAST + max(kind.lasts for kind in KINDS)


def count_kinds(plan: FaultPlan) -> dict[str, int]:
    """Return the number of faults per kind."""
    counts = Counter(_name(fault) for fault in plan.faults)
    return {kind.name: counts[kind.name] for kind in KINDS if counts[kind.name]}


def _name(fault: Fault) -> str:
    """Return the name of the kind that makes a fault."""
    matching = (kind for kind in KINDS if kind.make(fault.step or 1, fault.rank) == fault)
    return next(kind.name for kind in matching if kind.all_workers == (fault.rank is None))
