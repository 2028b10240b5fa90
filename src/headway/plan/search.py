"""Branch-and-bound search for the fastest settings that fit, and why the others lost.

Every candidate has a lower bound: its passes with no communication between data ranks. The search takes candidates in
order of their bound, drops those that do not fit, estimates the rest, and stops when no bound is below the worst plan
it keeps. The result equals that of estimating every candidate.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from headway.errors import UsageError
from headway.hardware import Cluster
from headway.plan.architecture import Architecture
from headway.plan.candidates import LONG, candidates, held_microbatches, settings_of
from headway.plan.checks import check
from headway.plan.costs import CostModel
from headway.plan.estimate import Estimate, estimate
from headway.plan.layer import layer_mix
from headway.plan.memory import memory
from headway.plan.settings import Mesh, Settings
from headway.plan.stages import blocks_of_ranks, stage_counts
from headway.plan.step import cut_stages, end_times
from headway.plan.task import SearchSpace, TrainingTask, trainer_limits

Rank = Literal["time", "cost"]
RECOMPUTED = ("none", "attention", "selective", "except-attention", "full")
"""Recomputation policies, least first."""
GIB = 2**30
ROUNDING = 1e-9
"""Relative error of a bound against its estimate: the two sum the same seconds in a different order."""


@dataclass(frozen=True)
class RankedPlan:
    """One plan among others."""

    estimate: Estimate
    reason: str
    """Why it lost to the best plan, with numbers."""
    runnable: bool
    """Whether this version's trainer runs it."""


@dataclass(frozen=True)
class SearchResult:
    """Ranked plans, and how many candidates it took."""

    plans: tuple[RankedPlan, ...]
    """The best of each kind of mesh, best first; empty if nothing fits."""
    tried: int
    """Candidates in the search space."""
    pruned_by_memory: int
    """Candidates that did not fit; those with too high a bound were never checked."""
    estimated: int
    """Candidates that fit and whose step was estimated."""

    @property
    def best(self) -> RankedPlan | None:
        """The plan that won."""
        return self.plans[0] if self.plans else None

    @property
    def runnable(self) -> RankedPlan | None:
        """The best plan that this version's trainer runs."""
        runnable_plans = (plan for plan in self.plans if plan.runnable)
        return min(runnable_plans, key=lambda plan: plan.estimate.step.seconds, default=None)


def search(
    task: TrainingTask, costs: CostModel, choices: SearchSpace | None = None, rank: Rank = "time", keep: int = 8
) -> SearchResult:
    """The best plan and its runners-up, each the best of its kind of mesh.

    A kind is the sizes of the tensor, pipeline, context and expert axes; everything else is optimized within it. The
    best plan that this version's trainer runs comes last unless it already ranks. Raise UsageError if no candidate is
    valid; return no plans if none fits.
    """
    choices = choices or SearchSpace()
    context = choices.context if choices.context is not None else task.seq >= LONG
    result = _search(task, costs, choices, rank, keep, context)
    for wider in _wider(costs, choices, context):
        if not result.plans:
            result = _search(task, costs, wider, rank, keep, context=bool(wider.context))
    if not result.tried:
        raise _nothing(task, costs, choices)
    return result


def _wider(costs: CostModel, choices: SearchSpace, context: bool) -> Iterator[SearchSpace]:
    """Wider search spaces for when nothing fits: context parallelism, then tensor axes across nodes."""
    if choices.context is None and not context:
        yield replace(choices, context=True)
    if choices.max_tensor is None:
        yield replace(choices, context=choices.context is not False, max_tensor=costs.cluster.devices)


def _nothing(task: TrainingTask, costs: CostModel, choices: SearchSpace) -> UsageError:
    """Why no candidate is valid: the first conflict of the requested mesh, or of the simplest one."""
    mesh = choices.mesh or Mesh(shard=costs.cluster.devices)
    sizes = choices.microbatches or (1,)
    try:
        check(task.architecture, settings_of(task, mesh, max(choices.zero), sizes[0]), costs.cluster)
    except UsageError as error:
        return error
    return UsageError(
        "no valid settings in the search space", hint="allow more schedules, microbatches or another mesh"
    )


