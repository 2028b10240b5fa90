"""How much memory a step needs on one device, by what holds it, at the moment it needs most.

Two moments can be the peak: the end of a forward pass, when every activation and the loss's temporaries are alive;
and the end of the backward pass, when all gradients are. Bytes are what a framework's allocator hands out; the
context of the device, the buffers of communication and fragmentation come on top before a plan is said to fit.
"""

from dataclasses import dataclass

from headway.hardware import Cluster
from headway.plan.architecture import Architecture, layer_kinds
from headway.plan.flops import layer_parameters, routed_parameters
from headway.plan.pipeline import in_flight as in_flight_forwards
from headway.plan.rank_share import block_parameters, is_exact, rest_parameters, worker_blocks
from headway.plan.settings import LOW, MicrobatchShape, Settings
from headway.plan.stages import blocks_of_ranks

__all__ = [
    "PeakMemory",
    "activation_bytes",
    "holds_full_gradients",
    "local_parameters",
    "memory",
    "non_layer_parameters",
    "optimizer_bytes_each",
]

CONTEXT_BYTES = 0.5 * 2**30
"""CUDA's context with its kernels loaded; 0.3 to 0.7 GiB are reported."""
COMMUNICATOR_BYTES = 0.35 * 2**30
"""NCCL's buffers for each group a device talks in; 0.5 GiB were measured on A100s, less with fewer channels."""
RESERVED = 1.08
"""What an allocator typically holds over what it handed out: 4 to 9 percent more are reported."""
FRAGMENTATION = 0.03
"""What of that it cannot give back when memory is short."""
LOGITS_BYTES = {"stepwise": 12, "eager": 14, "sharded": 10, "fused": 6}
"""Alive at once for each logit: two bytes, and float32 copies of it."""
CHUNK_ELEMENTS = 2**28
"""Logits that a chunked loss holds at once."""


@dataclass(frozen=True)
class PeakMemory:
    """Bytes at the peak, on the device that needs most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    """Weights brought together, or cast down, for the layers at work."""
    logits: float
    """Of the loss: logits, their gradient, temporaries."""
    overhead: float
    """Context, communication buffers, fragmentation: outside of what the framework counts as allocated."""
    capacity: float
    """What the device has."""
    rank: int = 0
    """Of the device, on the pipeline axis, where ranks are told apart."""

    @property
    def allocated(self) -> float:
        """What the framework's allocator hands out at the peak."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.gathered + self.logits

    @property
    def reserved(self) -> float:
        """What the allocator typically holds for that."""
        return self.allocated * RESERVED

    @property
    def total(self) -> float:
        """All of it."""
        return self.allocated + self.overhead

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.total <= self.capacity


