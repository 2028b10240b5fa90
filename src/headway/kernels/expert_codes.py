"""What experts in float8 do between their grouped GEMMs: `kernels/expert_rows.py` with codes in place of bfloat16.

    activation   h[n] = w[n] * silu(gate[n]) * up[n], in e4m3 with a scale per row, in one pass
    turned       codes_t[:, n] = codes[row[n]] * factor[n], or zeros where row[n] is -1
    relative     factor[n] = scale[n] * other[token[n]] / most[e], with most[e] the largest such product of an expert

The gradient of a weight sums over rows, and scales by row cannot leave such a sum. But they are powers of two: of two
factors that are multiplied row by row, one takes both scales into its codes, relative to the largest of the expert.
That is exact but where a code gets too small, as it would with one scale for all rows.

All are memory-bound; a row is in one program, which finds its scale and casts it without reading it again. An expert's
scales are in one program too: they lie side by side, and a maximum by atomics would wait for as many rows.

Shapes: as in `expert_rows`; M places for rows, of which each expert has a multiple of 16.
"""

import torch
from torch import Tensor
from torch.library import wrap_triton

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.dispatch import fused, uses_triton
from headway.kernels.expert_rows import reference_activation, reference_activation_backward
from headway.kernels.fp8 import BLOCK, E4M3, WARPS, _to_float8, inverse_of, scale_of
from headway.kernels.triton_compat import tl, triton, triton_op

MOST_WIDTH = 8192
"""Elements of a row that a program holds."""
SCALES = 4096
"""Scales of an expert's rows that a program reads at a time."""
LEAST_SCALE = 2.0**-126
"""Of an expert whose rows are all zeros."""


