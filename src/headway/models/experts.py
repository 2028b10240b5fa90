"""Mixtures of experts: which tokens an expert sees, what it makes of them, and how all come to see about as many.

No token is dropped: tokens are sorted by expert, each expert's go through its matrices, and what it makes of them comes
back weighted. Every sum has an order of its own that nothing changes. `kernels.table.experts` says by which kernel:

    device  precision, widths          kernel
    GPU     bfloat16, multiples of 8   grouped: one product for all experts, for which the host never waits
    any     the rest                   loop over those experts that have tokens
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headway.kernels import dispatch as table
from headway.models.layers import Linear, gated, silu
from headway.models.loss import autocast

__all__ = [
    "BiasBalance",
    "Experts",
    "LoadBalanceLoss",
    "MoeFeedForward",
    "Route",
    "set_loss_scale",
    "softmax_top_k",
    "swiglu",
    "top_k_softmax",
    "uneven",
    "update_balance",
]

Route = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From logits [T, E] to the weights [T, X] and numbers [T, X] of the experts that each token sees."""


# -- routers


def softmax_top_k(logits_TE: Tensor, count: int, renormalize: bool = True) -> tuple[Tensor, Tensor]:
    """The likeliest experts, by their probabilities; these may be made to add up to one."""
    weights_TX, chosen_TX = logits_TE.float().softmax(dim=-1).topk(count, dim=-1)
    if renormalize:
        weights_TX = weights_TX / weights_TX.sum(dim=-1, keepdim=True)
    return weights_TX, chosen_TX


