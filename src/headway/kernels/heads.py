"""From one product for queries, keys and values to the heads of attention: RMSNorm over all heads, and rotation.

    u = x * rstd        rstd = 1 / sqrt(mean(x * x) + eps)        y = rotation(u * weight)

    with g the gradient of y, turned back, and v = g * weight:
    dx = rstd * (v - u * mean(v * u))       dweight = sum g * u       dbias = sum dx

The norm is over the whole width, all heads together, and pairs (2i, 2i + 1) of each head are turned by their position's
angle, as in Wan; either may be absent, and a part with neither is only read where the product put it. The bias is that
of the linear map which made x: whoever writes the gradient of x sums it on the way. Gradients of all parts are written
into one tensor, so that the product's own gradients are two products.

Arithmetic is float32 and each result is rounded once, where PyTorch rounds between norm and rotation.

It is memory-bound: forward reads and writes a part, backward reads g and x and writes dx. A program of the backward
pass takes every n-th row and accumulates its own float32 sums (`partial_sums.py`).

Saved for backward: x, the weights, one float32 rstd per row, and the table.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.partial_sums import sum_partials
from headway.kernels.triton_compat import tl, triton

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_WIDTH = 4096
"""A row must fit in the registers of one program, with the sums."""
PROGRAMS = 1056
"""Of a backward pass: eight per multiprocessor of an H200, where fewer were slower, and the same on all chips, so that
sums have the same order."""


class PartNorm(NamedTuple):
    """The norm and rotation of one part."""

    weight_D: Tensor
    eps: float
    rotate: bool = False
    """Whether pairs are turned by their position's angle."""


def reference(x_BLD: Tensor, norm: PartNorm | None, head: int, table_2LR: Tensor | None = None) -> Tensor:
    """Return the heads [B, L, N, H] of a part, in PyTorch."""
    if norm is not None:
        weight = norm.weight_D.to(x_BLD.dtype)
        x_BLD = torch.nn.functional.rms_norm(x_BLD, weight.shape, weight, norm.eps)
    x_BLNH = x_BLD.unflatten(-1, (-1, head))
    if norm is None or not norm.rotate:
        return x_BLNH
    assert table_2LR is not None, "rotation needs angles"
    cos_L1R, sin_L1R = table_2LR.unsqueeze(2)
    even, odd = x_BLNH.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((even * cos_L1R - odd * sin_L1R, odd * cos_L1R + even * sin_L1R), dim=-1)
    return pairs.flatten(-2).to(x_BLNH.dtype)


