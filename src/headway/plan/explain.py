"""Explains a plan: each term with its formula, computed by the functions that made the plan.

Sections are tables of plain values in bytes, seconds and FLOPs; the column name says which.
"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain

from headway.errors import plural
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
    holds_full_gradients,
    local_parameters,
    mean_activation_bytes,
    non_layer_parameters,
    optimizer_bytes_each,
    sharded_parameters,
)
from headway.plan.operations import Operation, Part, head_operations, layer_operations, optimizer_bytes
from headway.plan.pipeline import in_flight
from headway.plan.rates import power_share
from headway.plan.roofline import RooflinePoint
from headway.plan.settings import Settings
from headway.plan.stages import blocks_of_ranks, recomputed_share, stage_counts
from headway.plan.trainer_communication import end_comm_seconds

Cell = str | float | None
GIB = 2**30
PASSES = {"forward": "forward", "input_grad": "d input", "weight_grad": "d weight"}
AGAIN = {
    "full": (1.0, 1.0, 1.0),
    "except-attention": (1.0, 0.0, 1.0),
    "selective": (0.5, 0.0, 1.0),
    "attention": (0.0, 1.0, 0.0),
    "none": (0.0, 0.0, 0.0),
}
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


def explain(plan: Estimate, costs: CostModel) -> list[ExplainTable]:
    """Every term of a plan's step and memory, with its formula."""
    arch = plan.architecture
    kinds = list(layer_kinds(arch))
    sections = [_operations(plan, costs, experts, count) for experts, count in kinds]
    sections += [_ends(plan, costs), *(_passes(plan, costs, experts) for experts, _ in kinds)]
    sections += [_communication(plan, costs), *_pipeline(plan), _step(plan, costs), _useful(plan)]
    return [*sections, _memory(plan, costs), _clock(plan, costs), _parameters(costs)]


# -- operations


def _layer_part(plan: Estimate, experts: bool) -> Part:
    """A layer's operations; frozen weights have no gradients."""
    part = layer_operations(plan.architecture, experts, plan.settings.shape, plan.settings.software)
    return _trained(part, plan.settings)


def _trained(part: Part, settings: Settings) -> Part:
    return tuple(operation for operation in part if not (settings.frozen and operation.phase == "weight_grad"))


def _work(plan: Estimate, costs: CostModel, part: Part) -> Work:
    forward, inputs, weights = phases(costs.rates, part, plan.settings.software.attention)
    return forward + inputs + weights


def _sustained_speed(plan: Estimate, costs: CostModel, part: Part, inside: bool = True) -> Speed:
    """Sustained kernel speed, in a layer or at embedding and head."""
    settings, mix = plan.settings, _work(plan, costs, part)
    if inside:
        return speed(costs, settings.precision, mix, settings.software.scaling)
    return speed(costs, settings.shape.high_precision, mix)


def _rows(plan: Estimate, costs: CostModel, part: Part, inside: bool = True) -> Iterator[tuple[Cell, ...]]:
    sustained = _sustained_speed(plan, costs, part, inside)
    for operation in part:
        seconds = sustained.seconds(_work(plan, costs, (operation,)))
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


def _operations(plan: Estimate, costs: CostModel, experts: bool, count: int) -> ExplainTable:
    settings, shape = plan.settings, plan.settings.shape
    kind = "layer with experts" if experts else "layer"
    time = layer(plan.architecture, experts, settings, costs)
    tokens = f"{shape.sequences} x {shape.seq:,} tokens" + (f" / context {shape.context}" if shape.context > 1 else "")
    together = time.forward + time.input_grad + time.weight_grad
    note = f"{together * 1e3:.4g} ms per layer and microbatch, at the clock that power allows; {plural(count, 'layer')}"
    return ExplainTable(f"one {kind}, {tokens}", COLUMNS, tuple(_rows(plan, costs, _layer_part(plan, experts))), note)


def _ends(plan: Estimate, costs: CostModel) -> ExplainTable:
    rows = (_rows(plan, costs, _trained(part, plan.settings), inside=False) for part in _end_parts(plan))
    return ExplainTable("embedding, head and loss, one microbatch", COLUMNS, tuple(chain.from_iterable(rows)))