def top_k_softmax(logits_TE: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The likeliest experts, by probabilities among themselves: `softmax_top_k`, renormalized, in fewer products."""
    scores_TX, chosen_TX = logits_TE.float().topk(count, dim=-1)
    return scores_TX.softmax(dim=-1), chosen_TX


# -- experts


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """What most experts do between their matrices."""
    return gated(silu, gate, up)


class Experts(nn.Module):
    """Gated feed-forwards, of which each token sees a few. Their matrices lie stacked, so that one product does all."""

    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(
        self,
        count: int,
        dim: int,
        hidden: int,
        bias: bool = False,
        activation: Callable[[Tensor, Tensor], Tensor] = swiglu,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Parameter(torch.empty(count, hidden, dim))
        self.up = nn.Parameter(torch.empty(count, hidden, dim))
        self.down = nn.Parameter(torch.empty(count, dim, hidden))
        for name, outputs in (("gate", hidden), ("up", hidden), ("down", dim)):
            biases = nn.Parameter(torch.zeros(count, outputs)) if bias else None
            self.register_parameter(f"{name}_bias", biases)

    def forward(self, x_TD: Tensor, weights_TX: Tensor, chosen_TX: Tensor) -> Tensor:
        """For each token, the weighted sum of what its experts make of it."""
        if x_TD.is_meta:  # where only shapes are asked for, nobody knows how many rows an expert has
            return torch.empty_like(x_TD)
        x_TD = autocast(x_TD)
        count, hidden, dim = self.gate.shape
        kernel = table.experts(x_TD.device.type, x_TD.dtype, dim, hidden).kernel
        expert_N, order_N = chosen_TX.flatten().sort(stable=True)
        back_N = order_N.argsort()
        numbers_E = torch.arange(count, device=x_TD.device)
        ends_E = torch.searchsorted(expert_N, numbers_E, right=True, out_int32=True)
        rows_ND = _Gathered.apply(x_TD, order_N // chosen_TX.shape[1], back_N, chosen_TX.shape[1])
        if kernel == "grouped":
            made_ND = self.grouped(rows_ND, ends_E, expert_N)
        else:
            made_ND = self.loop(rows_ND, ends_E)
        made_TXD = _Gathered.apply(made_ND, back_N, order_N, 1).unflatten(0, chosen_TX.shape)
        with torch.autocast(x_TD.device.type, enabled=False):  # on GPUs it would sum a float32 copy
            return (made_TXD * weights_TX.unsqueeze(-1).to(made_TXD.dtype)).sum(dim=1)

    def loop(self, rows_ND: Tensor, ends_E: Tensor) -> Tensor:
        """Rows sorted by expert through its matrices, one expert after the other."""
        sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
        # Cut by `unbind`: its gradient is put together once, that of a slice is as large as all experts each time.
        gates, ups, downs = (matrices.unbind() for matrices in (self.gate, self.up, self.down))
        biases = [self._biases(name, len(sizes)) for name in ("gate_bias", "up_bias", "down_bias")]
        made = []
        for e, rows in enumerate(rows_ND.split(sizes)):
            if len(rows):
                gate = nn.functional.linear(rows, gates[e], biases[0][e])
                up = nn.functional.linear(rows, ups[e], biases[1][e])
                made.append(nn.functional.linear(self.activation(gate, up), downs[e], biases[2][e]))
        return torch.cat(made)

    def _biases(self, name: str, count: int) -> Any:
        biases_EF = getattr(self, name)
        return [None] * count if biases_EF is None else biases_EF.unbind()

    def grouped(self, rows_ND: Tensor, ends_E: Tensor, expert_N: Tensor) -> Tensor:
        """The same in three products; where an expert's rows end stays on the device."""

        def product(rows: Tensor, matrices: Tensor, biases: Tensor | None) -> Tensor:
            matrices = matrices.to(rows.dtype).transpose(1, 2)
            made: Tensor = nn.functional.grouped_mm(rows, matrices, offs=ends_E)
            if biases is None:
                return made
            # A product with ones and zeros is exact, and its gradient a sum whose order is always the same.
            member_NE = (expert_N.unsqueeze(1) == torch.arange(len(ends_E), device=rows.device)).to(rows.dtype)
            return made + member_NE @ biases.to(rows.dtype)

        gate, up = product(rows_ND, self.gate, self.gate_bias), product(rows_ND, self.up, self.up_bias)
        return product(self.activation(gate, up), self.down, self.down_bias)


class _Gathered(torch.autograd.Function):
    """Some rows by number, each of them `times` times. The way back is a look-up too: `back` says where each row went,
    the first time, the second, ...; so no two threads ever add to one number."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, numbers: Tensor, back: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.times = times
        return rows[numbers]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        there = gradient[back]
        return there if ctx.times == 1 else there.unflatten(0, (-1, ctx.times)).sum(dim=1), None, None, None


# -- balance, by an auxiliary loss


class LoadBalanceLoss(nn.Module):
    """Pulls a router towards experts that see few tokens, by the gradient of a loss that nobody else sees.

    The loss of a step is `coefficient` times the mean over its tokens of `uneven`, taken for each microbatch by itself.
    """

    loss_scale: Tensor

    def __init__(self, coefficient: float) -> None:
        super().__init__()
        self.coefficient = coefficient
        self.register_buffer("loss_scale", torch.zeros(()), persistent=False)
        """One by the tokens of a step: see `set_loss_scale`."""

    @torch.compiler.disable  # it would find that the loss is used for nothing, and leave its gradient out
    def forward(self, y_TD: Tensor, logits_TE: Tensor, chosen_TX: Tensor) -> Tensor:
        """What experts have made, as it is."""
        if not logits_TE.requires_grad or self.coefficient == 0:
            return y_TD
        out: Tensor = _Attached.apply(y_TD, uneven(logits_TE, chosen_TX), self.loss_scale, self.coefficient * len(y_TD))
        return out


def uneven(logits_TE: Tensor, chosen_TX: Tensor) -> Tensor:
    """How unevenly tokens go to experts: X where all see as many, more otherwise (Switch Transformer, eq. 4 to 6).

    The sum over experts of the share of tokens it sees times the mean of its probability, times the number of experts.
    """
    experts = torch.arange(logits_TE.shape[1], device=logits_TE.device)
    share_E = (chosen_TX.flatten().unsqueeze(1) == experts).sum(dim=0) / len(logits_TE)
    return len(experts) * (share_E * logits_TE.float().softmax(dim=-1).mean(dim=0)).sum()


class _Attached(torch.autograd.Function):
    """Passes a stream on; on the way back a loss that is no part of it has its gradient, too."""

    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, _: Tensor, scale: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.factor = factor
        return y_TD.view_as(y_TD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (scale,) = ctx.saved_tensors
        return gradient, scale * ctx.factor, None, None


def set_loss_scale(model: nn.Module, scale: float) -> None:
    """Tell every auxiliary loss what the loss of a step is multiplied with: 1 / tokens. Call it before the passes."""
    for module in model.modules():
        if isinstance(module, LoadBalanceLoss):
            module.loss_scale.fill_(scale)


# -- balance, by a bias (DeepSeek-V3)


class BiasBalance(nn.Module):
    """A bias for each expert by which it is chosen, and not weighed: raised where it sees few tokens, and lowered."""

    bias: Tensor
    counts: Tensor

    def __init__(self, count: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("bias", torch.zeros(count, dtype=torch.float32))
        self.register_buffer("counts", torch.zeros(count, dtype=torch.int64), persistent=False)
        """Tokens that each expert saw in this step's passes so far."""

    @torch.compiler.disable
    def forward(self, y_TD: Tensor, chosen_TX: Tensor) -> Tensor:
        """What experts have made, as it is."""
        out: Tensor = _Counted.apply(y_TD, chosen_TX, self.counts)
        return out


class _Counted(torch.autograd.Function):
    """Passes a stream on, and counts who sees whom on the way back: recomputation goes forward twice, and evaluation
    never comes back."""

    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, chosen_TX: Tensor, counts_E: Tensor) -> Tensor:
        ctx.save_for_backward(chosen_TX)
        ctx.counts = counts_E
        return y_TD.view_as(y_TD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (chosen_TX,) = ctx.saved_tensors
        experts = torch.arange(len(ctx.counts), device=chosen_TX.device)
        ctx.counts += (chosen_TX.flatten().unsqueeze(1) == experts).sum(dim=0)
        return gradient, None, None


@torch.no_grad()
def update_balance(model: nn.Module, world_sum: Callable[[Tensor], Tensor]) -> None:
    """Move every bias by its rate, towards an even load, and begin to count anew. Call it after the optimizer's step.

    `world_sum` adds counts up over all workers that saw other tokens with the same experts.
    """
    found = [module for module in model.modules() if isinstance(module, BiasBalance)]
    if not found:
        return
    totals = world_sum(torch.cat([module.counts for module in found])).split([len(m.counts) for m in found])
    for module, total_E in zip(found, totals, strict=True):
        # In whole numbers, so that an expert with exactly its share is left alone.
        module.bias += module.rate * (total_E.sum() - total_E * len(total_E)).sign()
        module.counts.zero_()


# -- the feed-forward that they make up


class MoeFeedForward(nn.Module):
    """A feed-forward of experts with an even load by an auxiliary loss: Mixtral, Qwen3-MoE, gpt-oss."""

    def __init__(self, router: Linear, route: Route, experts: Experts, balance: float) -> None:
        super().__init__()
        self.router, self.route, self.experts, self.balance = router, route, experts, LoadBalanceLoss(balance)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Transform each token by the experts it is sent to."""
        x_TD = x_BLD.flatten(0, 1)
        logits_TE = self.router(x_TD)
        weights_TX, chosen_TX = self.route(logits_TE)
        y_TD = self.experts(x_TD, weights_TX, chosen_TX)
        return self.balance(y_TD, logits_TE, chosen_TX).view(x_BLD.shape)