def activation_bytes(
    arch: Architecture, with_experts: bool, shape: MicrobatchShape, settings: Settings
) -> tuple[float, float]:
    """Bytes one layer keeps for its backward pass of one microbatch: without recomputation, and with the policy at
    hand."""
    software, tokens, split = settings.software, shape.tokens, shape.tensor
    eager, stream = software.fusion == "eager", software.stream_bytes
    streams = split if software.sequence_parallel else 1
    low = 1 if settings.precision in LOW else 2
    # inputs of the two norms, and the normalized copies that products read
    copies = (
        (5 if arch.gated else 4) if software.casts_weights and eager else 2 if software.fusion != "compiled" else 1
    ) * low
    kept = arch.dim * (2 * stream + copies + (2 * software.dropout)) / streams
    if not software.regathers and streams > 1:
        # of attention and of the feed-forward, as gathered
        kept = arch.dim * ((2 * stream + 2 * software.dropout) / streams + 2 * low)
    width = arch.heads * (arch.head_dim + arch.value_dim) / split
    keys = max(1.0, arch.kv_heads / split) * (arch.head_dim + arch.value_dim)
    kept += 2 * (width + keys) + (2 * (arch.heads / split * arch.head_dim + keys / 2) if arch.qk_norm else 0)
    if software.attention == "unfused":
        kept += (5 if software.dropout else 2) * arch.heads / split * shape.seq
    inner = (8 if eager else 4 + low) if arch.gated else 2 + low
    if not with_experts:
        kept += inner * arch.hidden / split
    else:
        assert arch.experts is not None, "a layer with experts belongs to a model with experts"
        routed = arch.experts.top_k / split * settings.imbalance
        kept += routed * (inner * arch.experts.hidden + (2 + low) * arch.dim)
        kept += inner * arch.experts.hidden * arch.experts.shared / split
    whole = tokens * kept * (shape.width / 2)
    if settings.recompute == "full":
        return whole, tokens * arch.dim * stream / streams * (shape.width / 2)
    if settings.recompute == "selective" and software.keeps_gemm_outputs:
        # what enters the layer, attention's result, and those of all products, before they are added up
        inner_kept = 2 * (2 if arch.gated else 1) * arch.hidden / split if not with_experts else 0.0
        chosen = arch.dim * (stream / streams + 4) + 2 * (width + keys) + inner_kept
        return whole, min(whole, tokens * chosen * (shape.width / 2))
    if settings.recompute == "selective":
        # the layer's input, attention's output, and every other product's
        inner_kept = 2 * arch.hidden / split if not with_experts else 0.0
        chosen = arch.dim * (stream + 2) / streams + 2 * arch.heads * arch.value_dim / split + keys + inner_kept
        return whole, min(whole, tokens * chosen)
    if settings.recompute == "attention" and software.attention == "unfused":
        return whole, whole - tokens * (5 if software.dropout else 2) * arch.heads / split * shape.seq
    return whole, whole


def local_parameters(arch: Architecture, settings: Settings, rank: int = 0) -> tuple[float, float]:
    """Parameters one device of a pipeline's rank holds before data sharding: of experts, and all others."""
    mesh = settings.mesh
    if is_exact(arch, settings):
        blocks = worker_blocks(arch, settings, rank) * block_parameters(arch, mesh.tensor)
        return 0.0, float(blocks + rest_parameters(arch, settings, rank))
    routed = dense = 0.0
    for experts, count in layer_kinds(arch):
        expert_count = routed_parameters(arch) if experts else 0
        routed += count / mesh.pipeline * expert_count / mesh.expert
        dense += count / mesh.pipeline * (layer_parameters(arch, experts) - expert_count) / mesh.tensor
    tables = arch.vocab * arch.dim / mesh.tensor
    if mesh.pipeline == 1:
        dense += tables * (1 if arch.tied else 2)
    elif rank in (0, mesh.pipeline - 1):
        dense += tables
    return routed, dense + arch.positions * arch.dim


def memory(arch: Architecture, settings: Settings, cluster: Cluster, in_flight: float = 1.0) -> PeakMemory:
    """The peak on the device that needs most: a pipeline's first stage, which holds `in_flight` microbatches'
    activations, or its last, which holds one microbatch's and the loss. Of our own trainer, which may give the stages
    between more blocks, any."""
    ranks = settings.mesh.pipeline
    if ranks == 1:
        return _stage(arch, settings, cluster, _Rank(0, arch.layers, 1.0, last=True))
    if settings.software.is_headway:
        candidates = _candidate_ranks(arch, settings)
    else:
        layers = arch.layers / ranks
        candidates = [_Rank(0, layers, max(1.0, in_flight), last=False), _Rank(0, layers, 1.0, last=True)]
    return max((_stage(arch, settings, cluster, candidate) for candidate in candidates), key=lambda stage: stage.total)


@dataclass(frozen=True)
class _Rank:
    """A rank of a pipeline."""

    rank: int
    layers: float
    held: float
    """Microbatches whose activations it holds at most."""
    last: bool


