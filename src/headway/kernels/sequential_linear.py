"""Products of few rows with weights, whose bits do not depend on the number of rows: sums go through K in order.

    linear           x @ w.T (+ bias)                   one output of several weights: queries, keys and values
    gated_linear     silu(x @ gate.T) * (x @ up.T)
    linear_into      stream += x @ w.T (+ bias)         rounded before and after the addition, as in modules

A program has some columns of the output, and goes through their weights from the first input to the last with one
float32 accumulator. No sum is split up, so a row has the same bits alone, in a batch and with any tiling; cuBLAS has
exactly these bits for many rows, where training uses it (docs/inference.md), but splits sums for few.

Decoding is bound by reading weights. A matrix of 4096 x 4096 takes a Hopper GPU 8 us, so what counts besides is how
soon the reading starts: with `early` (programmatic dependent launch) a program loads its first weights while the
kernel before it ends.

Weights of one product may lie in several tensors, as queries, keys and values do: nothing is copied, so that the
engine can use a trainer's weights in place.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.triton_compat import runs_on, tl, triton

MOST_ROWS = 512
"""Rows up to which this is about as fast as cuBLAS, or faster."""
DEPTHS = (256, 128, 64, 32, 16)
LEAST_PROGRAMS = 128
"""Programs that a product has, if its columns suffice."""
SHARED = 220 * 1024
"""Bytes of shared memory that the tiles of a program may take."""


class LinearTiling(NamedTuple):
    """A program's share of a product."""

    rows: int
    columns: int
    depth: int
    """Inputs at a time."""
    warps: int
    stages: int
    """Of the pipeline that loads them."""


def takes(x: Tensor, *weights: Tensor) -> bool:
    """Whether the kernels take these products: on a GPU, in half precision, and in whole tiles of inputs."""
    return runs_on(x.device) and all(
        w.dtype == x.dtype and w.is_contiguous() and w.shape[1] % DEPTHS[-1] == 0 for w in weights
    )


