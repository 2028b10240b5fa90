"""The fault matrix: an unfaulted run first, then one run per case, each compared with its reference.

reference     an unfaulted run of the same recipe; cases that need another recipe have a reference of their own
try           one run under the faults of a case: recovery times, messages, and violations of its oracle
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headway.chaos.cases import FaultCase, make_context
from headway.chaos.driver import ChaosHarness, FaultedRun, LauncherSignal, run_with_faults
from headway.chaos.random_faults import draw_fault_plan, steps_needed
from headway.chaos.recovery_times import (
    RecoveryTimes,
    agent_messages,
    describe_statuses,
    differences,
    known_median,
    lost_s,
    measure,
    median_step_s,
    oracle_violations,
)
from headway.errors import RunError, plural
from headway.recipe import FaultPlan, Recipe, with_settings
from headway.recipe.faults import read_fired_faults
from headway.track import RunFolder, compare_runs, read_recipe, read_run

RESTARTS = 3
"""A recipe with fewer restarts gets this many: recovery is what is tested."""
PATIENCE = 20.0
"""How many times as long as the unfaulted run a faulted one may take, in addition to MIN_PATIENCE_S."""
MIN_PATIENCE_S = 120.0

Report = Callable[[str], None]


@dataclass(frozen=True)
class CaseRun:
    """One run under the faults of a case."""

    figures: RecoveryTimes | None
    """None if no fault fired."""
    said: tuple[str, ...]
    """The agent's messages."""
    complaints: tuple[str, ...]
    """Violations of the oracle; empty if it is met."""
    left: tuple[str, ...]
    """What it left behind."""
    seconds: float
    """Duration of the whole run."""

    @property
    def met(self) -> bool:
        """Whether the oracle is met and nothing was left behind."""
        return not self.complaints and not self.left


@dataclass(frozen=True)
class CaseResult:
    """A case and its tries."""

    case: FaultCase
    tries: tuple[CaseRun, ...]

    @property
    def met(self) -> int:
        """Number of tries that met the oracle."""
        return sum(run.met for run in self.tries)

    def median(self, figure: Callable[[RecoveryTimes], float | None]) -> float | None:
        """Return the median of a figure over the tries that have it."""
        return known_median(figure(run.figures) for run in self.tries if run.figures)


@dataclass(frozen=True)
class FaultMatrix:
    """The results of all cases."""

    recipe: str
    workers: int
    steps: int
    step_s: float
    """Median step of the unfaulted run."""
    results: tuple[CaseResult, ...]
    reference: RunFolder
    """The unfaulted run."""

    @property
    def met(self) -> bool:
        """Whether every try of every case met its oracle."""
        return all(result.met == len(result.tries) for result in self.results)


@dataclass(frozen=True)
class SoakResult:
    """One run under many faults."""

    seed: int
    faults: FaultPlan
    struck: tuple[int, ...]
    """Numbers of the faults that fired."""
    steps: int
    attempts: int
    lost_s: float
    """Worker-seconds of detection, restart and rework."""
    complaints: tuple[str, ...]
    left: tuple[str, ...]
    seconds: float
    """Duration of the whole run."""

    @property
    def met(self) -> bool:
        """Whether all faults fired, it ended like the unfaulted run, and left nothing behind."""
        return not self.complaints and not self.left and len(self.struck) == len(self.faults.faults)


class _ReferenceRuns:
    """Unfaulted runs by recipe, each run when first needed."""

    def __init__(self, harness: ChaosHarness, report: Report) -> None:
        self._harness, self._report = harness, report
        self._runs: list[tuple[Recipe, FaultedRun]] = []

    def of(self, recipe: Recipe) -> FaultedRun:
        """Return the unfaulted run of a recipe."""
        for other, run in self._runs:
            if other == recipe:
                return run
        self._report("the unfaulted run" + (f" of {plural(recipe.train.steps, 'step')}" if self._runs else ""))
        run = run_with_faults(self._harness, recipe, f"reference-{len(self._runs) + 1}")
        if run.statuses != [0] or run.left:
            why = run.left[0] + " was left behind" if run.left else run.reason
            raise RunError(f"the unfaulted run failed: {why}", hint="check that headway train runs the recipe")
        self._runs.append((recipe, run))
        return run


