"""Adafactor (Shazeer and Stern 2018): of the gradient's square, a mean for each row and each column is kept.

Their product stands for the mean of each element. Without momentum, with the learning rate of the schedule rather than
one relative to the weights, and with updates clipped to a root mean square of one. Means are over rows and columns of
whole matrices: workers that have parts of one add their sums up, all matrices in one exchange, and their updates'
squares in another.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from headway.parallel.local_part import to_local
from headway.train.optim.parameter_state import (
    ParameterState,
    State,
    add_up,
    laid_out,
    opened,
    sharded_axes,
    zeros_like,
)
from headway.train.optim.rounding import RoundingBits

__all__ = ["adafactor", "adafactor_states"]

EXPONENT = -0.8
"""The decay of the mean of squares is 1 - step ** EXPONENT."""
LEAST_SQUARE = 1e-30
LARGEST = 1.0
"""Root mean square of an update."""


def adafactor_states(one: ParameterState) -> State:
    """Means of squares: of rows and columns of a matrix, or of each element of what is none."""
    state = {"step": torch.zeros((), dtype=torch.float32, device=one.weight.device)}
    if not _factored(one):
        return state | {"square": zeros_like(one.parameter, torch.float32)}
    for key, shape in zip(("rows", "columns"), _shapes(one), strict=True):
        here = torch.zeros(shape, device=one.weight.device)
        state[key] = laid_out(here, shape, one.parameter, copies=True)
    return state


def adafactor(items: Sequence[ParameterState], group: Mapping[str, Any], dice: RoundingBits) -> None:
    """One update of each."""
    torch._foreach_add_([one.state["step"] for one in items], 1.0)
    for shared in _by_team(items):
        _learn(shared)
        norms = torch.stack([_update_square(one) for one in shared])
        add_up(norms, shared[0].parameter)
        for one, norm in zip(shared, norms.unbind(), strict=True):
            clip = (norm / math.prod(one.shape)).sqrt().div(LARGEST).clamp(min=1.0)
            weight = opened(one.weight)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(_update(one).mul_(group["lr"] / clip))
            one.put("weight", one.weight, weight, dice)


def _factored(one: ParameterState) -> bool:
    return len(one.shape) >= 2


def _shapes(one: ParameterState) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the means of rows and of columns."""
    return one.shape[:-1], (*one.shape[:-2], one.shape[-1])


def _by_team(items: Sequence[ParameterState]) -> Iterator[list[ParameterState]]:
    """Parameters whose parts lie on the same workers."""
    teams = dict[Any, list[ParameterState]]()
    for one in items:
        mesh = one.parameter.device_mesh if isinstance(one.parameter, DTensor) else None
        teams.setdefault((mesh, sharded_axes(one.parameter)), []).append(one)
    yield from teams.values()


def _learn(items: Sequence[ParameterState]) -> None:
    """Bring the means of squares up to this step."""
    factored = [one for one in items if _factored(one)]
    sums = [part for one in factored for part in _sums(one)]
    if sums:
        flat = torch.cat([part.reshape(-1) for part in sums])
        add_up(flat, factored[0].parameter)
        sums = [
            total.view_as(part) for part, total in zip(sums, torch.split(flat, [p.numel() for p in sums]), strict=True)
        ]
    totals = iter(sums)
    for one in items:
        weight = one.state["step"] ** EXPONENT  # of what is new
        if _factored(one):
            to_local(one.state["rows"]).lerp_(next(totals) / one.shape[-1], weight)
            to_local(one.state["columns"]).lerp_(next(totals) / one.shape[-2], weight)
        else:
            one.moment("square").lerp_(opened(one.gradient).square().add_(LEAST_SQUARE), weight)


def _sums(one: ParameterState) -> tuple[Tensor, Tensor]:
    """Sums of squares over rows and columns of the whole, as far as this worker has them."""
    square = opened(one.gradient).square().add_(LEAST_SQUARE)
    rows, columns = (square.new_zeros(shape) for shape in _shapes(one))
    slices = one.box.slices((0,) * len(one.shape))
    rows[slices[:-1]] = square.sum(dim=-1)
    columns[(*slices[:-2], slices[-1])] = square.sum(dim=-2)
    return rows, columns


def _update(one: ParameterState) -> Tensor:
    """The gradient over the root of its mean square, before it is clipped."""
    if not _factored(one):
        return opened(one.gradient) * one.moment("square").rsqrt()
    rows, columns = _shares(one)
    return (opened(one.gradient) * rows.unsqueeze(-1)).mul_(columns.unsqueeze(-2))


def _update_square(one: ParameterState) -> Tensor:
    """The sum of its squares; of a matrix, without making it: that would be as much new memory again."""
    if not _factored(one):
        return _update(one).square().sum()
    rows, columns = _shares(one)
    along_rows = torch.matmul(opened(one.gradient).square(), columns.square().unsqueeze(-1)).squeeze(-1)
    return (along_rows * rows.square()).sum()


def _shares(one: ParameterState) -> tuple[Tensor, Tensor]:
    """What each row and each column of this worker's part is multiplied by."""
    slices = one.box.slices((0,) * len(one.shape))
    rows, columns = to_local(one.state["rows"]), to_local(one.state["columns"])
    shares = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt()
    return shares[slices[:-1]], columns.rsqrt()[(*slices[:-2], slices[-1])]
