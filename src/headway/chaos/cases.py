"""The rows of the fault matrix: what breaks, how the run must take it, and what it is held against.

A row is plain data and two functions of a `Scene`, the run that it strikes: which faults, and what of the recipe they
need to be otherwise. How it must be taken is one of a few ways:

    restarted     workers are started again by their agent, from the newest state
    woken         the same workers go on after they stood still
    unhurt        no step waits for it
    resumed       the run is over for its keeper; somebody resumes it, and it ends as if nothing had been
    refused       going on would be wrong: it must stop, and say why
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGKILL, SIGTERM, SIGUSR1, Signals
from typing import Literal

from headway.errors import RecipeError, UsageError
from headway.recipe import FaultPlan, Recipe
from headway.recipe.faults import AGENT, KEEPER

__all__ = ["CASES", "CaseContext", "FaultCase", "Way", "scene_of", "select_cases"]

Way = Literal["restarted", "woken", "unhurt", "resumed", "refused"]
LEAST_STEPS = 6
SLOWER = 0.3
"""Of a step, that a slow worker takes longer."""
COPIED_S = 1.0
"""Within which a small state reaches a second node."""
SLOW_FOR_S = 8.0
"""Agents look for stragglers every few seconds, over the last steps."""


@dataclass(frozen=True)
class CaseContext:
    """The run that is struck."""

    workers: int
    steps: int
    batch: int
    disk_every: int
    """Steps between saves to disk; 0: only the last step is saved."""
    memory_every: int = 0
    step_s: float = 0.0
    """Median of a step that nothing happens to; 0: not known yet."""

    @property
    def step(self) -> int:
        """Where it strikes: a third of the way, when all timeouts are learnt."""
        return max(2, self.steps // 3)

    @property
    def last(self) -> int:
        """The worker that is struck."""
        return self.workers - 1

    @property
    def saved(self) -> int:
        """The first step from there on that is saved to memory or disk; the last one is in any case."""
        every = [steps for steps in (self.memory_every, self.disk_every) if steps]
        return min([self.steps, *(_next(self.step, steps) for steps in every)])

    @property
    def on_disk(self) -> int:
        """The first step from there on, but not the last one, that is saved to disk."""
        step = _next(self.step, self.disk_every) if self.disk_every else self.steps
        if step >= self.steps:
            raise RecipeError(
                f"no save to disk between step {self.step} and the last",
                hint=f"--set checkpoint.every_steps={max(1, self.steps // 6)}",
            )
        return step


def scene_of(recipe: Recipe, workers: int, step_s: float = 0.0) -> CaseContext:
    """The scene that a recipe makes."""
    every = recipe.checkpoint.every_steps
    if every == "auto":
        raise RecipeError(
            "faults strike at known steps, and checkpoint.every_steps = auto saves at any",
            hint="--set checkpoint.every_steps=25",
        )
    if recipe.train.steps < LEAST_STEPS:
        raise RecipeError(
            f"a run of {recipe.train.steps} steps is over before a fault can strike", hint="--set train.steps=60"
        )
    return CaseContext(
        workers, recipe.train.steps, recipe.train.batch, every, recipe.checkpoint.memory_every_steps, step_s
    )


def _next(step: int, every: int) -> int:
    return -(-step // every) * every


@dataclass(frozen=True)
class FaultCase:
    """One way for things to break."""

    name: str
    what: str
    """In words, for the docs."""
    way: Way
    signs: tuple[str, ...]
    """Kinds of the agent's events by which it is noticed; none where the run's processes themselves end."""
    plan: Callable[[CaseContext], FaultPlan]
    attempts: int = 2
    """Lives that the run must have had at its end."""
    settings: Callable[[CaseContext], list[str]] = lambda _: []
    """What of the recipe is otherwise, as `--set` takes it; the run that it is held against has the same."""
    names: bool = False
    """Whether the worker that was struck must be named."""
    least_workers: int = 1
    even: bool = False
    """Whether workers must come in pairs."""
    signal: Signals | None = None
    """Sent to the keeper at the scene's step."""
    nodes: int = 1
    """Machines that the run is on, each an agent here; the run that it is held against is on one."""
    spares: int = 0
    skips: bool = False
    """Whether samples are passed over; the run that it is held against passes the same ones over."""

    @property
    def statuses(self) -> tuple[int, ...]:
        """What the run's keepers must exit with, one after the other."""
        if self.way == "resumed":
            return (75 if self.signal else -SIGKILL, 0)
        return (1,) if self.way == "refused" else (0,)