def cut(rows: int, outputs: int, inputs: int, products: int = 1) -> LinearTiling:
    """Choose a tiling, measured on an H200; `products` are made side by side."""
    block = 16 if rows <= 16 else 32 if rows <= 32 else 64
    columns, depth, warps, stages = 64, 64, 4, 4
    if rows <= 16 and outputs > 16384:
        depth = 128
    elif rows <= 16:
        columns, depth, stages = 32, 128, 5
        if 2 * -(-outputs // columns) < LEAST_PROGRAMS:
            columns, depth, warps, stages = 16, 256, 2, 4
    elif outputs > 16384:
        if rows > 128:
            block, columns, warps, stages = 128, 256, 8, 3
        elif rows > 64:
            block, columns, warps, stages = 128, 128, 8, 4
        else:
            stages = 5
    elif products > 1:
        if rows > 256:
            block, warps = 128, 8
        elif rows > 128:
            columns = 128
        elif rows > 64:
            stages = 6
        else:
            columns, depth = 32, 128
    elif rows <= 32:
        columns = _columns(-(-rows // block), outputs)
        depth, stages = 128, 3 if columns == 64 else 4
    elif rows > 256:
        block, columns, depth, warps = (128, 128, 64, 8) if outputs > 2048 else (64, 64, 128, 4)
    elif rows > 128 and outputs > 2048:
        columns, stages = 128, 6
    else:
        columns, depth = (64 if rows > 64 and outputs > 2048 else 32), 128
    depth = next(d for d in DEPTHS if d <= depth and inputs % d == 0)
    # The first tiles of weights have a place of their own.
    while stages > 2 and 2 * depth * (stages * (block + products * columns) + products * columns) > SHARED:
        stages -= 1
    return LinearTiling(block, columns, depth, warps, stages)


def _columns(blocks: int, outputs: int) -> int:
    """Return as many columns as leave about a program per multiprocessor."""
    return next((columns for columns in (64, 32) if blocks * -(-outputs // columns) >= LEAST_PROGRAMS), 16)


# -- kernels


@triton.jit
def _silu_times(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, b0_ptr, b1_ptr, b2_ptr, stream_ptr, out_ptr, rows, x_stride, out_stride,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    ADDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IEEE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    w_ptr, b_ptr, outputs, before = w0_ptr, b0_ptr, N0, 0
    if not GATED:  # noqa: SIM102  (one is known when compiled)
        if N1 > 0:  # noqa: SIM102
            if block >= (N0 + COLUMNS - 1) // COLUMNS:
                block -= (N0 + COLUMNS - 1) // COLUMNS
                w_ptr, b_ptr, outputs, before = w1_ptr, b1_ptr, N1, N0
                if block >= (N1 + COLUMNS - 1) // COLUMNS:
                    block -= (N1 + COLUMNS - 1) // COLUMNS
                    w_ptr, b_ptr, outputs, before = w2_ptr, b2_ptr, N2, N0 + N1
    w_ptr = tl.multiple_of(w_ptr, 16)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, DEPTH)
    # Rows and columns beyond the last repeat it: loads without masks.
    safe_row = tl.minimum(row, rows - 1).to(tl.int64)
    safe_column = tl.minimum(column, outputs - 1).to(tl.int64)
    x_at = x_ptr + safe_row[:, None] * x_stride + inner[None, :]
    w_at = w_ptr + safe_column[None, :] * K + inner[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    if GATED:
        up_at = w1_ptr + safe_column[None, :] * K + inner[:, None]
        up_acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        w = tl.load(w_at)
        up = tl.load(up_at)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        x = tl.load(x_at)
        acc = _dot(x, w, acc, IEEE)
        up_acc = _dot(x, up, up_acc, IEEE)
        for first in range(DEPTH, K, DEPTH):
            x = tl.load(x_at + first)
            acc = _dot(x, tl.load(w_at + first), acc, IEEE)
            up_acc = _dot(x, tl.load(up_at + first), up_acc, IEEE)
        dtype = x_ptr.dtype.element_ty
        acc = _silu_times(acc.to(dtype).to(tl.float32), up_acc.to(dtype).to(tl.float32))
    else:
        w = tl.load(w_at)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        acc = _dot(tl.load(x_at), w, acc, IEEE)
        for first in range(DEPTH, K, DEPTH):
            acc = _dot(tl.load(x_at + first), tl.load(w_at + first), acc, IEEE)
    if BIASED:
        acc += tl.load(b_ptr + safe_column).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (column < outputs)[None, :]
    place = row.to(tl.int64)[:, None] * out_stride + (before + column)[None, :]
    if ADDS:
        dtype = out_ptr.dtype.element_ty
        stream = tl.load(stream_ptr + place, mask=inside, other=0.0).to(tl.float32)
        acc = stream + acc.to(dtype).to(tl.float32)
    tl.store(out_ptr + place, acc, mask=inside)


@triton.jit
def _dot(x, w, acc, IEEE: tl.constexpr):
    if IEEE:
        return tl.dot(x, w, acc, input_precision="ieee")
    return tl.dot(x, w, acc)


# -- launches


def linear(
    x_TD: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    dtype: torch.dtype | None = None,
    tiling: LinearTiling | None = None,
    early: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias of up to three weights side by side [T, sum of outputs], by default in x's dtype."""
    outputs = [len(weight) for weight in weights]
    if out is None:
        out = torch.empty(len(x_TD), sum(outputs), dtype=dtype or x_TD.dtype, device=x_TD.device)
    return _launch(x_TD, weights, biases, out, None, tiling, early, gated=False)


def gated_linear(
    x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, *, tiling: LinearTiling | None = None, early: bool = False
) -> Tensor:
    """Return silu(x @ gate.T) * (x @ up.T), with the rounding of separate products."""
    out = torch.empty(len(x_TD), len(gate_FD), dtype=x_TD.dtype, device=x_TD.device)
    return _launch(x_TD, (gate_FD, up_FD), None, out, None, tiling, early, gated=True)


def linear_into(
    stream_TO: Tensor,
    x_TD: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None = None,
    *,
    tiling: LinearTiling | None = None,
    early: bool = False,
) -> Tensor:
    """Add x @ weight.T + bias to a contiguous stream in place, and return it."""
    return _launch(x_TD, (weight_OD,), (bias_O,), stream_TO, stream_TO, tiling, early, gated=False)


def _launch(
    x_TD: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    out: Tensor,
    stream: Tensor | None,
    tiling: LinearTiling | None,
    early: bool,
    *,
    gated: bool,
) -> Tensor:
    rows, inputs = x_TD.shape
    if rows == 0:
        return out
    sizes = [len(weight) for weight in weights] + [0, 0]
    tiling = tiling or cut(rows, sizes[0] if gated else sum(sizes), inputs, 2 if gated else 1)
    blocks = sum(-(-size // tiling.columns) for size in (sizes[:1] if gated else sizes))
    first, second, third = [*weights, *[weights[0]] * 2][:3]
    given = [b for b in biases or () if b is not None]
    assert len(given) in (0, len(weights)), "all have a bias, or none"
    padded = [*(given or [first]), *[(given or [first])[0]] * 2]
    options = {"launch_pdl": True} if early else {}
    _linear_kernel[(-(-rows // tiling.rows), blocks)](
        x_TD, first, second, third, *padded[:3], out if stream is None else stream, out, rows,
        x_TD.stride(0), out.stride(0), N0=sizes[0], N1=0 if gated else sizes[1], N2=0 if gated else sizes[2],
        K=inputs, GATED=gated, BIASED=bool(given), ADDS=stream is not None, ROWS=tiling.rows, COLUMNS=tiling.columns,
        DEPTH=tiling.depth, IEEE=x_TD.dtype == torch.float32, EARLY=early, num_warps=tiling.warps,
        num_stages=tiling.stages, **options,
    )  # fmt: skip
    return out


def _ahead(name: str, outputs: tuple[int, int, int], inputs: int, rows: int, **flags: bool) -> LaunchSpec:
    gated = flags.get("GATED", False)
    tiling = cut(rows, outputs[0] if gated else sum(outputs), inputs, 2 if gated else 1)
    types = dict.fromkeys(("x_ptr", "w0_ptr", "w1_ptr", "w2_ptr"), "*bf16")
    types |= dict.fromkeys(("b0_ptr", "b1_ptr", "b2_ptr", "stream_ptr", "out_ptr"), "*bf16")
    types |= {"rows": "i32", "x_stride": "i32", "out_stride": "i32"}
    constants = {
        "N0": outputs[0], "N1": 0 if gated else outputs[1], "N2": 0 if gated else outputs[2], "K": inputs,
        "GATED": gated, "BIASED": False, "ADDS": flags.get("ADDS", False), "ROWS": tiling.rows,
        "COLUMNS": tiling.columns, "DEPTH": tiling.depth, "IEEE": False, "EARLY": flags.get("EARLY", False),
    }  # fmt: skip
    return LaunchSpec(
        f"linear.{name}", _linear_kernel, types, constants, tiling.warps, tiling.stages, frozenset({"rows"})
    )


AHEAD = (
    _ahead("qkv.1", (2048, 512, 512), 2048, 1, EARLY=True),
    _ahead("gated.1", (14336, 14336, 0), 4096, 1, GATED=True, EARLY=True),
    _ahead("down.1", (4096, 0, 0), 14336, 1, ADDS=True),
    _ahead("qkv.256", (2048, 1024, 1024), 1024, 256),
    _ahead("gated.256", (3072, 3072, 0), 1024, 256, GATED=True),
)