def roofline_points(plan: Estimate, costs: CostModel) -> list[RooflinePoint]:
    """What a device computes in a step, by operation: layers, recomputation, head, loss and optimizer."""
    settings, arch = plan.settings, plan.architecture
    runs = settings.microbatches
    points: dict[str, RooflinePoint] = {}
    for experts, count in layer_kinds(arch):
        part = _layer_part(plan, experts)
        each = count / settings.mesh.pipeline * runs
        _add(points, plan, costs, part, each, _sustained_speed(plan, costs, part))
    for part in _end_parts(plan):
        part = _trained(part, settings)
        _add(points, plan, costs, part, runs, _sustained_speed(plan, costs, part, inside=False))
    update = plan.step.accounts["optimizer"]
    return [
        *points.values(),
        RooflinePoint("optimizer", 0.0, _updated(plan) * optimizer_bytes(settings.software), update),
    ]


def _add(
    points: dict[str, RooflinePoint], plan: Estimate, costs: CostModel, part: Part, times: float, sustained: Speed
) -> None:
    inside = part[0].name != "embedding" and not any(operation.name == "head" for operation in part)
    settings = plan.settings
    kept = settings.recompute == "selective" and settings.software.keeps_gemm_outputs
    shares = (0.0, 0.0, 1.0) if kept else AGAIN[settings.recompute]
    part_of = recomputed_share(plan.architecture.layers, settings)
    again = dict(zip(("gemm", "attention", "memory"), (part_of * share for share in shares), strict=True))
    for operation in part:
        runs = times * (1 + (again[operation.kind] if inside and operation.phase == "forward" else 0.0))
        old = points.get(operation.name, RooflinePoint(operation.name, 0.0, 0.0, 0.0))
        seconds = sustained.seconds(_work(plan, costs, (operation,)))
        points[operation.name] = RooflinePoint(
            operation.name,
            old.flops + runs * operation.flops,
            old.bytes + runs * operation.bytes,
            old.seconds + runs * seconds,
        )


# -- passes and the step


def _passes(plan: Estimate, costs: CostModel, experts: bool) -> ExplainTable:
    """One layer's forward and backward pass."""
    time = layer(plan.architecture, experts, plan.settings, costs)
    blocks = plan.settings.recompute_blocks
    blocks_note = (
        f", {plural(blocks, 'layer')} per device" if blocks is not None and plan.settings.recompute != "none" else ""
    )
    policy = f"{plan.settings.recompute}{blocks_note}"
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


def _mean(plan: Estimate, costs: CostModel, name: str) -> float:
    """An attribute of LayerTime, averaged over layers."""
    arch = plan.architecture
    mix = layer_mix(arch, plan.settings, costs)
    return sum(float(getattr(time, name)) * (count / arch.layers) for _, count, time in mix)


def step_terms(plan: Estimate, costs: CostModel) -> tuple[tuple[str, str, float], ...]:
    """Names, formulas and seconds of the terms of a step, averaged over pipeline stages; they sum to the step."""
    settings, step, arch = plan.settings, plan.step, plan.architecture
    forward, backward, host_wait = (_mean(plan, costs, name) for name in ("total_forward", "backward", "host_wait"))
    ends, runs, stages = _end_seconds(plan, costs), settings.microbatches, settings.mesh.pipeline
    between = sum(sum(pair) for pair in end_comm_seconds(arch, settings, costs))
    layers, share = arch.layers / stages, f" / {stages} stages" if stages > 1 else ""
    loop = step.accounts["host"] - arch.layers / settings.mesh.pipeline * runs * host_wait
    each = f"{layers:.4g} layers x {runs} microbatches x"
    terms = [
        ("layers, forward", f"{each} {forward * 1e3:.4g} ms", layers * runs * forward),
        ("layers, backward", f"{each} {backward * 1e3:.4g} ms", layers * runs * backward),
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
        ("optimizer", _update(plan, costs), step.accounts["optimizer"]),
        ("host loop", "what the device waits for", max(0.0, loop)),
    ]
    return tuple(term for term in terms if term[2] > 0)


def _bubble(settings: Settings) -> str:
    mesh = settings.mesh
    return f"{settings.schedule}, {mesh.pipeline} stages x {settings.chunks}, {settings.microbatches} microbatches"


