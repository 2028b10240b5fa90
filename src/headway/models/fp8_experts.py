"""A pass of gated experts in float8 as one function: `models/fused_experts.py` with all nine products in e4m3.

    product             factors                            scales
    gate, up, down      rows and weights                   of rows; one per matrix stack
    dh, dx              gradients of rows, weights         the same
    dWg, dWu, dWd       gradients of rows and rows,        one per expert: those of rows go into the codes of the factor
                        both turned                        that has them anyway, see `kernels/expert_codes.py`

Tokens are cast before they are spread: X copies of a byte per number. Float8 products sum over groups of a multiple of
16 rows, so that each expert's rows begin at one; places between are never read as rows, and are zeros where sums run
over rows. Weights are cast once per step, both ways, where a process has all of them: 2 bytes per weight. Elsewhere
they are cast once per pass, and codes for the backward pass are kept: 1 byte per weight.

All nine sum in the tensor core's own accumulator, of some 14 bits, as torchao's experts do. Sums of experts are short,
over a width or an expert's rows: simulated with 14 bits, sums of 2048 random products lose 0.08 %, and 0.26 % if
numbers have a mean of half their spread, beside 4 and 0.4 % that codes in e4m3 are off by. Over 16,384 it is 0.3 and
4 %: so the dense layers of `fp8_linear.py`, whose gradients sum over all tokens, sum exactly there.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.kernels.expert_codes import activation, activation_backward, relative_scales, turned
from headway.kernels.expert_rows import combined, spread
from headway.kernels.fp8 import E4M3, MULTIPLE, Float8, cast
from headway.kernels.fp8_observed import observe
from headway.models.fp8_linear import Float8Weights
from headway.models.fused_experts import sorted_places


class Places(NamedTuple):
    """Where rows are: each expert's begin at a multiple of 16."""

    back_TX: Tensor
    """The places of a token's rows."""
    ends_E: Tensor
    """Where each expert's places end."""
    token_M: Tensor
    """The token of a place, or -1."""


def float8_experts(
    x_TD: Tensor, weights_TX: Tensor, chosen_TX: Tensor, matrices: tuple[Tensor, Tensor, Tensor], float8: Float8Weights
) -> Tensor:
    """Return the weighted sum [T, D] of each token's experts, SwiGLU without biases; `matrices` are gate, up, down."""
    places = padded_places(chosen_TX, len(matrices[0]))
    held = [x for stack in float8.stacks for x in (stack.codes, stack.codes_t, stack.scale)]
    y_TD: Tensor = _Float8Experts.apply(x_TD, weights_TX.float(), *matrices, float8.observed, *places, *held)
    return y_TD


