"""The norm of many gradients in one pass, and their scaling in place where the norm is too large.

    norm = sqrt(sum over all tensors of sum x^2)        factor = min(1, clip / (norm + 1e-6))        x <- factor x

Bytes bind both: the norm reads each gradient once, the scaling reads and writes it. A table on the device says where
each tensor lies and how long it is, and a map says which piece of which tensor each program takes, so that tensors of
one dtype are one launch however many there are. A program adds up the squares of one piece in float32 and writes one
number to a place of its own; those numbers are then added up in float64. No number is added in an order that could
change, so that the norm has the same bits in every run. What is infinite or no number shows in the norm.

The scaling reads the factor on the device and leaves at once where it is 1: a step without clipping reads a few bytes
a piece. The fused AdamW takes the factor itself and needs no such pass.

Nothing is differentiated, and tensors hide behind their addresses: call this outside of compiled graphs.
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

__all__ = [
    "AHEAD",
    "NormTable",
    "clip_factor",
    "gradient_norm",
    "reference",
    "reference_scale",
    "scale",
    "sum_of_squares",
    "table_of",
]

LEAST_NORM = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to a norm before it divides by it."""
BLOCK = 4096
"""Elements at a time: 32 for each of 128 threads, eight loads of 16 bytes of float32 on their way at once."""
LOOPS = 4
"""Blocks of a program: a map of 8 and a sum of 4 bytes for each 16384 elements."""
WARPS = 4


@dataclass(frozen=True)
class _Launch:
    """Tensors of one dtype that a program can read in the same way."""

    dtype: torch.dtype
    aligned: bool
    """Addresses and lengths are such that a thread may read 16 bytes at once."""
    entries: Tensor
    """Of each tensor its address and its length."""
    pieces: Tensor


@dataclass(frozen=True)
class NormTable:
    """Where some tensors lie; good for as long as they lie there."""

    addresses: tuple[tuple[int, int, torch.dtype], ...]
    launches: tuple[_Launch, ...]
    device: torch.device


def table_of(tensors: Sequence[Tensor], before: NormTable | None = None) -> NormTable:
    """A table of tensors of one device: the one of before where all lie as they did.

    Each must fill its memory without gaps, in whatever order of dims; ValueError otherwise.
    """
    addresses = tuple((tensor.data_ptr(), tensor.numel(), tensor.dtype) for tensor in tensors)
    if before is not None and before.addresses == addresses:
        return before
    device = tensors[0].device if tensors else torch.device("cpu")
    kinds = dict[tuple[torch.dtype, bool], list[tuple[int, int]]]()
    for tensor, (address, length, dtype) in zip(tensors, addresses, strict=True):
        if tensor.device != device or not _dense(tensor):
            raise ValueError(f"a tensor on {tensor.device} with strides {tensor.stride()} lies with gaps or elsewhere")
        if length:
            kinds.setdefault((dtype, address % 16 == 0 and length % 16 == 0), []).append((address, length))
    launches = []
    for (dtype, aligned), entries in kinds.items():
        pieces = map_of([-(-length // (BLOCK * LOOPS)) for _, length in entries])
        made = uploaded(np.array(entries, dtype=np.int64), device)
        launches.append(_Launch(dtype, aligned, made, uploaded(pieces, device)))
    return NormTable(addresses, tuple(launches), device)


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor fills one stretch of memory, so that a sum over it may go through that in any order."""
    if tensor.is_contiguous():
        return True
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    return tensor.permute(order).is_contiguous()


@triton.jit
def _place(entries, pieces, TYPE: tl.constexpr, ALIGNED: tl.constexpr, SPAN: tl.constexpr):
    """Where a program's tensor begins, how long it is, and where the program's piece of it begins."""
    program = tl.program_id(0).to(tl.int64)
    entry = tl.load(pieces + 2 * program).to(tl.int64)
    first = tl.load(pieces + 2 * program + 1).to(tl.int64) * SPAN
    data = tl.load(entries + 2 * entry).to(tl.pointer_type(TYPE))
    length = tl.load(entries + 2 * entry + 1)
    if ALIGNED:
        # Of the pointer, not of the number it was: the compiler forgets what it knew of that in the cast.
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
    data, length, first = _place(entries, pieces, TYPE, ALIGNED, BLOCK * LOOPS)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(LOOPS):
        places = first + i * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(data + places, mask=places < length, other=0.0).to(tl.float32)
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
        data, length, first = _place(entries, pieces, TYPE, ALIGNED, BLOCK * LOOPS)
        for i in range(LOOPS):
            places = first + i * BLOCK + tl.arange(0, BLOCK)
            inside = places < length
            x = tl.load(data + places, mask=inside, other=0.0).to(tl.float32)
            tl.store(data + places, (x * share).to(TYPE), mask=inside)


def sum_of_squares(table: NormTable) -> Tensor:
    """Over all elements of a table's tensors: a float64 scalar on their device."""
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
    """The norm of all of a table's tensors together: a float32 scalar on their device."""
    return sum_of_squares(table).sqrt().float()


def clip_factor(norm: Tensor, clip: float) -> Tensor:
    """What gradients of this norm are multiplied by so that it is `clip` at most: a float32 scalar on its device."""
    return (clip / (norm + LEAST_NORM)).clamp(max=1.0).float()


def scale(table: NormTable, factor: Tensor) -> None:
    """Multiply all of a table's tensors by a float32 scalar of their device, in place; by 1 touches none."""
    if factor.dtype != torch.float32 or factor.numel() != 1:
        raise ValueError(f"the factor is one float32 number, not {factor.dtype} of shape {tuple(factor.shape)}")
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
    """The norm of all tensors together, by the norms of each."""
    if not tensors:
        return torch.zeros(())
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors])
    )


def reference_scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all in place."""
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
