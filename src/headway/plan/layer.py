"""Predicts one layer on one microbatch: seconds of kernels, collectives and host, by phase."""

from dataclasses import dataclass, replace
from functools import lru_cache

from headway.plan.architecture import Architecture, layer_kinds
from headway.plan.collective_times import DeviceGroup, collective_seconds
from headway.plan.context import context_seconds
from headway.plan.costs import CostModel
from headway.plan.operations import Part, layer_operations
from headway.plan.rates import Rates, generation_name, power_share
from headway.plan.settings import LOW, RECOMPUTE_GATHERS, RECOMPUTE_GEMMS, MicrobatchShape, Settings, Software
from headway.plan.stages import recomputed_share

HIDDEN_TENSOR = 0.6
"""Share of collectives that an overlapped tensor axis hides: async tensor parallelism and user buffers split them."""
NEVER_HIDDEN = 0.1
"""Share of a collective that the weight gradient cannot hide: its first piece."""
EXPERTS_HOST = 7.0
"""Host time of a layer with experts over a dense one: routing, permutations, casts per expert. Megatron's takes about
9 ms per layer and microbatch without CUDA graphs."""
FUSED_EXPERTS_HOST = 2.0
"""The same of fused experts: nine products and five kernels between them, in place of a feed-forward's nine and two.
The device of a step of 6.9B on an H200 never waited for the host."""
TENSOR_HOST = 1.08
"""Host time of a layer under tensor parallelism over one without."""
ROW_SCALED = 0.5
"""Speed of 8-bit GEMMs with row-wise scales over tensor-wise ones: slower than bfloat16 in torchtitan's tables."""
BACKWARD_HOST = 1.75
"""Host time of a backward pass over a forward pass: measured on an H200 host, 1.90 over 1.07 ms."""


@dataclass(frozen=True)
class Work:
    """Device seconds at full clock, by what bounds them."""

    gemm: float = 0.0
    attention: float = 0.0
    memory: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.gemm + other.gemm, self.attention + other.attention, self.memory + other.memory)


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer on one microbatch."""

    forward: float
    input_grad: float
    weight_grad: float
    recompute: float
    """Recomputation before the backward pass, collectives included."""
    comm_forward: float
    """Exposed collectives of the tensor, context and expert axes."""
    comm_backward: float
    host_forward: float
    """Host time to launch the pass."""
    host_backward: float

    @property
    def device_forward(self) -> float:
        """Device seconds of the forward pass."""
        return self.forward + self.comm_forward

    @property
    def device_backward(self) -> float:
        """Device seconds of the backward pass, recomputation included."""
        return self.recompute + self.input_grad + self.weight_grad + self.comm_backward

    @property
    def backward(self) -> float:
        """Seconds of the backward pass: the larger of host and device."""
        return max(self.device_backward, self.host_backward)

    @property
    def total_forward(self) -> float:
        """Seconds of the forward pass: the larger of host and device."""
        return max(self.device_forward, self.host_forward)

    @property
    def host_wait(self) -> float:
        """Seconds in both passes in which the device waits for the host."""
        return self.total_forward - self.device_forward + self.backward - self.device_backward


def phases(rates: Rates, part: Part, kernel: str) -> tuple[Work, Work, Work]:
    """Device time of operations: forward, input gradient and weight gradient."""
    sums = {"forward": [0.0, 0.0, 0.0], "input_grad": [0.0, 0.0, 0.0], "weight_grad": [0.0, 0.0, 0.0]}
    for operation in part:
        into = sums[operation.phase]
        if operation.kind == "gemm":
            into[0] += rates.gemm(operation)
        elif operation.kind == "attention":
            mixed = kernel == "cudnn-flash2"
            by_phase = "cudnn" if operation.phase == "forward" else "flash2"
            into[1] += rates.attention(operation, by_phase if mixed else kernel)
        else:
            into[2] += rates.memory(operation)
    return Work(*sums["forward"]), Work(*sums["input_grad"]), Work(*sums["weight_grad"])


@lru_cache(maxsize=65536)
def _layer_phases(
    rates: Rates, arch: Architecture, experts: bool, shape: MicrobatchShape, software: Software
) -> tuple[Work, Work, Work]:
    return phases(rates, layer_operations(arch, experts, shape, software), software.attention)


@dataclass(frozen=True)
class Speed:
    """Sustained speed over the kernel model's at full clock."""

    gemm: float
    attention: float
    memory: float

    def seconds(self, work: Work) -> float:
        """Sustained seconds of the work."""
        return work.gemm / self.gemm + work.attention / self.attention + work.memory / self.memory