# -- the search


def _search(
    task: TrainingTask, costs: CostModel, choices: SearchSpace, rank: Rank, keep: int, context: bool
) -> SearchResult:
    bounds = _Bounds(task, costs)
    least = choices.least_blocks
    cut = map(bounds.cut, candidates(task, costs.cluster, choices, context))
    ordered = [(bounds.of(replace(settings, recompute="none") if least else settings), settings) for settings in cut]
    ordered.sort(key=lambda pair: pair[0])
    best, unfit, estimated = _estimate_best(task, costs, ordered, rank, keep, choices)
    limits = trainer_limits(task.architecture)
    if best and not limits.allows(best[0].settings):
        # the best of a kind may hide a runnable plan of the same kind
        runnable = [pair for pair in ordered if limits.allows(pair[1])]
        more_plans, _, more_estimated = _estimate_best(task, costs, runnable, rank, 1, choices)
        best += [plan for plan in more_plans if all(plan.settings != other.settings for other in best)]
        # of plans as fast as the best, one that runs is the best: on a context axis alone, all ZeRO stages are
        as_fast = (1 + ROUNDING) * _price(best[0], rank)
        best.sort(key=lambda plan: _price(plan, rank) > as_fast or not limits.allows(plan.settings))
        estimated += more_estimated
    plans = tuple(
        RankedPlan(plan, _reason(plan, best[0], rank, costs), limits.allows(plan.settings)) for plan in best
    )  # fmt: skip
    return SearchResult(plans, len(ordered), unfit, estimated)


def _estimate_best(
    task: TrainingTask,
    costs: CostModel,
    ordered: Iterable[tuple[float, Settings]],
    rank: Rank,
    keep: int,
    choices: SearchSpace,
) -> tuple[list[Estimate], int, int]:
    """The best plan of each of the best kinds of mesh, and how many candidates did not fit and were estimated."""
    best: dict[tuple[int, ...], Estimate] = {}
    last = float("inf")
    unfit = estimated = 0
    for bound, settings in ordered:
        bound *= 1 - ROUNDING
        if bound > last:
            break
        rival = best.get(_kind(settings.mesh))
        if rival is not None and bound > rival.step.seconds:
            continue
        fit = fitting(task.architecture, settings, costs.cluster, choices)
        if fit is None:
            unfit += 1
            continue
        estimated += 1
        plan = estimate(task.architecture, fit, costs)
        if rival is None or _order(plan, rank) < _order(rival, rank):
            best[_kind(settings.mesh)] = plan
            times = sorted(plan.step.seconds for plan in best.values())
            last = times[keep - 1] if len(times) >= keep else last
    return sorted(best.values(), key=lambda plan: _order(plan, rank))[:keep], unfit, estimated


def fitting(arch: Architecture, settings: Settings, cluster: Cluster, choices: SearchSpace) -> Settings | None:
    """The settings if they fit, with as few layers recomputed as possible where that is open; else None."""

    def fits(blocks: int | None, room: float = 0.0) -> bool:
        trial = replace(settings, recompute_blocks=blocks)
        need = memory(arch, trial, cluster, held_microbatches(trial))
        return need.total <= need.capacity * (1 - room)

    if not choices.least_blocks or settings.recompute == "none":
        return settings if fits(settings.recompute_blocks) else None
    if not fits(None):
        return None
    # no recomputation at all is a candidate of its own where the space has it
    fewest, every = 1 if "none" in choices.recompute else 0, max(blocks_of_ranks(arch.layers, settings))
    upper = every
    while fewest < upper:
        middle = (fewest + upper) // 2
        fewest, upper = (fewest, middle) if fits(middle, choices.room) else (middle + 1, upper)
    return replace(settings, recompute_blocks=None if fewest == every else fewest)