def row_codes(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales [M] by row, in PyTorch."""
    scale = scale_of(x_MK.float().abs().amax(dim=1, keepdim=True), e5m2=False)
    return (x_MK.float() * inverse_of(scale)).to(E4M3), scale.flatten()


def reference_turned(codes_RC: Tensor, row_M: Tensor, factor_M: Tensor | None) -> Tensor:
    """Return the transposed codes [C, M], in PyTorch."""
    rows_MC = codes_RC.float()[row_M.clamp(min=0).long()]
    factor_M = torch.ones_like(row_M, dtype=torch.float32) if factor_M is None else factor_M
    rows_MC = torch.where(row_M.unsqueeze(1) < 0, 0, rows_MC * factor_M.unsqueeze(1))
    return rows_MC.mT.to(E4M3).contiguous()


def activation(gate_MH: Tensor, up_MH: Tensor, weights_TX: Tensor, back_TX: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of weighted SwiGLU, and their scales; of places without a row, anything."""
    if uses_triton("fp8", gate_MH):
        codes: tuple[Tensor, Tensor] = _activation(gate_MH, up_MH, weights_TX, back_TX)
        return codes
    return row_codes(reference_activation(gate_MH, up_MH, weights_TX, back_TX))


def activation_backward(
    dh_MH: Tensor, gate_MH: Tensor, up_MH: Tensor, weights_TX: Tensor, back_TX: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the codes and scales of the gradients of gate and of up, and the gradient of weights."""
    if uses_triton("fp8", gate_MH):
        codes: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _activation_backward(
            dh_MH, gate_MH, up_MH, weights_TX, back_TX
        )
        return codes
    dgate, dup, dweights, _ = reference_activation_backward(dh_MH, gate_MH, up_MH, weights_TX, back_TX)
    return *row_codes(dgate), *row_codes(dup), dweights


def turned(codes_RC: Tensor, row_M: Tensor, factor_M: Tensor | None = None) -> Tensor:
    """Return the transposed codes [C, M] of the rows named, each times a power of two of at most 1."""
    if fused("fp8", row_M.device.type, torch.bfloat16).kernel == "triton":
        codes: Tensor = _turned(codes_RC, row_M, factor_M)
        return codes
    return reference_turned(codes_RC, row_M, factor_M)


def relative_scales(scale_M: Tensor, other_T: Tensor, token_M: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales of rows times those of their tokens, relative to the largest of their expert; and these."""
    if uses_triton("fp8", scale_M):
        scales: tuple[Tensor, Tensor] = _relative(scale_M, other_T, token_M, ends_E)
        return scales
    return reference_relative(scale_M, other_T, token_M, ends_E)


def reference_relative(scale_M: Tensor, other_T: Tensor, token_M: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    """The same, in PyTorch."""
    scale_M = torch.where(token_M < 0, 0, scale_M * other_T[token_M.clamp(min=0)])
    numbers_M = torch.arange(len(token_M), dtype=ends_E.dtype, device=ends_E.device)
    expert_M = torch.searchsorted(ends_E, numbers_M, right=True).clamp(max=len(ends_E) - 1)
    most_E = torch.zeros(len(ends_E), device=scale_M.device).scatter_reduce(0, expert_M, scale_M, "amax")
    most_E = most_E.clamp(min=LEAST_SCALE)
    return scale_M / most_E[expert_M], most_E


# -- kernels


@triton.jit
def _scale(x):
    bits = tl.max(tl.abs(x), axis=0).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return tl.where(bits < 0x7F800000, scale, float("nan"))


@triton.jit
def _activation_kernel(
    gate_ptr, up_ptr, weights_ptr, back_ptr, codes_ptr, scale_ptr, width, ROUNDS: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(back_ptr + place).to(tl.int64)
    weight = tl.load(weights_ptr + place).to(tl.float32)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(up_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
    h = (gate * tl.sigmoid(gate) * up * weight).to(gate_ptr.dtype.element_ty).to(tl.float32)
    scale = _scale(h)
    tl.store(codes_ptr + row * width + column, _to_float8(h * (1 / scale), False, ROUNDS), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _activation_backward_kernel(
    dh_ptr, gate_ptr, up_ptr, weights_ptr, back_ptr, dgate_ptr, dgate_scale_ptr, dup_ptr, dup_scale_ptr, dweights_ptr,
    width, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(back_ptr + place).to(tl.int64)
    weight = tl.load(weights_ptr + place).to(tl.float32)
    column = tl.arange(0, BLOCK)
    inside = column < width
    dh = tl.load(dh_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
    gate = tl.load(gate_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(up_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(dweights_ptr + place, tl.sum(dh * silu * up, axis=0))
    slope = dh * weight
    dgate = (slope * up * (sigmoid + silu * (1 - sigmoid))).to(gate_ptr.dtype.element_ty).to(tl.float32)
    scale = _scale(dgate)
    tl.store(dgate_ptr + row * width + column, _to_float8(dgate * (1 / scale), False, ROUNDS), mask=inside)
    tl.store(dgate_scale_ptr + row, scale)
    dup = (slope * silu).to(gate_ptr.dtype.element_ty).to(tl.float32)
    scale = _scale(dup)
    tl.store(dup_ptr + row * width + column, _to_float8(dup * (1 / scale), False, ROUNDS), mask=inside)
    tl.store(dup_scale_ptr + row, scale)


@triton.jit
def _turned_kernel(
    codes_ptr, row_ptr, factor_ptr, out_ptr, places, width,
    FACTORS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    place = ((tl.program_id(0) // blocks) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = ((tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    row = tl.load(row_ptr + place, mask=place < places, other=-1).to(tl.int64)
    inside = (row >= 0)[:, None] & (column < width)[None, :]
    codes = tl.load(codes_ptr + row[:, None] * width + column[None, :], mask=inside, other=0)
    if FACTORS:
        factor = tl.load(factor_ptr + place, mask=row >= 0, other=0)
        codes = _to_float8(codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor[:, None], False, ROUNDS)
        codes = tl.where(inside, codes.to(tl.uint8, bitcast=True), 0)
    out = out_ptr + column[:, None] * places + place[None, :]
    tl.store(out, tl.trans(codes), mask=(column < width)[:, None] & (place < places)[None, :])


@triton.jit
def _row_scales(scale_ptr, other_ptr, token_ptr, place, end):
    """Products of positive scales, or NaN; zeros where no row is."""
    token = tl.load(token_ptr + place, mask=place < end, other=-1)
    scale = tl.load(scale_ptr + place, mask=token >= 0, other=0)
    return scale * tl.load(other_ptr + token, mask=token >= 0, other=0)


@triton.jit
def _relative_kernel(
    scale_ptr, other_ptr, token_ptr, ends_ptr, factor_ptr, most_ptr, places, experts, LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    if expert == experts - 1:
        end = places
    most = tl.zeros([BLOCK], tl.int32)
    for first in range(begin, end, BLOCK):
        scale = _row_scales(scale_ptr, other_ptr, token_ptr, first + tl.arange(0, BLOCK), end)
        most = tl.maximum(most, scale.to(tl.int32, bitcast=True))  # ordered as numbers are, NaNs above all
    largest = tl.max(most, axis=0).to(tl.float32, bitcast=True)
    largest = tl.where(largest < LEAST, LEAST, largest)
    tl.store(most_ptr + expert, largest)
    for first in range(begin, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        scale = _row_scales(scale_ptr, other_ptr, token_ptr, place, end)
        tl.store(factor_ptr + place, scale * (1.0 / largest), mask=place < end)


# -- operators


def _power_of_two(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _codes(x_MH: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x_MH.shape, dtype=E4M3, device=x_MH.device)
    return codes, torch.empty(len(x_MH), dtype=torch.float32, device=x_MH.device).fill_(1)


@triton_op("headway::experts_activation_codes", mutates_args=())
def _activation(gate_MH: Tensor, up_MH: Tensor, weights_TX: Tensor, back_TX: Tensor) -> tuple[Tensor, Tensor]:
    codes_MH, scale_M = _codes(gate_MH)
    width = gate_MH.shape[1]
    if back_TX.numel():
        wrap_triton(_activation_kernel)[(back_TX.numel(),)](
            gate_MH.contiguous(),
            up_MH.contiguous(),
            weights_TX.contiguous(),
            back_TX.contiguous(),
            codes_MH,
            scale_M,
            width,
            ROUNDS=gate_MH.device.type == "cpu",
            BLOCK=_power_of_two(width),
            num_warps=_warps(width),
        )
    return codes_MH, scale_M


@_activation.register_fake
def _(gate_MH: Tensor, _up_MH: Tensor, _weights_TX: Tensor, _back_TX: Tensor) -> tuple[Tensor, Tensor]:
    return _codes(gate_MH)


def _warps(width: int) -> int:
    return min(8, max(2, _power_of_two(width) // 256))


@triton_op("headway::experts_activation_codes_backward", mutates_args=())
def _activation_backward(
    dh_MH: Tensor, gate_MH: Tensor, up_MH: Tensor, weights_TX: Tensor, back_TX: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = (*_codes(gate_MH), *_codes(gate_MH))
    dweights_TX = torch.empty(back_TX.shape, dtype=torch.float32, device=gate_MH.device)
    width = gate_MH.shape[1]
    if back_TX.numel():
        wrap_triton(_activation_backward_kernel)[(back_TX.numel(),)](
            dh_MH.contiguous(),
            gate_MH.contiguous(),
            up_MH.contiguous(),
            weights_TX.contiguous(),
            back_TX.contiguous(),
            *outputs,
            dweights_TX,
            width,
            ROUNDS=gate_MH.device.type == "cpu",
            BLOCK=_power_of_two(width),
            num_warps=_warps(width),
        )
    return *outputs, dweights_TX


@_activation_backward.register_fake
def _(
    _dh_MH: Tensor, gate_MH: Tensor, _up_MH: Tensor, _weights_TX: Tensor, back_TX: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dweights_TX = torch.empty(back_TX.shape, dtype=torch.float32, device=gate_MH.device)
    return *_codes(gate_MH), *_codes(gate_MH), dweights_TX


@triton_op("headway::experts_turned", mutates_args=())
def _turned(codes_RC: Tensor, row_M: Tensor, factor_M: Tensor | None) -> Tensor:
    width, places = codes_RC.shape[1], len(row_M)
    out_CM = codes_RC.new_empty(width, places)
    if out_CM.numel():
        row_M = row_M.contiguous()
        wrap_triton(_turned_kernel)[(-(-places // BLOCK) * -(-width // BLOCK),)](
            codes_RC.contiguous().view(torch.uint8),
            row_M,
            row_M if factor_M is None else factor_M.contiguous(),
            out_CM.view(torch.uint8),
            places,
            width,
            FACTORS=factor_M is not None,
            ROUNDS=codes_RC.device.type == "cpu",
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return out_CM


@_turned.register_fake
def _(codes_RC: Tensor, row_M: Tensor, _factor_M: Tensor | None) -> Tensor:
    return codes_RC.new_empty(codes_RC.shape[1], len(row_M))


@triton_op("headway::experts_relative_scales", mutates_args=())
def _relative(scale_M: Tensor, other_T: Tensor, token_M: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    factor_M, most_E = _scales(scale_M, ends_E)
    wrap_triton(_relative_kernel)[(len(ends_E),)](
        scale_M.contiguous(),
        other_T.contiguous(),
        token_M.contiguous(),
        ends_E.contiguous(),
        factor_M,
        most_E,
        len(token_M),
        len(ends_E),
        LEAST=LEAST_SCALE,
        BLOCK=SCALES,
        num_warps=WARPS,
    )
    return factor_M, most_E


@_relative.register_fake
def _(scale_M: Tensor, _other_T: Tensor, _token_M: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    return _scales(scale_M, ends_E)


def _scales(scale_M: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(scale_M), scale_M.new_empty(len(ends_E))


# -- launches to compile ahead of time


_PLACES = {"weights_ptr": "*fp32", "back_ptr": "*i32", "gate_ptr": "*bf16", "up_ptr": "*bf16", "width": "i32"}
AHEAD: tuple[LaunchSpec, ...] = (
    LaunchSpec(
        "experts_activation_codes", _activation_kernel, _PLACES | {"codes_ptr": "*fp8e4nv", "scale_ptr": "*fp32"},
        {"ROUNDS": False, "BLOCK": 1024}, warps=4,
    ),
    LaunchSpec(
        "experts_activation_codes_backward", _activation_backward_kernel,
        _PLACES | dict.fromkeys(("dgate_ptr", "dup_ptr"), "*fp8e4nv") | {"dh_ptr": "*bf16"}
        | dict.fromkeys(("dgate_scale_ptr", "dup_scale_ptr", "dweights_ptr"), "*fp32"),
        {"ROUNDS": False, "BLOCK": 1024}, warps=4,
    ),
    *(
        LaunchSpec(
            f"experts_turned{'_factors' * factors}", _turned_kernel,
            {"codes_ptr": "*u8", "row_ptr": "*i32", "factor_ptr": "*fp32" if factors else "*i32", "out_ptr": "*u8",
             "places": "i32", "width": "i32"},
            {"FACTORS": factors, "ROUNDS": False, "BLOCK": BLOCK}, warps=WARPS,
        )
        for factors in (False, True)
    ),
    LaunchSpec(
        "experts_relative_scales", _relative_kernel,
        dict.fromkeys(("scale_ptr", "other_ptr", "factor_ptr", "most_ptr"), "*fp32")
        | dict.fromkeys(("token_ptr", "ends_ptr"), "*i32") | {"places": "i32", "experts": "i32"},
        {"LEAST": LEAST_SCALE, "BLOCK": SCALES}, warps=WARPS,
    ),
)  # fmt: skip
