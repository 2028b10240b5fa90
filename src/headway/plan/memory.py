"""Predicts the peak memory of a step per device, by what holds it.

The peak is either the end of a forward pass, when all activations and the loss's temporaries are alive, or the end of
the backward pass, when all gradients are. Bytes are what the framework's allocator hands out; device context,
communication buffers and fragmentation come on top.
"""

from dataclasses import dataclass

from headway.hardware import Cluster
from headway.plan.architecture import Architecture, layer_kinds, layer_matrices
from headway.plan.context import kept_bytes
from headway.plan.flops import layer_parameters, routed_parameters
from headway.plan.operations import low_share
from headway.plan.pipeline import in_flight as in_flight_forwards
from headway.plan.rank_share import block_parameters, is_exact, rest_parameters, worker_blocks
from headway.plan.settings import LOW, MicrobatchShape, Settings
from headway.plan.stages import blocks_of_ranks

CONTEXT_BYTES = 0.5 * 2**30
"""CUDA context with kernels loaded; reports range from 0.3 to 0.7 GiB."""
COMMUNICATOR_BYTES = 0.35 * 2**30
"""NCCL buffers per communicator; 0.5 GiB measured on A100s, less with fewer channels."""
RESERVED = 1.08
"""Reserved over allocated memory; reports range from 1.04 to 1.09."""
FRAGMENTATION = 0.03
"""Share of that which the allocator cannot free when memory is short."""
LOGITS_BYTES = {"stepwise": 12, "eager": 14, "sharded": 10, "fused": 6}
"""Bytes alive at once per logit: two, and its float32 copies."""
CHUNK_ELEMENTS = 2**28
"""Logits per chunk of a chunked loss."""


@dataclass(frozen=True)
class PeakMemory:
    """Peak bytes on the device that needs most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    """Weights gathered or cast for the current layers."""
    logits: float
    """Logits, their gradient and temporaries of the loss."""
    overhead: float
    """Context, communication buffers, fragmentation: not counted as allocated by the framework."""
    capacity: float
    """Device memory."""
    rank: int = 0
    """Pipeline rank of the device, if ranks are modelled separately."""

    @property
    def allocated(self) -> float:
        """Peak bytes that the framework's allocator hands out."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.gathered + self.logits

    @property
    def reserved(self) -> float:
        """Bytes that the allocator typically reserves for that."""
        return self.allocated * RESERVED

    @property
    def total(self) -> float:
        """Allocated bytes and overhead."""
        return self.allocated + self.overhead

    @property
    def fits(self) -> bool:
        """Whether the total fits in device memory."""
        return self.total <= self.capacity