def run_matrix(
    harness: ChaosHarness, recipe: Recipe, cases: Sequence[FaultCase], repeat: int, report: Report
) -> FaultMatrix:
    """Run a recipe under every case, `repeat` times each."""
    recipe, references = _with_restarts(recipe), _ReferenceRuns(harness, report)
    for case in cases:  # report what cannot be planned before anything runs
        case.plan(make_context(recipe, harness.workers))
    reference = references.of(recipe)
    harness = replace(harness, patience_s=MIN_PATIENCE_S + PATIENCE * reference.seconds)
    step_s = median_step_s(read_run(reference.run))
    results = []
    for number, case in enumerate(cases, start=1):
        tries = []
        for turn in range(1, repeat + 1):
            report(f"{case.name}, {number} of {len(cases)}" + (f", try {turn} of {repeat}" if repeat > 1 else ""))
            tries.append(_run_case(harness, recipe, case, step_s, references, f"{case.name}-{turn}"))
        results.append(CaseResult(case, tuple(tries)))
    return FaultMatrix(recipe.name, harness.workers, recipe.train.steps, step_s, tuple(results), reference.run)


def _with_restarts(recipe: Recipe) -> Recipe:
    return with_settings(recipe, [f"train.restarts={max(RESTARTS, recipe.train.restarts)}"])


def _run_case(
    harness: ChaosHarness, recipe: Recipe, case: FaultCase, step_s: float, references: _ReferenceRuns, name: str
) -> CaseRun:
    """Run a recipe once under the faults of a case, and check it against its oracle."""
    recipe = with_settings(recipe, case.settings(make_context(recipe, harness.workers, step_s)))
    context = make_context(recipe, harness.workers, step_s)
    faulted = run_with_faults(
        harness, recipe, name, case.plan(context),
        launcher_signal=None if case.signal is None else LauncherSignal(case.signal, context.step),
        resumes=case.way == "resumed", nodes=case.nodes, spares=case.spares,
    )  # fmt: skip
    if not faulted.fault_times:
        return CaseRun(None, (), ("the fault never fired",), tuple(faulted.left), faulted.seconds)
    reference = None
    if case.way != "refused":
        if case.skips:  # skip the samples that the run came to skip
            skip = [list(samples) for samples in read_recipe(faulted.run).data.skip]
            recipe = with_settings(recipe, [f"data.skip={skip}"])
        reference = references.of(recipe)
    records, fault_ns = read_run(faulted.run), faulted.fault_times[0]
    violations = oracle_violations(
        case, records, statuses=faulted.statuses, fault_ns=fault_ns, rank=context.last, steps=recipe.train.steps,
        against=None if reference is None else compare_runs(reference.run, faulted.run),
    )  # fmt: skip
    figures = measure(records, fault_ns, case.way, case.signs, faulted.ended_ns)
    usual = 0.0 if reference is None else lost_s(read_run(reference.run))
    figures = replace(figures, lost_s=max(0.0, figures.lost_s - usual))
    if faulted.not_resumed is not None:
        violations.append(f"it could not be resumed: {faulted.not_resumed}")
    if not harness.keep:
        shutil.rmtree(faulted.run.path, ignore_errors=True)
    messages = agent_messages(records, fault_ns)
    return CaseRun(figures, tuple(messages), tuple(violations), tuple(faulted.left), faulted.seconds)


def run_soak(harness: ChaosHarness, recipe: Recipe, count: int, seed: int, report: Report) -> SoakResult:
    """Run a recipe once under many faults, one after the other, drawn from a seed."""
    context = make_context(recipe, harness.workers)
    faults = draw_fault_plan(
        seed, count, harness.workers, saved_every=context.memory_every or context.disk_every,
        disk_every=context.disk_every, replicas=recipe.parallel is not None and recipe.parallel.replicate > 1,
    )  # fmt: skip
    recipe = with_settings(_with_restarts(recipe), [f"train.steps={steps_needed(faults)}"])
    reference = _ReferenceRuns(harness, report).of(recipe)
    report(f"{plural(count, 'fault')} in {plural(recipe.train.steps, 'step')}")
    harness = replace(harness, patience_s=MIN_PATIENCE_S + PATIENCE * (reference.seconds + count))
    faulted = run_with_faults(harness, recipe, f"random-{seed}", faults)
    records = read_run(faulted.run)
    violations = differences(records, recipe.train.steps, compare_runs(reference.run, faulted.run))
    if faulted.statuses != [0]:
        violations = [f"it exited with {describe_statuses(faulted.statuses)}: {faulted.reason}", *violations]
    return SoakResult(
        seed=seed,
        faults=faults,
        struck=tuple(sorted({fault.number for fault in read_fired_faults(faulted.run.faults)})),
        steps=recipe.train.steps,
        attempts=max(record.header.attempt for record in records),
        lost_s=lost_s(records),
        complaints=tuple(violations),
        left=tuple(faulted.left),
        seconds=faulted.seconds,
    )
