"""Where a plan's numbers come from: each term with its formula, recomputed by the functions that made the plan.

Sections are tables of plain values. Units are bytes, seconds and FLOPs; a column's name says which.
"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain

from headway.plan.architecture import layer_kinds
from headway.plan.communication import CommCost, exchanges
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
    gradients_wait,
    kept_of_each,
    local_parameters,
    outside_parameters,
)
from headway.plan.operations import Operation, Part, head_operations, layer_operations, optimizer_bytes
from headway.plan.pipeline import in_flight
from headway.plan.rates import power_share
from headway.plan.roofline import RooflinePoint
from headway.plan.settings import Settings
from headway.plan.stages import blocks_of_ranks, recomputed_share, stage_counts
from headway.plan.trainer_communication import end_exchanges

__all__ = ["Cell", "ExplainTable", "explain", "parameter_meanings", "roofline_points", "step_terms"]

Cell = str | float | None
GIB = 2**30
PASSES = {"forward": "forward", "input_grad": "d input", "weight_grad": "d weight"}
AGAIN = {"full": (1.0, 1.0, 1.0), "selective": (0.5, 0.0, 1.0), "attention": (0.0, 1.0, 0.0), "none": (0.0, 0.0, 0.0)}
"""What of a forward pass's products, attention and memory-bound kernels runs a second time, by policy."""
BUBBLES = {
    "1f1b": "(stages - 1) x (forward + backward)",
    "interleaved": "(stages - 1) / chunks x (forward + backward)",
    "zero-bubble": "(stages - 1) x (forward + input gradient - weight gradient)",
}
"""Of a pipeline whose stages are all alike, and which waits for no transfer."""


@dataclass(frozen=True)
class ExplainTable:
    """One table of an explanation."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    """What to know of it, in a sentence."""


def explain(made: Estimate, costs: CostModel) -> list[ExplainTable]:
    """Every term of a plan's step and memory, with its formula."""
    arch = made.architecture
    kinds = list(layer_kinds(arch))
    sections = [_operations(made, costs, experts, count) for experts, count in kinds]
    sections += [_ends(made, costs), *(_passes(made, costs, experts) for experts, _ in kinds)]
    sections += [_exchanges(made, costs), *_pipeline(made), _step(made, costs), _useful(made)]
    return [*sections, _memory(made, costs), _clock(made, costs), _parameters(costs)]


# -- operations


def _part(made: Estimate, experts: bool) -> Part:
    """A layer's operations; frozen weights have no gradients."""
    part = layer_operations(made.architecture, experts, made.settings.shape, made.settings.software)
    return _trained(part, made.settings)


def _trained(part: Part, settings: Settings) -> Part:
    return tuple(one for one in part if not (settings.frozen and one.phase == "weight_grad"))


def _work(made: Estimate, costs: CostModel, part: Part) -> Work:
    forward, inputs, weights = phases(costs.rates, part, made.settings.software.attention)
    return forward + inputs + weights


def _fast(made: Estimate, costs: CostModel, part: Part, inside: bool = True) -> Speed:
    """What training sustains of kernels' speed, in a layer or at the ends of the model."""
    settings, mix = made.settings, _work(made, costs, part)
    if inside:
        return speed(costs, settings.precision, mix, settings.software.scaling)
    return speed(costs, settings.shape.other, mix)


def _rows(made: Estimate, costs: CostModel, part: Part, inside: bool = True) -> Iterator[tuple[Cell, ...]]:
    fast = _fast(made, costs, part, inside)
    for one in part:
        seconds = fast.seconds(_work(made, costs, (one,)))
        sizes = (one.m, one.n, one.k) if one.kind == "product" else (None, None, None)
        yield (one.name, PASSES[one.phase], *sizes, one.flops, one.bytes, seconds, _of_roof(costs, one, seconds))


def _of_roof(costs: CostModel, one: Operation, seconds: float) -> float:
    """What the operation must take at least over what it takes."""
    memory = one.bytes / costs.cluster.chip.bandwidth_bytes_s
    return max(memory, one.flops / costs.rates.peak(one.precision) if one.flops else 0.0) / seconds


COLUMNS = ("operation", "pass", "m", "n", "k", "flops", "bytes", "seconds", "of roof")


