"""Exact number of parameters per rank under Headway's trainer.

The tensor axis splits matrices. Norms, biases of row-parallel matrices, and key-value heads if there are fewer than
ranks are replicated, and their gradients are reduced once per step. The first pipeline stage has the embedding, the
last the final norm and head; a tied table is on both.
"""

from itertools import accumulate

from headway.plan import diffusion
from headway.plan.architecture import Architecture
from headway.plan.flops import layer_parameters, routed_parameters
from headway.plan.settings import Settings
from headway.plan.stages import blocks_of_ranks, stage_counts


def is_exact(arch: Architecture, settings: Settings) -> bool:
    """Whether shares are exact: Headway's trainer, and a model without experts or latent attention."""
    return settings.software.is_headway and arch.experts is None and arch.latent is None


def worker_blocks(arch: Architecture, settings: Settings, rank: int) -> int:
    """Blocks of a pipeline rank."""
    return blocks_of_ranks(arch.layers, settings)[rank]


def mixture_blocks(arch: Architecture, settings: Settings, rank: int) -> int:
    """Blocks of a pipeline rank with experts."""
    if arch.experts is None:
        return 0
    ends = list(accumulate(stage_counts(arch.layers, settings)))
    stages = list(zip([0, *ends], ends, strict=False))[rank :: settings.mesh.pipeline]
    return sum(end - max(begin, min(arch.experts.dense_layers, end)) for begin, end in stages)


def expert_parameters(arch: Architecture) -> int:
    """Parameters of a layer's routed experts, biases included."""
    experts = arch.experts
    if experts is None:
        return 0
    biases = experts.count * (2 * experts.hidden + arch.dim) if experts.bias else 0
    return routed_parameters(arch) + biases


def shared_parameters(arch: Architecture, settings: Settings, rank: int) -> int:
    """Parameters of all blocks of a pipeline rank, per tensor rank, without routed experts."""
    blocks, mixtures = worker_blocks(arch, settings, rank), mixture_blocks(arch, settings, rank)
    if arch.experts is None and arch.latent is None:
        return blocks * block_parameters(arch, settings.mesh.tensor)
    assert settings.mesh.tensor == 1, "experts and latent attention are not split"
    beside = layer_parameters(arch, True) - expert_parameters(arch) if mixtures else 0
    return mixtures * beside + (blocks - mixtures) * layer_parameters(arch, False)


def block_parameters(arch: Architecture, tensor: int) -> int:
    """Parameters of a dense block per tensor rank."""
    if arch.diffusion is not None:
        share, whole = diffusion.layer_counts(arch)
        return share // tensor + whole
    queries = arch.heads * arch.head_dim
    split = arch.dim * queries + queries * arch.dim + (queries if arch.qkv_bias else 0)
    inner = arch.hidden * (2 if arch.gated else 1)
    split += arch.dim * inner + arch.hidden * arch.dim + (inner if arch.mlp_bias else 0)
    keys = _keys(arch)
    replicated = _norms(arch) + _row_biases(arch)
    return split // tensor + (keys if arch.kv_heads % tensor else keys // tensor) + replicated


def summed_parameters(arch: Architecture, tensor: int) -> int:
    """Parameters of a block that every tensor rank replicates, so that their gradients are reduced."""
    if arch.diffusion is not None:
        return 0  # every rank sees all tokens, and has their whole gradients
    return _norms(arch) + _row_biases(arch) + (_keys(arch) if arch.kv_heads % tensor else 0)


def _keys(arch: Architecture) -> int:
    """Parameters of the key and value projections."""
    return 2 * arch.kv_heads * arch.head_dim * (arch.dim + (1 if arch.qkv_bias else 0))


def _norms(arch: Architecture) -> int:
    return 2 * _norm(arch) + (2 * arch.head_dim if arch.qk_norm else 0)


def _norm(arch: Architecture) -> int:
    return arch.dim * (2 if arch.layer_norm else 1)


def _row_biases(arch: Architecture) -> int:
    """Biases of row-parallel matrices."""
    return arch.dim * (arch.output_bias + arch.mlp_bias)


def table_parameters(arch: Architecture, tensor: int) -> int:
    """Parameters of embedding or head per tensor rank; the last may have fewer rows."""
    return -(-arch.vocab // tensor) * arch.dim


def rest_parameters(arch: Architecture, settings: Settings, rank: int) -> int:
    """Parameters of a pipeline rank outside of blocks: embedding, final norm, head."""
    if arch.diffusion is not None:
        return diffusion.outer_parameters(arch)
    ranks, table = settings.mesh.pipeline, table_parameters(arch, settings.mesh.tensor)
    count = table + arch.positions * arch.dim if rank == 0 else 0
    if rank == ranks - 1:
        count += _norm(arch) + (0 if arch.tied and ranks == 1 else table)
    return count