def speed(costs: CostModel, precision: str, mix: Work, scaling: str = "tensor") -> Speed:
    """Sustained speed of each kind of kernel under the power limit, for a mix of kernels."""
    if costs.ideal:
        return Speed(1.0, 1.0, 1.0)
    p = costs.parameters
    clock = power_share(costs.cluster.chip, costs.cluster.power_w, mix.gemm, mix.attention, mix.memory, costs.demand)
    gemm = getattr(p, generation_name(costs.cluster.chip), 1.0)
    if precision in LOW:
        gemm *= p.low * (ROW_SCALED if scaling == "row" else 1.0)
    return Speed(gemm * clock, p.attention * clock, p.memory)


def layer(arch: Architecture, experts: bool, settings: Settings, costs: CostModel) -> LayerTime:
    """Predict a dense or expert layer on one microbatch."""
    shape = settings.shape
    forward, inputs, weights = _layer_phases(costs.rates, arch, experts, shape, settings.software)
    if settings.frozen:
        weights = Work()
    sustained = speed(costs, settings.precision, forward + inputs + weights, settings.software.scaling)
    forward_s, input_s, weight_s = sustained.seconds(forward), sustained.seconds(inputs), sustained.seconds(weights)
    comm_forward, comm_backward, comm_again = _communication(
        arch, experts, settings, costs, (forward_s, input_s, weight_s)
    )
    recompute_s = sustained.seconds(_recomputed(forward, settings)) + comm_again
    host_forward, host_backward = _host(experts, settings, costs)
    return LayerTime(
        forward_s, input_s, weight_s, recompute_s, comm_forward, comm_backward, host_forward, host_backward
    )


def layer_mix(arch: Architecture, settings: Settings, costs: CostModel) -> list[tuple[bool, float, LayerTime]]:
    """Every kind of layer (with experts or not, recomputed or not) and how many there are."""
    recomputed = recomputed_share(arch.layers, settings)
    mix = []
    for share, variant in ((recomputed, settings), (1 - recomputed, replace(settings, recompute="none"))):
        if share > 0:
            mix += [(kind, share * count, layer(arch, kind, variant, costs)) for kind, count in layer_kinds(arch)]
    return mix


def _recomputed(forward: Work, settings: Settings) -> Work:
    if settings.recompute == "full":
        return forward
    if settings.recompute == "except-attention":
        return Work(forward.gemm, 0.0, forward.memory)
    if settings.recompute == "selective" and settings.software.keeps_gemm_outputs:
        return Work(0.0, 0.0, forward.memory)
    if settings.recompute == "selective":
        return Work(0.5 * forward.gemm, 0.0, forward.memory)  # every other GEMM output is kept, and attention
    if settings.recompute == "attention":
        return Work(0.0, forward.attention, 0.0)
    return Work()


def _host(experts: bool, settings: Settings, costs: CostModel) -> tuple[float, float]:
    software = settings.software
    if software.cuda_graphs or costs.ideal:
        return 0.0, 0.0
    forward, backward = costs.rates.host(software) or (costs.parameters.host_s, BACKWARD_HOST * costs.parameters.host_s)
    if costs.rates.host(software) is None and software.fusion == "compiled":
        forward, backward = 0.6 * forward, 0.6 * backward
    experts_host = FUSED_EXPERTS_HOST if software.fused_experts else EXPERTS_HOST
    factor = (TENSOR_HOST if settings.mesh.tensor > 1 else 1.0) * (experts_host if experts else 1.0)
    hooked = settings.recompute == "selective" and software.keeps_gemm_outputs
    if hooked or settings.recompute in RECOMPUTE_GEMMS:
        # Autograd hooks that save and restore state cost the host about as much as the pass itself.
        backward += forward * software.recompute_host
        forward *= 0.5 + 0.5 * software.recompute_host
    return forward * factor, backward * factor


