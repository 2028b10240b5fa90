"""Exact bytes that a worker of Headway's trainer communicates per step, by collective and mesh axis.

Bytes are of full tensors, as in `collective_times.collective_seconds`. A few numbers that all workers share once per
step are left out: losses, the gradient norm, stop requests.
"""

from collections import defaultdict
from collections.abc import Iterator

from headway.plan.architecture import Architecture, DiffusionShape
from headway.plan.context import exchanges
from headway.plan.rank_share import (
    expert_parameters,
    is_exact,
    mixture_blocks,
    rest_parameters,
    shared_parameters,
    summed_parameters,
    table_parameters,
    worker_blocks,
)
from headway.plan.settings import Settings

Kind = tuple[str, str]
"""A collective (all_gather, reduce_scatter, all_reduce, all_to_all, send) and its mesh axis; `expert shard` are the
workers of the shard axis that have the same experts. Weights are sharded over shard and context together, `shard`."""
STATISTICS_BYTES = 12
"""Per token of a vocabulary-parallel loss: largest logit, sum of exponentials and the label's logit, in float32."""
COUNT_BYTES = 8
"""Per expert and pass: the number of rows that a worker sends to it."""
F32 = 4


def traffic(arch: Architecture, settings: Settings, rank: int = 0) -> dict[Kind, float]:
    """Bytes per step by collective and axis, of a worker on a pipeline rank."""
    known = is_exact(arch, settings) or (settings.software.is_headway and settings.mesh.tensor == 1)
    assert known, "only the communication of Headway's trainer is exact"
    total: dict[Kind, float] = defaultdict(float)
    for part in (_tensor, _context, _experts, _data, _pipeline):
        for kind, size in part(arch, settings, rank):
            total[kind] += size
    return {kind: size for kind, size in total.items() if size}


def _tensor(arch: Architecture, settings: Settings, rank: int) -> Iterator[tuple[Kind, float]]:
    """Inputs and outputs of attention and feed-forward in each layer; the same at embedding and head."""
    mesh, tokens = settings.mesh, settings.shape.tokens
    if mesh.tensor == 1:
        return
    runs = settings.microbatches
    entering = tokens * arch.dim * settings.stream_width * runs
    leaving = tokens * arch.dim * settings.shape.width * runs
    blocks = worker_blocks(arch, settings, rank)
    if arch.diffusion is not None:
        yield ("all_reduce", "tensor"), _diffusion(arch, arch.diffusion, settings) * blocks
        return
    # recomputation repeats both gathers and attention's reduction, but not the feed-forward's
    recomputed = _recomputed(settings, blocks)
    yield ("all_gather", "tensor"), 2 * blocks * (entering + leaving) + 2 * recomputed * entering
    yield ("reduce_scatter", "tensor"), 2 * blocks * (leaving + entering) + recomputed * leaving
    if rank == 0:
        yield ("reduce_scatter", "tensor"), entering
        yield ("all_gather", "tensor"), entering
    if rank == mesh.pipeline - 1:
        yield ("all_gather", "tensor"), entering
        yield ("reduce_scatter", "tensor"), entering
        yield ("all_reduce", "tensor"), STATISTICS_BYTES * tokens * runs
    yield ("all_reduce", "tensor"), summed_bytes(arch, settings, rank)


def _diffusion(arch: Architecture, shape: DiffusionShape, settings: Settings) -> float:
    """All-reduces of a layer: outputs forward and inputs backward, of two or three parts, and of text and image."""
    passes = 2 + (settings.recompute != "none")
    stream = settings.shape.tokens * arch.dim * (3 if shape.text_tokens else 2)
    others = settings.shape.sequences * (shape.text_tokens + shape.image_tokens) * arch.dim * 2
    return settings.shape.width * settings.microbatches * (passes * stream + others)


def _recomputed(settings: Settings, blocks: int) -> int:
    if settings.recompute == "none":
        return 0
    return blocks if settings.recompute_blocks is None else min(blocks, settings.recompute_blocks)