def _hang(point: Literal["data", "collective", "optimizer"]) -> Callable[[CaseContext], FaultPlan]:
    return lambda scene: FaultPlan().add("hang", point=point, step=scene.step, rank=scene.last, attempt=None)


def _kill_worker(scene: CaseContext) -> FaultPlan:
    return FaultPlan().add("kill", point="compute", step=scene.step, rank=scene.last, attempt=None)


def _at_agent(*ranks: int, action: Literal["kill", "stop"] = "kill") -> Callable[[CaseContext], FaultPlan]:
    def plan(scene: CaseContext) -> FaultPlan:
        found = FaultPlan()
        for rank in ranks:
            found = found.add(action, point="watch", step=scene.step, rank=rank, attempt=None)
        return found

    return plan


def _slow(scene: CaseContext) -> FaultPlan:
    seconds = round(max(1e-3, SLOWER * scene.step_s), 6)
    return FaultPlan().add("slow", point="data", step=scene.step, rank=scene.last, seconds=seconds)


def _long_enough(scene: CaseContext) -> list[str]:
    """So many steps that an agent has time to see who is slow, in the two thirds that are left of them."""
    slowly = SLOW_FOR_S / max(1e-3, (1 + SLOWER) * scene.step_s)
    return [f"train.steps={max(scene.steps, math.ceil(1.5 * slowly))}"]


def _nan(scene: CaseContext, always: bool = False) -> FaultPlan:
    first = (scene.step - 1) * scene.batch if always else None
    return FaultPlan().add(
        "nan", point="collective", step=scene.step, rank=scene.last, attempt=None, always=always, cursor=first
    )


def _struck_again(scene: CaseContext) -> FaultPlan:
    """The same worker dies, and once more as it is restored."""
    return _kill_worker(scene).add("kill", point="restore", rank=scene.last, attempt=2)


def _at_node(action: Literal["kill-node", "stop-node"]) -> Callable[[CaseContext], FaultPlan]:
    """A moment after the state before it has reached a second node."""
    return lambda scene: _after_copies(FaultPlan(), scene.step, scene.last).add(
        action, step=scene.step, rank=scene.last
    )


def _two_nodes(scene: CaseContext) -> FaultPlan:
    """A node, and the one that took its place as soon as it has made a step."""
    step = scene.step + 1
    plan = _after_copies(_at_node("kill-node")(scene), step, scene.last, attempt=2)
    return plan.add("kill-node", step=step, rank=scene.last, attempt=2)


def _after_copies(plan: FaultPlan, step: int, rank: int, attempt: int = 1) -> FaultPlan:
    return plan.stall("start", step, COPIED_S, rank, attempt)


