"""Linear layers in float8: their products, forward and backward, and the weights' codes.

    y  = x @ w.T        inputs and weights in e4m3
    dx = dy @ w         gradients in e5m2, or in e4m3
    dw = dy.T @ x

Each tensor is cast once for the two products that it is a factor of. Layers that read the same input are one product
(`Float8Weights` of several layers): one cast, one wide product, and the sum over layers of their inputs' gradients in
its accumulator. The codes of the input are what the backward pass keeps, half of the bytes of bfloat16.

Where a process has all of a weight, its codes are cast once per step (`Float8Weights.refresh`). Where weights are
gathered or split, they are cast at each use, and again in the backward pass.

Every layer observes its numbers on the way: the largest magnitude of inputs and gradients, and of a sample of their
rows the shares that become zero and that would not fit (`kernels/fp8_observed.py`). These travel as the gradient of
`observed`, a leaf that nothing else reads: so a compiler, recomputation and CUDA graphs treat them as they treat any
gradient.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headway.kernels.fp8 import (
    E4M3,
    MULTIPLE,
    Float8,
    cast,
    cast_into,
    inverse_of,
    product,
    scale_of,
)
from headway.kernels.fp8_observed import SAMPLED_ROWS, observe
from headway.kernels.fp8_weights import CastGroup, CastTable, cast_all, table_of
from headway.kernels.gated import gated_pair, gated_pair_backward
from headway.kernels.inputs import autocast

OBSERVED = (
    "passes", "input_amax", "input_underflow", "input_overflow", "gradient_amax", "gradient_underflow",
    "gradient_overflow",
)  # fmt: skip
"""What a layer observes, summed over the passes of a step."""
SCALE_STRIDE = 4
"""Numbers between two scales: cuBLAS takes a scale only at an address that is a multiple of 16 bytes."""


class Float8Options(NamedTuple):
    """How products are cast."""

    rowwise: bool = False
    e5m2: bool = True
    """The format of gradients."""


class Float8Weights:
    """The weights of layers that share an input, as factors of float8 products; codes are absent until `hold`."""

    def __init__(self, options: Float8Options) -> None:
        self.rowwise, self.e5m2 = options
        self.codes: Tensor | None = None
        """[N, K], the layers' outputs one after the other."""
        self.codes_t: Tensor | None = None
        self.scale: Tensor | None = None
        self.scale_t: Tensor | None = None
        """Of columns; None if it is that of rows."""
        self.stacks: tuple[Float8Weights, ...] = ()
        """Of experts: the codes of gate, up and down, one expert after the other, if they are held."""
        self.observed: Tensor | None = None
        """[16, OBSERVED]; sums over dim 0 are what was observed."""

    def observe(self, device: torch.device) -> None:
        """Observe numbers from now on."""
        self.observed = torch.zeros(SAMPLED_ROWS, len(OBSERVED), device=device, requires_grad=True)

    def hold(self, outputs: int, inputs: int, device: torch.device) -> None:
        """Allocate codes."""
        self.codes = torch.empty(outputs, inputs, dtype=E4M3, device=device)
        self.codes_t = torch.empty(inputs, outputs, dtype=E4M3, device=device)

    def places_of(self, weights: tuple[Tensor, ...]) -> CastGroup:
        """Return weights and where their codes go."""
        assert self.codes is not None
        assert self.codes_t is not None
        return CastGroup(weights, self.codes, self.codes_t)

    @torch.no_grad()
    def refresh(self, weights: tuple[Tensor, ...], inverse: Tensor | None = None) -> None:
        """Cast weights that have changed; `inverse` is that of their common scale, if not by rows."""
        assert self.codes is not None
        assert self.codes_t is not None
        if inverse is None:
            cast_weights = cast(torch.cat(weights).bfloat16(), rowwise=True)
            self.codes.copy_(cast_weights.codes)
            self.codes_t.copy_(cast_weights.codes_t)
            # in the same memory as before, which a captured graph reads
            self.scale = cast_weights.scale if self.scale is None else self.scale.copy_(cast_weights.scale)
            self.scale_t = cast_weights.scale_t if self.scale_t is None else self.scale_t.copy_(cast_weights.scale_t)
            return
        begin = 0
        for weight in weights:
            end = begin + len(weight)
            cast_into(weight, inverse, self.codes[begin:end], self.codes_t[:, begin:end])
            begin = end


