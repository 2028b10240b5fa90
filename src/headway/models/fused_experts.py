"""A pass of gated experts as one function: nine grouped GEMMs, and one kernel for what is between two of them.

    rows = spread(x)      gate, up = rows @ Wg.T, rows @ Wu.T      h = w * silu(gate) * up      y = combined(h @ Wd.T)

    drows = spread(dy)    dh = drows @ Wd      dgate, dup, dw, h = activation_backward(dh)
    dWd = drows.T @ h     dWg, dWu = dgate.T @ rows, dup.T @ rows      dx = combined(dgate @ Wg + dup @ Wu)

See `kernels/expert_rows.py`. Numbers of rows per expert stay on the device. GEMMs take matrices as they lie, in both
passes: nothing is transposed in memory. Kept for the backward pass are x's rows, gate and up.
"""

from typing import Any

import torch
from torch import Tensor, nn

from headway.kernels.expert_rows import activation, activation_backward, combined, spread

WIDE = 256
"""Most experts whose numbers are sorted as bytes, by one pass of a radix sort."""


def fused_experts(
    x_TD: Tensor, weights_TX: Tensor, chosen_TX: Tensor, gate_EHD: Tensor, up_EHD: Tensor, down_EDH: Tensor
) -> Tensor:
    """Return the weighted sum [T, D] of each token's experts, SwiGLU without biases."""
    back_TX, ends_E = places(chosen_TX, len(gate_EHD))
    y_TD: Tensor = _FusedExperts.apply(x_TD, weights_TX.float(), gate_EHD, up_EHD, down_EDH, back_TX, ends_E)
    return y_TD


def places(chosen_TX: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return where each token's rows are once sorted by expert [T, X], and where each expert's rows end [E]."""
    _, order_N, ends_E = sorted_places(chosen_TX, count)
    numbers_N = torch.arange(len(order_N), dtype=torch.int32, device=order_N.device)
    return torch.empty_like(numbers_N).scatter_(0, order_N, numbers_N).view(chosen_TX.shape), ends_E


def sorted_places(chosen_TX: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return experts of rows sorted by them [N], which of all choices each row is [N], and where experts' rows end."""
    kind = torch.uint8 if count <= WIDE else torch.int16
    expert_N, order_N = chosen_TX.flatten().to(kind).sort(stable=True)
    numbers_E = torch.arange(count, dtype=torch.int32, device=expert_N.device)
    return expert_N, order_N, torch.searchsorted(expert_N.int(), numbers_E, right=True, out_int32=True)


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TX: Tensor,
        gate_EHD: Tensor,
        up_EHD: Tensor,
        down_EDH: Tensor,
        back_TX: Tensor,
        ends_E: Tensor,
    ) -> Tensor:
        rows_ND = spread(x_TD, back_TX)
        gate_NH, up_NH = _product(rows_ND, gate_EHD.mT, ends_E), _product(rows_ND, up_EHD.mT, ends_E)
        h_NH = activation(gate_NH, up_NH, weights_TX, back_TX)
        y_TD = combined(_product(h_NH, down_EDH.mT, ends_E), back_TX)
        ctx.save_for_backward(rows_ND, gate_NH, up_NH, weights_TX, gate_EHD, up_EHD, down_EDH, back_TX, ends_E)
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows_ND, gate_NH, up_NH, weights_TX, gate_EHD, up_EHD, down_EDH, back_TX, ends_E = ctx.saved_tensors
        drows_ND = spread(dy_TD, back_TX)
        dh_NH = _product(drows_ND, down_EDH, ends_E)
        dgate_NH, dup_NH, dweights_TX, h_NH = activation_backward(dh_NH, gate_NH, up_NH, weights_TX, back_TX)
        dmatrices: list[Tensor | None] = [None, None, None]
        for i, (outputs, inputs) in enumerate(((dgate_NH, rows_ND), (dup_NH, rows_ND), (drows_ND, h_NH))):
            if ctx.needs_input_grad[2 + i]:
                dmatrices[i] = _product(outputs.mT, inputs, ends_E)
        dx_TD = combined(_product(dgate_NH, gate_EHD, ends_E), back_TX, _product(dup_NH, up_EHD, ends_E))
        return dx_TD, dweights_TX, *dmatrices, None, None


def _product(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """Return a grouped GEMM: groups of rows of a, or of what is summed over."""
    product: Tensor = nn.functional.grouped_mm(a, b, offs=ends_E)
    return product
