"""Float8 casts and products of linear layers.

    scale = the least power of two with max |x| <= scale * largest code         codes = round(x / scale)
    x_MK @ w_NK.T  =  scale_x * scale_w * (codes_MK @ codes_NK.T)

Scales are powers of two, so that dividing by one is exact: codes depend on neither the order of operations nor the
device, and casting what codes stand for gives the same codes and scale. That costs at most one bit of range, and no
precision. A scale is that of the whole tensor (tensorwise) or of a row (rowwise), and is always taken from the numbers
at hand, so that nothing saturates and no state is kept. The scale of something not finite is NaN.

A Hopper GPU multiplies float8 matrices only where both are contiguous along the dim that is summed over. The three
products of a linear layer sum over inputs, outputs and tokens, so that each tensor is needed with its rows contiguous,
and its columns. A program of the cast reads a tile once and writes both. It is memory-bound: two bytes read and two
written per element of bfloat16.

Weights are cast as bfloat16 has them, also where they are stored in float32: shards are gathered in it.

Elsewhere codes are multiplied in float32, which is exact up to the order of the sum.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import wrap_triton

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.dispatch import uses_triton
from headway.kernels.triton_compat import tl, triton, triton_op

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Sizes of float8 products are multiples of this."""
BLOCK = 128
"""Rows and columns of a tile: whole 128-byte lines of codes both ways."""
WARPS = 8


class Float8(NamedTuple):
    """A matrix [M, K] in float8; codes that are not needed are empty."""

    codes: Tensor
    """[M, K]."""
    codes_t: Tensor
    """[K, M]."""
    scale: Tensor
    """[1, 1], or [M, 1] by rows."""
    scale_t: Tensor
    """[1, 1], or [K, 1] by columns."""
    amax: Tensor
    """The largest magnitude, in float32."""


def largest(e5m2: bool) -> float:
    """Return the largest number of a format."""
    return 57344.0 if e5m2 else 448.0


def smallest(e5m2: bool) -> float:
    """Return the smallest number of a format that is not zero; half of it still rounds to zero."""
    return 2.0**-16 if e5m2 else 2.0**-9


def amax_of(x_MK: Tensor, dim: int) -> Tensor:
    """Return the largest magnitudes along a dim, in float32: a reduction that a compiler joins to what makes x."""
    return torch.linalg.vector_norm(x_MK, float("inf"), dim=dim, keepdim=True).float()


def scale_of(amax: Tensor, e5m2: bool) -> Tensor:
    """Return the scales of amaxes. Both formats' largest number is 1.75 times a power of two."""
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - (15 if e5m2 else 8) + ((bits & 0x7FFFFF) > 0x600000).int()
    scale = (exponent.clamp(1, 253) << 23).view(torch.float32)  # such that its inverse is a normal number, too
    return torch.where(amax < float("inf"), scale, torch.nan)


def inverse_of(scale: Tensor) -> Tensor:
    """Return 1 / scale, which is exact."""
    return 1 / scale


def cast(
    x_MK: Tensor,
    *,
    e5m2: bool = False,
    rowwise: bool = False,
    amax: Tensor | None = None,
    rows: bool = True,
    columns: bool = True,
) -> Float8:
    """Cast a matrix to float8, with one scale or one per row (and per column for its transpose, if that is needed).

    `amax` is the largest magnitude if known, or any number of them; `rows` and `columns` say which codes are needed.
    """
    amax = amax_of(x_MK, 1) if amax is None or rowwise else amax
    most = amax.amax()
    if rowwise:
        scale = scale_of(amax, e5m2)
        scale_t = scale_of(amax_of(x_MK, 0), e5m2).mT if columns else scale
    else:
        scale = scale_t = scale_of(most.reshape(1, 1), e5m2)
    inverse, inverse_t = inverse_of(scale), inverse_of(scale_t)
    if uses_triton("fp8", x_MK):
        codes, codes_t = _cast(x_MK, inverse, inverse_t, e5m2, rowwise, rows, columns)
    else:
        codes, codes_t = reference(x_MK, inverse, inverse_t, e5m2=e5m2, rows=rows, columns=columns)
    return Float8(codes, codes_t, scale, scale_t, most)


