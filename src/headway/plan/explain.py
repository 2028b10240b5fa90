"""Explains a plan: each term with its formula, computed by the functions that made the plan.

Sections are tables of plain values in bytes, seconds and FLOPs; the column name says which.
"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain

from headway.plan.architecture import layer_kinds
from headway.plan.communication import CommCost, communication_costs
from headway.plan.costs import CostModel
from headway.plan.efficiencies import Efficiencies
from headway.plan.estimate import Estimate
from headway.plan.flops import flops_per_token
from headway.plan.layer import Speed, Work, layer, layer_mix, phases, speed
from headway.plan.memory import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    FRAGMENTATION,
    activation_bytes,
    holds_full_gradients,
    local_parameters,
    non_layer_parameters,
    optimizer_bytes_each,
)
from headway.plan.operations import Operation, Part, head_operations, layer_operations, optimizer_bytes
from headway.plan.pipeline import in_flight
from headway.plan.rates import power_share
from headway.plan.roofline import RooflinePoint
from headway.plan.settings import Settings
from headway.plan.stages import blocks_of_ranks, recomputed_share, stage_counts
from headway.plan.trainer_communication import end_comm_seconds

__all__ = ["Cell", "ExplainTable", "explain", "parameter_meanings", "roofline_points", "step_terms"]

Cell = str | float | None
GIB = 2**30
PASSES = {"forward": "forward", "input_grad": "d input", "weight_grad": "d weight"}
AGAIN = {"full": (1.0, 1.0, 1.0), "selective": (0.5, 0.0, 1.0), "attention": (0.0, 1.0, 0.0), "none": (0.0, 0.0, 0.0)}
"""Share of a forward pass's GEMMs, attention and memory-bound kernels that is recomputed, by policy."""
BUBBLES = {
    "1f1b": "(stages - 1) x (forward + backward)",
    "interleaved": "(stages - 1) / chunks x (forward + backward)",
    "zero-bubble": "(stages - 1) x (forward + input gradient - weight gradient)",
}
"""Of a pipeline with equal stages and free transfers."""


@dataclass(frozen=True)
class ExplainTable:
    """One table of an explanation."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    """A sentence below the table."""


def explain(estimate: Estimate, costs: CostModel) -> list[ExplainTable]:
    """Every term of a plan's step and memory, with its formula."""
    arch = estimate.architecture
    kinds = list(layer_kinds(arch))
    sections = [_operations(estimate, costs, experts, count) for experts, count in kinds]
    sections += [_ends(estimate, costs), *(_passes(estimate, costs, experts) for experts, _ in kinds)]
    sections += [_communication(estimate, costs), *_pipeline(estimate), _step(estimate, costs), _useful(estimate)]
    return [*sections, _memory(estimate, costs), _clock(estimate, costs), _parameters(costs)]


# -- operations


def _layer_part(estimate: Estimate, experts: bool) -> Part:
    """A layer's operations; frozen weights have no gradients."""
    part = layer_operations(estimate.architecture, experts, estimate.settings.shape, estimate.settings.software)
    return _trained(part, estimate.settings)


def _trained(part: Part, settings: Settings) -> Part:
    return tuple(operation for operation in part if not (settings.frozen and operation.phase == "weight_grad"))


def _work(estimate: Estimate, costs: CostModel, part: Part) -> Work:
    forward, inputs, weights = phases(costs.rates, part, estimate.settings.software.attention)
    return forward + inputs + weights


def _sustained_speed(estimate: Estimate, costs: CostModel, part: Part, inside: bool = True) -> Speed:
    """Sustained kernel speed, in a layer or at embedding and head."""
    settings, mix = estimate.settings, _work(estimate, costs, part)
    if inside:
        return speed(costs, settings.precision, mix, settings.software.scaling)
    return speed(costs, settings.shape.high_precision, mix)