def _end_seconds(plan: Estimate, costs: CostModel) -> list[float]:
    """Seconds of the embedding, and of final norm, head and loss, per microbatch."""
    parts = (_trained(part, plan.settings) for part in _end_parts(plan))
    return [_sustained_speed(plan, costs, part, inside=False).seconds(_work(plan, costs, part)) for part in parts]


def _end_parts(plan: Estimate) -> tuple[Part, Part]:
    return head_operations(plan.architecture, plan.settings.shape, plan.settings.software)


def _step(plan: Estimate, costs: CostModel) -> ExplainTable:
    note = f"{plan.step.seconds:.4g} s per step in total"
    return ExplainTable("a step, averaged over devices", ("term", "formula", "seconds"), step_terms(plan, costs), note)


def _useful(plan: Estimate) -> ExplainTable:
    settings = plan.settings
    tokens = settings.batch * settings.seq
    flops = flops_per_token(plan.architecture, settings.seq)
    rows: tuple[tuple[Cell, ...], ...] = (
        (
            "useful",
            f"{flops:.4g} FLOPs per token x {tokens:,} tokens / ({settings.mesh.devices:,} x {plan.peak_flops_s:.4g})",
            plan.step.accounts["useful"],
        ),
    )
    full = f"{100 * plan.mfu_full_attention:.1f} % counting full attention"
    note = f"MFU {100 * plan.mfu:.1f} %: useful seconds over the step; {full}"
    return ExplainTable("useful seconds of a step", ("term", "formula", "seconds"), rows, note)


def _updated(plan: Estimate) -> float:
    """Parameters that a device updates."""
    routed, dense = local_parameters(plan.architecture, plan.settings)
    return sharded_parameters(plan.settings, routed, dense) if plan.settings.zero >= 1 else routed + dense


def _update(plan: Estimate, costs: CostModel) -> str:
    if plan.settings.software.offloads_moments:
        return f"{_updated(plan):.4g} parameters; moments are copied from the host and back"
    moved, seconds = optimizer_bytes(plan.settings.software), plan.step.accounts["optimizer"]
    count = _updated(plan)
    rate = count * moved / seconds if seconds else costs.cluster.chip.bandwidth_bytes_s
    return f"{moved:g} B x {count:.4g} parameters / {rate / 1e12:.3g} TB/s"


# -- communication and the pipeline


def _communication(plan: Estimate, costs: CostModel) -> ExplainTable:
    columns = ("exchange", "operation", "bytes", "group", "over", "seconds", "times", "exposed")
    rows = tuple(_communication_row(cost) for cost in communication_costs(plan, costs))
    exposed = plan.step.accounts["exposed communication"]
    note = f"{exposed:.4g} s per step are exposed" if rows else "no communication on one device"
    return ExplainTable("communication in a step", columns, rows, note)


def _communication_row(cost: CommCost) -> tuple[Cell, ...]:
    group = f"{cost.group.size}" + (f" by {cost.group.stride}" if cost.group.stride > 1 else "")
    return cost.name, cost.operation, cost.bytes, group, cost.level, cost.seconds, cost.times, cost.exposed


def _pipeline(plan: Estimate) -> Iterator[ExplainTable]:
    settings, step = plan.settings, plan.step
    if settings.mesh.pipeline == 1:
        return
    layers = stage_counts(plan.architecture.layers, settings)
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


def _memory(plan: Estimate, costs: CostModel) -> ExplainTable:
    settings, memory = plan.settings, plan.memory
    software = settings.software
    states, _ = _optimizer_bytes(plan)
    rows: list[tuple[Cell, ...]] = [
        ("weights", *_held(plan, software.weight_bytes, settings.zero >= 3)),
        ("gradients", *_gradients(plan)),
        ("optimizer", *_held(plan, states, settings.zero >= 1)),
        ("activations", *_activations(plan)),
        ("gathered", "weights gathered or cast for the current layers", memory.gathered),
        ("logits", f"of the {software.loss} loss", memory.logits),
        ("overhead", _overhead(plan, costs), memory.overhead),
    ]
    note = f"{memory.total / GIB:.1f} of {memory.capacity / GIB:.0f} GB at the peak"
    return ExplainTable("memory of the device that needs most", ("part", "formula", "bytes"), tuple(rows), note)


