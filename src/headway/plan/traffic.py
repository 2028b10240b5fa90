"""What a worker of Headway's own trainer sends and receives in one step, to the byte.

Bytes are of whole tensors, as `network.collective_seconds` counts them: what a gather makes, what is scattered, what is
reduced, what is sent. Groups of one exchange nothing. Left out are the few numbers that all workers share once a step:
losses, the gradient's norm, the wish to stop.
"""

from collections import defaultdict
from collections.abc import Iterator

from headway.plan.architecture import Architecture
from headway.plan.rank_share import (
    block_parameters,
    is_exact,
    rest_parameters,
    summed_parameters,
    table_parameters,
    worker_blocks,
)
from headway.plan.settings import Settings

__all__ = ["STATISTICS_BYTES", "Kind", "summed_bytes", "tied_bytes", "traffic"]

Kind = tuple[str, str]
"""An operation (all_gather, reduce_scatter, all_reduce, send) and the axis it goes over."""
STATISTICS_BYTES = 12
"""Of each token's loss over a vocabulary that is shared out: the largest logit, the sum of exponentials and the
label's logit, in float32."""
F32 = 4


def traffic(arch: Architecture, settings: Settings, rank: int = 0) -> dict[Kind, float]:
    """Bytes of one step by operation and axis, of a worker on a rank of the pipeline axis (or of the only one)."""
    assert is_exact(arch, settings), "only our own trainer's exchanges are known to the byte"
    total: dict[Kind, float] = defaultdict(float)
    for part in (_tensor(arch, settings, rank), _data(arch, settings, rank), _pipeline(arch, settings, rank)):
        for kind, size in part:
            total[kind] += size
    return {kind: size for kind, size in total.items() if size}


def _tensor(arch: Architecture, settings: Settings, rank: int) -> Iterator[tuple[Kind, float]]:
    """Of each layer, what enters attention and feed-forward and what leaves them; the same at the model's ends."""
    mesh, tokens = settings.mesh, settings.shape.tokens
    if mesh.tensor == 1:
        return
    runs = settings.microbatches
    entering = tokens * arch.dim * settings.stream_width * runs
    leaving = tokens * arch.dim * settings.shape.width * runs
    blocks = worker_blocks(arch, settings, rank)
    # computed again: both gathers, and what attention adds to the stream; what the feed-forward adds nobody needs
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


def _recomputed(settings: Settings, blocks: int) -> int:
    if settings.recompute == "none":
        return 0
    return blocks if settings.recompute_blocks is None else min(blocks, settings.recompute_blocks)


def summed_bytes(arch: Architecture, settings: Settings, rank: int) -> float:
    """Gradients that are added up over the tensor axis once a step, after the shard axis has shared them out."""
    mesh = settings.mesh
    if mesh.tensor == 1:
        return 0.0
    count = worker_blocks(arch, settings, rank) * summed_parameters(arch, mesh.tensor)
    if rank == mesh.pipeline - 1:
        count += arch.dim * (2 if arch.layer_norm else 1)
    return F32 * count / mesh.shard


def _data(arch: Architecture, settings: Settings, rank: int) -> Iterator[tuple[Kind, float]]:
    """Weights that are gathered, and gradients that are added up once a step."""
    mesh = settings.mesh
    blocks = worker_blocks(arch, settings, rank) * block_parameters(arch, mesh.tensor)
    rest = rest_parameters(arch, settings, rank)
    if mesh.shard > 1:
        # without a pipeline in every microbatch: blocks for both passes, what is left once
        runs = settings.microbatches if mesh.pipeline == 1 else 1
        passes = 1 if settings.keeps_weights or mesh.pipeline > 1 else 2
        yield ("all_gather", "shard"), settings.shape.width * runs * (passes * blocks + rest)
        sums = runs if settings.reduces_each else 1
        yield ("reduce_scatter", "shard"), F32 * sums * (blocks + rest)
    if mesh.replicate > 1:
        yield ("all_reduce", "replicate"), F32 * (blocks + rest) / mesh.shard


def _pipeline(arch: Architecture, settings: Settings, rank: int) -> Iterator[tuple[Kind, float]]:
    """The stream to the next stage and its gradient to the one before; and a tied table's gradient."""
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
    """Of a tied table's gradient, which a pipeline's first and last stage each have a part of."""
    mesh = settings.mesh
    if not arch.tied or mesh.pipeline == 1:
        return 0.0
    return F32 * table_parameters(arch, mesh.tensor) / mesh.shard
