"""Adafactor (Shazeer and Stern 2018): second moments factored into a mean per row and per column.

Without momentum, with the learning rate of the schedule instead of a relative one, and with updates clipped to a root
mean square of one. Means are over rows and columns of whole matrices: workers with parts of a matrix reduce their sums,
all matrices in one collective, and the squares of their updates in another.
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

EXPONENT = -0.8
"""The decay of second moments is 1 - step ** EXPONENT."""
LEAST_SQUARE = 1e-30
LARGEST = 1.0
"""Largest root mean square of an update."""


def adafactor_states(item: ParameterState) -> State:
    """Return second moments: per row and column of a matrix, per element of anything else."""
    state = {"step": torch.zeros((), dtype=torch.float32, device=item.weight.device)}
    if not _factored(item):
        return state | {"square": zeros_like(item.parameter, torch.float32)}
    for key, shape in zip(("rows", "columns"), _shapes(item), strict=True):
        here = torch.zeros(shape, device=item.weight.device)
        state[key] = laid_out(here, shape, item.parameter, copies=True)
    return state


def adafactor(items: Sequence[ParameterState], group: Mapping[str, Any], dice: RoundingBits) -> None:
    """Update each parameter."""
    torch._foreach_add_([item.state["step"] for item in items], 1.0)
    for shared in _by_shard_group(items):
        _learn(shared)
        norms = torch.stack([_update_square(item) for item in shared])
        add_up(norms, shared[0].parameter)
        for item, norm in zip(shared, norms.unbind(), strict=True):
            clip = (norm / math.prod(item.shape)).sqrt().div(LARGEST).clamp(min=1.0)
            weight = opened(item.weight)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(_update(item).mul_(group["lr"] / clip))
            item.put("weight", item.weight, weight, dice)


def _factored(item: ParameterState) -> bool:
    return len(item.shape) >= 2


def _shapes(item: ParameterState) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the row and column means."""
    return item.shape[:-1], (*item.shape[:-2], item.shape[-1])


def _by_shard_group(items: Sequence[ParameterState]) -> Iterator[list[ParameterState]]:
    """Yield parameters that are sharded over the same workers."""
    groups = dict[Any, list[ParameterState]]()
    for item in items:
        mesh = item.parameter.device_mesh if isinstance(item.parameter, DTensor) else None
        groups.setdefault((mesh, sharded_axes(item.parameter)), []).append(item)
    yield from groups.values()


def _learn(items: Sequence[ParameterState]) -> None:
    """Update the second moments."""
    factored = [item for item in items if _factored(item)]
    sums = [part for item in factored for part in _sums(item)]
    if sums:
        flat = torch.cat([part.reshape(-1) for part in sums])
        add_up(flat, factored[0].parameter)
        sums = [
            total.view_as(part) for part, total in zip(sums, torch.split(flat, [p.numel() for p in sums]), strict=True)
        ]
    totals = iter(sums)
    for item in items:
        weight = item.state["step"] ** EXPONENT  # of the new squares
        if _factored(item):
            to_local(item.state["rows"]).lerp_(next(totals) / item.shape[-1], weight)
            to_local(item.state["columns"]).lerp_(next(totals) / item.shape[-2], weight)
        else:
            item.moment("square").lerp_(opened(item.gradient).square().add_(LEAST_SQUARE), weight)


def _sums(item: ParameterState) -> tuple[Tensor, Tensor]:
    """Return this worker's sums of squares over rows and columns of the whole matrix."""
    square = opened(item.gradient).square().add_(LEAST_SQUARE)
    rows, columns = (square.new_zeros(shape) for shape in _shapes(item))
    slices = item.box.slices((0,) * len(item.shape))
    rows[slices[:-1]] = square.sum(dim=-1)
    columns[(*slices[:-2], slices[-1])] = square.sum(dim=-2)
    return rows, columns


def _update(item: ParameterState) -> Tensor:
    """Return the unclipped update: the gradient over the root of the second moment."""
    if not _factored(item):
        return opened(item.gradient) * item.moment("square").rsqrt()
    rows, columns = _shares(item)
    return (opened(item.gradient) * rows.unsqueeze(-1)).mul_(columns.unsqueeze(-2))


def _update_square(item: ParameterState) -> Tensor:
    """Return the sum of squares of an update, without materializing that of a matrix."""
    if not _factored(item):
        return _update(item).square().sum()
    rows, columns = _shares(item)
    along_rows = torch.matmul(opened(item.gradient).square(), columns.square().unsqueeze(-1)).squeeze(-1)
    return (along_rows * rows.square()).sum()


def _shares(item: ParameterState) -> tuple[Tensor, Tensor]:
    """Return the factors of each row and column of this worker's part."""
    slices = item.box.slices((0,) * len(item.shape))
    rows, columns = to_local(item.state["rows"]), to_local(item.state["columns"])
    shares = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt()
    return shares[slices[:-1]], columns.rsqrt()[(*slices[:-2], slices[-1])]