def _kind(mesh: Mesh) -> tuple[int, ...]:
    return mesh.tensor, mesh.pipeline, mesh.context, mesh.expert


def _price(plan: Estimate, rank: Rank) -> float:
    """What plans are ranked by: seconds per step, or device-seconds per token."""
    return plan.step.seconds if rank == "time" else 1 / plan.tokens_s_per_device


def _order(plan: Estimate, rank: Rank) -> tuple[object, ...]:
    """Sort key: price, then less recomputation, less memory, and a fixed order."""
    settings = plan.settings
    return (
        _price(plan, rank), RECOMPUTED.index(settings.recompute), plan.memory.total, _kind(settings.mesh),
        settings.mesh.replicate, settings.microbatch, settings.zero, settings.schedule, settings.chunks,
        settings.precision, settings.software.moment_bytes,
    )  # fmt: skip


# -- the bound


class _Bounds:
    """Lower bounds of step times, cached over what candidates share."""

    def __init__(self, task: TrainingTask, costs: CostModel) -> None:
        self._task, self._costs = task, costs
        self._layers: dict[tuple[object, ...], tuple[float, float, float]] = {}
        self._ends: dict[tuple[object, ...], tuple[float, float, float, float]] = {}
        self._passes: dict[tuple[object, ...], float] = {}
        self._cuts: dict[tuple[object, ...], tuple[int, ...] | None] = {}

    def cut(self, settings: Settings) -> Settings:
        """The settings with the pipeline stages that the trainer would choose."""
        if settings.mesh.pipeline == 1 or settings.stages is not None or not settings.software.is_headway:
            return settings
        key = (*_shape(settings), settings.mesh.pipeline, settings.chunks)
        if key not in self._cuts:
            self._cuts[key] = cut_stages(self._task.architecture, settings, self._costs).stages
        return replace(settings, stages=self._cuts[key])

    def of(self, settings: Settings) -> float:
        """Lower bound of a step: passes and host loop, without data-parallel communication and the optimizer."""
        settings = self.cut(settings)
        shape = _shape(settings)
        key = (
            *shape,
            settings.mesh.pipeline,
            settings.microbatches,
            settings.schedule,
            settings.chunks,
            settings.stages,
        )
        if key not in self._passes:
            layers = (shape, settings.stages if settings.recompute_blocks is not None else None)
            if layers not in self._layers:
                self._layers[layers] = self._layer(settings)
            end = (
                settings.mesh.tensor,
                settings.mesh.context,
                settings.microbatch,
                settings.precision,
                settings.software.casts_weights,
            )
            if end not in self._ends:
                self._ends[end] = self._end(settings)
            self._passes[key] = _passes_at_least(
                self._task.architecture.layers, settings, self._layers[layers], self._ends[end]
            )
        return self._passes[key] + (self._costs.parameters.loop_s if settings.software.waits_each_step else 0.0)

    def _layer(self, settings: Settings) -> tuple[float, float, float]:
        """Forward, input gradient and weight gradient of a layer, on average."""
        arch = self._task.architecture
        kinds = [(time, count / arch.layers) for _, count, time in layer_mix(arch, settings, self._costs)]
        forward = sum(time.total_forward * share for time, share in kinds)
        backward = sum(time.backward * share for time, share in kinds)
        weight = sum(time.weight_grad * share for time, share in kinds)
        return forward, backward - weight, weight

    def _end(self, settings: Settings) -> tuple[float, float, float, float]:
        """Forward and backward of the embedding; of the last norm, head and loss."""
        first, last = end_times(self._task.architecture, settings, self._costs)
        return *first, *last


def _shape(settings: Settings) -> tuple[object, ...]:
    """What the time of a layer depends on."""
    mesh, casts = settings.mesh, settings.software.casts_weights
    sizes = (mesh.tensor, mesh.context, mesh.expert, settings.microbatch)
    return *sizes, settings.recompute, settings.recompute_blocks, settings.precision, casts


def lower_bound(task: TrainingTask, settings: Settings, costs: CostModel) -> float:
    """Lower bound of the step time."""
    return _Bounds(task, costs).of(settings)


