"""Predicts the time of a training step, by account.

A step is the passes of its microbatches, in pipeline order if there is one, then the exposed rest of the gradient
reduction, and the optimizer. Each layer takes the larger of its host and device time; overlapped communication slows
it down, and only what does not fit beside it is exposed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from headway.plan.architecture import Architecture, layer_kinds
from headway.plan.collective_times import DeviceGroup, collective_seconds
from headway.plan.costs import CostModel
from headway.plan.flops import flops_per_token, layer_parameters, routed_parameters
from headway.plan.layer import LayerTime, Work, layer_mix, phases, speed
from headway.plan.memory import local_parameters, non_layer_parameters, sharded_parameters
from headway.plan.operations import head_operations, optimizer_bytes
from headway.plan.pipeline import StageTime, Timeline, simulate
from headway.plan.rank_share import block_parameters, is_exact
from headway.plan.rates import generation
from headway.plan.settings import LOW, Settings
from headway.plan.stages import stage_counts, stages_by_cost
from headway.plan.trainer_communication import NEVER_HIDDEN, end_comm_seconds, end_weight_seconds, step_transfers

ACCOUNTS = (
    "useful",
    "kernels below peak",
    "recomputation",
    "exposed communication",
    "slowed by overlap",
    "pipeline bubble",
    "host",
    "optimizer",
)
"""Where the seconds of a step go, in display order."""

UPDATE = 0.82
"""Share of the best memory bandwidth that optimizer kernels reach: measured on an H200, 3.4 of 4.2 TB/s."""
UPDATE_PRODUCTS = 0.5
"""Assumed share of the peak that the GEMMs of Muon's update reach; its two collectives are not counted."""
HOST_LINK_BYTES_S = 55e9
"""Between a device and pinned host memory: measured on an H200 host over PCIe 5.0 x16, which peaks at 64e9."""
HOST_LINK_PEAK_BYTES_S = 64e9


@dataclass(frozen=True)
class Step:
    """One training step."""

    seconds: float
    accounts: dict[str, float]
    """Seconds by account, in the order of ACCOUNTS, averaged over pipeline stages; they sum to the step."""
    exposed: dict[str, float]
    """Exposed communication by what is sent."""
    in_flight: float
    """Most microbatches whose activations the first pipeline stage holds."""
    bubble_share: float
    """Share of the passes, on the busiest stage."""


@dataclass(frozen=True)
class _Passes:
    """Seconds of one microbatch: an average layer, and the ends of the model (embedding; head and loss)."""

    forward: float
    backward: float
    weight_share: float
    """Share of the backward pass spent on weight gradients, which a schedule may defer."""
    first: tuple[float, float]
    """Embedding, forward and backward."""
    last: tuple[float, float]
    """Final norm, head and loss, forward and backward."""


def step(arch: Architecture, settings: Settings, costs: CostModel) -> Step:
    """Predict the seconds of a step, by account."""
    layers = [(time, count / arch.layers) for _, count, time in layer_mix(arch, settings, costs)]

    def mean(get: Callable[[LayerTime], float]) -> float:
        return sum(get(time) * share for time, share in layers)

    forward, backward = mean(lambda time: time.total_forward), mean(lambda time: time.backward)

    # weights gathered and gradients scattered per layer and microbatch
    sharded = _sharded(arch, settings, costs)
    slow_f, wait_f = _beside(forward, sharded[0], settings, costs)
    slow_b, wait_b = _beside(backward, sharded[1], settings, costs)
    wait_b += sharded[2]

    # all microbatches, in schedule order
    first, last = end_times(arch, settings, costs)
    at_first, at_last = end_comm_seconds(arch, settings, costs)
    weight_share = mean(lambda time: time.weight_grad) / backward if backward else 0.0
    passes = _Passes(
        forward + slow_f + wait_f, backward + slow_b + wait_b, weight_share,
        (first[0] + at_first[0], first[1] + at_first[1]), (last[0] + at_last[0], last[1] + at_last[1]),
    )  # fmt: skip
    timeline = _schedule(arch, settings, costs, passes)

    # once per step
    window = backward * arch.layers / settings.mesh.pipeline
    gradients = _gradients(arch, settings, costs, window)
    end_weights = end_weight_seconds(arch, settings, costs)
    update = _update(arch, settings, costs)
    passes_s = timeline.seconds
    loop = settings.software.loop_s if settings.software.loop_s is not None else costs.parameters.loop_s
    loop = 0.0 if costs.ideal else loop
    if not settings.software.waits_each_step:
        # the host runs ahead: its loop counts only if the device waits for the host anyway
        host_total = _host_total(arch, settings, layers) + loop
        loop = max(0.0, host_total - passes_s - end_weights - gradients - update)
    total = passes_s + end_weights + gradients + update + loop

    # average share of layers and ends per device; imbalance between stages counts as bubble
    per = arch.layers / settings.mesh.pipeline * settings.microbatches
    ends = sum(first + last) * settings.microbatches / settings.mesh.pipeline
    busy = sum(timeline.busy) / len(timeline.busy)
    useful = useful_seconds(arch, settings, costs)
    exposed = {
        "inside layers": per * mean(lambda time: time.comm_forward + time.comm_backward)
        + sum(at_first + at_last) * settings.microbatches / settings.mesh.pipeline,
        "weights and gradients of layers": per * (wait_f + wait_b) + end_weights,
        "gradients of the step": gradients,
    }
    accounts = {
        "useful": useful,
        "kernels below peak": per * mean(lambda time: time.forward + time.input_grad + time.weight_grad)
        + ends
        - useful,
        "recomputation": per * mean(lambda time: time.recompute),
        "exposed communication": sum(exposed.values()),
        "slowed by overlap": per * (slow_f + slow_b),
        "pipeline bubble": passes_s - busy,
        "host": per * mean(lambda time: time.host_wait) + loop,
        "optimizer": update,
    }
    return Step(
        seconds=total,
        accounts=accounts,
        exposed=exposed,
        in_flight=max(timeline.in_flight) / settings.chunks,
        bubble_share=1 - max(timeline.busy) / passes_s if passes_s else 0.0,
    )