def _rows(estimate: Estimate, costs: CostModel, part: Part, inside: bool = True) -> Iterator[tuple[Cell, ...]]:
    sustained = _sustained_speed(estimate, costs, part, inside)
    for operation in part:
        seconds = sustained.seconds(_work(estimate, costs, (operation,)))
        sizes = (operation.m, operation.n, operation.k) if operation.kind == "gemm" else (None, None, None)
        yield (
            operation.name,
            PASSES[operation.phase],
            *sizes,
            operation.flops,
            operation.bytes,
            seconds,
            _of_roof(costs, operation, seconds),
        )


def _of_roof(costs: CostModel, operation: Operation, seconds: float) -> float:
    """Roofline time of an operation over its predicted time."""
    memory = operation.bytes / costs.cluster.chip.bandwidth_bytes_s
    return max(memory, operation.flops / costs.rates.peak(operation.precision) if operation.flops else 0.0) / seconds


COLUMNS = ("operation", "pass", "m", "n", "k", "flops", "bytes", "seconds", "of roof")


def _operations(estimate: Estimate, costs: CostModel, experts: bool, count: int) -> ExplainTable:
    settings, shape = estimate.settings, estimate.settings.shape
    kind = "layer with experts" if experts else "layer"
    time = layer(estimate.architecture, experts, settings, costs)
    tokens = f"{shape.sequences} x {shape.seq:,} tokens" + (f" / context {shape.context}" if shape.context > 1 else "")
    together = time.forward + time.input_grad + time.weight_grad
    note = f"{together * 1e3:.4g} ms per layer and microbatch, at the clock that power allows; {count} layers"
    return ExplainTable(
        f"one {kind}, {tokens}", COLUMNS, tuple(_rows(estimate, costs, _layer_part(estimate, experts))), note
    )


def _ends(estimate: Estimate, costs: CostModel) -> ExplainTable:
    parts = head_operations(estimate.architecture, estimate.settings.shape, estimate.settings.software)
    rows = (_rows(estimate, costs, _trained(part, estimate.settings), inside=False) for part in parts)
    return ExplainTable("embedding, head and loss, one microbatch", COLUMNS, tuple(chain.from_iterable(rows)))


def roofline_points(estimate: Estimate, costs: CostModel) -> list[RooflinePoint]:
    """What a device computes in a step, by operation: layers, recomputation, head, loss and optimizer."""
    settings, arch = estimate.settings, estimate.architecture
    runs = settings.microbatches
    points: dict[str, RooflinePoint] = {}
    for experts, count in layer_kinds(arch):
        part = _layer_part(estimate, experts)
        each = count / settings.mesh.pipeline * runs
        _add(points, estimate, costs, part, each, _sustained_speed(estimate, costs, part))
    for part in head_operations(arch, settings.shape, settings.software):
        part = _trained(part, settings)
        _add(points, estimate, costs, part, runs, _sustained_speed(estimate, costs, part, inside=False))
    update = estimate.step.accounts["optimizer"]
    return [
        *points.values(),
        RooflinePoint("optimizer", 0.0, _updated(estimate) * optimizer_bytes(settings.software), update),
    ]


def _add(
    points: dict[str, RooflinePoint], estimate: Estimate, costs: CostModel, part: Part, times: float, sustained: Speed
) -> None:
    inside = part[0].name != "embedding" and not any(operation.name == "head" for operation in part)
    settings = estimate.settings
    kept = settings.recompute == "selective" and settings.software.keeps_gemm_outputs
    shares = (0.0, 0.0, 1.0) if kept else AGAIN[settings.recompute]
    part_of = recomputed_share(estimate.architecture.layers, settings)
    again = dict(zip(("gemm", "attention", "memory"), (part_of * share for share in shares), strict=True))
    for operation in part:
        runs = times * (1 + (again[operation.kind] if inside and operation.phase == "forward" else 0.0))
        old = points.get(operation.name, RooflinePoint(operation.name, 0.0, 0.0, 0.0))
        seconds = sustained.seconds(_work(estimate, costs, (operation,)))
        points[operation.name] = RooflinePoint(
            operation.name,
            old.flops + runs * operation.flops,
            old.bytes + runs * operation.bytes,
            old.seconds + runs * seconds,
        )


