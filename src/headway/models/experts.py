"""Mixture of experts: routing, expert computation and load balancing.

No token is dropped: tokens are sorted by expert, pass through its matrices, and return weighted. Every sum has a fixed
order. `kernels.dispatch.experts` chooses the kernel:

    device  precision, widths          kernel
    GPU     bfloat16, multiples of 8   grouped GEMM over all experts, without a host sync
    any     the rest                   loop over experts with tokens

Where products are grouped and experts have no biases, all of a pass is one function (`models/fused_experts.py`, in
float8 `models/fp8_experts.py`), but for exact mode and for experts that workers share out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headway.kernels import batch_invariant, routing
from headway.kernels import dispatch as table
from headway.kernels.expert_codes import MOST_WIDTH
from headway.models.fp8_experts import float8_experts
from headway.models.fp8_grouped import grouped_linear
from headway.models.fp8_linear import Float8Weights, linear
from headway.models.fused_experts import fused_experts
from headway.models.layers import Linear, gated, silu
from headway.models.loss import autocast

Route = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From logits [T, E] to the weights [T, X] and indices [T, X] of each token's experts."""


# -- routers


def softmax_top_k(logits_TE: Tensor, count: int, renormalize: bool = True) -> tuple[Tensor, Tensor]:
    """Choose the likeliest experts by probability, optionally renormalized."""
    if table.uses_triton("experts", logits_TE) and logits_TE.shape[1] <= routing.MOST_EXPERTS:
        return routing.softmax_top_k(logits_TE, count, renormalize)
    return routing.reference(logits_TE, count, renormalize)