def activation_bytes(
    arch: Architecture, with_experts: bool, shape: MicrobatchShape, settings: Settings
) -> tuple[float, float]:
    """Activation bytes that a layer keeps per microbatch: without recomputation, and under the settings' policy."""
    software, tokens, split = settings.software, shape.tokens, shape.tensor
    eager, stream = software.fusion == "eager", software.stream_bytes
    streams = split if software.sequence_parallel else 1
    low = 1 if settings.precision in LOW else 2
    # inputs of the two norms, and the normalized copies that GEMMs read
    copies = (
        (5 if arch.gated else 4) if software.casts_weights and eager else 2 if software.fusion != "compiled" else 1
    ) * low
    if settings.precision in LOW and software.is_headway:
        copies = 2  # the codes of both norms' outputs
    per_token = arch.dim * (2 * stream + copies + (2 * software.dropout)) / streams
    if not software.regathers and streams > 1:
        # gathered inputs of attention and feed-forward
        per_token = arch.dim * ((2 * stream + 2 * software.dropout) / streams + 2 * low)
    width = arch.heads * (arch.head_dim + arch.value_dim) / split
    keys = max(1.0, arch.kv_heads / split) * (arch.head_dim + arch.value_dim)
    per_token += 2 * (width + keys) + (2 * (arch.heads / split * arch.head_dim + keys / 2) if arch.qk_norm else 0)
    if settings.precision in LOW and software.is_headway:
        per_token += arch.heads * arch.value_dim / split  # the codes of attention's output, beside it
    if arch.diffusion is not None and arch.diffusion.text_tokens:
        # cross-attention: its norm, queries and output, and keys and values of the text
        others = arch.diffusion.text_tokens + arch.diffusion.image_tokens
        per_token += arch.dim * (stream + copies + 2 * (2 + 2 * others / shape.seq) / split)
    if software.attention == "unfused":
        per_token += (5 if software.dropout else 2) * arch.heads / split * shape.seq
    inner = (8 if eager else 4 + low) if arch.gated else 2 + low
    if not with_experts:
        per_token += inner * arch.hidden / split
    else:
        assert arch.experts is not None, "a layer with experts belongs to a model with experts"
        routed = arch.experts.top_k / split * settings.imbalance
        if software.fused_experts:  # rows, gate and up; in float8 tokens in place of rows, and the activation's codes
            kept = 4 * arch.experts.hidden + 2 * arch.dim if low == 2 else 5 * arch.experts.hidden
            per_token += routed * kept
        else:
            per_token += routed * (inner * arch.experts.hidden + (2 + low) * arch.dim)
        per_token += inner * arch.experts.hidden * arch.experts.shared / split
    full = tokens * per_token * (shape.width / 2) + kept_bytes(arch, settings)
    if settings.recompute == "full":
        return full, tokens * arch.dim * stream / streams * (shape.width / 2)
    if settings.recompute == "except-attention":
        output = arch.heads / split * (2 * arch.value_dim + 4)  # and its log-sum-exp
        return full, min(full, tokens * (arch.dim * stream / streams + output) * (shape.width / 2))
    if settings.recompute == "selective" and software.keeps_gemm_outputs:
        # the layer's input, attention's output, and the outputs of all GEMMs before they are reduced
        inner_kept = 2 * (2 if arch.gated else 1) * arch.hidden / split if not with_experts else 0.0
        chosen = arch.dim * (stream / streams + 4) + 2 * (width + keys) + inner_kept
        return full, min(full, tokens * chosen * (shape.width / 2))
    if settings.recompute == "selective":
        # the layer's input, attention's output, and every other GEMM's
        inner_kept = 2 * arch.hidden / split if not with_experts else 0.0
        chosen = arch.dim * (stream + 2) / streams + 2 * arch.heads * arch.value_dim / split + keys + inner_kept
        return full, min(full, tokens * chosen)
    if settings.recompute == "attention" and software.attention == "unfused":
        return full, full - tokens * (5 if software.dropout else 2) * arch.heads / split * shape.seq
    return full, full


def mean_activation_bytes(arch: Architecture, settings: Settings, layers: float) -> tuple[float, float]:
    """Bytes that an average layer of a rank with `layers` keeps per microbatch, and of a recomputed layer at work."""
    recomputed = 1.0 if settings.recompute_blocks is None else min(1.0, settings.recompute_blocks / layers)
    kinds = [(n, *activation_bytes(arch, experts, settings.shape, settings)) for experts, n in layer_kinds(arch)]
    mean = sum(n * (recomputed * policy + (1 - recomputed) * full) for n, full, policy in kinds) / arch.layers
    return mean, max(full for _, full, _ in kinds) if settings.recompute != "none" and recomputed else 0.0


def local_parameters(arch: Architecture, settings: Settings, rank: int = 0) -> tuple[float, float]:
    """Parameters per device of a pipeline rank before sharding: of experts, and all others."""
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
    """The peak on the device that needs most.

    In a pipeline that is the first stage, with activations of `in_flight` microbatches, or the last, with those of one
    and the loss; under Headway's trainer, which may give middle stages more blocks, any stage.
    """
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
    """A pipeline rank."""

    rank: int
    layers: float
    held: float
    """Most microbatches whose activations it holds."""
    last: bool


def _candidate_ranks(arch: Architecture, settings: Settings) -> list[_Rank]:
    """Ranks that may need most: first, last, and the first of the middle ranks for each number of blocks."""
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
    per_layer, working = mean_activation_bytes(arch, settings, rank.layers)
    activations = per_layer * rank.layers * rank.held * (1 - settings.offloaded)
    gathered = _gathered(arch, settings, rank.rank)
    accumulated = gradients if settings.microbatches > 1 or software.gradient_buffers else 0.0
    stream = shape.tokens * arch.dim * software.stream_bytes / mesh.tensor * (shape.width / 2)

    # the end of a forward pass, against the end of the backward pass
    logits = _logits(arch, settings) if rank.last else 0.0
    forward = (accumulated, activations + stream, gathered, logits)
    waiting = activations if mesh.pipeline > 1 and (rank.held > 1 or not rank.last) else 0.0
    backward = (gradients, waiting + working, 0.0 if software.casts_weights else gathered, 0.0)
    parts = max(forward, backward, key=sum)
    allocated = weights + states + sum(parts)
    return PeakMemory(
        weights=weights, optimizer=states, gradients=parts[0], activations=parts[1], gathered=parts[2], logits=parts[3],
        overhead=_overhead(settings, cluster, allocated), capacity=cluster.chip.memory_bytes, rank=rank.rank,
    )  # fmt: skip