def _operations(made: Estimate, costs: CostModel, experts: bool, count: int) -> ExplainTable:
    settings, shape = made.settings, made.settings.shape
    kind = "layer with experts" if experts else "layer"
    one = layer(made.architecture, experts, settings, costs)
    tokens = f"{shape.sequences} x {shape.seq:,} tokens" + (f" / context {shape.context}" if shape.context > 1 else "")
    together = one.forward + one.input_grad + one.weight_grad
    note = f"{together * 1e3:.4g} ms a layer and microbatch, at the clock that power leaves; there are {count} layers"
    return ExplainTable(f"one {kind}, {tokens}", COLUMNS, tuple(_rows(made, costs, _part(made, experts))), note)


def _ends(made: Estimate, costs: CostModel) -> ExplainTable:
    parts = head_operations(made.architecture, made.settings.shape, made.settings.software)
    rows = (_rows(made, costs, _trained(part, made.settings), inside=False) for part in parts)
    return ExplainTable("the ends of the model, one microbatch", COLUMNS, tuple(chain.from_iterable(rows)))


def roofline_points(made: Estimate, costs: CostModel) -> list[RooflinePoint]:
    """All that a device computes in a step, by operation: layers, recomputation, head, loss, and the optimizer."""
    settings, arch = made.settings, made.architecture
    runs = settings.microbatches
    points: dict[str, RooflinePoint] = {}
    for experts, count in layer_kinds(arch):
        part = _part(made, experts)
        each = count / settings.mesh.pipeline * runs
        _add(points, made, costs, part, each, _fast(made, costs, part))
    for part in head_operations(arch, settings.shape, settings.software):
        part = _trained(part, settings)
        _add(points, made, costs, part, runs, _fast(made, costs, part, inside=False))
    update = made.step.accounts["optimizer"]
    return [
        *points.values(),
        RooflinePoint("optimizer", 0.0, _updated(made) * optimizer_bytes(settings.software), update),
    ]


def _add(
    points: dict[str, RooflinePoint], made: Estimate, costs: CostModel, part: Part, times: float, fast: Speed
) -> None:
    inside = part[0].name != "embedding" and not any(one.name == "head" for one in part)
    settings = made.settings
    kept = settings.recompute == "selective" and settings.software.keeps_products
    shares = (0.0, 0.0, 1.0) if kept else AGAIN[settings.recompute]
    part_of = recomputed_share(made.architecture.layers, settings)
    again = dict(zip(("product", "attention", "memory"), (part_of * share for share in shares), strict=True))
    for one in part:
        runs = times * (1 + (again[one.kind] if inside and one.phase == "forward" else 0.0))
        old = points.get(one.name, RooflinePoint(one.name, 0.0, 0.0, 0.0))
        seconds = fast.seconds(_work(made, costs, (one,)))
        points[one.name] = RooflinePoint(
            one.name, old.flops + runs * one.flops, old.bytes + runs * one.bytes, old.seconds + runs * seconds
        )


# -- passes and the step


def _passes(made: Estimate, costs: CostModel, experts: bool) -> ExplainTable:
    """One layer's forward and backward pass."""
    one = layer(made.architecture, experts, made.settings, costs)
    blocks = made.settings.recompute_blocks
    some = f", of {blocks} layers a device" if blocks is not None and made.settings.recompute != "none" else ""
    policy = f"{made.settings.recompute}{some}"
    rows: list[tuple[Cell, ...]] = [
        ("forward", "kernels", one.forward),
        ("input gradient", "kernels", one.input_grad),
        ("weight gradient", "kernels", one.weight_grad),
        ("recomputation", f"policy: {policy}", one.again),
        ("exchanges forward", "exposed, of the tensor, context and expert axes", one.exchange_forward),
        ("exchanges backward", "exposed", one.exchange_backward),
        (
            "waiting for the host",
            f"host {one.host_forward * 1e3:.3g} + {one.host_backward * 1e3:.3g} ms, "
            f"device {one.device_forward * 1e3:.3g} + {one.device_backward * 1e3:.3g} ms",
            one.waits_for_host,
        ),
    ]
    both = one.whole_forward + one.backward
    title = "one layer with experts, both passes" if experts else "one layer, both passes"
    return ExplainTable(title, ("term", "formula", "seconds"), tuple(rows), f"together {both * 1e3:.4g} ms")


@dataclass(frozen=True)
class _Mean:
    """A layer on average over the model's kinds."""

    forward: float
    backward: float
    waits: float


def _mean(made: Estimate, costs: CostModel) -> _Mean:
    arch = made.architecture
    kinds = [(one, count / arch.layers) for _, count, one in layer_mix(arch, made.settings, costs)]

    def over(get: str) -> float:
        return sum(float(getattr(one, get)) * share for one, share in kinds)

    return _Mean(over("whole_forward"), over("backward"), over("waits_for_host"))


