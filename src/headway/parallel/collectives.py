"""Differentiable collectives on activations, each with its collective in the backward pass.

    gathered   all-gather                 backward: reduce-scatter
    scattered  reduce-scatter             backward: all-gather
    summed     all-reduce                 backward: identity
    copied     identity                   backward: all-reduce
    whole      all-gather                 backward: this worker's share
    exchanged  all-to-all of rows         backward: all-to-all the other way
    shifted    send to the next worker    backward: to the one before

`whole` is for what all workers then compute alike. Shares are equal parts of one dim. A tensor that a worker holds
whole is the same on all workers of the group.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return all shares of a tensor, by rank."""
    full: Tensor = _Gathered.apply(x, dim, group)
    return full


def scattered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this worker's share of the sum over workers."""
    share: Tensor = _Scattered.apply(x, dim, group)
    return share


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over workers."""
    total: Tensor = _Summed.apply(x, group)
    return total


def copied(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor itself, whose gradient is summed over workers."""
    same: Tensor = _Copied.apply(x, group)
    return same


def whole(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return all shares of a tensor, by rank, for a result that all workers compute: its gradient is not summed."""
    full: Tensor = _Whole.apply(x, dim, group)
    return full


def exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows that workers have for this one, by rank: `sent` of `rows` go to each, `received` come."""
    arrived: Tensor = _Exchanged.apply(rows, sent, received, group)
    return arrived


def shifted(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor of the worker before this one; the first gets that of the last."""
    arrived: Tensor = _Shifted.apply(x, group)
    return arrived


def _shift(x: Tensor, by: int, group: dist.ProcessGroup) -> Tensor:
    rank, size, arrived = group.rank(), group.size(), torch.empty_like(x, memory_format=torch.contiguous_format)
    send = dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=(rank + by) % size)
    receive = dist.P2POp(dist.irecv, arrived, group=group, group_peer=(rank - by) % size)
    for request in dist.batch_isend_irecv([send, receive]):
        request.wait()
    return arrived


def _exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=group)
    return arrived


def _gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    parts = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    _all_gather(parts, x.contiguous(), group)
    return parts.unflatten(0, (group.size(), -1)).movedim(0, dim).flatten(dim, dim + 1)


def _scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    parts = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    share = torch.empty_like(parts[0])
    _reduce_scatter(share, parts.flatten(0, 1), group)
    return share


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _scatter(gradient, ctx.dim, ctx.group), None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.chunk(ctx.group.size(), dim=ctx.dim)[ctx.group.rank()], None, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


class _Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _shift(x, 1, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _shift(gradient, -1, ctx.group), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradient, ctx.dim, ctx.group), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


def _all_gather(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    # Renamed after PyTorch 2.11; the old name now warns.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(out, x, group=group)


def _reduce_scatter(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    call(out, x, group=group)