def useful_seconds(arch: Architecture, settings: Settings, costs: CostModel) -> float:
    """Seconds of the model FLOPs of a step at the chip's peak."""
    flops = flops_per_token(arch, settings.seq) * settings.batch * settings.seq
    return flops / (settings.mesh.devices * costs.rates.peak(settings.precision))


def _host_total(arch: Architecture, settings: Settings, layers: list[tuple[LayerTime, float]]) -> float:
    each = sum((time.host_forward + time.host_backward) * share for time, share in layers)
    return each * arch.layers / settings.mesh.pipeline * settings.microbatches


Ends = tuple[tuple[float, float], tuple[float, float]]


def end_times(arch: Architecture, settings: Settings, costs: CostModel) -> Ends:
    """Forward and backward seconds of the embedding, and of final norm, head and loss."""
    parts = head_operations(arch, settings.shape, settings.software)
    times = []
    for part in parts:
        forward, inputs, weights = phases(costs.rates, part, settings.software.attention)
        if settings.frozen:
            weights = Work()
        sustained = speed(costs, settings.shape.high_precision, forward + inputs + weights)
        times.append((sustained.seconds(forward), sustained.seconds(inputs + weights)))
    return times[0], times[1]


# -- the pipeline schedule


def _schedule(arch: Architecture, settings: Settings, costs: CostModel, passes: _Passes) -> Timeline:
    mesh, count = settings.mesh, settings.microbatches
    stages = _stages(arch.layers, settings, passes)
    if mesh.pipeline == 1:
        busy = count * sum(stage.forward + stage.backward for stage in stages)
        return Timeline(busy, (busy,), (settings.chunks,))
    transfer = 0.0 if costs.ideal else _transfer(arch, settings, costs)
    return simulate(settings.schedule, stages, mesh.pipeline, count, transfer)


def _stages(layers: int, settings: Settings, passes: _Passes) -> tuple[StageTime, ...]:
    counts = stage_counts(layers, settings)
    stages = []
    for i, count in enumerate(counts):
        forward, backward = count * passes.forward, count * passes.backward
        weight = backward * passes.weight_share
        inputs = backward - weight
        if i == 0:
            forward, weight = forward + passes.first[0], weight + passes.first[1]
        if i == len(counts) - 1:
            forward, inputs = forward + passes.last[0], inputs + passes.last[1]
        stages.append(StageTime(forward, inputs, weight))
    return tuple(stages)


def cut_stages(arch: Architecture, settings: Settings, costs: CostModel) -> Settings:
    """The settings with pipeline stages cut by cost, if the trainer does so and none are stated."""
    mesh = settings.mesh
    if mesh.pipeline == 1 or settings.stages is not None or not settings.software.is_headway:
        return settings
    each = sum(count * (time.total_forward + time.backward) for _, count, time in layer_mix(arch, settings, costs))
    ends = zip(end_times(arch, settings, costs), end_comm_seconds(arch, settings, costs), strict=True)
    first, last = (arch.layers * sum(computed + communicated) / each for computed, communicated in ends)
    return replace(settings, stages=stages_by_cost(arch.layers, first, last, mesh.pipeline, settings.chunks))


def _transfer(arch: Architecture, settings: Settings, costs: CostModel) -> float:
    """Seconds to send activations to the next stage."""
    mesh, software = settings.mesh, settings.software
    size = settings.shape.tokens * arch.dim * settings.stream_width / (mesh.tensor if software.sequence_parallel else 1)
    group = DeviceGroup(2, mesh.tensor * mesh.context * mesh.data)
    return collective_seconds(costs.network, "send", size, group)


# -- communication between data ranks