def step_terms(made: Estimate, costs: CostModel) -> tuple[tuple[str, str, float], ...]:
    """What a device does in a step, on average over a pipeline's stages: names, formulas, and seconds that sum up to
    it."""
    settings, step, arch = made.settings, made.step, made.architecture
    mean, ends = _mean(made, costs), _end_seconds(made, costs)
    runs, stages = settings.microbatches, settings.mesh.pipeline
    between = sum(sum(pair) for pair in end_exchanges(arch, settings, costs))
    layers, share = arch.layers / stages, f" / {stages} stages" if stages > 1 else ""
    loop = step.accounts["host"] - arch.layers / settings.mesh.pipeline * runs * mean.waits
    each = f"{layers:.4g} layers x {runs} microbatches x"
    terms = [
        ("layers, forward", f"{each} {mean.forward * 1e3:.4g} ms", layers * runs * mean.forward),
        ("layers, backward", f"{each} {mean.backward * 1e3:.4g} ms", layers * runs * mean.backward),
        ("embedding", f"{runs} x {ends[0] * 1e3:.4g} ms{share}", runs * ends[0] / stages),
        ("head and loss", f"{runs} x {ends[1] * 1e3:.4g} ms{share}", runs * ends[1] / stages),
        ("exchanges at the ends", f"{runs} x {between * 1e3:.4g} ms{share}", runs * between / stages),
        (
            "slowed by overlap",
            f"contention {costs.parameters.contention:.3g} x what travels beside kernels",
            step.accounts["slowed by overlap"],
        ),
        ("weights and gradients of layers", "exposed", step.exposed["weights and gradients of layers"]),
        ("pipeline bubble", _bubble(settings), step.accounts["pipeline bubble"]),
        ("gradients of the step", "exposed", step.exposed["gradients of the step"]),
        ("optimizer", _update(made, costs), step.accounts["optimizer"]),
        ("the loop's own host time", "what the device waits for", max(0.0, loop)),
    ]
    return tuple(term for term in terms if term[2] > 0)


def _bubble(settings: Settings) -> str:
    mesh = settings.mesh
    return f"{settings.schedule}, {mesh.pipeline} stages x {settings.chunks}, {settings.microbatches} microbatches"


def _end_seconds(made: Estimate, costs: CostModel) -> tuple[float, float]:
    """Of one microbatch: the embedding, and the last norm, head and loss."""
    embedding, head = (
        _trained(part, made.settings)
        for part in head_operations(made.architecture, made.settings.shape, made.settings.software)
    )
    both = [_fast(made, costs, part, inside=False).seconds(_work(made, costs, part)) for part in (embedding, head)]
    return both[0], both[1]


def _step(made: Estimate, costs: CostModel) -> ExplainTable:
    note = f"together {made.step.seconds:.4g} s a step"
    return ExplainTable(
        "a step, on average over devices", ("term", "formula", "seconds"), step_terms(made, costs), note
    )


def _useful(made: Estimate) -> ExplainTable:
    settings = made.settings
    tokens = settings.batch * settings.seq
    flops = flops_per_token(made.architecture, settings.seq)
    rows: tuple[tuple[Cell, ...], ...] = (
        (
            "useful",
            f"{flops:.4g} FLOPs a token x {tokens:,} tokens / ({settings.mesh.devices:,} x {made.peak_flops_s:.4g})",
            made.step.accounts["useful"],
        ),
    )
    full = f"{100 * made.mfu_full_attention:.1f} % counting full attention"
    note = f"MFU {100 * made.mfu:.1f} %: useful over the step; {full}"
    return ExplainTable("what of it is useful", ("term", "formula", "seconds"), rows, note)


def _updated(made: Estimate) -> float:
    """Parameters that one device updates."""
    routed, dense = local_parameters(made.architecture, made.settings)
    return _sharded(made.settings, routed, dense) if made.settings.zero >= 1 else routed + dense


def _sharded(settings: Settings, routed: float, dense: float) -> float:
    """Of a device's parameters, what is left when its shard group shares them."""
    mesh = settings.mesh
    owners = mesh.shard * mesh.context
    return dense / owners + routed / max(1.0, owners * mesh.tensor / mesh.expert)