def reference(
    x_MK: Tensor, inverse: Tensor, inverse_t: Tensor, *, e5m2: bool, rows: bool = True, columns: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the codes of a matrix and of its transpose, in PyTorch."""
    dtype = E5M2 if e5m2 else E4M3
    none = x_MK.new_empty(0, dtype=dtype)
    codes = (x_MK.float() * inverse).to(dtype) if rows else none
    codes_t = (x_MK.float().mT * inverse_t).to(dtype).contiguous() if columns else none
    return codes, codes_t


def cast_into(x_MK: Tensor, inverse: Tensor, codes_MK: Tensor, codes_KM: Tensor) -> None:
    """Write the codes in e4m3 of a matrix as bfloat16 has it into parts of other tensors, in PyTorch; see
    `fp8_weights.py`."""
    for part, codes in zip((codes_MK, codes_KM), reference(x_MK.bfloat16(), inverse, inverse, e5m2=False), strict=True):
        part.copy_(codes)


def product(
    a_MK: Tensor, scale_a: Tensor, b_NK: Tensor, scale_b: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """Return a @ b.T of codes and scales; `fast` sums with fewer bits, as a forward pass may."""
    if a_MK.device.type == "cuda":
        if scale_a.numel() == 1:
            scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
        else:
            scale_b = scale_b.mT
        return torch._scaled_mm(a_MK, b_NK.mT, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)
    with torch.autocast(a_MK.device.type, enabled=False):
        return (torch.mm(a_MK.float(), b_NK.float().mT) * (scale_a * scale_b.mT)).to(dtype)


# -- the kernel


@triton.jit
def _to_float8(x, E5M2: tl.constexpr, ROUNDS: tl.constexpr):
    if ROUNDS:  # Triton's interpreter drops the carry of a mantissa that rounds up: round before it casts
        DROPPED: tl.constexpr = 21 if E5M2 else 20
        bits = x.to(tl.int32, bitcast=True)
        bits += (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)
        normal = ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)
        SHIFT: tl.constexpr = 1.5 * 2**7 if E5M2 else 1.5 * 2**14  # float32 has the steps of subnormal codes there
        LEAST: tl.constexpr = 2**-14 if E5M2 else 2**-6
        x = tl.where(tl.abs(x) < LEAST, (x + SHIFT) - SHIFT, normal)
    return x.to(tl.float8e5) if E5M2 else x.to(tl.float8e4nv)


@triton.jit
def _cast_kernel(
    x_ptr,
    inverse_ptr,
    inverse_t_ptr,
    codes_ptr,
    codes_t_ptr,
    rows,
    width,
    x_stride,
    codes_stride,
    codes_t_stride,
    E5M2: tl.constexpr,
    ROWWISE: tl.constexpr,
    WRITES_ROWS: tl.constexpr,
    WRITES_COLUMNS: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(width, BLOCK)
    row = ((tl.program_id(0) // blocks) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = ((tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0).to(tl.float32)
    if ROWWISE:
        by_row = tl.load(inverse_ptr + row, mask=row < rows, other=1)[:, None]
    else:
        by_row = tl.load(inverse_ptr)
    codes = _to_float8(x * by_row, E5M2, ROUNDS)
    if WRITES_ROWS:
        tl.store(codes_ptr + row[:, None] * codes_stride + column[None, :], codes, mask=inside)
    if WRITES_COLUMNS:
        if ROWWISE:
            by_column = tl.load(inverse_t_ptr + column, mask=column < width, other=1)[None, :]
            codes = _to_float8(x * by_column, E5M2, ROUNDS)
        place = codes_t_ptr + column[:, None] * codes_t_stride + row[None, :]
        tl.store(place, tl.trans(codes), mask=(column < width)[:, None] & (row < rows)[None, :])


def _outputs(x_MK: Tensor, e5m2: bool, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    dtype, (count, width) = E5M2 if e5m2 else E4M3, x_MK.shape
    return (
        x_MK.new_empty((count, width) if rows else (0,), dtype=dtype),
        x_MK.new_empty((width, count) if columns else (0,), dtype=dtype),
    )


@triton_op("headway::fp8_cast", mutates_args=())
def _cast(
    x_MK: Tensor, inverse: Tensor, inverse_t: Tensor, e5m2: bool, rowwise: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    codes, codes_t = _outputs(x_MK, e5m2, rows, columns)
    _launch(x_MK, inverse, inverse_t, codes, codes_t, e5m2=e5m2, rowwise=rowwise)
    return codes, codes_t


@_cast.register_fake
def _(
    x_MK: Tensor, _inverse: Tensor, _inverse_t: Tensor, e5m2: bool, _rowwise: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    return _outputs(x_MK, e5m2, rows, columns)


def _launch(
    x_MK: Tensor,
    inverse: Tensor,
    inverse_t: Tensor,
    codes: Tensor,
    codes_t: Tensor,
    *,
    e5m2: bool,
    rowwise: bool,
) -> None:
    """Write what is not empty of codes."""
    count, width = x_MK.shape
    if x_MK.numel() == 0:
        return
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    wrap_triton(_cast_kernel)[(-(-count // BLOCK) * -(-width // BLOCK),)](
        x_MK,
        inverse.contiguous(),
        inverse_t.contiguous(),
        codes,
        codes_t,
        count,
        width,
        x_MK.stride(0),
        codes.stride(0),
        codes_t.stride(0),
        E5M2=e5m2,
        ROWWISE=rowwise,
        WRITES_ROWS=codes.numel() > 0,
        WRITES_COLUMNS=codes_t.numel() > 0,
        ROUNDS=x_MK.device.type == "cpu",
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


# -- launches to compile ahead of time


def _ahead(name: str, dtype: str, *, e5m2: bool, rowwise: bool, rows: bool = True, columns: bool = True) -> LaunchSpec:
    codes, count = "*fp8e5" if e5m2 else "*fp8e4nv", "i32"
    types = {"x_ptr": f"*{dtype}", "inverse_ptr": "*fp32", "inverse_t_ptr": "*fp32", "codes_ptr": codes}
    types |= {"codes_t_ptr": codes, "rows": count, "width": count}
    types |= {"x_stride": count, "codes_stride": count, "codes_t_stride": count}
    constants = {"E5M2": e5m2, "ROWWISE": rowwise, "WRITES_ROWS": rows, "WRITES_COLUMNS": columns}
    constants |= {"ROUNDS": False, "BLOCK": BLOCK}
    return LaunchSpec(f"fp8_cast_{name}", _cast_kernel, types, constants, warps=WARPS)


AHEAD: tuple[LaunchSpec, ...] = (
    _ahead("activation", "bf16", e5m2=False, rowwise=False),
    _ahead("gradient", "bf16", e5m2=True, rowwise=False),
    _ahead("rowwise", "bf16", e5m2=False, rowwise=True),
    _ahead("rows", "bf16", e5m2=False, rowwise=False, columns=False),
)