def padded_places(chosen_TX: Tensor, count: int) -> Places:
    """Return places of rows sorted by expert, as many as any routing needs."""
    expert_N, order_N, ends_E = sorted_places(chosen_TX, count)
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    padded_E = (sizes_E + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    padded_ends_E = padded_E.cumsum(0, dtype=torch.int32)
    shift_E = padded_ends_E - padded_E - ends_E + sizes_E
    numbers_N = torch.arange(len(order_N), dtype=torch.int32, device=order_N.device)
    place_N = numbers_N + shift_E[expert_N.int()]
    back_TX = torch.empty_like(numbers_N).scatter_(0, order_N, place_N).view(chosen_TX.shape)
    total = (len(order_N) + count * (MULTIPLE - 1) + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    token_M = torch.full((total,), -1, dtype=torch.int32, device=order_N.device)
    token_M = token_M.scatter_(0, place_N.long(), (order_N // chosen_TX.shape[1]).int())
    return Places(back_TX, padded_ends_E, token_M)


class _Float8Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TX: Tensor,
        gate_EHD: Tensor,
        up_EHD: Tensor,
        down_EDH: Tensor,
        observed: Tensor | None,
        back_TX: Tensor,
        ends_E: Tensor,
        token_M: Tensor,
        *held: Tensor,
    ) -> Tensor:
        x8 = cast(x_TD, rowwise=True, columns=False)
        if held:
            gate8, up8, down8 = (Float8(*held[i : i + 3], held[i + 2], held[i + 2]) for i in (0, 3, 6))
        else:
            gate8, up8, down8 = (cast(matrices.bfloat16().flatten(0, 1)) for matrices in (gate_EHD, up_EHD, down_EDH))

        def product(rows: tuple[Tensor, Tensor], matrices8: Float8, shape: torch.Size) -> Tensor:
            codes_t_E = matrices8.codes.view(shape).mT
            return _by_expert(*rows, codes_t_E, matrices8.scale, ends_E, x_TD.dtype)

        rows = _spread(x8.codes, x8.scale, back_TX, token_M)
        gate_MH, up_MH = product(rows, gate8, gate_EHD.shape), product(rows, up8, up_EHD.shape)
        h8 = activation(gate_MH, up_MH, weights_TX, back_TX)
        y_TD = combined(product(h8, down8, down_EDH.shape), back_TX)
        kept = [x for matrices8 in (gate8, up8, down8) for x in (matrices8.codes_t, matrices8.scale)]
        seen = None if observed is None else observe(x_TD, x8, e5m2=False)
        ctx.save_for_backward(
            x8.codes, x8.scale, gate_MH, up_MH, *h8, weights_TX, *kept, back_TX, ends_E, token_M, seen
        )
        ctx.dtypes, ctx.held = [matrices.dtype for matrices in (gate_EHD, up_EHD, down_EDH)], len(held)
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_codes, x_scale, gate_MH, up_MH, h_codes, h_scale, weights_TX, *kept = ctx.saved_tensors
        gate_t, gate_scale, up_t, up_scale, down_t, down_scale, back_TX, ends_E, token_M, seen = kept
        dtype, experts = dy_TD.dtype, len(ends_E)
        dy8 = cast(dy_TD, rowwise=True, columns=False)
        drows, dscale_M = _spread(dy8.codes, dy8.scale, back_TX, token_M)
        dh_MH = _by_expert(drows, dscale_M, _turned_back(down_t, experts), down_scale, ends_E, dtype)
        dgate, dgate_scale, dup, dup_scale, dweights_TX = activation_backward(
            dh_MH, gate_MH, up_MH, weights_TX, back_TX
        )
        dx_TD = combined(
            _by_expert(dgate, dgate_scale, _turned_back(gate_t, experts), gate_scale, ends_E, dtype),
            back_TX,
            _by_expert(dup, dup_scale, _turned_back(up_t, experts), up_scale, ends_E, dtype),
        )
        slopes: list[Tensor | None] = [None] * 3
        if any(ctx.needs_input_grad[2:5]):
            x_t, dy_t = turned(x_codes, token_M), turned(dy8.codes, token_M)
            places = token_M, ends_E
            dgate_t, dgate_most = _with_scales(dgate, dgate_scale, x_scale, *places)
            dup_t, dup_most = _with_scales(dup, dup_scale, x_scale, *places)
            h_t, h_most = _with_scales(h_codes, h_scale, dy8.scale, *places)
            slopes = [
                _over_rows(dgate_t, x_t, dgate_most, ends_E, dtype).to(ctx.dtypes[0]),
                _over_rows(dup_t, x_t, dup_most, ends_E, dtype).to(ctx.dtypes[1]),
                _over_rows(dy_t, h_t, h_most, ends_E, dtype).to(ctx.dtypes[2]),
            ]
        observed = None if seen is None else observe(dy_TD, dy8, e5m2=False, before=seen)
        return dx_TD, dweights_TX, *slopes, observed, *(None,) * (3 + ctx.held)


def _spread(codes_TD: Tensor, scale_T1: Tensor, back_TX: Tensor, token_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of rows."""
    rows_MD = spread(codes_TD.view(torch.uint8), back_TX, len(token_M)).view(E4M3)
    return rows_MD, scale_T1.flatten()[token_M.clamp(min=0)]


def _turned_back(codes_t: Tensor, experts: int) -> Tensor:
    """Return transposed codes [K, E * N] as [E, N, K], whose dim of length N is contiguous."""
    return codes_t.unflatten(1, (experts, -1)).permute(1, 2, 0)


def _with_scales(
    codes_MC: Tensor, scale_M: Tensor, other_T1: Tensor, token_M: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    """Return transposed codes that have both factors' scales by row, and what is left: a scale per expert."""
    factor_M, most_E = relative_scales(scale_M, other_T1.flatten(), token_M, ends_E)
    places_M = torch.where(token_M < 0, -1, torch.arange(len(token_M), dtype=torch.int32, device=token_M.device))
    return turned(codes_MC, places_M, factor_M), most_E


def _by_expert(
    a_MK: Tensor, scale_M: Tensor, b_EKN: Tensor, scale: Tensor, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return each place's row times its expert's matrix; b's dim of length K is contiguous."""
    experts, _, outputs = b_EKN.shape
    if a_MK.device.type == "cuda":
        scale_EN = scale.expand(experts, outputs).contiguous()
        by_expert: Tensor = torch._scaled_grouped_mm(
            a_MK, b_EKN, scale_M, scale_EN, offs=ends_E, out_dtype=dtype, use_fast_accum=True
        )
        return by_expert
    out_MN, begins = a_MK.new_zeros(len(a_MK), outputs, dtype=dtype), [0, *ends_E.tolist()]
    with torch.autocast(a_MK.device.type, enabled=False):
        for begin, end, b_KN in zip(begins, begins[1:], b_EKN, strict=False):
            rows = a_MK[begin:end].float() @ b_KN.float()
            out_MN[begin:end] = (rows * scale_M[begin:end].unsqueeze(1) * scale).to(dtype)
    return out_MN


def _over_rows(a_CM: Tensor, b_KM: Tensor, scale_E: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [E, C, K]: for each expert, the sum over its places."""
    if a_CM.device.type == "cuda":
        scale_a = scale_E.repeat_interleave(len(a_CM))
        scale_b = torch.ones(len(b_KM) * len(ends_E), device=a_CM.device)
        whole: Tensor = torch._scaled_grouped_mm(
            a_CM, b_KM.mT, scale_a, scale_b, offs=ends_E, out_dtype=dtype, use_fast_accum=True
        )
        return whole
    begins = [0, *ends_E.tolist()]
    with torch.autocast(a_CM.device.type, enabled=False):
        sums = [
            a_CM[:, begin:end].float() @ b_KM[:, begin:end].float().mT * scale
            for begin, end, scale in zip(begins, begins[1:], scale_E, strict=False)
        ]
    return torch.stack(sums).to(dtype)
