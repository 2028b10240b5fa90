"""Gradient norm over many tensors in one pass, and clipping in place.

    norm = sqrt(sum over all tensors of sum x^2)        factor = min(1, clip / (norm + 1e-6))        x <- factor x

Both are memory-bound: the norm reads each gradient once, the scaling reads and writes it. A table on the device has the
address and length of each tensor, and a map says which piece of which tensor each program handles, so that all tensors
of one dtype are one launch. A program sums the squares of one piece in float32 and writes one number to its own slot;
those numbers are then summed in float64. All sums have a fixed order, so that the norm has the same bits in every run.
Infinities and NaNs propagate to the norm.

The scaling reads the factor on the device and returns immediately if it is 1: a step without clipping reads a few bytes
per piece. The fused AdamW applies the factor itself and needs no such pass.

Nothing is differentiable, and tensors are hidden behind addresses: call this outside of compiled graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.pointer_table import map_of, named_type, uploaded
from headway.kernels.triton_compat import tl, triton

LEAST_NORM = 1e-6
"""Added to the norm before dividing, as in torch.nn.utils.clip_grad_norm_."""
BLOCK = 4096
"""Elements per iteration: 32 per each of 128 threads, eight 16-byte loads of float32 in flight."""
LOOPS = 4
"""Blocks per program: 8 bytes of map and 4 of sum per 16384 elements."""
WARPS = 4


@dataclass(frozen=True)
class _Launch:
    """Tensors of one dtype and alignment."""

    dtype: torch.dtype
    aligned: bool
    """Whether addresses and lengths allow 16-byte loads."""
    entries: Tensor
    """Address and length of each tensor."""
    pieces: Tensor


@dataclass(frozen=True)
class NormTable:
    """Addresses of tensors; valid while they do not move."""

    addresses: tuple[tuple[int, int, torch.dtype], ...]
    launches: tuple[_Launch, ...]
    device: torch.device


def table_of(tensors: Sequence[Tensor], before: NormTable | None = None) -> NormTable:
    """Return the table of tensors of one device: the previous one if none has moved.

    Each must be dense in memory, in any order of dims; raise ValueError otherwise.
    """
    addresses = tuple((tensor.data_ptr(), tensor.numel(), tensor.dtype) for tensor in tensors)
    if before is not None and before.addresses == addresses:
        return before
    device = tensors[0].device if tensors else torch.device("cpu")
    kinds = dict[tuple[torch.dtype, bool], list[tuple[int, int]]]()
    for tensor, (address, length, dtype) in zip(tensors, addresses, strict=True):
        if tensor.device != device or not _dense(tensor):
            raise ValueError(
                f"expected dense tensors on one device, got one on {tensor.device} with strides {tensor.stride()}"
            )
        if length:
            kinds.setdefault((dtype, address % 16 == 0 and length % 16 == 0), []).append((address, length))
    launches = []
    for (dtype, aligned), entries in kinds.items():
        pieces = map_of([-(-length // (BLOCK * LOOPS)) for _, length in entries])
        table = uploaded(np.array(entries, dtype=np.int64), device)
        launches.append(_Launch(dtype, aligned, table, uploaded(pieces, device)))
    return NormTable(addresses, tuple(launches), device)


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor is dense in memory, so that a sum may traverse it in memory order."""
    if tensor.is_contiguous():
        return True
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    return tensor.permute(order).is_contiguous()


@triton.jit
def _piece_start(entries, pieces, TYPE: tl.constexpr, ALIGNED: tl.constexpr, SPAN: tl.constexpr):
    """Return the address and length of a program's tensor, and the start of its piece."""
    program = tl.program_id(0).to(tl.int64)
    entry = tl.load(pieces + 2 * program).to(tl.int64)
    first = tl.load(pieces + 2 * program + 1).to(tl.int64) * SPAN
    data = tl.load(entries + 2 * entry).to(tl.pointer_type(TYPE))
    length = tl.load(entries + 2 * entry + 1)
    if ALIGNED:
        # A hint on the pointer, not on the integer: the compiler loses what it knew in the cast.
        data = tl.multiple_of(data, 16)
        length = tl.multiple_of(length, 16)
    return data, length, first