class TensorScales:
    """The scales of groups of weights, one per group, in memory that stays the same; few launches find all of them."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        most, places, begin = max(sizes), [], 0
        for size in sizes:
            places.append([*range(begin, begin + size), *[begin] * (most - size)])
            begin += size
        self._places = torch.tensor(places, device=device)
        """The weights of each group, as often as a group may have some."""
        self.scales = torch.ones(len(sizes), 1, SCALE_STRIDE, device=device)[..., :1]
        self._inverses = torch.ones(len(sizes), device=device)
        self._table: CastTable | None = None

    @torch.no_grad()
    def refresh(self, groups: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Find the scales of weights that have changed; return their inverses."""
        norms = torch.stack(torch._foreach_norm([weight for weights in groups for weight in weights], float("inf")))
        amaxes = norms.bfloat16().float()[self._places].amax(dim=1)  # the largest of rounded numbers
        self.scales.copy_(scale_of(amaxes, e5m2=False).view(-1, 1, 1))
        return inverse_of(self.scales).unbind()

    @torch.no_grad()
    def cast(self, groups: list[CastGroup]) -> None:
        """Find the scales of weights that have changed and cast them, on a device with Triton: each is read once."""
        self._table = table_of(groups, self._table)
        cast_all(self._table, self.scales, self._inverses)


# -- products


def linear(x: Tensor, float8: Float8Weights, weights: tuple[Tensor, ...]) -> Tensor:
    """Return the outputs of layers that share an input, side by side, without biases."""
    if x.is_meta:  # weights have no codes yet; only the shape matters
        return x.new_empty((*x.shape[:-1], sum(len(weight) for weight in weights)))
    x = autocast(x)
    held = (float8.codes, float8.codes_t, float8.scale, float8.scale_t)
    learns = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    rows_MK = _padded(x.reshape(-1, x.shape[-1]))
    y_MN = _Linear.apply(rows_MK, float8.observed, float8.rowwise, float8.e5m2, learns, *held, *weights)
    return y_MN[: x.shape[:-1].numel()].unflatten(0, x.shape[:-1])


def gated_feed_forward(
    x: Tensor, up: Float8Weights, down: Float8Weights, weights: tuple[Tensor, Tensor, Tensor], gelu: bool
) -> Tensor:
    """Return down(activation(gate(x)) * up(x)) of held weights: the casts between take the activation's own amax."""
    if x.is_meta:
        return torch.empty_like(x)
    x = autocast(x)
    held = (up.codes, up.codes_t, up.scale, up.scale_t, down.codes, down.codes_t, down.scale, down.scale_t)
    learns = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    rows_MK = _padded(x.reshape(-1, x.shape[-1]))
    y_MK = _GatedFeedForward.apply(
        rows_MK, up.observed, down.observed, up.rowwise, up.e5m2, learns, gelu, *held, *weights
    )
    return y_MK[: x.shape[:-1].numel()].unflatten(0, x.shape[:-1])


def _padded(x_MK: Tensor) -> Tensor:
    """Add rows of zeros, which change no sum, up to a size that products over rows take."""
    missing = -len(x_MK) % MULTIPLE
    return nn.functional.pad(x_MK, (0, 0, 0, missing)) if missing else x_MK


