"""Batch-invariant products and activations: a row has the same bits in every batch, wherever in it the row is.

BLAS chooses a kernel by the number of rows, and adds up in another order in each. Here rows are cut into tiles of
`ROWS`, the last one filled up with zeros, and every tile is a product of the same shape, so that only the place within
a tile and the other rows could matter: `rows_are_independent` tries that for a shape. There are always two tiles at
least: MKL gives a single product to all threads, which then share out its sum, and several to one thread each, so that
bits do not depend on the number of threads either.

PyTorch's activations treat the end of a vector, which depends on the batch, with other code than the rest of it; but
not exp, log, cos and tanh, nor what IEEE rounds correctly. Its norms, softmax and log-softmax go row by row.

The backward passes are ordinary ones.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 16
"""Rows of a tile: the fewest of which no place is special in MKL. Decoding one sequence pays for all of them."""
LEAST_TILES = 2


def linear(x: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, of any number of rows, each of which has the same bits in any batch."""
    y: Tensor = _Linear.apply(x, weight_OD, bias_O)
    return y


def product(x_TD: Tensor, weight_OD: Tensor) -> Tensor:
    """Return x @ weight.T in tiles of rows, without gradients."""
    rows, width = x_TD.shape
    tiles = max(LEAST_TILES, -(-rows // ROWS))
    padded_TD = torch.nn.functional.pad(x_TD, (0, 0, 0, tiles * ROWS - rows)).contiguous()
    weights = weight_OD.t().expand(tiles, -1, -1)
    return torch.bmm(padded_TD.view(tiles, ROWS, width), weights).flatten(0, 1)[:rows]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OD)
        y = product(x.flatten(0, -2), weight_OD).view(*x.shape[:-1], -1)
        return y if bias_O is None else y + bias_O

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OD = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        dx = dy @ weight_OD if wants_x else None
        dy_TO = dy.flatten(0, -2)
        dweight_OD = dy_TO.T @ x.flatten(0, -2) if wants_weight else None
        return dx, dweight_OD, dy_TO.sum(dim=0) if wants_bias else None


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x); an element has the same bits wherever it is."""
    y: Tensor = _Silu.apply(x)
    return y


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x / x.neg().exp_().add_(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(dy, x)


@cache
def rows_are_independent(outputs: int, inputs: int, device: str = "cpu") -> bool:
    """Whether rows of a product with a matrix [outputs, inputs] have the same bits at each place, by trying it.

    That is so with the libraries known; others may treat the last rows of a tile in their own way.
    """
    numbers = torch.arange(max(outputs, 2 * ROWS) * inputs, dtype=torch.float32, device=device)
    noise = (numbers * 0.6180339887).frac_().sub_(0.5)  # evenly spread: as good as random, and cheap
    weight_OD, x_TD = noise[: outputs * inputs].view(outputs, inputs), noise[-2 * ROWS * inputs :].view(-1, inputs)
    expected = product(x_TD, weight_OD)
    moved = (product(x_TD.roll(shift, 0), weight_OD).roll(-shift, 0) for shift in range(1, ROWS))
    alone = (product(x_TD[row : row + 1], weight_OD)[0] for row in (0, ROWS - 1))
    return all(torch.equal(y, expected) for y in moved) and all(
        torch.equal(y, expected[row]) for y, row in zip(alone, (0, ROWS - 1), strict=True)
    )


@cache
def elements_are_independent(device: str = "cpu") -> bool:
    """Whether exp and cos of an element have the same bits at each place of a vector, and exp(0) is 1, by trying it."""
    noise = torch.arange(1000, dtype=torch.float32, device=device).mul_(0.6180339887).frac_().mul_(-20)
    same = (
        torch.equal(operation(noise[place:].clone()), operation(noise)[place:])
        for operation in (torch.exp, torch.cos)
        for place in range(1, 64)
    )
    return all(same) and bool((torch.zeros(1000, device=device).exp() == 1).all())
