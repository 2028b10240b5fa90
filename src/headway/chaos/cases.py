"""The cases of the fault matrix: what breaks, how the run must recover, and what it is compared with.

A case is plain data and two functions of a `CaseContext`, the run under test: its faults, and the recipe settings they
need. The run must recover in one of these ways:

    restarted     the agent restarts workers from the newest state
    woken         the same workers continue after they were stopped
    unhurt        no step waits for it
    resumed       the launcher exits; the run is resumed, and ends like the unfaulted one
    refused       continuing would be wrong: it must stop and say why
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGKILL, SIGTERM, SIGUSR1, Signals
from typing import Literal

from headway.errors import RecipeError, UsageError, plural, suggest
from headway.recipe import FaultPlan, Recipe
from headway.recipe.faults import AGENT, KEEPER, Action, ChildPoint, WorkerPoint
from headway.rl.sandbox import check_sandbox, why_no_sandbox

Way = Literal["restarted", "woken", "unhurt", "resumed", "refused"]
MIN_STEPS = 6
SLOWDOWN = 0.3
"""How much longer a step of the slow worker takes, as a share of a step."""
REPLICATION_S = 1.0
"""Time in which a small snapshot reaches a second node."""
SLOW_FOR_S = 8.0
"""Agents check for stragglers every few seconds, over the last steps."""


@dataclass(frozen=True)
class CaseContext:
    """The run under test."""

    workers: int
    steps: int
    batch: int
    disk_every: int
    """Steps between saves to disk; 0: only the last step is saved."""
    memory_every: int = 0
    step_s: float = 0.0
    """Median unfaulted step; 0: not known yet."""

    @property
    def step(self) -> int:
        """Step of the fault: a third of the way, when all timeouts are learned."""
        return max(2, self.steps // 3)

    @property
    def last(self) -> int:
        """Rank of the faulted worker."""
        return self.workers - 1

    @property
    def saved(self) -> int:
        """The first step from there on that is saved to memory or disk; the last one always is."""
        intervals = [every for every in (self.memory_every, self.disk_every) if every]
        return min([self.steps, *(next_multiple(self.step, every) for every in intervals)])

    @property
    def on_disk(self) -> int:
        """The first step from there on, except the last, that is saved to disk."""
        step = next_multiple(self.step, self.disk_every) if self.disk_every else self.steps
        if step >= self.steps:
            raise RecipeError(
                f"no save to disk between step {self.step} and the last",
                hint=f"--set checkpoint.every_steps={max(1, self.steps // 6)}",
            )
        return step


def make_context(recipe: Recipe, workers: int, step_s: float = 0.0) -> CaseContext:
    """Make the context of a recipe's runs."""
    every = recipe.checkpoint.every_steps
    if every == "auto":
        raise RecipeError(
            "faults need known save steps, but checkpoint.every_steps is auto",
            hint="--set checkpoint.every_steps=25",
        )
    if recipe.train.steps < MIN_STEPS:
        raise RecipeError(
            f"train.steps is {recipe.train.steps}: too few for a fault and a recovery", hint="--set train.steps=60"
        )
    return CaseContext(
        workers, recipe.train.steps, recipe.train.batch, every, recipe.checkpoint.memory_every_steps, step_s
    )