def summed_bytes(arch: Architecture, settings: Settings, rank: int) -> float:
    """Gradients of replicated parameters, reduced over the tensor axis once per step after sharding."""
    mesh = settings.mesh
    if mesh.tensor == 1 or arch.diffusion is not None:
        return 0.0
    count = worker_blocks(arch, settings, rank) * summed_parameters(arch, mesh.tensor)
    if rank == mesh.pipeline - 1:
        count += arch.dim * (2 if arch.layer_norm else 1)
    return F32 * count / mesh.owners


def _context(arch: Architecture, settings: Settings, rank: int) -> Iterator[tuple[Kind, float]]:
    """What attention needs of other workers' parts of sequences, and its gradients."""
    blocks = worker_blocks(arch, settings, rank)
    passes = blocks + _recomputed(settings, blocks)
    for exchange in exchanges(arch, settings):
        calls = settings.microbatches * (passes * exchange.forward + blocks * exchange.backward)
        yield (exchange.operation, "context"), calls * exchange.bytes


def _experts(arch: Architecture, settings: Settings, rank: int) -> Iterator[tuple[Kind, float]]:
    """Rows sent to experts and back, and their gradients: on average over workers, since routing is rarely even."""
    mesh, experts = settings.mesh, arch.experts
    if mesh.expert == 1 or experts is None:
        return
    blocks = mixture_blocks(arch, settings, rank)
    passes = blocks + min(blocks, _recomputed(settings, worker_blocks(arch, settings, rank)))
    rows = settings.shape.tokens * experts.top_k * arch.dim * settings.shape.width
    sent = 2 * (passes + blocks) * rows + passes * COUNT_BYTES * experts.count
    yield ("all_to_all", "expert"), settings.microbatches * sent


def _data(arch: Architecture, settings: Settings, rank: int) -> Iterator[tuple[Kind, float]]:
    """Gathered weights, and gradients reduced once per step: of experts over the workers that have the same ones."""
    mesh = settings.mesh
    dense = shared_parameters(arch, settings, rank)
    experts = mixture_blocks(arch, settings, rank) * expert_parameters(arch)
    rest = rest_parameters(arch, settings, rank)
    parts: list[tuple[str, int, float, int]]
    if mesh.expert == 1:
        parts = [("shard", mesh.owners, dense + experts, rest)]
    else:
        own = experts / mesh.expert
        parts = [("shard", mesh.owners, dense, rest), ("expert shard", mesh.owners // mesh.expert, own, 0)]
    for axis, size, blocks, outside in parts:
        if size > 1:
            # without a pipeline in every microbatch: blocks for both passes, the rest once
            runs = settings.microbatches if mesh.pipeline == 1 else 1
            passes = 1 if settings.keeps_weights or mesh.pipeline > 1 else 2
            yield ("all_gather", axis), settings.shape.width * runs * (passes * blocks + outside)
            sums = runs if settings.reduces_each else 1
            yield ("reduce_scatter", axis), F32 * sums * (blocks + outside)
        if mesh.replicate > 1:
            yield ("all_reduce", "replicate"), F32 * (blocks + outside) / size


def _pipeline(arch: Architecture, settings: Settings, rank: int) -> Iterator[tuple[Kind, float]]:
    """Activations to the next stage, gradients to the previous one, and the gradient of a tied table."""
    mesh = settings.mesh
    if mesh.pipeline == 1:
        return
    stages = range(mesh.pipeline * settings.chunks)
    own = stages[rank :: mesh.pipeline]
    sent = sum((stage != stages[-1]) + (stage != 0) for stage in own)
    stream = settings.shape.tokens * arch.dim * settings.stream_width / mesh.tensor
    yield ("send", "pipeline"), sent * settings.microbatches * stream
    if rank in (0, mesh.pipeline - 1):
        yield ("all_reduce", "pipeline"), tied_bytes(arch, settings)


def tied_bytes(arch: Architecture, settings: Settings) -> float:
    """Bytes of a tied table's gradient, which the first and last pipeline stages sum."""
    mesh = settings.mesh
    if not arch.tied or mesh.pipeline == 1:
        return 0.0
    return F32 * table_parameters(arch, mesh.tensor) / mesh.owners