def _candidate_ranks(arch: Architecture, settings: Settings) -> list[_Rank]:
    """Ranks that may need most: the first, the last, and of those between with as many blocks the first."""
    ranks, blocks = settings.mesh.pipeline, blocks_of_ranks(arch.layers, settings)
    in_flight = in_flight_forwards(settings.schedule, ranks, settings.chunks, settings.microbatches)
    chosen = {0, ranks - 1, *({blocks[rank]: rank for rank in range(ranks - 2, 0, -1)}.values())}
    return [
        _Rank(rank, blocks[rank], max(1.0, in_flight[rank] / settings.chunks), last=rank == ranks - 1)
        for rank in sorted(chosen)
    ]


def _stage(arch: Architecture, settings: Settings, cluster: Cluster, rank: _Rank) -> PeakMemory:
    mesh, software, shape = settings.mesh, settings.software, settings.shape
    weights, gradients, states = _states(arch, settings, rank.rank)
    layers = [(n, *activation_bytes(arch, experts, shape, settings)) for experts, n in layer_kinds(arch)]
    recomputed = 1.0 if settings.recompute_blocks is None else min(1.0, settings.recompute_blocks / rank.layers)
    per_layer = sum(n * (recomputed * policy + (1 - recomputed) * whole) for n, whole, policy in layers) / arch.layers
    kept = per_layer * rank.layers * rank.held * (1 - settings.offloaded)
    working = max(whole for _, whole, _ in layers) if settings.recompute != "none" and recomputed else 0.0
    gathered = _gathered(arch, settings, rank.rank)
    accumulated = gradients if settings.microbatches > 1 or software.gradient_buffers else 0.0
    stream = shape.tokens * arch.dim * software.stream_bytes / mesh.tensor * (shape.width / 2)

    # the end of a forward pass, against the end of the backward pass
    logits = _logits(arch, settings) if rank.last else 0.0
    forward = (accumulated, kept + stream, gathered, logits)
    waiting = kept if mesh.pipeline > 1 and (rank.held > 1 or not rank.last) else 0.0
    backward = (gradients, waiting + working, 0.0 if software.casts_weights else gathered, 0.0)
    parts = max(forward, backward, key=sum)
    allocated = weights + states + sum(parts)
    return PeakMemory(
        weights=weights, optimizer=states, gradients=parts[0], activations=parts[1], gathered=parts[2], logits=parts[3],
        overhead=_overhead(settings, cluster, allocated), capacity=cluster.chip.memory_bytes, rank=rank.rank,
    )  # fmt: skip


def _states(arch: Architecture, settings: Settings, rank: int) -> tuple[float, float, float]:
    """Of weights, gradients and optimizer."""
    mesh, software = settings.mesh, settings.software
    routed, dense = local_parameters(arch, settings, rank)
    count = routed + dense
    owners = mesh.shard * mesh.context
    sharded = dense / owners + routed / max(1.0, owners * mesh.tensor / mesh.expert)
    held = sharded if settings.zero >= 3 else count
    if settings.frozen:
        return held * 2, 0.0, 0.0
    outside = non_layer_parameters(arch, settings, rank)
    state_bytes, trained = optimizer_bytes_each(settings, count, outside)
    states = (sharded if settings.zero >= 1 else count) * state_bytes
    gradients = (sharded if settings.zero >= 2 else count) * software.gradient_bytes
    if software.updates_in_backward:
        gradients = (outside + (count - outside) / arch.layers) * software.gradient_bytes
    if holds_full_gradients(settings):
        gradients = count * (software.gradient_bytes if settings.zero == 2 else software.reduce_bytes)
    return held * software.weight_bytes, gradients * trained, states