# -- passes and the step


def _passes(estimate: Estimate, costs: CostModel, experts: bool) -> ExplainTable:
    """One layer's forward and backward pass."""
    time = layer(estimate.architecture, experts, estimate.settings, costs)
    blocks = estimate.settings.recompute_blocks
    blocks_note = (
        f", {blocks} layers per device" if blocks is not None and estimate.settings.recompute != "none" else ""
    )
    policy = f"{estimate.settings.recompute}{blocks_note}"
    rows: list[tuple[Cell, ...]] = [
        ("forward", "kernels", time.forward),
        ("input gradient", "kernels", time.input_grad),
        ("weight gradient", "kernels", time.weight_grad),
        ("recomputation", f"policy: {policy}", time.recompute),
        ("collectives forward", "exposed, of the tensor, context and expert axes", time.comm_forward),
        ("collectives backward", "exposed", time.comm_backward),
        (
            "waiting for the host",
            f"host {time.host_forward * 1e3:.3g} + {time.host_backward * 1e3:.3g} ms, "
            f"device {time.device_forward * 1e3:.3g} + {time.device_backward * 1e3:.3g} ms",
            time.host_wait,
        ),
    ]
    total = time.total_forward + time.backward
    title = "one layer with experts, both passes" if experts else "one layer, both passes"
    return ExplainTable(title, ("term", "formula", "seconds"), tuple(rows), f"{total * 1e3:.4g} ms in total")


@dataclass(frozen=True)
class _Mean:
    """An average layer."""

    forward: float
    backward: float
    host_wait: float


def _mean(estimate: Estimate, costs: CostModel) -> _Mean:
    arch = estimate.architecture
    kinds = [(time, count / arch.layers) for _, count, time in layer_mix(arch, estimate.settings, costs)]

    def over(get: str) -> float:
        return sum(float(getattr(time, get)) * share for time, share in kinds)

    return _Mean(over("total_forward"), over("backward"), over("host_wait"))


def step_terms(estimate: Estimate, costs: CostModel) -> tuple[tuple[str, str, float], ...]:
    """Names, formulas and seconds of the terms of a step, averaged over pipeline stages; they sum to the step."""
    settings, step, arch = estimate.settings, estimate.step, estimate.architecture
    mean, ends = _mean(estimate, costs), _end_seconds(estimate, costs)
    runs, stages = settings.microbatches, settings.mesh.pipeline
    between = sum(sum(pair) for pair in end_comm_seconds(arch, settings, costs))
    layers, share = arch.layers / stages, f" / {stages} stages" if stages > 1 else ""
    loop = step.accounts["host"] - arch.layers / settings.mesh.pipeline * runs * mean.host_wait
    each = f"{layers:.4g} layers x {runs} microbatches x"
    terms = [
        ("layers, forward", f"{each} {mean.forward * 1e3:.4g} ms", layers * runs * mean.forward),
        ("layers, backward", f"{each} {mean.backward * 1e3:.4g} ms", layers * runs * mean.backward),
        ("embedding", f"{runs} x {ends[0] * 1e3:.4g} ms{share}", runs * ends[0] / stages),
        ("head and loss", f"{runs} x {ends[1] * 1e3:.4g} ms{share}", runs * ends[1] / stages),
        ("collectives at embedding and head", f"{runs} x {between * 1e3:.4g} ms{share}", runs * between / stages),
        (
            "slowed by overlap",
            f"contention {costs.parameters.contention:.3g} x overlapped communication",
            step.accounts["slowed by overlap"],
        ),
        ("weights and gradients of layers", "exposed", step.exposed["weights and gradients of layers"]),
        ("pipeline bubble", _bubble(settings), step.accounts["pipeline bubble"]),
        ("gradients of the step", "exposed", step.exposed["gradients of the step"]),
        ("optimizer", _update(estimate, costs), step.accounts["optimizer"]),
        ("host loop", "what the device waits for", max(0.0, loop)),
    ]
    return tuple(term for term in terms if term[2] > 0)


