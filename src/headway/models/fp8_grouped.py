"""Products of experts in float8, all in one: rows sorted by expert times each expert's own matrix.

    y_NO = rows_NK @ w_EOK[e].T        in float8, with scales by rows, as PyTorch's grouped product takes
    dx_NK = dy_NO @ w_EOK[e]           the same
    dw_EOK[e] = dy_NO.T @ rows_NK      in bfloat16: in float8 each expert's rows would have to be a multiple of 16

Weights are cast at each use: a step routes few rows to each of many experts, and held codes would be as large as all
of them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from headway.kernels.fp8 import cast
from headway.kernels.fp8_observed import observe
from headway.models.fp8_linear import Float8Weights


def grouped_linear(rows_NK: Tensor, matrices_EOK: Tensor, ends_E: Tensor, float8: Float8Weights) -> Tensor:
    """Return each row times its expert's matrix; expert e has the rows up to ends[e]."""
    result: Tensor = _GroupedLinear.apply(rows_NK, matrices_EOK, ends_E, float8.observed, float8.e5m2)
    return result


def _scaled(x_MK: Tensor, *, e5m2: bool) -> tuple[Tensor, Tensor]:
    x8 = cast(x_MK, rowwise=True, e5m2=e5m2, columns=False)
    return x8.codes, x8.scale.flatten()


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_NK: Tensor, matrices_EOK: Tensor, ends_E: Tensor, observed: Tensor | None, e5m2: bool
    ) -> Tensor:
        experts, outputs, inputs = matrices_EOK.shape
        rows8 = cast(rows_NK, rowwise=True, columns=False)
        codes, scales = _scaled(matrices_EOK.bfloat16().flatten(0, 1), e5m2=False)
        seen = None if observed is None else observe(rows_NK, rows8, e5m2=False)
        ctx.save_for_backward(rows_NK, matrices_EOK, ends_E, seen)
        ctx.e5m2 = e5m2
        return torch._scaled_grouped_mm(
            rows8.codes, codes.view(experts, outputs, inputs).mT, rows8.scale.flatten(), scales.view(experts, outputs),
            offs=ends_E, out_dtype=rows_NK.dtype, use_fast_accum=True,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows_NK, matrices_EOK, ends_E, seen = ctx.saved_tensors
        experts, outputs, inputs = matrices_EOK.shape
        dy_NO = dy_NO.contiguous()
        dy8 = cast(dy_NO, rowwise=True, e5m2=ctx.e5m2, columns=False)
        codes, scales = _scaled(matrices_EOK.bfloat16().mT.flatten(0, 1), e5m2=False)
        dx_NK = torch._scaled_grouped_mm(
            dy8.codes, codes.view(experts, inputs, outputs).mT, dy8.scale.flatten(), scales.view(experts, inputs),
            offs=ends_E, out_dtype=dy_NO.dtype, use_fast_accum=True,
        )  # fmt: skip
        dw_EOK = None
        if ctx.needs_input_grad[1]:
            dw_EOK = nn.functional.grouped_mm(dy_NO.mT, rows_NK, offs=ends_E).to(matrices_EOK.dtype)
        observed = None if seen is None else observe(dy_NO, dy8, e5m2=ctx.e5m2, before=seen)
        return dx_NK, dw_EOK, None, observed, None
