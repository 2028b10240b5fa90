"""Batch-invariant products and activations: a row has the same bits in every batch, wherever in it the row is.

BLAS chooses a kernel by the number of rows, and adds up in another order in each. Here rows are cut into tiles of
`ROWS`, the last one filled up with zeros, and every tile is a product of the same shape, so that only the place within
a tile and the other rows could matter: `rows_are_independent` tries that for a shape. Where there are several tiles or
threads, MKL gives each tile to one thread, but a single tile to all, which then share out its sums: so there are two at
least, and bits do not depend on the number of threads either.

Tiles of 16 rows take 1.2 to 2.6 times as long as one product of all rows, tiles of 128 rows 0.8 to 1.4 times (SmolLM2's
shapes, one core). So most rows of a large batch go into `WIDE` tiles, for shapes where `wide_tiles_agree`: where both
tiles have the same bits, since both add up in order.

PyTorch's activations treat the end of a vector, which depends on the batch, with other code than the rest of it; but
not exp, log, cos and tanh, nor what IEEE rounds correctly. Its norms, softmax and log-softmax go row by row.

The backward passes are ordinary ones. On GPUs, products are those of `exact_products.py`.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from headway.kernels import dispatch, exact_products

ROWS = 16
"""Rows of a tile: the fewest of which no place is special in MKL. Decoding one sequence pays for all of them."""
WIDE = 128
"""Rows of a wide tile."""


def linear(x: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, of any number of rows, each of which has the same bits in any batch."""
    y: Tensor = _Linear.apply(x, weight_OD, bias_O)
    return y


def float32_product(x_TD: Tensor, weight_OD: Tensor) -> Tensor:
    """Return x @ weight.T in float32, without gradients."""
    if dispatch.exact_triton(x_TD.device):
        return exact_products.product(x_TD, weight_OD, dtype=torch.float32)
    return product(x_TD, weight_OD)


def product(x_TD: Tensor, weight_OD: Tensor) -> Tensor:
    """Return x @ weight.T in tiles of rows, without gradients."""
    wide = len(x_TD) // WIDE
    if wide < least_tiles(len(weight_OD)) or not wide_tiles_agree(*weight_OD.shape, x_TD.device.type):
        return _in_tiles(x_TD, weight_OD, ROWS)
    most, rest = x_TD[: wide * WIDE], x_TD[wide * WIDE :]
    y_TO = _in_tiles(most, weight_OD, WIDE)
    return torch.cat((y_TO, _in_tiles(rest, weight_OD, ROWS))) if len(rest) else y_TO


def least_tiles(outputs: int) -> int:
    """Return the fewest products at a time of which each has one thread, and is not that of a matrix and a vector."""
    return 1 if torch.get_num_threads() == 1 and outputs > 1 else 2


def _in_tiles(x_TD: Tensor, weight_OD: Tensor, size: int) -> Tensor:
    """Return x @ weight.T in tiles of one size."""
    rows, width = x_TD.shape
    tiles = max(least_tiles(len(weight_OD)), -(-rows // size))
    padded_TD = torch.nn.functional.pad(x_TD, (0, 0, 0, tiles * size - rows)).contiguous()
    y_TO = torch.bmm(padded_TD.view(tiles, size, width), weight_OD.t().expand(tiles, -1, -1)).flatten(0, 1)
    return y_TO[:rows]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OD)
        if dispatch.exact_triton(x.device):
            return exact_products.product(x.flatten(0, -2), weight_OD, bias_O).view(*x.shape[:-1], -1)
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
    x_TD, weight_OD = _noise(2 * ROWS, inputs, device), _noise(outputs, inputs, device)
    expected = _in_tiles(x_TD, weight_OD, ROWS)
    moved = (_in_tiles(x_TD.roll(shift, 0), weight_OD, ROWS).roll(-shift, 0) for shift in range(1, ROWS))
    alone = (_in_tiles(x_TD[row : row + 1], weight_OD, ROWS)[0] for row in (0, ROWS - 1))
    return all(torch.equal(y, expected) for y in moved) and all(
        torch.equal(y, expected[row]) for y, row in zip(alone, (0, ROWS - 1), strict=True)
    )


@cache
def wide_tiles_agree(outputs: int, inputs: int, device: str = "cpu") -> bool:
    """Whether a wide tile gives each of its rows the bits of a tile of `ROWS`, by trying it: another order of sums
    would change most of them."""
    if device == "meta":
        return False
    # Recomputation stores the products of a pass by their order, and these are made in the first pass only.
    with _disable_current_modes():
        x_TD, weight_OD = _noise(2 * WIDE, inputs, device), _noise(outputs, inputs, device)
        return torch.equal(_in_tiles(x_TD, weight_OD, WIDE), _in_tiles(x_TD, weight_OD, ROWS))


def _noise(rows: int, width: int, device: str) -> Tensor:
    """Return evenly spread numbers: as good as random ones, and cheap."""
    row_R, column_W = (torch.arange(count, dtype=torch.float64, device=device) for count in (rows, width))
    turns_R, turns_W = row_R.mul_(0.7548776662466927).frac_().float(), column_W.mul_(0.5698402909980532).frac_().float()
    return (turns_R.unsqueeze(1) + turns_W).frac_().sub_(0.5)


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