def _bubble(settings: Settings) -> str:
    mesh = settings.mesh
    return f"{settings.schedule}, {mesh.pipeline} stages x {settings.chunks}, {settings.microbatches} microbatches"


def _end_seconds(estimate: Estimate, costs: CostModel) -> tuple[float, float]:
    """Seconds of the embedding, and of final norm, head and loss, per microbatch."""
    embedding, head = (
        _trained(part, estimate.settings)
        for part in head_operations(estimate.architecture, estimate.settings.shape, estimate.settings.software)
    )
    seconds = [
        _sustained_speed(estimate, costs, part, inside=False).seconds(_work(estimate, costs, part))
        for part in (embedding, head)
    ]
    return seconds[0], seconds[1]


def _step(estimate: Estimate, costs: CostModel) -> ExplainTable:
    note = f"{estimate.step.seconds:.4g} s per step in total"
    return ExplainTable(
        "a step, averaged over devices", ("term", "formula", "seconds"), step_terms(estimate, costs), note
    )


def _useful(estimate: Estimate) -> ExplainTable:
    settings = estimate.settings
    tokens = settings.batch * settings.seq
    flops = flops_per_token(estimate.architecture, settings.seq)
    rows: tuple[tuple[Cell, ...], ...] = (
        (
            "useful",
            f"{flops:.4g} FLOPs per token x {tokens:,} tokens / "
            f"({settings.mesh.devices:,} x {estimate.peak_flops_s:.4g})",
            estimate.step.accounts["useful"],
        ),
    )
    full = f"{100 * estimate.mfu_full_attention:.1f} % counting full attention"
    note = f"MFU {100 * estimate.mfu:.1f} %: useful seconds over the step; {full}"
    return ExplainTable("useful seconds of a step", ("term", "formula", "seconds"), rows, note)


def _updated(estimate: Estimate) -> float:
    """Parameters that a device updates."""
    routed, dense = local_parameters(estimate.architecture, estimate.settings)
    return _sharded(estimate.settings, routed, dense) if estimate.settings.zero >= 1 else routed + dense


def _sharded(settings: Settings, routed: float, dense: float) -> float:
    """Parameters per device after sharding."""
    mesh = settings.mesh
    owners = mesh.shard * mesh.context
    return dense / owners + routed / max(1.0, owners * mesh.tensor / mesh.expert)


def _update(estimate: Estimate, costs: CostModel) -> str:
    if estimate.settings.software.offloads_moments:
        return f"{_updated(estimate):.4g} parameters; moments are copied from the host and back"
    moved, seconds = optimizer_bytes(estimate.settings.software), estimate.step.accounts["optimizer"]
    count = _updated(estimate)
    rate = count * moved / seconds if seconds else costs.cluster.chip.bandwidth_bytes_s
    return f"{moved:g} B x {count:.4g} parameters / {rate / 1e12:.3g} TB/s"


# -- communication and the pipeline


def _communication(estimate: Estimate, costs: CostModel) -> ExplainTable:
    columns = ("exchange", "operation", "bytes", "group", "over", "seconds", "times", "exposed")
    rows = tuple(_communication_row(cost) for cost in communication_costs(estimate, costs))
    exposed = estimate.step.accounts["exposed communication"]
    note = f"{exposed:.4g} s per step are exposed" if rows else "no communication on one device"
    return ExplainTable("communication in a step", columns, rows, note)


def _communication_row(cost: CommCost) -> tuple[Cell, ...]:
    group = f"{cost.group.size}" + (f" by {cost.group.stride}" if cost.group.stride > 1 else "")
    return cost.name, cost.operation, cost.bytes, group, cost.level, cost.seconds, cost.times, cost.exposed


