"""The fastest way to run that fits, and why the others lost.

Every candidate has a bound: what its passes take when nothing travels between data ranks. The search goes through them
from the smallest bound on, drops what does not fit, estimates the rest, and is done when no bound is left below the
last plan that is kept. It finds what estimating all of them would find.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from headway.plan.step import cut_stages, ends_of_the_model
from headway.plan.task import RUNNABLE, SearchSpace, TrainingTask

__all__ = ["NodeCountPlan", "Rank", "RankedPlan", "SearchResult", "lower_bound", "search", "search_devices"]

Rank = Literal["time", "cost"]
RECOMPUTED = ("none", "attention", "selective", "full")
"""Ways to recompute, from the least on."""
GIB = 2**30
ROUNDING = 1e-9
"""By how much a bound may lie above its estimate: the two add up the same seconds in another order."""


@dataclass(frozen=True)
class RankedPlan:
    """One plan among others."""

    estimate: Estimate
    reason: str
    """Why it lost against the best one, with numbers; of the best, that it is."""
    runnable: bool
    """Whether this version's trainer runs it."""


@dataclass(frozen=True)
class SearchResult:
    """What a search found."""

    plans: tuple[RankedPlan, ...]
    """The best of each kind of mesh, best first; none where nothing fits."""
    tried: int
    """Ways to run that there were."""
    pruned_by_memory: int
    """Of those that came up, the ones that did not fit; the others came too late to win."""
    estimated: int
    """Of those that fit, the ones whose step was gone through."""

    @property
    def best(self) -> RankedPlan | None:
        """The plan that won."""
        return self.plans[0] if self.plans else None

    @property
    def runnable(self) -> RankedPlan | None:
        """The best plan that this version's trainer runs."""
        runnable_plans = (plan for plan in self.plans if plan.runnable)
        return min(runnable_plans, key=lambda plan: plan.estimate.step.seconds, default=None)


@dataclass(frozen=True)
class NodeCountPlan:
    """The best plan for one number of nodes."""

    nodes: int
    plan: RankedPlan | None
    reason: str
    """How it compares with the best number of nodes, or why there is no plan."""


def search(
    task: TrainingTask, costs: CostModel, choices: SearchSpace | None = None, rank: Rank = "time", keep: int = 8
) -> SearchResult:
    """The best plan and its runners-up, each the best of its kind of mesh: eight variants of one would teach nothing.

    A kind is the sizes of the tensor, pipeline, context and expert axes; how the rest is split into copies and shards,
    and all else, is settled within it. The best plan that this version's trainer runs comes last where it is not among
    them anyway. UsageError where nothing can run, memory aside; where nothing fits, no plans.
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
    """What is tried where nothing fits: shared sequences, then tensor axes that cross the fastest links' border too."""
    if choices.context is None and not context:
        yield replace(choices, context=True)
    if choices.max_tensor is None:
        yield replace(choices, context=choices.context is not False, max_tensor=costs.cluster.devices)


def search_devices(
    task: TrainingTask,
    costs_for: Callable[[int], CostModel],
    nodes: Sequence[int],
    choices: SearchSpace | None = None,
    rank: Rank = "time",
) -> tuple[NodeCountPlan, ...]:
    """The best plan for each number of nodes, in their order, compared by time of a step or device time of a token."""
    found = [(count, _best_or_why(task, costs_for(count), choices, rank)) for count in nodes]
    plans = [plan.estimate for _, plan in found if isinstance(plan, RankedPlan)]
    best = min(plans, key=lambda plan: _price(plan, rank), default=None)
    points = []
    for count, plan in found:
        if isinstance(plan, str):
            points.append(NodeCountPlan(count, None, plan))
        else:
            assert best is not None, "where there is a plan there is a best one"
            points.append(NodeCountPlan(count, plan, _against(plan.estimate, best, rank)))
    return tuple(points)


def _best_or_why(task: TrainingTask, costs: CostModel, choices: SearchSpace | None, rank: Rank) -> RankedPlan | str:
    try:
        result = search(task, costs, choices, rank, keep=1)
    except UsageError as error:
        return error.message
    return result.best or "does not fit"