class _Linear(torch.autograd.Function):
    """The three products of a linear layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        observed: Tensor | None,
        rowwise: bool,
        e5m2: bool,
        learns: bool,
        codes: Tensor | None,
        codes_t: Tensor | None,
        scale: Tensor | None,
        scale_t: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        x8 = cast(x_MK, rowwise=rowwise, columns=learns)
        is_held = codes is not None
        if codes is None or scale is None:
            (weight,) = weights
            codes, _, scale, *_ = cast(weight.bfloat16(), rowwise=rowwise, columns=False)
        y_MN = product(x8.codes, x8.scale, codes, scale, x_MK.dtype, fast=True)
        seen = None if observed is None else observe(x_MK, x8, e5m2=False)
        kept = (codes_t, scale if scale_t is None else scale_t) if is_held else (weights[0], None)
        ctx.save_for_backward(x8.codes_t, x8.scale_t, *kept, seen)
        ctx.rowwise, ctx.e5m2, ctx.learns, ctx.is_held = rowwise, e5m2, learns, is_held
        ctx.sizes, ctx.dtypes = [len(weight) for weight in weights], [weight.dtype for weight in weights]
        return y_MN

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_codes_t, x_scale_t, codes_t, scale_t, seen = ctx.saved_tensors
        if not ctx.is_held:
            _, codes_t, _, scale_t, _ = cast(codes_t.bfloat16(), rowwise=ctx.rowwise, rows=False)
        dy8 = cast(dy_MN, e5m2=ctx.e5m2, rowwise=ctx.rowwise, columns=ctx.learns)
        dx_MK = product(dy8.codes, dy8.scale, codes_t, scale_t, dy_MN.dtype)
        slopes = (
            _weight_gradients(dy8, x_codes_t, x_scale_t, dy_MN.dtype, ctx) if ctx.learns else [None] * len(ctx.sizes)
        )
        observed = None if seen is None else observe(dy_MN, dy8, e5m2=ctx.e5m2, before=seen)
        return dx_MK, observed, *(None,) * 7, *slopes


class _GatedFeedForward(torch.autograd.Function):
    """The nine products of a gated feed-forward."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        up_observed: Tensor | None,
        down_observed: Tensor | None,
        rowwise: bool,
        e5m2: bool,
        learns: bool,
        gelu: bool,
        up: Tensor,
        up_t: Tensor,
        up_scale: Tensor,
        up_scale_t: Tensor | None,
        down: Tensor,
        down_t: Tensor,
        down_scale: Tensor,
        down_scale_t: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        x8 = cast(x_MK, rowwise=rowwise, columns=learns)
        pair = product(x8.codes, x8.scale, up, up_scale, x_MK.dtype, fast=True)
        hidden, amaxes = gated_pair(pair, gelu)
        hidden8 = cast(hidden, rowwise=rowwise, amax=amaxes, columns=learns)
        y_MK = product(hidden8.codes, hidden8.scale, down, down_scale, x_MK.dtype, fast=True)
        seen = (None, None)
        if up_observed is not None and down_observed is not None:
            seen = observe(x_MK, x8, e5m2=False), observe(hidden, hidden8, e5m2=False)
        up_scale_t = up_scale if up_scale_t is None else up_scale_t
        down_scale_t = down_scale if down_scale_t is None else down_scale_t
        ctx.save_for_backward(
            x8.codes_t,
            x8.scale_t,
            pair,
            hidden8.codes_t,
            hidden8.scale_t,
            up_t,
            up_scale_t,
            down_t,
            down_scale_t,
            *seen,
        )
        ctx.rowwise, ctx.e5m2, ctx.learns, ctx.gelu = rowwise, e5m2, learns, gelu
        ctx.sizes, ctx.dtypes = [len(weight) for weight in weights], [weight.dtype for weight in weights]
        return y_MK

    @staticmethod
    def backward(ctx: Any, dy_MK: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_t, x_scale_t, pair, hidden_t, hidden_scale_t, up_t, up_scale_t, down_t, down_scale_t, *seen = (
            ctx.saved_tensors
        )
        dtype = dy_MK.dtype
        dy8 = cast(dy_MK, e5m2=ctx.e5m2, rowwise=ctx.rowwise, columns=ctx.learns)
        dhidden = product(dy8.codes, dy8.scale, down_t, down_scale_t, dtype)
        dpair, amaxes = gated_pair_backward(dhidden, pair, ctx.gelu)
        dpair8 = cast(dpair, e5m2=ctx.e5m2, rowwise=ctx.rowwise, amax=amaxes, columns=ctx.learns)
        dx_MK = product(dpair8.codes, dpair8.scale, up_t, up_scale_t, dtype)
        slopes: list[Tensor | None] = [None] * 3
        if ctx.learns:
            of_pair = product(dpair8.codes_t, dpair8.scale_t, x_t, x_scale_t, dtype).split(ctx.sizes[:2])
            of_down = product(dy8.codes_t, dy8.scale_t, hidden_t, hidden_scale_t, dtype)
            slopes = [slope.to(kind) for slope, kind in zip((*of_pair, of_down), ctx.dtypes, strict=True)]
        observed = (None, None)
        if seen[0] is not None:
            observed = (
                observe(dpair, dpair8, e5m2=ctx.e5m2, before=seen[0]),
                observe(dy_MK, dy8, e5m2=ctx.e5m2, before=seen[1]),
            )
        return dx_MK, *observed, *(None,) * 12, *slopes


def _weight_gradients(
    dy8: Float8, x_codes_t: Tensor, x_scale_t: Tensor, dtype: torch.dtype, ctx: Any
) -> list[Tensor | None]:
    """Return each layer's part of one product."""
    whole = product(dy8.codes_t, dy8.scale_t, x_codes_t, x_scale_t, dtype)
    return [part.to(kind) for part, kind in zip(whole.split(ctx.sizes), ctx.dtypes, strict=True)]