def _pipeline(estimate: Estimate) -> Iterator[ExplainTable]:
    settings, step = estimate.settings, estimate.step
    if settings.mesh.pipeline == 1:
        return
    layers = stage_counts(estimate.architecture.layers, settings)
    spread = f"{min(layers)}" if min(layers) == max(layers) else f"{min(layers)} to {max(layers)}"
    rows: tuple[tuple[Cell, ...], ...] = (
        ("bubble of even stages", BUBBLES[settings.schedule], None),
        ("bubble here", f"{_bubble(settings)}, simulated", step.accounts["pipeline bubble"]),
        ("layers per stage", spread, None),
        ("activations held", f"of {step.in_flight:.3g} microbatches on the first rank", None),
    )
    note = f"{100 * step.bubble_share:.1f} % of the passes, on the busiest rank"
    yield ExplainTable("the pipeline", ("term", "formula", "seconds"), rows, note)


# -- memory


def _memory(estimate: Estimate, costs: CostModel) -> ExplainTable:
    settings, memory = estimate.settings, estimate.memory
    software = settings.software
    states, _ = _optimizer_bytes(estimate)
    rows: list[tuple[Cell, ...]] = [
        ("weights", *_held(estimate, software.weight_bytes, settings.zero >= 3)),
        ("gradients", *_gradients(estimate)),
        ("optimizer", *_held(estimate, states, settings.zero >= 1)),
        ("activations", *_activations(estimate)),
        ("gathered", "weights gathered or cast for the current layers", memory.gathered),
        ("logits", f"of the {software.loss} loss", memory.logits),
        ("overhead", _overhead(estimate, costs), memory.overhead),
    ]
    note = f"{memory.total / GIB:.1f} of {memory.capacity / GIB:.0f} GB at the peak"
    return ExplainTable("memory of the device that needs most", ("part", "formula", "bytes"), tuple(rows), note)


def _held(estimate: Estimate, each: float, shared: bool) -> tuple[str, float]:
    """Formula and bytes of `each` per parameter of the device, or of its shard."""
    settings = estimate.settings
    if settings.frozen:
        return "frozen", estimate.memory.weights if each == settings.software.weight_bytes else 0.0
    routed, dense = local_parameters(estimate.architecture, settings, estimate.memory.rank)
    owners = settings.mesh.shard * settings.mesh.context
    if not shared or owners == 1:
        return f"{each:g} B x {routed + dense:.4g} parameters", each * (routed + dense)
    share = _sharded(settings, routed, dense)
    note = f" / {owners}" if not routed else f", {share:.4g} of them here"
    return f"{each:g} B x {routed + dense:.4g} parameters{note}", each * share


def _gradients(estimate: Estimate) -> tuple[str, float]:
    settings, software = estimate.settings, estimate.settings.software
    if not estimate.memory.gradients:
        return "none at the peak, which is the end of the forward pass", 0.0
    _, trained = _optimizer_bytes(estimate)
    if settings.zero >= 3 and holds_full_gradients(settings):
        text, size = _held(estimate, software.reduce_bytes * trained, shared=False)
        return f"{text}: reduced once per step", size
    if software.updates_in_backward:
        return (
            "of one block and of parameters outside of blocks: updated in the backward pass",
            estimate.memory.gradients,
        )
    return _held(estimate, software.gradient_bytes * trained, settings.zero >= 2)


def _optimizer_bytes(estimate: Estimate) -> tuple[float, float]:
    """Optimizer bytes per parameter of the device that needs most, and the share that is trained."""
    arch, settings, rank = estimate.architecture, estimate.settings, estimate.memory.rank
    count = sum(local_parameters(arch, settings, rank))
    return optimizer_bytes_each(settings, count, non_layer_parameters(arch, settings, rank))