def non_layer_parameters(arch: Architecture, settings: Settings, rank: int = 0) -> float:
    """Of the parameters of a pipeline's rank, before data sharding, those outside of blocks."""
    mesh = settings.mesh
    if is_exact(arch, settings):
        return float(rest_parameters(arch, settings, rank))
    tables = arch.vocab * arch.dim / mesh.tensor
    if mesh.pipeline > 1:
        tables *= rank in (0, mesh.pipeline - 1)
    elif not arch.tied:
        tables *= 2
    return tables + arch.positions * arch.dim


def optimizer_bytes_each(settings: Settings, count: float, outside: float) -> tuple[float, float]:
    """Bytes that the optimizer keeps for each of so many parameters, on the average, and the share that is trained."""
    software = settings.software
    if software.states is None:
        return software.master_bytes + (0.0 if software.offloads_moments else 2 * software.moment_bytes), 1.0
    states, share = software.states, outside / max(1.0, count)
    return (
        states.rest_bytes * share + states.block_bytes * (1 - share),
        states.rest_trained * share + states.block_trained * (1 - share),
    )


def holds_full_gradients(settings: Settings) -> bool:
    """Whether gradients that end up sharded travel once a step, and wait in full until then."""
    several = settings.software.is_headway and settings.microbatches > 1 and not settings.reduces_each
    return settings.zero >= 2 and (settings.mesh.pipeline > 1 or several)


def _overhead(settings: Settings, cluster: Cluster, allocated: float) -> float:
    if cluster.chip.name == "cpu":
        return 0.5 * 2**30
    mesh = settings.mesh
    groups = sum(size > 1 for size in (mesh.tensor, mesh.pipeline, mesh.context, mesh.data, mesh.expert))
    return CONTEXT_BYTES + groups * COMMUNICATOR_BYTES + FRAGMENTATION * allocated


def _gathered(arch: Architecture, settings: Settings, rank: int) -> float:
    """Weights brought together or cast for use."""
    mesh, software = settings.mesh, settings.software
    count = sum(local_parameters(arch, settings, rank))
    if software.casts_weights:
        return 2 * count
    width = settings.shape.width if software.is_headway else 2
    if settings.zero < 3 or mesh.shard * mesh.context == 1:
        # copies of the whole round their own weights for products, and keep that for both passes
        return width * count if software.is_headway and mesh.data > 1 else 0.0
    if settings.keeps_weights or mesh.pipeline > 1:
        return width * count
    layer = max(_layer_weights(arch, experts, settings) for experts, _ in layer_kinds(arch))
    tables = arch.vocab * arch.dim / mesh.tensor * (1 if arch.tied else 2)
    # two layers' weights and one layer's gradients on their way, beside the tables that stay
    return width * tables + layer * (2 * width + software.reduce_bytes)


def _layer_weights(arch: Architecture, experts: bool, settings: Settings) -> float:
    """Weights of one layer that its devices bring together: experts only where several ranks share one's."""
    mesh = settings.mesh
    routed = routed_parameters(arch) if experts else 0
    shared = mesh.shard * mesh.context * mesh.tensor > mesh.expert
    return (layer_parameters(arch, experts) - routed) / mesh.tensor + (routed / mesh.expert if shared else 0.0)


def _logits(arch: Architecture, settings: Settings) -> float:
    """Logits, their gradient and the loss's temporaries, of one microbatch."""
    tokens = settings.shape.tokens
    elements = tokens * arch.vocab / settings.mesh.tensor
    if settings.software.loss == "chunked":
        # while one chunk's logits are made, the chunk before is still alive
        alive = 11 * elements if elements <= CHUNK_ELEMENTS else 16 * CHUNK_ELEMENTS
        # the head's gradient in float32 and the stream's; a tensor axis gathers the stream for it
        streams = 2 * tokens * arch.dim * (settings.shape.width / 2)
        streams += settings.stream_width * tokens * arch.dim if settings.mesh.tensor > 1 else 0.0
        return alive + 4 * arch.vocab * arch.dim / settings.mesh.tensor + streams
    return elements * LOGITS_BYTES[settings.software.loss]