def _update(made: Estimate, costs: CostModel) -> str:
    if made.settings.software.offloads_moments:
        return f"{_updated(made):.4g} parameters, whose moments come from the host and go back"
    moved, seconds = optimizer_bytes(made.settings.software), made.step.accounts["optimizer"]
    count = _updated(made)
    rate = count * moved / seconds if seconds else costs.cluster.chip.bandwidth_bytes_s
    return f"{moved:g} B x {count:.4g} parameters / {rate / 1e12:.3g} TB/s"


# -- exchanges and the pipeline


def _exchanges(made: Estimate, costs: CostModel) -> ExplainTable:
    columns = ("exchange", "operation", "bytes", "group", "over", "seconds", "times", "exposed")
    rows = tuple(_exchange_row(one) for one in exchanges(made, costs))
    exposed = made.step.accounts["exposed communication"]
    note = f"{exposed:.4g} s of a step are exposed" if rows else "one device exchanges nothing"
    return ExplainTable("what travels in a step", columns, rows, note)


def _exchange_row(one: CommCost) -> tuple[Cell, ...]:
    group = f"{one.group.size}" + (f" by {one.group.stride}" if one.group.stride > 1 else "")
    return one.name, one.operation, one.bytes, group, one.level, one.seconds, one.times, one.exposed


def _pipeline(made: Estimate) -> Iterator[ExplainTable]:
    settings, step = made.settings, made.step
    if settings.mesh.pipeline == 1:
        return
    layers = stage_counts(made.architecture.layers, settings)
    spread = f"{min(layers)}" if min(layers) == max(layers) else f"{min(layers)} to {max(layers)}"
    rows: tuple[tuple[Cell, ...], ...] = (
        ("bubble of even stages", BUBBLES[settings.schedule], None),
        ("bubble here", f"{_bubble(settings)}, gone through one by one", step.accounts["pipeline bubble"]),
        ("layers of a stage", spread, None),
        ("activations held", f"of {step.in_flight:.3g} microbatches on the first rank", None),
    )
    note = f"{100 * step.bubble_share:.1f} % of the passes, on the busiest rank"
    yield ExplainTable("the pipeline", ("term", "formula", "seconds"), rows, note)


# -- memory


def _memory(made: Estimate, costs: CostModel) -> ExplainTable:
    settings, memory = made.settings, made.memory
    software = settings.software
    states, _ = _kept(made)
    rows: list[tuple[Cell, ...]] = [
        ("weights", *_held(made, software.weight_bytes, settings.zero >= 3)),
        ("gradients", *_gradients(made)),
        ("optimizer", *_held(made, states, settings.zero >= 1)),
        ("activations", *_activations(made)),
        ("gathered", "weights brought together or cast for the layers at work", memory.gathered),
        ("logits", f"the loss's, {software.loss}", memory.logits),
        ("overhead", _overhead(made, costs), memory.overhead),
    ]
    note = f"together {memory.total / GIB:.1f} of {memory.capacity / GIB:.0f} GB, at the peak"
    return ExplainTable("memory of the device that needs most", ("part", "formula", "bytes"), tuple(rows), note)


def _held(made: Estimate, each: float, shared: bool) -> tuple[str, float]:
    """So many bytes for each parameter of the device, or of its share."""
    settings = made.settings
    if settings.frozen:
        return "frozen", made.memory.weights if each == settings.software.weight_bytes else 0.0
    routed, dense = local_parameters(made.architecture, settings, made.memory.rank)
    owners = settings.mesh.shard * settings.mesh.context
    if not shared or owners == 1:
        return f"{each:g} B x {routed + dense:.4g} parameters", each * (routed + dense)
    share = _sharded(settings, routed, dense)
    note = f" / {owners}" if not routed else f", {share:.4g} of them here"
    return f"{each:g} B x {routed + dense:.4g} parameters{note}", each * share


def _gradients(made: Estimate) -> tuple[str, float]:
    settings, software = made.settings, made.settings.software
    if not made.memory.gradients:
        return "none at the peak, which is the end of the forward pass", 0.0
    _, trained = _kept(made)
    if settings.zero >= 3 and gradients_wait(settings):
        text, size = _held(made, software.reduce_bytes * trained, shared=False)
        return f"{text}: they travel once a step", size
    if software.updates_early:
        return "of one block and of what is outside of blocks: the others are gone by then", made.memory.gradients
    return _held(made, software.gradient_bytes * trained, settings.zero >= 2)