def top_k_softmax(logits_TE: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Choose the likeliest experts, with a softmax over them: renormalized `softmax_top_k` with less work."""
    scores_TX, chosen_TX = logits_TE.float().topk(count, dim=-1)
    return scores_TX.softmax(dim=-1), chosen_TX


# -- experts


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The activation of most experts."""
    return gated(silu, gate, up)


class Experts(nn.Module):
    """Gated feed-forward experts, with stacked matrices for grouped GEMMs."""

    exact = False
    """Whether a token has the same bits in every batch: see `models/exact.py`."""
    fp8: Float8Weights | None = None
    """Their products in float8: see `models/fp8.py`."""
    is_shared = False
    """Whether other workers have some of them: see `parallel/expert.py`."""
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
        """Return the weighted sum of each token's expert outputs."""
        if x_TD.is_meta:  # rows per expert are unknown; only the shape matters
            return torch.empty_like(x_TD)
        x_TD = autocast(x_TD)
        if self._is_fused(x_TD):
            matrices = (self.gate, self.up, self.down)
            if self.fp8 is not None:
                return float8_experts(x_TD, weights_TX, chosen_TX, matrices, self.fp8)
            return fused_experts(x_TD, weights_TX, chosen_TX, *(stack.to(x_TD.dtype) for stack in matrices))
        expert_N, order_N = chosen_TX.flatten().sort(stable=True)
        back_N = order_N.argsort()
        rows_ND = gather_rows(x_TD, order_N // chosen_TX.shape[1], back_N, chosen_TX.shape[1])
        made_ND = self.compute(rows_ND, expert_N)
        made_TXD = gather_rows(made_ND, back_N, order_N).unflatten(0, chosen_TX.shape)
        if self.exact:
            return _summed(made_TXD * weights_TX.unsqueeze(-1)).to(made_TXD.dtype)
        with torch.autocast(x_TD.device.type, enabled=False):  # on GPUs it would sum a float32 copy
            return (made_TXD * weights_TX.unsqueeze(-1).to(made_TXD.dtype)).sum(dim=1)

    def _is_fused(self, x_TD: Tensor) -> bool:
        """Whether all of a pass is one function: experts are here, without biases, and products are grouped."""
        return self.is_plain and len(x_TD) > 0 and self._kernel(x_TD.device, x_TD.dtype) == "grouped"

    @property
    def is_plain(self) -> bool:
        """Whether all of a pass is one function where products are grouped."""
        plain = self.activation is swiglu and self.gate_bias is None and not self.is_shared
        return plain and not self.exact and (self.fp8 is None or self.gate.shape[1] <= MOST_WIDTH)

    def compute(self, rows_ND: Tensor, expert_N: Tensor) -> Tensor:
        """Apply to each row its expert, by number; rows are sorted by expert."""
        numbers_E = torch.arange(len(self.gate), device=rows_ND.device)
        ends_E = torch.searchsorted(expert_N, numbers_E, right=True, out_int32=True)
        if len(rows_ND) and self._kernel(rows_ND.device, rows_ND.dtype) == "grouped":
            return self.grouped(rows_ND, ends_E, expert_N)
        return self.loop(rows_ND, ends_E)

    def _kernel(self, device: torch.device, dtype: torch.dtype) -> str:
        _, hidden, dim = self.gate.shape
        return table.experts(device.type, dtype, dim, hidden).kernel

    def grouped_on(self, device: torch.device) -> bool:
        """Whether products in bfloat16 are grouped on a device."""
        return self._kernel(device, torch.bfloat16) == "grouped"

    def needs_no_host(self) -> bool:
        """Whether a pass in the weights' own precision never waits for the device, so that a graph can contain it."""
        return self._kernel(self.gate.device, self.gate.dtype) == "grouped"

    def loop(self, rows_ND: Tensor, ends_E: Tensor) -> Tensor:
        """Apply experts one by one to rows sorted by expert."""
        sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
        # `unbind` assembles its gradient once; that of a slice would be as large as all experts each time.
        gates, ups, downs = (matrices.unbind() for matrices in (self.gate, self.up, self.down))
        biases = [self._biases(name, len(sizes)) for name in ("gate_bias", "up_bias", "down_bias")]
        outputs, apply = [], self._linear()
        for e, rows in enumerate(rows_ND.split(sizes)):
            if len(rows) or not len(rows_ND):  # without any rows, the weights still get gradients: zeros
                gate = apply(rows, gates[e], biases[0][e])
                up = apply(rows, ups[e], biases[1][e])
                outputs.append(apply(self.activation(gate, up), downs[e], biases[2][e]))
        return torch.cat(outputs)

    def _linear(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        """Return the product of one expert."""
        if self.fp8 is not None:
            return partial(_float8, self.fp8)
        return batch_invariant.linear if self.exact else nn.functional.linear

    def _biases(self, name: str, count: int) -> Any:
        biases_EF = getattr(self, name)
        return [None] * count if biases_EF is None else biases_EF.unbind()

    def grouped(self, rows_ND: Tensor, ends_E: Tensor, expert_N: Tensor) -> Tensor:
        """The same in three grouped GEMMs; row offsets stay on the device."""

        def product(rows: Tensor, matrices: Tensor, biases: Tensor | None) -> Tensor:
            if self.fp8 is not None:
                result = grouped_linear(rows, matrices, ends_E, self.fp8)
            else:
                matrices = matrices.to(rows.dtype).transpose(1, 2)
                result = nn.functional.grouped_mm(rows, matrices, offs=ends_E)
            if biases is None:
                return result
            # A product with ones and zeros is exact, and its gradient a sum whose order is always the same.
            member_NE = (expert_N.unsqueeze(1) == torch.arange(len(ends_E), device=rows.device)).to(rows.dtype)
            return result + member_NE @ biases.to(rows.dtype)

        gate, up = product(rows_ND, self.gate, self.gate_bias), product(rows_ND, self.up, self.up_bias)
        return product(self.activation(gate, up), self.down, self.down_bias)


def _float8(weights: Float8Weights, rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    y = linear(rows, weights, (matrix,))
    return y if bias is None else y + bias.to(y.dtype)


def _summed(made_TXD: Tensor) -> Tensor:
    """Return the sum over X in order: PyTorch's own may have another order where a vector ends."""
    first_TD, *others = made_TXD.unbind(1)
    return sum(others, first_TD)


def gather_rows(rows: Tensor, numbers: Tensor, back: Tensor, times: int = 1) -> Tensor:
    """Gather rows by index, each `times` times. The backward pass is a gather too: `back` has the positions of each
    row's copies, so that no two threads add to one number."""
    gathered: Tensor = _Gathered.apply(rows, numbers, back, times)
    return gathered


class _Gathered(torch.autograd.Function):
    """See `gather_rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, numbers: Tensor, back: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.times = times
        return rows[numbers]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        gathered = gradient[back]
        return gathered if ctx.times == 1 else gathered.unflatten(0, (-1, ctx.times)).sum(dim=1), None, None, None


# -- balance, by an auxiliary loss


class LoadBalanceLoss(nn.Module):
    """Adds the gradient of an auxiliary load-balancing loss, which is not part of the recorded loss.

    The loss of a step is `coefficient` times the mean over its tokens of `uneven`, per microbatch.
    """

    loss_scale: Tensor
    whole_share: Callable[[Tensor], Tensor] | None = None
    """Averages the experts' shares of tokens over workers that have other parts of the same sequences."""

    def __init__(self, coefficient: float) -> None:
        super().__init__()
        self.coefficient = coefficient
        self.register_buffer("loss_scale", torch.zeros(()), persistent=False)
        """1 / tokens of a step: see `set_loss_scale`."""

    @torch.compiler.disable  # it would drop the loss, which looks unused, and its gradient
    def forward(self, y_TD: Tensor, logits_TE: Tensor, chosen_TX: Tensor) -> Tensor:
        """Return the experts' output unchanged."""
        if not logits_TE.requires_grad or self.coefficient == 0:
            return y_TD
        imbalance = uneven(logits_TE, chosen_TX, self.whole_share)
        out: Tensor = _Attached.apply(y_TD, imbalance, self.loss_scale, self.coefficient * len(y_TD))
        return out


def uneven(logits_TE: Tensor, chosen_TX: Tensor, whole_share: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the load imbalance: X for an even load, more otherwise (Switch Transformer, eq. 4 to 6).

    Number of experts times the sum over experts of their share of tokens times their mean probability. With
    `whole_share`, which gives shares of more tokens than these, it is the part of these tokens in their imbalance.
    """
    experts = torch.arange(logits_TE.shape[1], device=logits_TE.device)
    share_E = (chosen_TX.flatten().unsqueeze(1) == experts).sum(dim=0) / len(logits_TE)
    share_E = share_E if whole_share is None else whole_share(share_E)
    return len(experts) * (share_E * logits_TE.float().softmax(dim=-1).mean(dim=0)).sum()


class _Attached(torch.autograd.Function):
    """Identity that also backpropagates a loss which is not part of its output."""

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
    """Set the loss scale of a step, 1 / tokens, for every auxiliary loss. Call it before the passes."""
    for module in model.modules():
        if isinstance(module, LoadBalanceLoss):
            module.loss_scale.fill_(scale)


# -- balance, by a bias (DeepSeek-V3)


class BiasBalance(nn.Module):
    """Routing bias per expert, which affects choice but not weights: raised for underloaded experts, else lowered."""

    bias: Tensor
    counts: Tensor

    def __init__(self, count: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("bias", torch.zeros(count, dtype=torch.float32))
        self.register_buffer("counts", torch.zeros(count, dtype=torch.int64), persistent=False)
        """Tokens per expert in this step's passes so far."""

    @torch.compiler.disable
    def forward(self, y_TD: Tensor, chosen_TX: Tensor) -> Tensor:
        """Return the experts' output unchanged."""
        out: Tensor = _Counted.apply(y_TD, chosen_TX, self.counts)
        return out


class _Counted(torch.autograd.Function):
    """Identity that counts tokens per expert in the backward pass: recomputation runs forward twice, and evaluation has
    no backward pass."""

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
    """Update every bias by its rate, towards an even load, and reset counts. Call it after the optimizer's step.

    `world_sum` sums counts over workers with other tokens and the same experts.
    """
    balances = [module for module in model.modules() if isinstance(module, BiasBalance)]
    if not balances:
        return
    totals = world_sum(torch.cat([module.counts for module in balances])).split([len(m.counts) for m in balances])
    for module, total_E in zip(balances, totals, strict=True):
        # In integers, so that an expert with exactly its share stays unchanged.
        module.bias += module.rate * (total_E.sum() - total_E * len(total_E)).sign()
        module.counts.zero_()


# -- the MoE feed-forward


class MoeFeedForward(nn.Module):
    """A MoE feed-forward balanced by an auxiliary loss: Mixtral, Qwen3-MoE, gpt-oss."""

    def __init__(self, router: Linear, route: Route, experts: Experts, balance: float) -> None:
        super().__init__()
        self.router, self.route, self.experts, self.balance = router, route, experts, LoadBalanceLoss(balance)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Apply each token's experts."""
        x_TD = x_BLD.flatten(0, 1)
        logits_TE = self.router(x_TD)
        weights_TX, chosen_TX = self.route(logits_TE)
        y_TD = self.experts(x_TD, weights_TX, chosen_TX)
        return self.balance(y_TD, logits_TE, chosen_TX).view(x_BLD.shape)
