"""The fault matrix: the unfaulted run first, then one run a row, each held against the truth that is its own.

truth     a run of the same recipe that nothing happens to; rows that need another recipe have a truth of their own
try       one run that a row's faults strike: figures, sentences, and what is not as it must be
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headway.chaos.cases import FaultCase, scene_of
from headway.chaos.driver import ChaosHarness, FaultedRun, LauncherSignal, forget, run_with_faults
from headway.chaos.random_faults import draw_fault_plan, steps_needed
from headway.chaos.recovery_times import (
    RecoveryTimes,
    in_words,
    lost_s,
    measure,
    median_step_s,
    oracle_violations,
    parted,
    said,
)
from headway.errors import RunError
from headway.recipe import FaultPlan, Recipe, with_settings
from headway.recipe.faults import read_fired_faults
from headway.track import RunFolder, compare_runs, read_recipe

__all__ = ["CaseResult", "CaseRun", "FaultMatrix", "SoakResult", "chaos", "run_soak"]

RESTARTS = 3
"""A recipe that wants fewer has as many here: what is tried out is going on."""
PATIENCE = 20.0
"""How many times as long as the unfaulted run a faulted one may take, beside LEAST_PATIENCE_S."""
LEAST_PATIENCE_S = 120.0

Tell = Callable[[str], None]


@dataclass(frozen=True)
class CaseRun:
    """One run that a row's faults struck."""

    figures: RecoveryTimes | None
    """None when nothing struck."""
    said: tuple[str, ...]
    complaints: tuple[str, ...]
    """What is not as it must be; nothing where the oracle is met."""
    left: tuple[str, ...]
    """What it left behind."""
    seconds: float
    """The whole run took."""

    @property
    def met(self) -> bool:
        """Whether all is as it must be."""
        return not self.complaints and not self.left


@dataclass(frozen=True)
class CaseResult:
    """A row and its tries."""

    row: FaultCase
    tries: tuple[CaseRun, ...]

    @property
    def met(self) -> int:
        """Tries in which all was as it must be."""
        return sum(one.met for one in self.tries)

    def median(self, figure: Callable[[RecoveryTimes], float | None]) -> float | None:
        """Of a figure, over the tries that have it."""
        found = [value for one in self.tries if one.figures and (value := figure(one.figures)) is not None]
        return statistics.median(found) if found else None


@dataclass(frozen=True)
class FaultMatrix:
    """All rows."""

    recipe: str
    workers: int
    steps: int
    step_s: float
    """Median step of the unfaulted run."""
    results: tuple[CaseResult, ...]
    truth: RunFolder
    """The unfaulted run."""

    @property
    def met(self) -> bool:
        """Whether every try of every row met its oracle."""
        return all(result.met == len(result.tries) for result in self.results)


@dataclass(frozen=True)
class SoakResult:
    """One run that many faults struck."""

    seed: int
    faults: FaultPlan
    struck: tuple[int, ...]
    """The numbers of those that did."""
    steps: int
    attempts: int
    lost_s: float
    """Of all workers, on noticing, starting again and redoing."""
    complaints: tuple[str, ...]
    left: tuple[str, ...]
    seconds: float
    """The whole run took."""

    @property
    def met(self) -> bool:
        """Whether all struck, it ended as if nothing had happened, and left nothing behind."""
        return not self.complaints and not self.left and len(self.struck) == len(self.faults.faults)


class _Truths:
    """Unfaulted runs, each made when it is first asked for."""

    def __init__(self, stage: ChaosHarness, tell: Tell) -> None:
        self._stage, self._tell = stage, tell
        self._made: list[tuple[Recipe, FaultedRun]] = []

    def of(self, recipe: Recipe) -> FaultedRun:
        """The run of a recipe that nothing happens to."""
        for other, lived in self._made:
            if other == recipe:
                return lived
        self._tell("the unfaulted run" + (f" of {recipe.train.steps} steps" if self._made else ""))
        lived = run_with_faults(self._stage, recipe, f"truth-{len(self._made) + 1}")
        if lived.statuses != [0] or lived.left:
            why = lived.left[0] + " was left behind" if lived.left else lived.reason
            raise RunError(
                f"the unfaulted run failed: {why}", hint="headway train shows whether the recipe runs at all"
            )
        self._made.append((recipe, lived))
        return lived