def _held(plan: Estimate, each: float, shared: bool) -> tuple[str, float]:
    """Formula and bytes of `each` per parameter of the device, or of its shard."""
    settings = plan.settings
    if settings.frozen:
        return "frozen", plan.memory.weights if each == settings.software.weight_bytes else 0.0
    routed, dense = local_parameters(plan.architecture, settings, plan.memory.rank)
    owners = settings.mesh.shard * settings.mesh.context
    if not shared or owners == 1:
        return f"{each:g} B x {routed + dense:.4g} parameters", each * (routed + dense)
    share = sharded_parameters(settings, routed, dense)
    note = f" / {owners}" if not routed else f", {share:.4g} of them here"
    return f"{each:g} B x {routed + dense:.4g} parameters{note}", each * share


def _gradients(plan: Estimate) -> tuple[str, float]:
    settings, software = plan.settings, plan.settings.software
    if not plan.memory.gradients:
        return "none at the peak, which is the end of the forward pass", 0.0
    _, trained = _optimizer_bytes(plan)
    if settings.zero >= 3 and holds_full_gradients(settings):
        text, size = _held(plan, software.reduce_bytes * trained, shared=False)
        return f"{text}: reduced once per step", size
    if software.updates_in_backward:
        return ("of one block and of parameters outside of blocks: updated in the backward pass", plan.memory.gradients)
    return _held(plan, software.gradient_bytes * trained, settings.zero >= 2)


def _optimizer_bytes(plan: Estimate) -> tuple[float, float]:
    """Optimizer bytes per parameter of the device that needs most, and the share that is trained."""
    arch, settings, rank = plan.architecture, plan.settings, plan.memory.rank
    count = sum(local_parameters(arch, settings, rank))
    return optimizer_bytes_each(settings, count, non_layer_parameters(arch, settings, rank))


def _activations(plan: Estimate) -> tuple[str, float]:
    """Formula and bytes of the peak."""
    settings, arch = plan.settings, plan.architecture
    ranks = settings.mesh.pipeline
    here = (
        blocks_of_ranks(arch.layers, settings)[plan.memory.rank]
        if settings.software.is_headway
        else arch.layers / ranks
    )
    mean, working = mean_activation_bytes(arch, settings, here)
    kept = mean * here * (1 - settings.offloaded)
    wide = settings.software.stream_bytes * settings.shape.width / 2
    stream = settings.shape.tokens * arch.dim * wide / settings.mesh.tensor
    held = _held_microbatches(plan)
    layers = f"{here:.4g} layers x {kept / here / GIB:.3g} GB"
    moments = [
        (f"{layers} x {held:.3g} microbatches + the stream", kept * held + stream),
        (f"{layers} + the stream", kept + stream),
        (f"{layers} x {held:.3g} microbatches + the current layer", kept * held + working),
        ("the current layer, recomputed", working),
    ]
    if held == 1.0:
        moments = moments[1:]
    return min(moments, key=lambda moment: abs(moment[1] - plan.memory.activations))


def _held_microbatches(plan: Estimate) -> float:
    """Microbatches whose activations the device that needs most holds."""
    settings, ranks = plan.settings, plan.settings.mesh.pipeline
    if ranks == 1:
        return 1.0
    if not settings.software.is_headway:
        return max(1.0, plan.step.in_flight)
    held = in_flight(settings.schedule, ranks, settings.chunks, settings.microbatches)
    return max(1.0, held[plan.memory.rank] / settings.chunks)


def _overhead(plan: Estimate, costs: CostModel) -> str:
    if costs.cluster.chip.name == "cpu":
        return "assumed for the process"
    mesh = plan.settings.mesh
    groups = sum(size > 1 for size in (mesh.tensor, mesh.pipeline, mesh.context, mesh.data, mesh.expert))
    parts = f"{CONTEXT_BYTES / GIB:g} GB context + {groups} groups x {COMMUNICATOR_BYTES / GIB:g} GB"
    return f"{parts} + {100 * FRAGMENTATION:.0f} % fragmentation"


# -- clock and parameters


def _clock(plan: Estimate, costs: CostModel) -> ExplainTable:
    chip, limit = costs.cluster.chip, costs.cluster.power_w
    rows: list[tuple[Cell, ...]] = []
    for experts, _ in layer_kinds(plan.architecture):
        part = _layer_part(plan, experts)
        mix, sustained = _work(plan, costs, part), _sustained_speed(plan, costs, part)
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
