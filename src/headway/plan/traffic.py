"""Exact bytes that a worker of Headway's trainer communicates per step, by collective and mesh axis.

Bytes are of full tensors, as in `collective_times.collective_seconds`. A few numbers that all workers share once per
step are left out: losses, the gradient norm, stop requests.
"""

from collections import defaultdict
from collections.abc import Iterator

from headway.plan.architecture import Architecture, DiffusionShape
from headway.plan.rank_share import (
    block_parameters,
    is_exact,
    rest_parameters,
    summed_parameters,
    table_parameters,
    worker_blocks,
)
from headway.plan.settings import Settings

Kind = tuple[str, str]
"""A collective (all_gather, reduce_scatter, all_reduce, send) and its mesh axis."""
STATISTICS_BYTES = 12
"""Per token of a vocabulary-parallel loss: largest logit, sum of exponentials and the label's logit, in float32."""
F32 = 4


def traffic(arch: Architecture, settings: Settings, rank: int = 0) -> dict[Kind, float]:
    """Bytes per step by collective and axis, of a worker on a pipeline rank."""
    assert is_exact(arch, settings), "only the communication of Headway's trainer is exact"
    total: dict[Kind, float] = defaultdict(float)
    for part in (_tensor(arch, settings, rank), _data(arch, settings, rank), _pipeline(arch, settings, rank)):
        for kind, size in part:
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
    return F32 * count / mesh.shard


def _data(arch: Architecture, settings: Settings, rank: int) -> Iterator[tuple[Kind, float]]:
    """Gathered weights, and gradients reduced once per step."""
    mesh = settings.mesh
    blocks = worker_blocks(arch, settings, rank) * block_parameters(arch, mesh.tensor)
    rest = rest_parameters(arch, settings, rank)
    if mesh.shard > 1:
        # without a pipeline in every microbatch: blocks for both passes, the rest once
        runs = settings.microbatches if mesh.pipeline == 1 else 1
        passes = 1 if settings.keeps_weights or mesh.pipeline > 1 else 2
        yield ("all_gather", "shard"), settings.shape.width * runs * (passes * blocks + rest)
        sums = runs if settings.reduces_each else 1
        yield ("reduce_scatter", "shard"), F32 * sums * (blocks + rest)
    if mesh.replicate > 1:
        yield ("all_reduce", "replicate"), F32 * (blocks + rest) / mesh.shard


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
    return F32 * table_parameters(arch, mesh.tensor) / mesh.shard