def _sharded(arch: Architecture, settings: Settings, costs: CostModel) -> tuple[float, float, float]:
    """ZeRO 3, per layer and microbatch: seconds of gathering weights forward, of weights and gradients backward, and of
    weights that nothing hides. In a pipeline, weights are gathered once per step."""
    mesh, software = settings.mesh, settings.software
    group = DeviceGroup(mesh.shard * mesh.context, mesh.tensor)
    if settings.zero < 3 or group.size == 1 or mesh.pipeline > 1:
        return 0.0, 0.0, 0.0
    gather = scatter = 0.0
    size = 1 if settings.precision in LOW and software.gathers_low_precision else settings.shape.width
    for experts, count in layer_kinds(arch):
        for _, number, members in layer_pieces(arch, experts, settings):
            share = count / arch.layers
            gather += share * collective_seconds(costs.network, "all_gather", number * size, members)
            if not settings.frozen:
                moved = number * software.reduce_bytes
                scatter += share * collective_seconds(costs.network, "reduce_scatter", moved, members)
    if software.is_headway and not settings.reduces_each:
        scatter /= settings.microbatches
    again = 0.0 if settings.keeps_weights else gather
    return (gather, again + scatter, 0.0) if software.prefetch else (gather, scatter, again)


def layer_pieces(arch: Architecture, experts: bool, settings: Settings) -> Iterator[tuple[str, float, DeviceGroup]]:
    """Parameters of a layer that are sent together, and their group of devices."""
    mesh = settings.mesh
    group = DeviceGroup(mesh.shard * mesh.context, mesh.tensor)
    if is_exact(arch, settings):
        yield "weights", block_parameters(arch, mesh.tensor), group
        return
    routed = routed_parameters(arch) if experts else 0
    yield "weights", (layer_parameters(arch, experts) - routed) / mesh.tensor, group
    if routed and group.size * mesh.tensor > mesh.expert:
        yield "experts", routed / mesh.expert, DeviceGroup(group.size * mesh.tensor // mesh.expert, mesh.expert)


def _beside(compute: float, transfer: float, settings: Settings, costs: CostModel) -> tuple[float, float]:
    """Seconds by which overlapped communication slows compute, and its exposed seconds."""
    if transfer == 0.0 or costs.ideal:
        return 0.0, 0.0
    if not settings.software.data_overlap:
        return 0.0, transfer
    p = costs.parameters
    return p.contention * min(compute, transfer), max(0.0, transfer - compute * p.hidden)


def _gradients(arch: Architecture, settings: Settings, costs: CostModel, window: float) -> float:
    """Exposed seconds of the gradient reduction once per step, and of gathering updated weights."""
    mesh, software, p = settings.mesh, settings.software, costs.parameters
    if settings.frozen or costs.ideal:
        return 0.0
    if is_exact(arch, settings):
        return sum(transfer.exposed for transfer in step_transfers(arch, settings, costs, window))
    count = sum(local_parameters(arch, settings))
    if settings.zero >= 3 and mesh.pipeline == 1:
        group = DeviceGroup(mesh.replicate, mesh.tensor * mesh.context * mesh.shard)
        size = count / (mesh.shard * mesh.context) * software.reduce_bytes
        return collective_seconds(costs.network, "all_reduce", size, group)
    group = DeviceGroup(mesh.data * mesh.context, mesh.tensor)
    if group.size == 1:
        return 0.0
    reduce = _in_pieces(
        costs, "all_reduce" if settings.zero == 0 else "reduce_scatter", count * software.reduce_bytes, group, settings
    )
    back = 0.0 if settings.zero == 0 else _in_pieces(costs, "all_gather", count * 2, group, settings)
    if not software.data_overlap:
        return reduce + back
    hidden = p.hidden * window
    return max(NEVER_HIDDEN * reduce, reduce - hidden) + max(NEVER_HIDDEN * back, back - hidden / 2)


def _in_pieces(costs: CostModel, operation: str, size: float, group: DeviceGroup, settings: Settings) -> float:
    """Seconds of a collective in sequential buckets."""
    pieces = max(1, round(size / settings.software.bucket_bytes))
    return pieces * collective_seconds(costs.network, operation, size / pieces, group)


def _update(arch: Architecture, settings: Settings, costs: CostModel) -> float:
    """Seconds of the optimizer's memory-bound kernels."""
    chip = costs.cluster.chip
    if settings.frozen:
        return 0.0
    routed, dense = local_parameters(arch, settings)
    count = routed + dense
    inside = 1 - non_layer_parameters(arch, settings) / max(1.0, count)
    if settings.zero >= 1:
        count = sharded_parameters(settings, routed, dense)
    rate = chip.bandwidth_bytes_s
    if not costs.ideal:
        rate *= generation(chip).memory * UPDATE * costs.parameters.memory
    seconds = count * optimizer_bytes(settings.software) / rate
    if settings.software.offloads_moments:
        # to the device and back, one after the other
        link = HOST_LINK_PEAK_BYTES_S if costs.ideal else HOST_LINK_BYTES_S
        seconds += 2 * count * 2 * settings.software.moment_bytes / link
    states = settings.software.states
    if states is not None and states.block_flops:
        peak = chip.peak("fp32" if chip.name == "cpu" else "bf16") * (1.0 if costs.ideal else UPDATE_PRODUCTS)
        seconds += count * inside * states.block_flops / peak
    return seconds