def _communication(
    arch: Architecture, experts: bool, settings: Settings, costs: CostModel, times: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Exposed seconds of a layer's collectives: forward, backward and during recomputation."""
    mesh = settings.mesh
    forward = backward = again = 0.0
    if mesh.tensor > 1:
        forward, backward, again = _tensor(arch, experts, settings, costs, times[2])
    forward_other = 0.0
    if mesh.context > 1:
        forward_s, backward_s = exposed_context(arch, settings, costs, times[0], times[1])
        forward_other, backward = forward_other + forward_s, backward + backward_s
        if settings.software.is_headway and settings.recompute == "selective":
            again += forward_s
    if experts and mesh.expert > 1:
        forward_s, backward_s = _expert_all_to_all(arch, settings, costs)
        forward_other, backward = forward_other + forward_s, backward + backward_s
    whole = settings.recompute in RECOMPUTE_GEMMS
    return forward + forward_other, backward, again + (forward_other if whole else 0.0)


def _tensor(
    arch: Architecture, experts: bool, settings: Settings, costs: CostModel, weight_grad_s: float
) -> tuple[float, float, float]:
    """Two pairs of all-gather and reduce-scatter per pass, or two all-reduces; with experts, which are not split, one;
    with cross-attention, three.

    The backward pass gathers the input again for the weight gradient unless it was kept; the input gradient hides half
    of that. Some programs overlap the reduction of the input gradient with the weight gradient. Recomputation repeats
    all collectives, but for the last reduction if the gathered input is kept.
    """
    software, group = settings.software, DeviceGroup(settings.mesh.tensor)
    leaving = settings.shape.tokens * arch.dim * settings.shape.width
    entering = settings.shape.tokens * arch.dim * settings.stream_width
    pairs = 3 if crosses(arch) else 1 if experts else 2
    if costs.ideal:
        return 0.0, 0.0, 0.0
    if not software.regathers:
        gathers, scatters = (
            [collective_seconds(costs.network, operation, size, group) for size in (entering, leaving)]
            for operation in ("all_gather", "reduce_scatter")
        )
        again = pairs * gathers[0] + (pairs - 1) * scatters[1] if settings.recompute in RECOMPUTE_GATHERS else 0.0
        return pairs * (gathers[0] + scatters[1]), pairs * (gathers[1] + scatters[0]), again
    if software.sequence_parallel:
        gather = pairs * collective_seconds(costs.network, "all_gather", leaving, group)
        scatter = pairs * collective_seconds(costs.network, "reduce_scatter", leaving, group)
        forward, exposed, hideable = gather + scatter, gather, scatter + 0.5 * gather
    else:
        forward = hideable = pairs * collective_seconds(costs.network, "all_reduce", leaving, group)
        exposed = 0.0
    again = forward if settings.recompute in RECOMPUTE_GEMMS else 0.0
    if software.tensor_overlap:
        remaining = 1 - HIDDEN_TENSOR
        return forward * remaining, (exposed + hideable) * remaining, again * remaining
    if software.weight_overlap:
        hideable = max(NEVER_HIDDEN * hideable, hideable - costs.parameters.hidden * weight_grad_s)
    return forward, exposed + hideable, again


def exposed_context(
    arch: Architecture, settings: Settings, costs: CostModel, forward_time: float, backward_time: float
) -> tuple[float, float]:
    """Exposed seconds of the context axis in a layer, forward and backward, beside the layer's own seconds."""
    forward_s, backward_s = context_seconds(arch, settings, costs)
    if settings.software.is_headway:  # attention waits for all of it
        return (0.0, 0.0) if costs.ideal else (forward_s, backward_s)
    # the next block of keys and values is sent during attention on this one; nothing hides the first hop
    unhidden = 0.0 if costs.ideal else 1 / settings.mesh.context
    return (
        max(forward_s * unhidden, forward_s - 0.5 * forward_time),
        max(backward_s * unhidden, backward_s - 0.5 * backward_time),
    )


def crosses(arch: Architecture) -> bool:
    """Whether layers have cross-attention, a third part that the tensor axis splits."""
    return arch.diffusion is not None and arch.diffusion.text_tokens > 0


def _expert_all_to_all(arch: Architecture, settings: Settings, costs: CostModel) -> tuple[float, float]:
    """All-to-alls that dispatch and combine tokens; backward the same for their gradients."""
    assert arch.experts is not None, "a layer with experts belongs to a model with experts"
    mesh = settings.mesh
    routed = settings.shape.tokens / mesh.tensor * arch.experts.top_k * arch.dim * settings.imbalance
    group = DeviceGroup(mesh.expert)
    dispatch_width = 1 if settings.precision in LOW else settings.shape.width
    dispatch = collective_seconds(costs.network, "all_to_all", routed * dispatch_width, group)
    combine = collective_seconds(costs.network, "all_to_all", routed * settings.shape.width, group)
    remaining = 0.0 if costs.ideal else 1 - settings.software.expert_overlap
    return (dispatch + combine) * remaining, 2 * combine * remaining
