"""One layer on one microbatch: seconds of each phase on the device, of the exchanges inside, and of the host."""

from dataclasses import dataclass
from functools import lru_cache

from headway.plan.architecture import Architecture, layer_kinds
from headway.plan.collective_times import DeviceGroup, collective_seconds
from headway.plan.costs import CostModel
from headway.plan.operations import Part, layer_operations
from headway.plan.rates import Rates, family_name, power_share
from headway.plan.settings import LOW, MicrobatchShape, Settings, Software
from headway.plan.stages import recomputed_share

__all__ = ["HIDDEN_TENSOR", "LayerTime", "Speed", "Work", "layer", "layer_mix", "phases", "speed"]

HIDDEN_TENSOR = 0.6
"""What an overlapped tensor axis hides of its exchanges: async tensor parallelism and user buffers split them into
pieces."""
NEVER_HIDDEN = 0.1
"""Of an exchange that runs beside the weights' gradient: its first piece has nothing to run beside."""
EXPERTS_HOST = 7.0
"""Host seconds of a layer with experts over a dense one's: routing, permutations, casts for each expert; Megatron's
take some 9 ms a layer and microbatch where no graph is captured."""
TENSOR_HOST = 1.08
"""Host seconds of a layer that is split over a tensor axis over a whole one's."""
ROW_SCALED = 0.5
"""Eight-bit products with a scale for each row over those with one for the tensor: other kernels, slower than
bfloat16's in torchtitan's tables."""
BACKWARD_HOST = 1.75
"""Host seconds of a backward pass over a forward one's: measured on an H200's host, 1.90 over 1.07 ms."""


@dataclass(frozen=True)
class Work:
    """Device seconds at full clock, by what bounds them."""

    product: float = 0.0
    attention: float = 0.0
    memory: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.product + other.product, self.attention + other.attention, self.memory + other.memory)


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer on one microbatch."""

    forward: float
    input_grad: float
    weight_grad: float
    again: float
    """Recomputed before the backward pass, exchanges included."""
    exchange_forward: float
    """Exposed exchanges of the tensor, context and expert axes."""
    exchange_backward: float
    host_forward: float
    """What the host needs to hand it all over."""
    host_backward: float

    @property
    def device_forward(self) -> float:
        """Device seconds of the forward pass."""
        return self.forward + self.exchange_forward

    @property
    def device_backward(self) -> float:
        """Device seconds of the backward pass, recomputation included."""
        return self.again + self.input_grad + self.weight_grad + self.exchange_backward

    @property
    def backward(self) -> float:
        """Seconds of the backward pass: the larger of host and device."""
        return max(self.device_backward, self.host_backward)

    @property
    def whole_forward(self) -> float:
        """Seconds of the forward pass: the larger of host and device."""
        return max(self.device_forward, self.host_forward)

    @property
    def waits_for_host(self) -> float:
        """Seconds of both passes in which the device waits for the host."""
        return self.whole_forward - self.device_forward + self.backward - self.device_backward


def phases(rates: Rates, part: Part, kernel: str) -> tuple[Work, Work, Work]:
    """Forward, input gradient and weight gradient of some operations."""
    sums = {"forward": [0.0, 0.0, 0.0], "input_grad": [0.0, 0.0, 0.0], "weight_grad": [0.0, 0.0, 0.0]}
    for operation in part:
        into = sums[operation.phase]
        if operation.kind == "product":
            into[0] += rates.product(operation)
        elif operation.kind == "attention":
            into[1] += rates.attention(operation, kernel)
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
    """Over kernels' modelled speed at full clock: what training sustains."""

    product: float
    attention: float
    memory: float

    def seconds(self, work: Work) -> float:
        """Of some work."""
        return work.product / self.product + work.attention / self.attention + work.memory / self.memory


def speed(costs: CostModel, precision: str, mix: Work, scaling: str = "tensor") -> Speed:
    """What power and the parameters leave of each kind of kernel's speed, where kernels come in such a mix."""
    if costs.ideal:
        return Speed(1.0, 1.0, 1.0)
    p = costs.parameters
    clock = power_share(costs.cluster.chip, costs.cluster.power_w, mix.product, mix.attention, mix.memory, costs.demand)
    product = getattr(p, family_name(costs.cluster.chip), 1.0)
    if precision in LOW:
        product *= p.low * (ROW_SCALED if scaling == "row" else 1.0)
    return Speed(product * clock, p.attention * clock, p.memory)


def layer(arch: Architecture, experts: bool, settings: Settings, costs: CostModel) -> LayerTime:
    """One layer of a kind on one microbatch."""
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
    """Every kind of layer with how many there are: with experts or not, computed again or not."""
    recomputed = recomputed_share(arch.layers, settings)
    mix = []
    for share, variant in ((recomputed, settings), (1 - recomputed, settings.but(recompute="none"))):
        if share > 0:
            mix += [(kind, share * count, layer(arch, kind, variant, costs)) for kind, count in layer_kinds(arch)]
    return mix


def _recomputed(forward: Work, settings: Settings) -> Work:
    if settings.recompute == "full":
        return forward
    if settings.recompute == "selective" and settings.software.keeps_products:
        return Work(0.0, 0.0, forward.memory)
    if settings.recompute == "selective":
        return Work(0.5 * forward.product, 0.0, forward.memory)  # every other product is kept, and attention
    if settings.recompute == "attention":
        return Work(0.0, forward.attention, 0.0)
    return Work()


