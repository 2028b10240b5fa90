"""Routing of tokens by softmax and top-k, in one pass each way.

    p = softmax(logits)     chosen[x] = the x-th likeliest expert     weights[x] = p[chosen[x]], perhaps over their sum

    dp[e] = the gradient of the weight of e, if e was chosen      dlogits = p * (dp - sum of p * dp)

Of experts that are exactly as likely, the first is chosen. A program has whole rows of a few tokens, in float32: a row
is read once and its probabilities are made again in the backward pass. PyTorch's top-k of as many short rows takes
a block of threads for each, and then sorts.

Shapes: T tokens, E experts, X experts per token.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.triton_compat import tl, triton, triton_op

TOKENS = 16
"""Tokens per program."""
MOST_EXPERTS = 1024
WARPS = 4


def reference(logits_TE: Tensor, count: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Return the weights and indices of each token's experts, in PyTorch."""
    weights_TX, chosen_TX = logits_TE.float().softmax(dim=-1).topk(count, dim=-1)
    if renormalize:
        weights_TX = weights_TX / weights_TX.sum(dim=-1, keepdim=True)
    return weights_TX, chosen_TX


def softmax_top_k(logits_TE: Tensor, count: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Return the weights, float32, and indices of each token's experts."""
    routed: tuple[Tensor, Tensor] = _route(logits_TE, count, renormalize)
    return routed


@triton.jit
def _softmax(logits_ptr, token, expert, tokens, experts, stride):
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    logits = tl.load(logits_ptr + token[:, None] * stride + expert[None, :], mask=inside, other=-float("inf"))
    logits = tl.where((token < tokens)[:, None], logits.to(tl.float32), 0)
    logits = tl.where((expert < experts)[None, :], logits, -float("inf"))
    shifted = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    return shifted / tl.sum(shifted, axis=1)[:, None]


@triton.jit
def _route_kernel(
    logits_ptr, weights_ptr, chosen_ptr, tokens, experts, stride,
    X: tl.constexpr, X2: tl.constexpr, E2: tl.constexpr, RENORMALIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    expert = tl.arange(0, E2)
    slot = tl.arange(0, X2)[None, :]
    p = _softmax(logits_ptr, token, expert, tokens, experts, stride)
    left = tl.where((expert < experts)[None, :], p, -1.0)
    weights = tl.zeros([TOKENS, X2], dtype=tl.float32)
    chosen = tl.zeros([TOKENS, X2], dtype=tl.int32)
    for x in tl.static_range(X):
        most = tl.max(left, axis=1)
        first = tl.min(tl.where(left == most[:, None], expert[None, :], E2), axis=1)
        first = tl.minimum(first, experts - 1)  # of logits that are not finite, some expert
        weights = tl.where(slot == x, most[:, None], weights)
        chosen = tl.where(slot == x, first[:, None], chosen)
        left = tl.where(expert[None, :] == first[:, None], -2.0, left)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, axis=1)[:, None]
    inside = (token < tokens)[:, None] & (slot < X)
    tl.store(weights_ptr + token[:, None] * X + slot, weights, mask=inside)
    tl.store(chosen_ptr + token[:, None] * X + slot, chosen.to(tl.int64), mask=inside)


@triton.jit
def _route_backward_kernel(
    dweights_ptr, logits_ptr, chosen_ptr, dlogits_ptr, tokens, experts, stride,
    X: tl.constexpr, E2: tl.constexpr, RENORMALIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    expert = tl.arange(0, E2)
    p = _softmax(logits_ptr, token, expert, tokens, experts, stride)
    dp = tl.zeros([TOKENS, E2], dtype=tl.float32)
    taken = tl.zeros([TOKENS, E2], dtype=tl.float32)
    for x in tl.static_range(X):
        chosen = tl.load(chosen_ptr + token * X + x, mask=token < tokens, other=0)
        dweight = tl.load(dweights_ptr + token * X + x, mask=token < tokens, other=0)
        here = expert[None, :] == chosen[:, None]
        dp += tl.where(here, dweight[:, None], 0.0)
        taken += tl.where(here, p, 0.0)
    if RENORMALIZE:  # w = p / s: dp = (dw - sum of dw * w) / s
        total = tl.sum(taken, axis=1)
        mean = tl.sum(dp * taken, axis=1) / total
        dp = tl.where(taken > 0, (dp - mean[:, None]) / total[:, None], 0.0)
    dlogits = p * (dp - tl.sum(p * dp, axis=1)[:, None])
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    place = dlogits_ptr + token[:, None] * experts + expert[None, :]
    tl.store(place, dlogits.to(dlogits_ptr.dtype.element_ty), mask=inside)


def _power_of_two(number: int) -> int:
    return max(2, 1 << (number - 1).bit_length())


def _outputs(logits_TE: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = (len(logits_TE), count)
    return logits_TE.new_empty(shape, dtype=torch.float32), logits_TE.new_empty(shape, dtype=torch.int64)


@triton_op("headway::route", mutates_args=())
def _route(logits_TE: Tensor, count: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    weights_TX, chosen_TX = _outputs(logits_TE, count)
    tokens, experts = logits_TE.shape
    if tokens:
        wrap_triton(_route_kernel)[(-(-tokens // TOKENS),)](
            logits_TE,
            weights_TX,
            chosen_TX,
            tokens,
            experts,
            logits_TE.stride(0),
            X=count,
            X2=_power_of_two(count),
            E2=_power_of_two(experts),
            RENORMALIZE=renormalize,
            TOKENS=TOKENS,
            num_warps=WARPS,
        )
    return weights_TX, chosen_TX


@_route.register_fake
def _(logits_TE: Tensor, count: int, _renormalize: bool) -> tuple[Tensor, Tensor]:
    return _outputs(logits_TE, count)


@triton_op("headway::route_backward", mutates_args=())
def _route_backward(dweights_TX: Tensor, logits_TE: Tensor, chosen_TX: Tensor, renormalize: bool) -> Tensor:
    logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    tokens, experts = logits_TE.shape
    dlogits_TE = torch.empty((tokens, experts), dtype=logits_TE.dtype, device=logits_TE.device)
    if tokens:
        wrap_triton(_route_backward_kernel)[(-(-tokens // TOKENS),)](
            dweights_TX.contiguous(),
            logits_TE,
            chosen_TX.contiguous(),
            dlogits_TE,
            tokens,
            experts,
            logits_TE.stride(0),
            X=chosen_TX.shape[1],
            E2=_power_of_two(experts),
            RENORMALIZE=renormalize,
            TOKENS=TOKENS,
            num_warps=WARPS,
        )
    return dlogits_TE


@_route_backward.register_fake
def _(_dweights_TX: Tensor, logits_TE: Tensor, _chosen_TX: Tensor, _renormalize: bool) -> Tensor:
    return torch.empty(logits_TE.shape, dtype=logits_TE.dtype, device=logits_TE.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.renormalize = inputs[2]
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dweights_TX: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
    return _route_backward(dweights_TX, *ctx.saved_tensors, ctx.renormalize), None, None


_route.register_autograd(_backward, setup_context=_keep)


def _ahead(name: str, kernel: Any, types: dict[str, str], **constants: Any) -> LaunchSpec:
    types = types | {"tokens": "i32", "experts": "i32", "stride": "i32"}
    constants |= {"X": 8, "E2": 64, "TOKENS": TOKENS}
    return LaunchSpec(name, kernel, types, constants, warps=WARPS)


AHEAD: tuple[LaunchSpec, ...] = tuple(
    launch
    for renormalize in (False, True)
    for launch in (
        _ahead(
            f"route{'_renormalized' * renormalize}", _route_kernel,
            {"logits_ptr": "*bf16", "weights_ptr": "*fp32", "chosen_ptr": "*i64"}, X2=8, RENORMALIZE=renormalize,
        ),
        _ahead(
            f"route{'_renormalized' * renormalize}_backward", _route_backward_kernel,
            {"dweights_ptr": "*fp32", "logits_ptr": "*bf16", "chosen_ptr": "*i64", "dlogits_ptr": "*bf16"},
            RENORMALIZE=renormalize,
        ),
    )
)  # fmt: skip