def next_multiple(step: int, every: int) -> int:
    """Return the first multiple of `every` from `step` on."""
    return -(-step // every) * every


@dataclass(frozen=True)
class FaultCase:
    """One kind of failure, and how a run must recover from it."""

    name: str
    what: str
    """Description, for the docs."""
    way: Way
    signs: tuple[str, ...]
    """Kinds of agent events that show it was noticed; empty if the run's processes end."""
    plan: Callable[[CaseContext], FaultPlan]
    attempts: int = 2
    """Attempts that the run must have had at its end."""
    settings: Callable[[CaseContext], list[str]] = lambda _: []
    """Recipe settings as for `--set`; the reference run has the same."""
    names: bool = False
    """Whether the agent must name the faulted worker."""
    min_workers: int = 1
    even: bool = False
    """Whether the number of workers must be even."""
    signal: Signals | None = None
    """Sent to the launcher at the context's step."""
    nodes: int = 1
    """Emulated nodes of the run; the reference run has one."""
    spares: int = 0
    skips: bool = False
    """Whether samples are skipped; the reference run skips the same ones."""
    policy: bool = False
    """Whether the run must be one of reinforcement learning."""
    sandbox: bool = False
    """Whether the machine must be able to build sandboxes."""

    @property
    def statuses(self) -> tuple[int, ...]:
        """Exit statuses of the run's launchers, one after the other."""
        if self.way == "resumed":
            return (75 if self.signal else -SIGKILL, 0)
        return (1,) if self.way == "refused" else (0,)


def _at_worker(action: Action, point: WorkerPoint) -> Callable[[CaseContext], FaultPlan]:
    return lambda context: FaultPlan().add(action, point=point, step=context.step, rank=context.last, attempt=None)


def _at_child(action: Action, point: ChildPoint) -> Callable[[CaseContext], FaultPlan]:
    return lambda context: FaultPlan().add(action, point=point, step=context.step, rank=context.last, attempt=None)


def _in_sandboxes(_: CaseContext) -> list[str]:
    return ['rl.rewards=["headway.chaos.rewards:digits_in_sandbox"]']


def _with_generators(_: CaseContext) -> list[str]:
    return ["rl.staleness=1", "rl.generators=1"]


def _at_agent(action: Action) -> Callable[[CaseContext], FaultPlan]:
    return lambda context: FaultPlan().add(action, point="watch", step=context.step, rank=AGENT, attempt=None)


def _kill_launcher_and_agent(context: CaseContext) -> FaultPlan:
    launcher = FaultPlan().add("kill", point="watch", step=context.step, rank=KEEPER, attempt=None)
    return launcher.add("kill", point="watch", step=context.step, rank=AGENT, attempt=None)


def _slow(context: CaseContext) -> FaultPlan:
    seconds = round(max(1e-3, SLOWDOWN * context.step_s), 6)
    return FaultPlan().add("slow", point="data", step=context.step, rank=context.last, seconds=seconds)


def _enough_steps(context: CaseContext) -> list[str]:
    """Set enough steps for the agent to find the straggler in the two thirds that are left."""
    slow_steps = SLOW_FOR_S / max(1e-3, (1 + SLOWDOWN) * context.step_s)
    return [f"train.steps={max(context.steps, math.ceil(1.5 * slow_steps))}"]


def _nan(context: CaseContext, always: bool = False) -> FaultPlan:
    first = (context.step - 1) * context.batch if always else None
    return FaultPlan().add(
        "nan", point="collective", step=context.step, rank=context.last, attempt=None, always=always, cursor=first
    )


def _kill_twice(context: CaseContext) -> FaultPlan:
    """Kill a worker, and again while it is restored."""
    return _at_worker("kill", "compute")(context).add("kill", point="restore", rank=context.last, attempt=2)


def _at_node(action: Action) -> Callable[[CaseContext], FaultPlan]:
    """A fault of a node, after the snapshot before it has reached a second node."""
    return lambda context: _after_replication(FaultPlan(), context.step, context.last).add(
        action, step=context.step, rank=context.last
    )


def _two_nodes(context: CaseContext) -> FaultPlan:
    """Kill a node, and the one that replaces it after its first step."""
    step = context.step + 1
    plan = _after_replication(_at_node("kill-node")(context), step, context.last, attempt=2)
    return plan.add("kill-node", step=step, rank=context.last, attempt=2)


def _after_replication(plan: FaultPlan, step: int, rank: int, attempt: int = 1) -> FaultPlan:
    return plan.stall("start", step, REPLICATION_S, rank, attempt)


CASES = (
    FaultCase("kill-worker", "SIGKILL of a worker", "restarted", ("exit",), _at_worker("kill", "compute")),
    FaultCase(
        "kill-all", "SIGKILL of all workers", "restarted", ("exit",),
        # In the first attempt only: a worker may die of its neighbour's death before it gets there.
        lambda context: FaultPlan().kill(step=context.step, point="start"),
    ),
    FaultCase("kill-agent", "SIGKILL of the agent", "unhurt", ("adopted",), _at_agent("kill"), attempts=1),
    FaultCase("kill-agent-and-keeper", "SIGKILL of agent and launcher", "resumed", (), _kill_launcher_and_agent),
    FaultCase(
        "stop-worker", "SIGSTOP of a worker", "woken", ("hang", "woken"), _at_worker("stop", "compute"),
        attempts=1, names=True,
    ),
    FaultCase("stop-agent", "SIGSTOP of the agent", "unhurt", ("alive",), _at_agent("stop"), attempts=1),
    FaultCase("exception", "an exception at a step", "restarted", ("exit",), _at_worker("raise", "compute")),
    FaultCase(
        "exit-in-save", "a worker exits in the middle of a save", "restarted", ("exit",),
        lambda context: FaultPlan().add("exit", point="saved", step=context.saved, rank=context.last, attempt=None),
    ),
    FaultCase("hang-data", "a hang in the data loader", "restarted", ("hang",), _at_worker("hang", "data"), names=True),
    FaultCase(
        "hang-collective", "a hang inside a collective", "restarted", ("hang",), _at_worker("hang", "collective"),
        names=True, min_workers=2,
    ),
    FaultCase(
        "hang-optimizer", "a hang in the optimizer", "restarted", ("hang",), _at_worker("hang", "optimizer"),
        names=True,
    ),
    FaultCase(
        "slow-rank", f"a worker whose data is late by {SLOWDOWN:.0%} of a step from then on", "unhurt", ("straggler",),
        _slow, attempts=1, settings=_enough_steps, names=True, min_workers=2,
    ),
    FaultCase(
        "full-disk", "a full disk for one save", "unhurt", ("unsaved",),
        lambda context: FaultPlan().add("full-disk", point="write", step=context.on_disk, rank=AGENT, attempt=None),
        attempts=1,
    ),
    FaultCase("nan-once", "a NaN loss, once", "restarted", ("exit",), _nan),
    FaultCase(
        "nan-always", "a NaN loss whenever the step runs", "restarted", ("exit",),
        lambda context: _nan(context, always=True), attempts=3,
        settings=lambda _: ["health.if_not_finite=skip"], skips=True,
    ),
    FaultCase(
        "flipped-bit", "a bit of a parameter flips in one replica", "restarted", ("exit",), _at_worker("flip", "start"),
        settings=lambda context: ["parallel.replicate=2", f"parallel.shard={context.workers // 2}"], min_workers=2,
        even=True,
    ),
    FaultCase("sigterm", "SIGTERM to the run", "resumed", (), lambda _: FaultPlan(), signal=SIGTERM),
    FaultCase("sigusr1", "SIGUSR1 to the run", "resumed", (), lambda _: FaultPlan(), signal=SIGUSR1),
    FaultCase("fault-in-recovery", "a worker dies, and again while it is restored", "restarted", ("exit",),
        _kill_twice, attempts=3),
    FaultCase(
        "same-error", "an exception whenever a step runs", "refused", ("exit",),
        lambda context: FaultPlan().add("raise", point="compute", step=context.step, rank=context.last, always=True),
    ),
    FaultCase(
        "kill-node", "SIGKILL of everything on one of two nodes; there is a spare", "restarted", ("exit",),
        _at_node("kill-node"), min_workers=2, nodes=2, spares=1,
    ),
    FaultCase(
        "stop-node", "SIGSTOP of a node's agent", "restarted", ("exit",), _at_node("stop-node"), min_workers=2,
        nodes=2, spares=1,
    ),
    FaultCase(
        "kill-two-nodes", "a lost node, and the loss of its replacement", "restarted", ("exit",), _two_nodes,
        attempts=3, min_workers=2, nodes=2, spares=2,
    ),
    FaultCase(
        "kill-lead", "SIGKILL of the leader", "restarted", ("end",),
        _at_agent("kill"), min_workers=2, nodes=2,
    ),
    FaultCase(
        "kill-generate", "SIGKILL of a worker that samples answers", "restarted", ("exit",),
        _at_worker("kill", "generate"), policy=True,
    ),
    FaultCase(
        "kill-score", "SIGKILL of a worker that waits for scores", "restarted", ("exit",),
        _at_worker("kill", "score"), policy=True,
    ),
    FaultCase(
        "kill-update", "SIGKILL of a worker before its update", "restarted", ("exit",),
        _at_worker("kill", "optimizer"), policy=True,
    ),
    FaultCase(
        "hang-generate", "a hang while answers are sampled", "restarted", ("hang",), _at_worker("hang", "generate"),
        names=True, policy=True,
    ),
    FaultCase(
        "hang-score", "a hang while a worker waits for scores", "restarted", ("hang",), _at_worker("hang", "score"),
        names=True, policy=True,
    ),
    FaultCase(
        "kill-scorer", "SIGKILL of a process that scores", "unhurt", (), _at_child("kill", "scorer"), attempts=1,
        policy=True,
    ),
    FaultCase(
        "stop-scorer", "SIGSTOP of a process that scores", "unhurt", (), _at_child("stop", "scorer"), attempts=1,
        policy=True,
    ),
    FaultCase(
        "kill-generator", "SIGKILL of a process that samples while its worker trains", "unhurt", (),
        _at_child("kill", "generator"), attempts=1, settings=_with_generators, policy=True,
    ),
    FaultCase(
        "stop-generator", "SIGSTOP of a process that samples while its worker trains", "unhurt", (),
        _at_child("stop", "generator"), attempts=1, settings=_with_generators, policy=True,
    ),
    FaultCase(
        "kill-sandbox", "SIGKILL of a sandbox of a code reward", "unhurt", (), _at_child("kill", "sandbox"),
        attempts=1, settings=_in_sandboxes, policy=True, sandbox=True,
    ),
    FaultCase(
        "stop-sandbox", "SIGSTOP of a sandbox of a code reward", "unhurt", (), _at_child("stop", "sandbox"),
        attempts=1, settings=_in_sandboxes, policy=True, sandbox=True,
    ),
)  # fmt: skip
"""All cases, in the order of the table."""


def select_cases(names: str, workers: int, *, policy: bool = False) -> list[FaultCase]:
    """Return some cases by name, or those of `all` that so many workers, such a recipe and this machine can run."""
    if names == "all":
        fitting = [case for case in CASES if _fits(case, workers) and (policy or not case.policy)]
        return [case for case in fitting if not case.sandbox or why_no_sandbox() is None]
    return [_named(name.strip(), workers, policy) for name in names.split(",")]


def _named(name: str, workers: int, policy: bool) -> FaultCase:
    case = next((case for case in CASES if case.name == name), None)
    if case is None:
        names = [case.name for case in CASES]
        raise UsageError(f"unknown fault {name!r}", hint=suggest(name, names, "docs/concepts/faults.md lists all"))
    if not _fits(case, workers):
        requirement = "an even number of workers" if case.even else f"{plural(case.min_workers, 'worker')} or more"
        raise UsageError(f"{name} needs {requirement}, not {workers}", hint="--workers 2")
    if case.policy and not policy:
        raise UsageError(f"{name} needs a recipe of reinforcement learning", hint="recipes/chaos-rl.toml")
    if case.sandbox:
        check_sandbox()
    return case


def _fits(case: FaultCase, workers: int) -> bool:
    return workers >= case.min_workers and not (case.even and workers % 2)