def _activations(estimate: Estimate) -> tuple[str, float]:
    """Formula and bytes of the peak."""
    settings, arch = estimate.settings, estimate.architecture
    ranks = settings.mesh.pipeline
    here = (
        blocks_of_ranks(arch.layers, settings)[estimate.memory.rank]
        if settings.software.is_headway
        else arch.layers / ranks
    )
    again = 1.0 if settings.recompute_blocks is None else min(1.0, settings.recompute_blocks / here)
    each = [(n, *activation_bytes(arch, experts, settings.shape, settings)) for experts, n in layer_kinds(arch)]
    mean = sum(n * (again * policy + (1 - again) * whole) for n, whole, policy in each) / arch.layers
    kept = mean * here * (1 - settings.offloaded)
    working = max(whole for _, whole, _ in each) if settings.recompute != "none" and again else 0.0
    wide = settings.software.stream_bytes * settings.shape.width / 2
    stream = settings.shape.tokens * arch.dim * wide / settings.mesh.tensor
    held = _held_microbatches(estimate)
    layers = f"{here:.4g} layers x {kept / here / GIB:.3g} GB"
    moments = [
        (f"{layers} x {held:.3g} microbatches + the stream", kept * held + stream),
        (f"{layers} + the stream", kept + stream),
        (f"{layers} x {held:.3g} microbatches + the current layer", kept * held + working),
        ("the current layer, recomputed", working),
    ]
    if held == 1.0:
        moments = moments[1:]
    return min(moments, key=lambda moment: abs(moment[1] - estimate.memory.activations))


def _held_microbatches(estimate: Estimate) -> float:
    """Microbatches whose activations the device that needs most holds."""
    settings, ranks = estimate.settings, estimate.settings.mesh.pipeline
    if ranks == 1:
        return 1.0
    if not settings.software.is_headway:
        return max(1.0, estimate.step.in_flight)
    held = in_flight(settings.schedule, ranks, settings.chunks, settings.microbatches)
    return max(1.0, held[estimate.memory.rank] / settings.chunks)


def _overhead(estimate: Estimate, costs: CostModel) -> str:
    if costs.cluster.chip.name == "cpu":
        return "assumed for the process"
    mesh = estimate.settings.mesh
    groups = sum(size > 1 for size in (mesh.tensor, mesh.pipeline, mesh.context, mesh.data, mesh.expert))
    parts = f"{CONTEXT_BYTES / GIB:g} GB context + {groups} groups x {COMMUNICATOR_BYTES / GIB:g} GB"
    return f"{parts} + {100 * FRAGMENTATION:.0f} % fragmentation"


# -- clock and parameters


def _clock(estimate: Estimate, costs: CostModel) -> ExplainTable:
    chip, limit = costs.cluster.chip, costs.cluster.power_w
    rows: list[tuple[Cell, ...]] = []
    for experts, _ in layer_kinds(estimate.architecture):
        part = _layer_part(estimate, experts)
        mix, sustained = _work(estimate, costs, part), _sustained_speed(estimate, costs, part)
        clock = 1.0
        if not costs.ideal:
            clock = power_share(chip, limit, mix.gemm, mix.attention, mix.memory, costs.demand)
        rows.append(
            ("with experts" if experts else "dense", clock, sustained.gemm, sustained.attention, sustained.memory)
        )
    columns = ("layers", "share of clock", "products", "attention", "memory-bound")
    note = (
        f"GEMMs would draw {costs.demand:.3g} x the chip's {chip.power_w:.0f} W at full clock; the limit is "
        f"{limit:.0f} W; the other columns are speeds relative to the kernel model"
    )
    return ExplainTable("power and speed", columns, tuple(rows), note)


def _parameters(costs: CostModel) -> ExplainTable:
    meanings = parameter_meanings()
    rows = tuple((name, value, meanings.get(name, "")) for name, value in asdict(costs.parameters).items())
    return ExplainTable("parameters of the cost model", ("name", "value", "meaning"), rows)


def parameter_meanings() -> dict[str, str]:
    """The docstring of each parameter of the cost model."""
    body = ast.parse(inspect.getsource(Efficiencies)).body[0]
    assert isinstance(body, ast.ClassDef), "Efficiencies is a class"
    meanings: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        documented = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and documented:
            meanings[field.target.id] = " ".join(str(text.value.value).split())  # type: ignore[attr-defined]
    return meanings
