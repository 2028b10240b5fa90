"""Products of a Newton-Schulz step, two of which are symmetric and cost half.

    A = X X^T                    [M, M] of X [M, N]
    B = b A + c A A              A is its own transpose, so that A A = A A^T: the same kernel again
    X <- a X + B X               no symmetry in it: cuBLAS

They are compute-bound. The first two are symmetric, so that only tiles on and below the diagonal are computed and
mirrored: M (M + 128) N multiply-adds instead of 2 M M N, about half. A program computes one tile of 128 x 128 in
float32 and, below the diagonal, writes it twice; eight rows of tiles are grouped, so that their inputs stay in the L2
cache. `b A` is added in the epilogue of the second product, without a pass of its own.

Mirrored tiles are bitwise equal. Small matrices leave multiprocessors idle either way and go to cuBLAS: see `worth`.
Nothing is differentiable: this is for an optimizer.
"""

import torch
from torch import Tensor
from torch.library import wrap_triton

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.triton_compat import runs_on, tl, triton, triton_op

TILE = 128
DEEP = 64
GROUP = 8
WARPS = 4
STAGES = 3
LEAST_TILES = 128
"""Fewest tiles on and below the diagonals of a batch: about one per multiprocessor of an H200 (132)."""


def worth(x: Tensor) -> bool:
    """Whether half of the tiles of x x^T fill a GPU, as those of one matrix of 2048 rows do."""
    rows = -(-x.shape[-2] // TILE)
    tiles = x.shape[:-2].numel() * rows * (rows + 1) // 2
    even = x.shape[-1] % 16 == 0 and x.shape[-2] % 16 == 0
    return runs_on(x.device) and even and tiles >= LEAST_TILES and x.dtype in (torch.bfloat16, torch.float16)


@triton.jit
def _symmetric_kernel(
    x,
    out,
    rows,
    inner,
    x_batch,
    x_row,
    scale,
    share,
    ADDED: tl.constexpr,
    TILE: tl.constexpr,
    DEEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out = scale * x x^T, and where ADDED, x being square, + share * x."""
    across = tl.cdiv(rows, TILE)
    program = tl.program_id(0)
    group = program // (GROUP * across)
    high = tl.minimum(across - group * GROUP, GROUP)
    i = group * GROUP + (program % (GROUP * across)) % high
    j = (program % (GROUP * across)) // high
    if i < j:
        return
    x += tl.program_id(1).to(tl.int64) * x_batch
    out += tl.program_id(1).to(tl.int64) * rows * rows
    left = (i * TILE + tl.arange(0, TILE)).to(tl.int64)
    columns = (j * TILE + tl.arange(0, TILE)).to(tl.int64)
    depth = tl.arange(0, DEEP)
    # rows past the end are read as the last ones, and never written
    left_x = x + tl.minimum(left, rows - 1)[:, None] * x_row + depth[None, :]
    right_x = x + tl.minimum(columns, rows - 1)[:, None] * x_row + depth[None, :]
    total = tl.zeros([TILE, TILE], tl.float32)
    for k in range(tl.cdiv(inner, DEEP)):
        inside = (depth < inner - k * DEEP)[None, :]
        a = tl.load(left_x, mask=inside, other=0.0)
        b = tl.load(right_x, mask=inside, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        left_x += DEEP
        right_x += DEEP
    total *= scale
    below = (left < rows)[:, None] & (columns < rows)[None, :]
    if ADDED:
        total += share * tl.load(x + left[:, None] * x_row + columns[None, :], mask=below, other=0.0).to(tl.float32)
    values = total.to(out.dtype.element_ty)
    tl.store(out + left[:, None] * rows + columns[None, :], values, mask=below)
    if i != j:
        mirrored = (columns < rows)[:, None] & (left < rows)[None, :]
        tl.store(out + columns[:, None] * rows + left[None, :], tl.trans(values), mask=mirrored)


@triton_op("headway::symmetric_product", mutates_args=())
def _symmetric_product(x: Tensor, scale: float, share: float) -> Tensor:
    batch, rows, inner = x.shape
    out = x.new_empty(batch, rows, rows)
    across = -(-rows // TILE)
    if out.numel() == 0:
        return out
    wrap_triton(_symmetric_kernel)[(across * across, batch)](
        x,
        out,
        rows,
        inner,
        x.stride(0),
        x.stride(1),
        scale,
        share,
        ADDED=share != 0.0,
        TILE=TILE,
        DEEP=DEEP,
        GROUP=GROUP,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out


def _batched(x: Tensor) -> Tensor:
    """Return a 3-D view whose last dim is contiguous."""
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(f"expected floating-point matrices, got {x.dtype} of shape {tuple(x.shape)}")
    x = _stacked(x)
    return x if x.stride(-1) == 1 else x.contiguous()


def _stacked(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-2].numel(), *x.shape[-2:])


def symmetric(x: Tensor) -> Tensor:
    """Return x x^T of matrices [..., M, N], accumulated in float32."""
    batched = _batched(x)
    return _symmetric_product(batched, 1.0, 0.0).view(*x.shape[:-1], x.shape[-2])


def polynomial(square: Tensor, b: float, c: float) -> Tensor:
    """Return b A + c A A of symmetric matrices [..., M, M]."""
    if square.shape[-1] != square.shape[-2]:
        raise ValueError(f"expected symmetric matrices, got {square.shape[-2]} x {square.shape[-1]}")
    return _symmetric_product(_batched(square), c, b).view(square.shape)


def step(x: Tensor, a: float, b: float, c: float) -> Tensor:
    """Return a X + (b A + c A A) X with A = X X^T, of matrices [..., M, N] with M <= N; by cuBLAS alone if faster."""
    if worth(x):
        result = polynomial(symmetric(x), b, c)
    else:
        result = reference_polynomial(reference_symmetric(x), b, c)
    return torch.baddbmm(_stacked(x), _stacked(result), _stacked(x), beta=a).view(x.shape)


def reference_symmetric(x: Tensor) -> Tensor:
    """x x^T."""
    return x @ x.mT


def reference_polynomial(square: Tensor, b: float, c: float) -> Tensor:
    """b A + c A A."""
    return b * square + c * (square @ square)


_INTEGERS = dict.fromkeys(("rows", "inner", "x_batch", "x_row"), "i32")
_NUMBERS = dict.fromkeys(("scale", "share"), "fp32")
AHEAD = tuple(
    LaunchSpec(
        f"newton_schulz {name}",
        _symmetric_kernel,
        {"x": dtype, "out": dtype} | _INTEGERS | _NUMBERS,
        {"ADDED": added, "TILE": TILE, "DEEP": DEEP, "GROUP": GROUP},
        WARPS,
        STAGES,
    )
    for name, dtype, added in (("square bf16", "*bf16", False), ("polynomial bf16", "*bf16", True))
)