def _states(arch: Architecture, settings: Settings, rank: int) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer states."""
    software = settings.software
    routed, dense = local_parameters(arch, settings, rank)
    count = routed + dense
    sharded = sharded_parameters(settings, routed, dense)
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


def sharded_parameters(settings: Settings, routed: float, dense: float) -> float:
    """Parameters per device after sharding, of its expert (`routed`) and other parameters."""
    mesh, owners = settings.mesh, settings.mesh.shard * settings.mesh.context
    return dense / owners + routed / max(1.0, owners * mesh.tensor / mesh.expert)


def non_layer_parameters(arch: Architecture, settings: Settings, rank: int = 0) -> float:
    """Parameters of a pipeline rank outside of layers, before sharding."""
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
    """Average optimizer bytes per parameter, and the share of trained parameters."""
    software = settings.software
    if software.states is None:
        return software.master_bytes + (0.0 if software.offloads_moments else 2 * software.moment_bytes), 1.0
    states, share = software.states, outside / max(1.0, count)
    return (
        states.rest_bytes * share + states.block_bytes * (1 - share),
        states.rest_trained * share + states.block_trained * (1 - share),
    )


def holds_full_gradients(settings: Settings) -> bool:
    """Whether sharded gradients are reduced once per step, and held unsharded until then."""
    several = settings.software.is_headway and settings.microbatches > 1 and not settings.reduces_each
    return settings.zero >= 2 and (settings.mesh.pipeline > 1 or several)


def _overhead(settings: Settings, cluster: Cluster, allocated: float) -> float:
    if cluster.chip.name == "cpu":
        return 0.5 * 2**30
    mesh = settings.mesh
    groups = sum(size > 1 for size in (mesh.tensor, mesh.pipeline, mesh.context, mesh.data, mesh.expert))
    return CONTEXT_BYTES + groups * COMMUNICATOR_BYTES + FRAGMENTATION * allocated


def _gathered(arch: Architecture, settings: Settings, rank: int) -> float:
    """Bytes of weights gathered or cast for use."""
    mesh, software = settings.mesh, settings.software
    count = sum(local_parameters(arch, settings, rank))
    if software.casts_weights:
        return 2 * count
    if software.holds_low_weights and settings.precision in LOW:
        matrices = [m for experts, n in layer_kinds(arch) for m in n * layer_matrices(arch, experts)]
        held = low_share(matrices, software.low_parts)
        return 2 * (count - non_layer_parameters(arch, settings, rank)) * held
    width = settings.shape.width if software.is_headway else 2
    if settings.zero < 3 or mesh.shard * mesh.context == 1:
        # replicas cast their own weights for GEMMs, and keep the copy for both passes
        return width * count if software.is_headway and mesh.data > 1 else 0.0
    if settings.keeps_weights or mesh.pipeline > 1:
        return width * count
    layer = max(_layer_weights(arch, experts, settings) for experts, _ in layer_kinds(arch))
    tables = arch.vocab * arch.dim / mesh.tensor * (1 if arch.tied else 2)
    # weights of two layers and gradients of one in transit, beside embedding and head
    return width * tables + layer * (2 * width + software.reduce_bytes)


def _layer_weights(arch: Architecture, experts: bool, settings: Settings) -> float:
    """Weights that are gathered for a layer; experts only if several ranks shard the same ones."""
    mesh = settings.mesh
    routed = routed_parameters(arch) if experts else 0
    shared = mesh.shard * mesh.context * mesh.tensor > mesh.expert
    return (layer_parameters(arch, experts) - routed) / mesh.tensor + (routed / mesh.expert if shared else 0.0)


def _logits(arch: Architecture, settings: Settings) -> float:
    """Bytes of logits, their gradient and the loss's temporaries per microbatch."""
    tokens = settings.shape.tokens
    elements = tokens * arch.vocab / settings.mesh.tensor
    if settings.software.loss == "chunked":
        # the previous chunk is still alive while the next one is computed
        alive = 11 * elements if elements <= CHUNK_ELEMENTS else 16 * CHUNK_ELEMENTS
        # the head's gradient in float32, and the stream's; a tensor axis gathers the stream
        streams = 2 * tokens * arch.dim * (settings.shape.width / 2)
        streams += settings.stream_width * tokens * arch.dim if settings.mesh.tensor > 1 else 0.0
        return alive + 4 * arch.vocab * arch.dim / settings.mesh.tensor + streams
    return elements * LOGITS_BYTES[settings.software.loss]