@triton.jit
def _squares_kernel(
    entries,
    pieces,
    sums,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOPS: tl.constexpr,
):
    data, length, first = _piece_start(entries, pieces, TYPE, ALIGNED, BLOCK * LOOPS)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(LOOPS):
        indices = first + i * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(data + indices, mask=indices < length, other=0.0).to(tl.float32)
        total += x * x
    tl.store(sums + tl.program_id(0), tl.sum(total))


@triton.jit
def _scale_kernel(
    entries,
    pieces,
    factor,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOPS: tl.constexpr,
):
    share = tl.load(factor)
    if share != 1.0:
        data, length, first = _piece_start(entries, pieces, TYPE, ALIGNED, BLOCK * LOOPS)
        for i in range(LOOPS):
            indices = first + i * BLOCK + tl.arange(0, BLOCK)
            inside = indices < length
            x = tl.load(data + indices, mask=inside, other=0.0).to(tl.float32)
            tl.store(data + indices, (x * share).to(TYPE), mask=inside)


def sum_of_squares(table: NormTable) -> Tensor:
    """Return the sum of squares over all tensors of a table, as a float64 scalar on their device."""
    sums = torch.empty(sum(len(launch.pieces) for launch in table.launches), device=table.device)
    first = 0
    for launch in table.launches:
        part = sums[first : first + len(launch.pieces)]
        first += len(launch.pieces)
        _squares_kernel[(len(part),)](
            launch.entries,
            launch.pieces,
            part,
            TYPE=named_type(launch.dtype),
            ALIGNED=launch.aligned,
            BLOCK=BLOCK,
            LOOPS=LOOPS,
            num_warps=WARPS,
        )
    return sums.sum(dtype=torch.float64)


def gradient_norm(table: NormTable) -> Tensor:
    """Return the norm over all tensors of a table, as a float32 scalar on their device."""
    return sum_of_squares(table).sqrt().float()


def clip_factor(norm: Tensor, clip: float) -> Tensor:
    """Return the factor that clips gradients of this norm to `clip`, as a float32 scalar on its device."""
    return (clip / (norm + LEAST_NORM)).clamp(max=1.0).float()


def scale(table: NormTable, factor: Tensor) -> None:
    """Multiply all tensors of a table by a float32 scalar of their device, in place; a factor of 1 is free."""
    if factor.dtype != torch.float32 or factor.numel() != 1:
        raise ValueError(f"expected one float32 factor, got {factor.dtype} of shape {tuple(factor.shape)}")
    for launch in table.launches:
        _scale_kernel[(len(launch.pieces),)](
            launch.entries,
            launch.pieces,
            factor,
            TYPE=named_type(launch.dtype),
            ALIGNED=launch.aligned,
            BLOCK=BLOCK,
            LOOPS=LOOPS,
            num_warps=WARPS,
        )


def reference(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm over all tensors."""
    if not tensors:
        return torch.zeros(())
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors])
    )


def reference_scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all tensors in place."""
    for tensor in tensors:
        tensor.copy_(tensor.float() * factor)


_TABLE = {"entries": "*i64", "pieces": "*i32"}


def _ahead(name: str, kernel: Any, last: str, dtype: str, aligned: bool) -> LaunchSpec:
    constants = {"TYPE": getattr(tl, dtype), "ALIGNED": aligned, "BLOCK": BLOCK, "LOOPS": LOOPS}
    return LaunchSpec(name, kernel, _TABLE | {last: "*fp32"}, constants, WARPS)


AHEAD = (
    _ahead("clip squares bf16", _squares_kernel, "sums", "bfloat16", True),
    _ahead("clip squares fp32", _squares_kernel, "sums", "float32", True),
    _ahead("clip squares fp32 unaligned", _squares_kernel, "sums", "float32", False),
    _ahead("clip scale bf16", _scale_kernel, "factor", "bfloat16", True),
    _ahead("clip scale fp32", _scale_kernel, "factor", "float32", True),
)
