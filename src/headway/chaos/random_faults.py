"""Many faults for one run, drawn from a seed: `plan(seed, count, ...) -> FaultPlan`, pure.

The same seed gives the same faults. Each strikes once, a few steps after the one before has been lived through.
Faults that need somebody to resume the run (agent and keeper both killed) are left out.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from headway.recipe import Fault, FaultPlan
from headway.recipe.faults import AGENT

__all__ = ["count_kinds", "draw_fault_plan", "steps_needed"]

FIRST, LAST = 8, 12
"""Steps before the first fault, which show how long things take, and after the last."""
APART = (4, 9)
"""Steps to the next fault, fewest and most."""
REST = 4
"""Other faults between two deaths of agents: a keeper takes many in a few seconds for a mistake in the agent."""


@dataclass(frozen=True)
class _Kind:
    """A kind of fault: how often it comes, how many steps it goes on beside the run, where it can strike."""

    name: str
    weight: float
    make: Callable[[int, int | None], Fault]
    """For a step and a rank."""
    all_workers: bool = False
    agent: bool = False
    lasts: int = 0
    """Steps that the run makes until it is over: those of a dead or stopped agent go on."""
    at: str = "any"
    """Steps that it can strike in: any, those that are saved, those that go to disk."""
    replicas: bool = False
    """Whether it is found on meshes with replicas only."""
    rests: bool = False
    """Whether some others come before the next of its kind."""


def _once(action: str, point: str) -> Callable[[int, int | None], Fault]:
    return lambda step, rank: Fault.model_validate(
        {"action": action, "point": point, "step": step, "rank": rank, "attempt": None}
    )


KINDS = (
    _Kind("kill a worker at a step's start", 10, _once("kill", "start")),
    _Kind("kill a worker in the forward pass", 10, _once("kill", "compute")),
    _Kind("kill a worker before the update", 10, _once("kill", "optimizer")),
    _Kind("kill all workers", 10, _once("kill", "start"), all_workers=True),
    _Kind("kill the agent", 10, _once("kill", "watch"), agent=True, lasts=50, rests=True),
    _Kind("stop a worker", 4, _once("stop", "compute")),
    _Kind("stop the agent", 2, _once("stop", "watch"), agent=True, lasts=120),
    _Kind("an exception", 12, _once("raise", "compute")),
    _Kind("leave in a save", 12, _once("exit", "saved"), at="saved"),
    _Kind("leave before a save", 6, _once("exit", "save"), at="saved"),
    _Kind("hang in the data loader", 1, _once("hang", "data")),
    _Kind("hang in a collective", 1, _once("hang", "collective")),
    _Kind("hang in the optimizer", 1, _once("hang", "optimizer")),
    _Kind("a full disk", 5, _once("full-disk", "write"), agent=True, at="disk"),
    _Kind("a loss that is no number", 10, _once("nan", "collective")),
    _Kind("a flipped bit", 10, _once("flip", "start"), replicas=True),
)


def draw_fault_plan(
    seed: int, count: int, workers: int, *, saved_every: int, disk_every: int, replicas: bool = False
) -> FaultPlan:
    """So many faults one after the other. Saves are made every so many steps (0: never), at all and to disk."""
    chance = random.Random(f"headway chaos {seed}")
    possible = [kind for kind in KINDS if _possible(kind, saved_every, disk_every, replicas)]
    drawn, faults, step = list[_Kind](), list[Fault](), FIRST
    for _ in range(count):
        now = [kind for kind in possible if not (kind.rests and kind in drawn[-REST:])]
        kind = chance.choices(now, [kind.weight for kind in now])[0]
        drawn.append(kind)
        step += chance.randint(*APART)
        step = _not_before(step, {"saved": saved_every, "disk": disk_every}.get(kind.at, 1))
        rank = AGENT if kind.agent else None if kind.all_workers else chance.randrange(workers)
        faults.append(kind.make(step, rank))
        step += kind.lasts
    return FaultPlan(faults=tuple(faults))


def _possible(kind: _Kind, saved_every: int, disk_every: int, replicas: bool) -> bool:
    places = {"any": 1, "saved": saved_every, "disk": disk_every}
    return places[kind.at] > 0 and (replicas or not kind.replicas)


def _not_before(step: int, every: int) -> int:
    return -(-step // every) * every


def steps_needed(plan: FaultPlan) -> int:
    """Steps that a run needs for all faults to strike, and to go on for a while."""
    last = max((fault.step or 0 for fault in plan.faults), default=FIRST)
    return last + LAST + max(kind.lasts for kind in KINDS)


def count_kinds(plan: FaultPlan) -> dict[str, int]:
    """How many there are of each kind, by their names."""
    found = Counter(_name(fault) for fault in plan.faults)
    return {kind.name: found[kind.name] for kind in KINDS if found[kind.name]}


def _name(fault: Fault) -> str:
    """The kind that would make it."""
    fits = (kind for kind in KINDS if kind.make(fault.step or 1, fault.rank) == fault)
    return next(kind.name for kind in fits if kind.all_workers == (fault.rank is None))