def _host(experts: bool, settings: Settings, costs: CostModel) -> tuple[float, float]:
    software = settings.software
    if software.graphs or costs.ideal:
        return 0.0, 0.0
    forward, backward = costs.rates.host(software) or (costs.parameters.host_s, BACKWARD_HOST * costs.parameters.host_s)
    if costs.rates.host(software) is None and software.fusion == "compiled":
        forward, backward = 0.6 * forward, 0.6 * backward
    factor = (TENSOR_HOST if settings.mesh.tensor > 1 else 1.0) * (EXPERTS_HOST if experts else 1.0)
    hooked = settings.recompute == "selective" and software.keeps_products
    if settings.recompute == "full" or hooked:
        # Saving and restoring what recomputation needs costs the host about as much as the pass itself where it hooks
        # into autograd.
        backward += forward * software.recompute_host
        forward *= 0.5 + 0.5 * software.recompute_host
    return forward * factor, backward * factor


def _communication(
    arch: Architecture, experts: bool, settings: Settings, costs: CostModel, times: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Exposed seconds of what a layer's devices exchange: forward, backward, and once more where the layer is computed
    again."""
    mesh = settings.mesh
    forward = backward = again = 0.0
    if mesh.tensor > 1:
        forward, backward, again = _tensor(arch, experts, settings, costs, times[2])
    forward_other = 0.0
    if mesh.context > 1:
        forward_s, backward_s = _ring(arch, settings, costs)
        # keys and values of the next block travel while attention works on this one; the first hop has nothing to
        # hide behind
        unhidden = 0.0 if costs.ideal else 1 / mesh.context
        forward_other += max(forward_s * unhidden, forward_s - 0.5 * times[0])
        backward += max(backward_s * unhidden, backward_s - 0.5 * times[1])
    if experts and mesh.expert > 1:
        forward_s, backward_s = _expert_all_to_all(arch, settings, costs)
        forward_other, backward = forward_other + forward_s, backward + backward_s
    return forward + forward_other, backward, again + (forward_other if settings.recompute == "full" else 0.0)


def _tensor(
    arch: Architecture, experts: bool, settings: Settings, costs: CostModel, weight_grad_s: float
) -> tuple[float, float, float]:
    """Two pairs of gather and scatter a pass, or two all-reduces; experts are not split, so that one pair remains.

    Backward, the gathered input is needed again for the weights' gradient, unless it was kept; half of that gather
    hides behind the input's gradient. Where the program lets it, what is known of an input's gradient travels beside
    the weights' one. A pass that is repeated exchanges all again, but for the last sum where nothing is gathered twice.
    """
    software, group = settings.software, DeviceGroup(settings.mesh.tensor)
    leaving = settings.shape.tokens * arch.dim * settings.shape.width
    entering = settings.shape.tokens * arch.dim * settings.stream_width
    pairs = 1 if experts else 2
    if costs.ideal:
        return 0.0, 0.0, 0.0
    if not software.regathers:
        gathers, scatters = (
            [collective_seconds(costs.network, operation, size, group) for size in (entering, leaving)]
            for operation in ("all_gather", "reduce_scatter")
        )
        again = pairs * gathers[0] + (pairs - 1) * scatters[1] if settings.recompute in ("selective", "full") else 0.0
        return pairs * (gathers[0] + scatters[1]), pairs * (gathers[1] + scatters[0]), again
    if software.sequence_parallel:
        gather = pairs * collective_seconds(costs.network, "all_gather", leaving, group)
        scatter = pairs * collective_seconds(costs.network, "reduce_scatter", leaving, group)
        forward, exposed, hideable = gather + scatter, gather, scatter + 0.5 * gather
    else:
        forward = hideable = pairs * collective_seconds(costs.network, "all_reduce", leaving, group)
        exposed = 0.0
    again = forward if settings.recompute == "full" else 0.0
    if software.tensor_overlap:
        remaining = 1 - HIDDEN_TENSOR
        return forward * remaining, (exposed + hideable) * remaining, again * remaining
    if software.weight_overlap:
        hideable = max(NEVER_HIDDEN * hideable, hideable - costs.parameters.hidden * weight_grad_s)
    return forward, exposed + hideable, again


def _ring(arch: Architecture, settings: Settings, costs: CostModel) -> tuple[float, float]:
    """Keys and values once around the ring; backward also their gradients."""
    mesh = settings.mesh
    heads = max(1.0, arch.kv_heads / mesh.tensor)
    size = heads * (arch.head_dim + arch.value_dim) * settings.shape.tokens * settings.shape.width
    group = DeviceGroup(2, max(1, mesh.tensor * mesh.context // 2))
    once = (mesh.context - 1) * collective_seconds(costs.network, "send", size, group)
    return once, 2 * once


def _expert_all_to_all(arch: Architecture, settings: Settings, costs: CostModel) -> tuple[float, float]:
    """Tokens to their experts and back, each way; backward the same for their gradients."""
    assert arch.experts is not None, "a layer with experts belongs to a model with experts"
    mesh = settings.mesh
    routed = settings.shape.tokens / mesh.tensor * arch.experts.top_k * arch.dim * settings.imbalance
    group = DeviceGroup(mesh.expert)
    dispatch_width = 1 if settings.precision in LOW else settings.shape.width
    dispatch = collective_seconds(costs.network, "all_to_all", routed * dispatch_width, group)
    combine = collective_seconds(costs.network, "all_to_all", routed * settings.shape.width, group)
    remaining = 0.0 if costs.ideal else 1 - settings.software.expert_overlap
    return (dispatch + combine) * remaining, 2 * combine * remaining