def _kept(made: Estimate) -> tuple[float, float]:
    """Bytes of the optimizer for each parameter of the device that needs most, and the share that is trained."""
    arch, settings, rank = made.architecture, made.settings, made.memory.rank
    count = sum(local_parameters(arch, settings, rank))
    return kept_of_each(settings, count, outside_parameters(arch, settings, rank))


def _activations(made: Estimate) -> tuple[str, float]:
    """The formula of the moment that was the peak."""
    settings, arch = made.settings, made.architecture
    ranks = settings.mesh.pipeline
    here = blocks_of_ranks(arch.layers, settings)[made.memory.rank] if settings.software.own else arch.layers / ranks
    again = 1.0 if settings.recompute_blocks is None else min(1.0, settings.recompute_blocks / here)
    each = [(n, *activation_bytes(arch, experts, settings.shape, settings)) for experts, n in layer_kinds(arch)]
    mean = sum(n * (again * policy + (1 - again) * whole) for n, whole, policy in each) / arch.layers
    kept = mean * here * (1 - settings.offloaded)
    working = max(whole for _, whole, _ in each) if settings.recompute != "none" and again else 0.0
    wide = settings.software.stream_bytes * settings.shape.width / 2
    stream = settings.shape.tokens * arch.dim * wide / settings.mesh.tensor
    held = _held_microbatches(made)
    layers = f"{here:.4g} layers x {kept / here / GIB:.3g} GB"
    moments = [
        (f"{layers} x {held:.3g} microbatches + the stream", kept * held + stream),
        (f"{layers} + the stream", kept + stream),
        (f"{layers} x {held:.3g} microbatches + a layer at work", kept * held + working),
        ("one layer at work, recomputed", working),
    ]
    if held == 1.0:
        moments = moments[1:]
    return min(moments, key=lambda moment: abs(moment[1] - made.memory.activations))


def _held_microbatches(made: Estimate) -> float:
    """Of which the device that needs most holds activations."""
    settings, ranks = made.settings, made.settings.mesh.pipeline
    if ranks == 1:
        return 1.0
    if not settings.software.own:
        return max(1.0, made.step.in_flight)
    most = in_flight(settings.schedule, ranks, settings.chunks, settings.microbatches)
    return max(1.0, most[made.memory.rank] / settings.chunks)


def _overhead(made: Estimate, costs: CostModel) -> str:
    if costs.cluster.chip.name == "cpu":
        return "assumed for the process itself"
    mesh = made.settings.mesh
    groups = sum(size > 1 for size in (mesh.tensor, mesh.pipeline, mesh.context, mesh.data, mesh.expert))
    parts = f"{CONTEXT_BYTES / GIB:g} GB context + {groups} groups x {COMMUNICATOR_BYTES / GIB:g} GB"
    return f"{parts} + {100 * FRAGMENTATION:.0f} % lost to fragments"


# -- clock and parameters


def _clock(made: Estimate, costs: CostModel) -> ExplainTable:
    chip, limit = costs.cluster.chip, costs.cluster.power_w
    rows: list[tuple[Cell, ...]] = []
    for experts, _ in layer_kinds(made.architecture):
        part = _part(made, experts)
        mix, fast = _work(made, costs, part), _fast(made, costs, part)
        clock = 1.0
        if not costs.ideal:
            clock = power_share(chip, limit, mix.product, mix.attention, mix.memory, costs.demand)
        rows.append(("with experts" if experts else "dense", clock, fast.product, fast.attention, fast.memory))
    columns = ("layers", "share of clock", "products", "attention", "memory-bound")
    note = (
        f"products would draw {costs.demand:.3g} x the chip's {chip.power_w:.0f} W at full clock, and the limit is "
        f"{limit:.0f} W; the other columns are speeds over the kernel model's"
    )
    return ExplainTable("power and speed", columns, tuple(rows), note)


def _parameters(costs: CostModel) -> ExplainTable:
    meanings = parameter_meanings()
    rows = tuple((name, value, meanings.get(name, "")) for name, value in asdict(costs.parameters).items())
    return ExplainTable("parameters of the cost model", ("name", "value", "meaning"), rows)


def parameter_meanings() -> dict[str, str]:
    """What each parameter of the cost model means: the docstrings under its fields."""
    body = ast.parse(inspect.getsource(Efficiencies)).body[0]
    assert isinstance(body, ast.ClassDef), "Parameters is a class"
    found: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        said = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and said:
            found[field.target.id] = " ".join(str(text.value.value).split())  # type: ignore[attr-defined]
    return found