CASES = (
    FaultCase("kill-worker", "SIGKILL of a worker", "restarted", ("exit",), _kill_worker),
    FaultCase(
        "kill-all", "SIGKILL of all workers", "restarted", ("exit",),
        # In the first attempt only: a worker may die of its neighbour's death before it gets there.
        lambda scene: FaultPlan().kill(step=scene.step, point="start"),
    ),
    FaultCase("kill-agent", "SIGKILL of the agent", "unhurt", ("adopted",), _at_agent(AGENT), attempts=1),
    FaultCase("kill-agent-and-keeper", "SIGKILL of agent and keeper", "resumed", (), _at_agent(KEEPER, AGENT)),
    FaultCase(
        "stop-worker", "SIGSTOP of a worker", "woken", ("hang", "woken"),
        lambda scene: FaultPlan().add("stop", point="compute", step=scene.step, rank=scene.last, attempt=None),
        attempts=1, names=True,
    ),
    FaultCase("stop-agent", "SIGSTOP of the agent", "unhurt", ("alive",), _at_agent(AGENT, action="stop"), attempts=1),
    FaultCase(
        "exception", "an exception at a step", "restarted", ("exit",),
        lambda scene: FaultPlan().add("raise", point="compute", step=scene.step, rank=scene.last, attempt=None),
    ),
    FaultCase(
        "exit-in-save", "a worker leaves in the middle of a save", "restarted", ("exit",),
        lambda scene: FaultPlan().add("exit", point="saved", step=scene.saved, rank=scene.last, attempt=None),
    ),
    FaultCase("hang-data", "a hang in the data loader", "restarted", ("hang",), _hang("data"), names=True),
    FaultCase(
        "hang-collective", "a hang inside a collective", "restarted", ("hang",), _hang("collective"), names=True,
        least_workers=2,
    ),
    FaultCase("hang-optimizer", "a hang in the optimizer", "restarted", ("hang",), _hang("optimizer"), names=True),
    FaultCase(
        "slow-rank", f"a worker whose data comes {SLOWER:.0%} of a step late from then on", "unhurt", ("straggler",),
        _slow, attempts=1, settings=_long_enough, names=True, least_workers=2,
    ),
    FaultCase(
        "full-disk", "a full disk for one save", "unhurt", ("unsaved",),
        lambda scene: FaultPlan().add("full-disk", point="write", step=scene.on_disk, rank=AGENT, attempt=None),
        attempts=1,
    ),
    FaultCase("nan-once", "a loss that is not a number, once", "restarted", ("exit",), _nan),
    FaultCase(
        "nan-always", "the same, whenever the step is made", "restarted", ("exit",),
        lambda scene: _nan(scene, always=True), attempts=3,
        settings=lambda _: ["health.if_not_finite=skip"], skips=True,
    ),
    FaultCase(
        "flipped-bit", "a bit of a parameter flips in one replica", "restarted", ("exit",),
        lambda scene: FaultPlan().add("flip", point="start", step=scene.step, rank=scene.last, attempt=None),
        settings=lambda scene: ["parallel.replicate=2", f"parallel.shard={scene.workers // 2}"], least_workers=2,
        even=True,
    ),
    FaultCase("sigterm", "SIGTERM to the run", "resumed", (), lambda _: FaultPlan(), signal=SIGTERM),
    FaultCase("sigusr1", "SIGUSR1 to the run", "resumed", (), lambda _: FaultPlan(), signal=SIGUSR1),
    FaultCase("fault-in-recovery", "a worker dies, and again when it is restored", "restarted", ("exit",),
        _struck_again, attempts=3),
    FaultCase(
        "same-error", "an exception whenever a step is made", "refused", ("exit",),
        lambda scene: FaultPlan().add("raise", point="compute", step=scene.step, rank=scene.last, always=True),
    ),
    FaultCase(
        "kill-node", "SIGKILL of all that a machine of two does; there is a spare one", "restarted", ("exit",),
        _at_node("kill-node"), least_workers=2, nodes=2, spares=1,
    ),
    FaultCase(
        "stop-node", "SIGSTOP of a machine's agent", "restarted", ("exit",), _at_node("stop-node"), least_workers=2,
        nodes=2, spares=1,
    ),
    FaultCase(
        "kill-two-nodes", "the machine that takes a lost one's place is lost too", "restarted", ("exit",), _two_nodes,
        attempts=3, least_workers=2, nodes=2, spares=2,
    ),
    FaultCase(
        "kill-lead", "SIGKILL of the agent that leads those of other machines", "restarted", ("end",),
        _at_agent(AGENT), least_workers=2, nodes=2,
    ),
)  # fmt: skip
"""Every row, in the order of the table."""


def select_cases(names: str, workers: int) -> list[FaultCase]:
    """The rows that were asked for: `all` of those that so many workers can show, or some by name."""
    if names == "all":
        return [row for row in CASES if _fits(row, workers)]
    return [_named(name.strip(), workers) for name in names.split(",")]


def _named(name: str, workers: int) -> FaultCase:
    row = next((row for row in CASES if row.name == name), None)
    if row is None:
        raise UsageError(f"there is no fault {name!r}", hint="all, or some of: " + ", ".join(row.name for row in CASES))
    if not _fits(row, workers):
        some = "an even number of workers" if row.even else f"{row.least_workers} workers or more"
        raise UsageError(f"{name} needs {some}, not {workers}", hint="--workers 2")
    return row


def _fits(row: FaultCase, workers: int) -> bool:
    return workers >= row.least_workers and not (row.even and workers % 2)