def _passes_at_least(
    layers: int, settings: Settings, layer: tuple[float, float, float], ends: tuple[float, float, float, float]
) -> float:
    """Lower bound of the passes of all microbatches under the schedule."""
    ranks, count = settings.mesh.pipeline, settings.microbatches
    if ranks == 1:
        return count * (layers * sum(layer) + sum(ends))
    counts = stage_counts(layers, settings)
    forward, inputs, weight = ([n * seconds for n in counts] for seconds in layer)
    forward[0], weight[0] = forward[0] + ends[0], weight[0] + ends[1]
    forward[-1], inputs[-1] = forward[-1] + ends[2], inputs[-1] + ends[3]
    total = [sum(parts) for parts in zip(forward, inputs, weight, strict=True)]
    busy = [count * sum(total[rank::ranks]) for rank in range(ranks)]
    if settings.schedule != "zero-bubble":
        # a rank starts once the ranks before it have sent a microbatch, and they finish after its last backward pass
        around = accumulate([0.0, *total[: ranks - 1]])
        return max(rank_busy + wait for rank_busy, wait in zip(busy, around, strict=True))
    # deferred weight gradients may fill the end, but no more of them than a rank has deferred
    starts = accumulate([0.0, *forward[:-1]])
    around = accumulate([0.0, *(a + b for a, b in zip(forward[:-1], inputs[:-1], strict=True))])
    bound = 0.0
    for rank, (start, wait) in enumerate(zip(starts, around, strict=True)):
        done = count * (forward[rank] + inputs[rank]) + max(0, count - 1 - rank) * weight[rank]
        bound = max(bound, busy[rank] + start, done + wait + weight[0])
    return bound


# -- why a plan lost


def _reason(plan: Estimate, best: Estimate, rank: Rank, costs: CostModel) -> str:
    if plan is best:
        return "fastest" if rank == "time" else "cheapest"
    sentence = _comparison(plan, best, rank)
    if plan.step.accounts["recomputation"] > best.step.accounts["recomputation"] and "recomputation" in sentence:
        without = replace(plan.settings, recompute="none")
        need = memory(plan.architecture, without, costs.cluster, held_microbatches(without))
        if not need.fits:
            sentence += f", without which it needs {need.total / GIB:.1f} of {need.capacity / GIB:.0f} GB"
    return sentence


def _comparison(plan: Estimate, best: Estimate, rank: Rank) -> str:
    """How much worse a plan is and mostly why: "9 % slower: 61 ms more exposed gradients per step"."""
    worse = _price(plan, rank) / _price(best, rank) - 1
    if worse < 0.0005:
        extra = plan.memory.total - best.memory.total
        return f"as fast, with {extra / GIB:.1f} GB more memory" if extra > 0.05 * GIB else "as fast"
    account, seconds = max(_losses(plan, best), key=lambda loss: loss[1])
    word = "slower" if rank == "time" else "more expensive"
    return f"{_percent(worse)} {word}: {_seconds(seconds)} more {account} per step"


def _losses(plan: Estimate, best: Estimate) -> list[tuple[str, float]]:
    """Seconds per step beyond the best plan's, by account."""
    slower = {**plan.step.accounts, **plan.step.exposed}
    faster = {**best.step.accounts, **best.step.exposed}
    names = [name for name in slower if name != "exposed communication"]
    return [(_NAMES.get(name, name), slower[name] - faster[name]) for name in names]


_NAMES = {
    "useful": "in useful work",
    "kernels below peak": "in kernels below peak",
    "slowed by overlap": "in kernels slowed by overlap",
    "host": "waiting for the host",
    "optimizer": "in the optimizer",
    "inside layers": "exposed collectives inside layers",
    "weights and gradients of layers": "exposed weights and gradients of layers",
    "gradients of the step": "exposed gradients",
}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0095 else f"{100 * share:.1f} %"


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.0095 else f"{1e3 * seconds:.1f} ms"