def heads_of(
    x_BLE: Tensor,
    bias_E: Tensor | None,
    norms: tuple[PartNorm | None, ...],
    head: int,
    table_2LR: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the heads [B, L, N, H] of each part of a product, one norm per part; parts have the same width.

    The bias is part of the product already; its gradient is computed here. The table has cosines and sines of each
    position, in float32.
    """
    width = x_BLE.shape[-1] // len(norms)
    if x_BLE.ndim != 3 or x_BLE.dtype not in DTYPES or width * len(norms) != x_BLE.shape[-1] or width % head:
        raise ValueError(f"no {len(norms)} parts of heads of {head} in {x_BLE.dtype} {tuple(x_BLE.shape)}")
    if not 0 < width <= MAX_WIDTH or head % 2:
        raise ValueError(f"expected parts of 1 to {MAX_WIDTH} numbers and even heads, got {width} and {head}")
    weights = [None if norm is None else norm.weight_D for norm in norms]
    rotates = tuple(norm is not None and norm.rotate for norm in norms)
    if any(rotates) and table_2LR is None:
        raise ValueError("parts that rotate need a table of angles")
    eps = tuple(0.0 if norm is None else norm.eps for norm in norms)
    given: tuple[Tensor, ...] = _Heads.apply(x_BLE.contiguous(), bias_E, table_2LR, head, eps, rotates, *weights)
    return given


# -- kernels


@triton.jit
def _angles(table_ptr, position, length, WIDTH: tl.constexpr, HEAD: tl.constexpr, PAIR_BLOCK: tl.constexpr):
    pair = tl.arange(0, PAIR_BLOCK)
    at = position * (HEAD // 2) + pair % (HEAD // 2)
    inside = pair < WIDTH // 2
    cos = tl.load(table_ptr + at, mask=inside, other=0)
    sin = tl.load(table_ptr + length * (HEAD // 2) + at, mask=inside, other=0)
    return cos, sin


@triton.jit
def _turned(x, cos, sin, PAIR_BLOCK: tl.constexpr):
    even, odd = tl.split(tl.reshape(x, [PAIR_BLOCK, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), [2 * PAIR_BLOCK])


@triton.jit
def _forward_kernel(
    x_ptr,
    weight_ptr,
    table_ptr,
    y_ptr,
    rstd_ptr,
    length,
    x_stride,
    eps,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    ROTATE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, 2 * PAIR_BLOCK)
    inside = column < WIDTH
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0).to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    tl.store(rstd_ptr + row, rstd)
    y = x * rstd * tl.load(weight_ptr + column, mask=inside, other=0).to(tl.float32)
    if ROTATE:
        cos, sin = _angles(table_ptr, row % length, length, WIDTH, HEAD, PAIR_BLOCK)
        y = _turned(y, cos, sin, PAIR_BLOCK)
    tl.store(y_ptr + row * WIDTH + column, y, mask=inside)


@triton.jit
def _backward_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    table_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    length,
    grad_stride,
    x_stride,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.arange(0, 2 * PAIR_BLOCK)
    inside = column < WIDTH
    dweight = tl.zeros([2 * PAIR_BLOCK], dtype=tl.float32)
    dbias = tl.zeros([2 * PAIR_BLOCK], dtype=tl.float32)
    if NORM:
        weight = tl.load(weight_ptr + column, mask=inside, other=0).to(tl.float32)
    for number in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.full([], 0, tl.int64) + number  # a plain number in the interpreter
        dx = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0).to(tl.float32)
        if NORM:
            normal = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0).to(tl.float32)
            rstd = tl.load(rstd_ptr + row)
            normal = normal * rstd
            if ROTATE:
                cos, sin = _angles(table_ptr, row % length, length, WIDTH, HEAD, PAIR_BLOCK)
                dx = _turned(dx, cos, -sin, PAIR_BLOCK)
            dweight += dx * normal
            dx = dx * weight
            dx = rstd * (dx - normal * (tl.sum(dx * normal, axis=0) / WIDTH))
        dbias += dx
        tl.store(dx_ptr + row * x_stride + column, dx, mask=inside)
    out = partial_ptr + tl.program_id(0).to(tl.int64) * 2 * WIDTH + column
    tl.store(out, dweight, mask=inside)
    tl.store(out + WIDTH, dbias, mask=inside)


# -- operators: opaque to a compiler, so that it neither copies what they return nor splits their passes


def _block(width: int) -> tuple[int, int]:
    """Return half of the width, rounded up to a power of two, and warps: 8 elements per thread."""
    half = max(1, 1 << (width // 2 - 1).bit_length())
    return half, max(1, min(16, half // 128))


def _backward_warps(half: int, norm: bool) -> int:
    """Return warps of the backward pass: reductions over a row cost less in fewer warps."""
    return max(1, min(16, half // (256 if norm else 128)))


@torch.library.custom_op("headway::normed_heads", mutates_args=())
def _normed_heads(x_BLD: Tensor, weight: Tensor, table: Tensor | None, eps: float, head: int) -> tuple[Tensor, Tensor]:
    """Return heads [B, L, N, H] of rows of any stride, and rstd [B, L]."""
    y, rstd = _heads_and_rstd(x_BLD, weight, table, eps, head)
    (rows, width), length, (half, warps) = (rstd.numel(), weight.shape[0]), x_BLD.shape[1], _block(weight.shape[0])
    if rows:
        _forward_kernel[(rows,)](
            x_BLD, weight, rstd if table is None else table, y, rstd, length, x_BLD.stride(1), eps,
            WIDTH=width, HEAD=head, PAIR_BLOCK=half, ROTATE=table is not None, num_warps=warps,
        )  # fmt: skip
    return y, rstd


@_normed_heads.register_fake
def _heads_and_rstd(
    x_BLD: Tensor, weight: Tensor, _table: Tensor | None, _eps: float, head: int
) -> tuple[Tensor, Tensor]:
    shape = (*x_BLD.shape[:2], weight.shape[0] // head, head)
    return x_BLD.new_empty(shape), x_BLD.new_empty(x_BLD.shape[:2], dtype=torch.float32)


@torch.library.custom_op("headway::heads_backward", mutates_args=())
def _heads_backward(
    grads: list[Tensor], x_BLE: Tensor, table: Tensor, weights: list[Tensor], rstds: list[Tensor], rotates: list[bool]
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the product, and the sums of each part for its weight and bias [P, 2, D].

    Weights and rstds of parts without them are empty.
    """
    dx, sums = _dx_and_sums(grads, x_BLE, table, weights, rstds, rotates)
    (rows, width), (half, _) = (x_BLE[..., 0].numel(), sums.shape[2]), _block(sums.shape[2])
    if not rows:
        return dx, sums.zero_()
    programs = min(rows, PROGRAMS)
    partial = torch.empty((len(grads), programs, 2, width), dtype=torch.float32, device=x_BLE.device)
    parts = zip(grads, weights, rstds, rotates, dx.split(width, -1), x_BLE.split(width, -1), partial, strict=True)
    for grad, weight, rstd, rotate, dx_part, x_part, partial_part in parts:
        grad_BLD = grad.flatten(2)
        if grad_BLD.stride(2) != 1 or grad_BLD.stride(0) != grad_BLD.shape[1] * grad_BLD.stride(1):
            grad_BLD = grad_BLD.contiguous()
        _backward_kernel[(programs,)](
            grad_BLD, x_part, weight, table, rstd, dx_part, partial_part, rows, x_BLE.shape[1],
            grad_BLD.stride(1), x_BLE.stride(1),
            WIDTH=width, HEAD=grad.shape[3], PAIR_BLOCK=half, NORM=weight.numel() > 0, ROTATE=rotate,
            STAGES=3 if half <= 2048 else 2, num_warps=_backward_warps(half, weight.numel() > 0),
        )  # fmt: skip
    sum_partials(partial, sums)
    return dx, sums


@_heads_backward.register_fake
def _dx_and_sums(
    grads: list[Tensor],
    x_BLE: Tensor,
    _table: Tensor,
    _weights: list[Tensor],
    _rstds: list[Tensor],
    _rotates: list[bool],
) -> tuple[Tensor, Tensor]:
    sums = x_BLE.new_empty((len(grads), 2, x_BLE.shape[-1] // len(grads)), dtype=torch.float32)
    return torch.empty_like(x_BLE), sums


class _Heads(torch.autograd.Function):
    """Parts without a norm are views of the product, which an operator may not return."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BLE: Tensor,
        bias_E: Tensor | None,
        table_2LR: Tensor | None,
        head: int,
        eps: tuple[float, ...],
        rotates: tuple[bool, ...],
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        none = x_BLE.new_empty(0)
        results: list[Tensor] = []  # `list[Tensor]()` is more than the compiler knows
        rstds: list[Tensor] = []
        for part, weight, rotate, least in zip(x_BLE.chunk(len(eps), -1), weights, rotates, eps, strict=True):
            y, rstd = part.unflatten(-1, (-1, head)), none
            if weight is not None:
                y, rstd = _normed_heads(part, weight, table_2LR if rotate else None, least, head)
            results.append(y)
            rstds.append(rstd)
        table = none if table_2LR is None else table_2LR
        ctx.save_for_backward(x_BLE, table, *(none if x is None else x for x in weights), *rstds)
        ctx.rotates = rotates
        ctx.bias = None if bias_E is None else bias_E.dtype
        ctx.normed = [weight is not None for weight in weights]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x_BLE, table, *kept = ctx.saved_tensors
        count = len(grads)
        weights, rstds = kept[:count], kept[count:]
        dx, sums = _heads_backward(list(grads), x_BLE, table, weights, rstds, list(ctx.rotates))
        dbias = None if ctx.bias is None else sums[:, 1].flatten().to(ctx.bias)
        dweights = [sums[i, 0].to(weights[i].dtype) if ctx.normed[i] else None for i in range(count)]
        return dx, dbias, None, None, None, None, *dweights


# -- launches to compile ahead of time


def _launches(width: int, head: int, dtype: str, *, norm: bool = True, rotate: bool = False) -> tuple[LaunchSpec, ...]:
    """Launches of both passes of one part of three."""
    x, single, (half, warps) = f"*{dtype}", "*fp32", _block(width)
    name = f"heads_{width}_{dtype}" + "_norm" * norm + "_rotate" * rotate
    forward = {"x_ptr": x, "weight_ptr": single, "table_ptr": single, "y_ptr": x, "rstd_ptr": single}
    forward |= {"length": "i32", "x_stride": "i32", "eps": "fp32"}
    backward = {"grad_ptr": x, "x_ptr": x, "weight_ptr": single, "table_ptr": single, "rstd_ptr": single}
    backward |= {"dx_ptr": x, "partial_ptr": single, "rows": "i32", "length": "i32"}
    backward |= {"grad_stride": "i32", "x_stride": "i32"}
    shared = {"WIDTH": width, "HEAD": head, "PAIR_BLOCK": half, "ROTATE": rotate}
    more = {"NORM": norm, "STAGES": 3 if half <= 2048 else 2}
    warps_back = _backward_warps(half, norm)
    back = LaunchSpec(f"{name}_backward", _backward_kernel, backward, {**shared, **more}, warps=warps_back)
    return (LaunchSpec(name, _forward_kernel, forward, shared, warps=warps), back) if norm else (back,)


AHEAD: tuple[LaunchSpec, ...] = (
    *_launches(1536, 128, "bf16", rotate=True),
    *_launches(1536, 128, "bf16"),
    *_launches(1536, 128, "bf16", norm=False),
    *_launches(1152, 72, "bf16", norm=False),
    *_launches(4096, 128, "bf16", rotate=True),
)