def chaos(stage: ChaosHarness, recipe: Recipe, rows: Sequence[FaultCase], repeat: int, tell: Tell) -> FaultMatrix:
    """Strike a recipe's runs with every row, so often."""
    recipe, truths = _with_restarts(recipe), _Truths(stage, tell)
    for row in rows:  # what cannot be planned is told before anything runs
        row.plan(scene_of(recipe, stage.workers))
    truth = truths.of(recipe)
    stage = replace(stage, patience_s=LEAST_PATIENCE_S + PATIENCE * truth.seconds)
    step_s = median_step_s(truth.records())
    results = []
    for number, row in enumerate(rows, start=1):
        tries = []
        for turn in range(1, repeat + 1):
            tell(f"{row.name}, {number} of {len(rows)}" + (f", try {turn} of {repeat}" if repeat > 1 else ""))
            tries.append(_try(stage, recipe, row, step_s, truths, f"{row.name}-{turn}"))
        results.append(CaseResult(row, tuple(tries)))
    return FaultMatrix(recipe.name, stage.workers, recipe.train.steps, step_s, tuple(results), truth.run)


def _with_restarts(recipe: Recipe) -> Recipe:
    return with_settings(recipe, [f"train.restarts={max(RESTARTS, recipe.train.restarts)}"])


def _try(stage: ChaosHarness, recipe: Recipe, row: FaultCase, step_s: float, truths: _Truths, name: str) -> CaseRun:
    """One run under a row's faults, and what came of it."""
    recipe = with_settings(recipe, row.settings(scene_of(recipe, stage.workers, step_s)))
    scene = scene_of(recipe, stage.workers, step_s)
    blow = None if row.signal is None else LauncherSignal(row.signal, scene.step)
    resumes = row.way == "resumed"
    lived = run_with_faults(
        stage, recipe, name, row.plan(scene), blow=blow, resumes=resumes, nodes=row.nodes, spares=row.spares
    )
    if not lived.struck:
        return CaseRun(None, (), ("the fault never struck",), tuple(lived.left), lived.seconds)
    truth = None if row.way == "refused" else truths.of(_same_skips(recipe, lived) if row.skips else recipe)
    records, moment = lived.records(), lived.struck[0]
    found = oracle_violations(
        row, records, statuses=lived.statuses, struck_ns=moment, rank=scene.last, steps=recipe.train.steps,
        against=None if truth is None else compare_runs(truth.run, lived.run),
    )  # fmt: skip
    figures = measure(records, moment, row.way, row.signs, lived.seen_ns)
    usual = 0.0 if truth is None else lost_s(truth.records())
    figures = replace(figures, lost_s=max(0.0, figures.lost_s - usual))
    if lived.not_resumed is not None:
        found.append(f"it could not be resumed: {lived.not_resumed}")
    forget(stage, lived)
    return CaseRun(figures, tuple(said(records, moment)), tuple(found), tuple(lived.left), lived.seconds)


def _same_skips(recipe: Recipe, lived: FaultedRun) -> Recipe:
    """The recipe with the samples passed over that a run came to pass over."""
    skip = [list(samples) for samples in read_recipe(lived.run).data.skip]
    return with_settings(recipe, [f"data.skip={skip}"])


def run_soak(stage: ChaosHarness, recipe: Recipe, count: int, seed: int, tell: Tell) -> SoakResult:
    """One run into which faults strike one after the other, as the seed has it."""
    scene = scene_of(recipe, stage.workers)
    faults = draw_fault_plan(
        seed, count, stage.workers, saved_every=scene.memory_every or scene.disk_every, disk_every=scene.disk_every,
        replicas=recipe.parallel is not None and recipe.parallel.replicate > 1,
    )  # fmt: skip
    recipe = with_settings(_with_restarts(recipe), [f"train.steps={steps_needed(faults)}"])
    truth = _Truths(stage, tell).of(recipe)
    tell(f"{count} faults in {recipe.train.steps} steps")
    stage = replace(stage, patience_s=LEAST_PATIENCE_S + PATIENCE * (truth.seconds + count))
    lived = run_with_faults(stage, recipe, f"random-{seed}", faults)
    records, met = lived.records(), {one.number for one in read_fired_faults(lived.run.faults)}
    found = parted(records, recipe.train.steps, compare_runs(truth.run, lived.run))
    if lived.statuses != [0]:
        found = [f"it ended with {in_words(lived.statuses)}: {lived.reason}", *found]
    return SoakResult(
        seed=seed,
        faults=faults,
        struck=tuple(sorted(met)),
        steps=recipe.train.steps,
        attempts=max(record.header.attempt for record in records),
        lost_s=lost_s(records),
        complaints=tuple(found),
        left=tuple(lived.left),
        seconds=lived.seconds,
    )
