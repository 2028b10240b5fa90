"""Exact number of parameters per rank under Headway's trainer, for dense decoders.

The tensor axis splits matrices. Norms, biases of row-parallel matrices, and key-value heads if there are fewer than
ranks are replicated, and their gradients are reduced once per step. The first pipeline stage has the embedding, the
last the final norm and head; a tied table is on both.
"""

from headway.plan import diffusion
from headway.plan.architecture import Architecture
from headway.plan.settings import Settings
from headway.plan.stages import blocks_of_ranks


def is_exact(arch: Architecture, settings: Settings) -> bool:
    """Whether shares are exact: Headway's trainer, and a model without experts or latent attention."""
    return settings.software.is_headway and arch.experts is None and arch.latent is None


def worker_blocks(arch: Architecture, settings: Settings, rank: int) -> int:
    """Blocks of a pipeline rank."""
    return blocks_of_ranks(arch.layers, settings)[rank]


def block_parameters(arch: Architecture, tensor: int) -> int:
    """Parameters of a block per tensor rank."""
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