def _nothing(task: TrainingTask, costs: CostModel, choices: SearchSpace) -> UsageError:
    """Why nothing can run: the first clash of the mesh that was asked for, or of the plainest one."""
    mesh = choices.mesh or Mesh(shard=costs.cluster.devices)
    sizes = choices.microbatches or (1,)
    try:
        check(task.architecture, settings_of(task, mesh, max(choices.zero), sizes[0]), costs.cluster)
    except UsageError as error:
        return error
    return UsageError("the choices leave no way to run", hint="allow more schedules, microbatches, or another mesh")


# -- going through the candidates


def _search(
    task: TrainingTask, costs: CostModel, choices: SearchSpace, rank: Rank, keep: int, context: bool
) -> SearchResult:
    bounds = _Bounds(task, costs)
    least = choices.least_blocks
    cut = map(bounds.cut, candidates(task, costs.cluster, choices, context))
    ordered = [(bounds.of(settings.but(recompute="none") if least else settings), settings) for settings in cut]
    ordered.sort(key=lambda pair: pair[0])
    best, unfit, estimated = _estimate_best(task, costs, ordered, rank, keep, choices)
    if best and not RUNNABLE.allows(best[0].settings):
        # the best of a kind may hide another of the same kind that runs
        runnable = [pair for pair in ordered if RUNNABLE.allows(pair[1])]
        more_plans, _, more_estimated = _estimate_best(task, costs, runnable, rank, 1, choices)
        best += [plan for plan in more_plans if all(plan.settings != other.settings for other in best)]
        estimated += more_estimated
    plans = tuple(
        RankedPlan(plan, _reason(plan, best[0], rank, costs), RUNNABLE.allows(plan.settings)) for plan in best
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
    """The best of each of the best kinds of mesh, how many ways did not fit, and how many were estimated."""
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
    """The way to run if it fits; where that is left open, with as few layers recomputed as do. None where it does
    not."""

    def fits(blocks: int | None, room: float = 0.0) -> bool:
        trial = settings.but(recompute_blocks=blocks)
        need = memory(arch, trial, cluster, held_microbatches(trial))
        return need.total <= need.capacity * (1 - room)

    if not choices.least_blocks or settings.recompute == "none":
        return settings if fits(settings.recompute_blocks) else None
    if not fits(None):
        return None
    # that nothing is recomputed at all is a way of its own where it is among the choices
    fewest, every = 1 if "none" in choices.recompute else 0, max(blocks_of_ranks(arch.layers, settings))
    upper = every
    while fewest < upper:
        middle = (fewest + upper) // 2
        fewest, upper = (fewest, middle) if fits(middle, choices.room) else (middle + 1, upper)
    return settings.but(recompute_blocks=None if fewest == every else fewest)


def _kind(mesh: Mesh) -> tuple[int, ...]:
    return mesh.tensor, mesh.pipeline, mesh.context, mesh.expert


def _price(plan: Estimate, rank: Rank) -> float:
    """What plans are compared by: seconds of a step, or device seconds of a token."""
    return plan.step.seconds if rank == "time" else 1 / plan.tokens_s_per_device


def _order(plan: Estimate, rank: Rank) -> tuple[object, ...]:
    """By price; where that is the same, by what is recomputed for nothing, by memory, and then in some fixed order."""
    settings = plan.settings
    return (
        _price(plan, rank), RECOMPUTED.index(settings.recompute), plan.memory.total, _kind(settings.mesh), settings.mesh.replicate,
        settings.microbatch, settings.zero, settings.schedule, settings.chunks, settings.precision, settings.software.moment_bytes,
    )  # fmt: skip


# -- the bound


class _Bounds:
    """Seconds that a step takes at least, computed once for what candidates share."""

    def __init__(self, task: TrainingTask, costs: CostModel) -> None:
        self._task, self._costs = task, costs
        self._layers: dict[tuple[object, ...], tuple[float, float, float]] = {}
        self._ends: dict[tuple[object, ...], tuple[float, float, float, float]] = {}
        self._passes: dict[tuple[object, ...], float] = {}
        self._cuts: dict[tuple[object, ...], tuple[int, ...] | None] = {}

    def cut(self, settings: Settings) -> Settings:
        """With the stages of its pipeline as the software cuts them."""
        if settings.mesh.pipeline == 1 or settings.stages is not None or not settings.software.own:
            return settings
        key = (*_shape(settings), settings.mesh.pipeline, settings.chunks)
        if key not in self._cuts:
            self._cuts[key] = cut_stages(self._task.architecture, settings, self._costs).stages
        return settings.but(stages=self._cuts[key])

    def of(self, settings: Settings) -> float:
        """Of one way to run: its passes and the loop around them; gradients, weights and the optimizer come on top."""
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
        return self._passes[key] + (self._costs.parameters.loop_s if settings.software.waits else 0.0)

    def _layer(self, settings: Settings) -> tuple[float, float, float]:
        """Forward, input gradient and weight gradient of a layer, on average."""
        arch = self._task.architecture
        kinds = [(time, count / arch.layers) for _, count, time in layer_mix(arch, settings, self._costs)]
        forward = sum(time.whole_forward * share for time, share in kinds)
        backward = sum(time.backward * share for time, share in kinds)
        weight = sum(time.weight_grad * share for time, share in kinds)
        return forward, backward - weight, weight

    def _end(self, settings: Settings) -> tuple[float, float, float, float]:
        """Forward and backward of the embedding; of the last norm, head and loss."""
        first, last = ends_of_the_model(self._task.architecture, settings, self._costs)
        return *first, *last


def _shape(settings: Settings) -> tuple[object, ...]:
    """What a layer's time hangs on."""
    mesh, casts = settings.mesh, settings.software.casts_weights
    sizes = (mesh.tensor, mesh.context, mesh.expert, settings.microbatch)
    return *sizes, settings.recompute, settings.recompute_blocks, settings.precision, casts


def lower_bound(task: TrainingTask, settings: Settings, costs: CostModel) -> float:
    """Seconds that a step takes at least."""
    return _Bounds(task, costs).of(settings)


def _passes_at_least(
    layers: int, settings: Settings, layer: tuple[float, float, float], ends: tuple[float, float, float, float]
) -> float:
    """What all microbatches' passes take at least, in the schedule's order."""
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
        # a rank starts when those before it passed a microbatch on, and after its last backward pass they do theirs
        around = accumulate([0.0, *total[: ranks - 1]])
        return max(rank_busy + wait for rank_busy, wait in zip(busy, around, strict=True))
    # weight gradients that are put off may fill the end, but no more of them than a rank has kept back
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
    sentence = _against(plan, best, rank)
    if plan.step.accounts["recomputation"] > best.step.accounts["recomputation"] and "recomputation" in sentence:
        without = plan.settings.but(recompute="none")
        need = memory(plan.architecture, without, costs.cluster, held_microbatches(without))
        if not need.fits:
            sentence += f", without which it needs {need.total / GIB:.1f} of {need.capacity / GIB:.0f} GB"
    return sentence


def _against(plan: Estimate, best: Estimate, rank: Rank) -> str:
    """By how much a plan is worse, and where most of that lies: "9 % slower: 61 ms more exposed gradients a step"."""
    if plan is best:
        return "fastest" if rank == "time" else "cheapest"
    worse = _price(plan, rank) / _price(best, rank) - 1
    if worse < 0.0005:
        extra = plan.memory.total - best.memory.total
        return f"as fast, with {extra / GIB:.1f} GB more memory" if extra > 0.05 * GIB else "as fast"
    # another number of devices shares the work differently: compare device seconds
    scale = plan.settings.mesh.devices / best.settings.mesh.devices if rank == "cost" else 1.0
    account, seconds = max(_losses(plan, best, scale), key=lambda loss: loss[1])
    word = "slower" if rank == "time" else "dearer"
    return f"{_percent(worse)} {word}: {_seconds(seconds)} more {account} a step"


def _losses(plan: Estimate, best: Estimate, scale: float) -> list[tuple[str, float]]:
    """Seconds of a step more than the best one has, by where they go."""
    own, reference = plan.step, best.step
    accounts = {name: seconds - reference.accounts[name] / scale for name, seconds in own.accounts.items()}
    exposed = {name: own.exposed[name] - reference.exposed[name] / scale for name in own.exposed}
    parts = {**accounts, **exposed}
    return [(_NAMES.get(name, name), parts[name]) for name in parts if name != "exposed communication"]


_NAMES = {
    "useful": "in useful work",
    "kernels below peak": "in kernels below peak",
    "slowed by overlap": "in kernels slowed by overlap",
    "host": "waiting for the host",
    "optimizer": "in the optimizer",
    "inside layers": "exposed exchanges inside layers",
    "weights and gradients of layers": "exposed weights and gradients of layers",
    "gradients of the step": "exposed gradients",
}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0095 else f"{100 * share:.1f} %"


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.0095 else f"{1e3 * seconds:.1f} ms"
