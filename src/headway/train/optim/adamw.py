"""AdamW, whatever its moments and weights are kept in.

`adamw` is PyTorch's: the fused kernel of torch.optim, a bucket of rows at a time. What is kept in float32 is updated in
place, and is what torch.optim.AdamW would make of it, to the bit, but for the last few elements of a tensor that does
not fill whole registers of a CPU: PyTorch rounds those otherwise than all others, and which are last depends on the
mesh. `fused_adamw` is Triton's, for GPUs: one pass over all tensors, with clipping on the way. Both round by the same
bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headway.errors import ModelError
from headway.kernels import adamw as kernels
from headway.kernels.adamw import AdamwTable
from headway.kernels.adamw_8bit import Codebooks, adamw_8bit, books_of
from headway.train.optim.eightbit import BLOCK, blocks, codebook, decode, encode
from headway.train.optim.parameter_state import ParameterState, State, laid_out, opened, zeros_like
from headway.train.optim.rounding import RoundingBits

__all__ = ["adamw", "adamw_states", "eightbit_states", "fused_adamw"]

REGISTER = 16
"""Numbers of the widest register there is."""
BUCKET_ELEMENTS = 1 << 25
"""Of weights, gradients and moments in float32 at once, where they are kept in less."""
ROOT = "exp_avg_root"
"""Of the second moment, which is what eight bits keep."""


def adamw_states(one: ParameterState, dtype: torch.dtype) -> State:
    """Two moments of one precision, there from the start: what a save copies never changes its shape."""
    return _step(one) | {key: zeros_like(one.parameter, dtype) for key in ("exp_avg", "exp_avg_sq")}


def eightbit_states(one: ParameterState) -> State:
    """Two moments in eight bits; ModelError for a mesh that would cut one of their blocks."""
    for box in one.boxes.values():
        inside = [edge for edge in (box.start[-1], box.stop[-1]) if edge % BLOCK and edge != one.shape[-1]]
        if inside and box.volume:
            raise ModelError(
                f"{one.name} is cut at column {inside[0]}, inside a block of {BLOCK} that adamw-8bit scales together",
                hint=f"use a tensor axis that leaves each worker a multiple of {BLOCK} columns, or another optimizer",
            )
    here = (*one.box.shape[:-1], blocks(one.box.shape[-1]))
    whole = (*one.shape[:-1], blocks(one.shape[-1]))
    found = _step(one)
    for key in ("exp_avg", ROOT):
        signed, device = key == "exp_avg", one.weight.device
        codes, _ = encode(torch.zeros(1, device=device), signed)
        found[key] = zeros_like(one.parameter, torch.uint8).fill_(int(codes))
        found[f"{key}_scale"] = laid_out(torch.zeros(here, device=device), whole, one.parameter)
    return found


def _step(one: ParameterState) -> State:
    return {"step": torch.zeros((), dtype=torch.float32, device=one.weight.device)}


@dataclass(frozen=True)
class _Rows:
    """Some rows of what this worker has of a parameter."""

    one: ParameterState
    first: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor[self.first : self.end]

    def moments(self) -> tuple[Tensor, Tensor]:
        """Both, in float32."""
        if ROOT not in self.one.state:
            return opened(self.of(self.one.moment("exp_avg"))), opened(self.of(self.one.moment("exp_avg_sq")))
        mean, root = (
            decode(self.of(self.one.moment(key)), self.of(self.one.moment(f"{key}_scale")), key == "exp_avg")
            for key in ("exp_avg", ROOT)
        )
        return mean, root.square_()

    def put(self, weight: Tensor, mean: Tensor, square: Tensor, dice: RoundingBits) -> None:
        """Put all back to where they are kept."""
        one = self.one
        one.put("weight", self.of(one.weight), weight, dice, self.first)
        if ROOT not in one.state:
            one.put("exp_avg", self.of(one.moment("exp_avg")), mean, dice, self.first)
            one.put("exp_avg_sq", self.of(one.moment("exp_avg_sq")), square, dice, self.first)
            return
        for key, value in (("exp_avg", mean), (ROOT, square.sqrt_())):
            codes, scales = encode(value, signed=key == "exp_avg")
            self.of(one.moment(key)).copy_(codes)
            self.of(one.moment(f"{key}_scale")).copy_(scales)


def fused_adamw(
    items: Sequence[ParameterState],
    group: Mapping[str, Any],
    dice: RoundingBits,
    factor: Tensor | None,
    before: AdamwTable | None,
) -> AdamwTable | None:
    """One update of each, and of what shows a master copy; gradients are multiplied by the factor on their way.

    Returns where everything lies, which the next call may be given.
    """
    if not items:
        return before
    torch._foreach_add_([one.state["step"] for one in items], 1.0)
    parts = [_part(one) for one in items]
    rates = {"lr": group["lr"], "betas": group["betas"], "eps": group["eps"], "weight_decay": group["weight_decay"]}
    if ROOT not in items[0].state:
        return kernels.adamw(parts, **rates, factor=factor, draw=dice.key, before=before)
    books = _books(items[0].weight.device)
    return adamw_8bit(parts, books, **rates, factor=factor, draw=dice.key, before=before)


def _part(one: ParameterState) -> kernels.AdamwPart:
    eight = ROOT in one.state
    return kernels.AdamwPart(
        weight=one.weight.detach(),
        gradient=one.gradient.contiguous(),
        mean=one.moment("exp_avg"),
        square=one.moment(ROOT if eight else "exp_avg_sq"),
        step=one.state["step"],
        name=one.name,
        box=one.box,
        shape=one.shape,
        shown=one.shown,
        scales=(one.moment("exp_avg_scale"), one.moment(f"{ROOT}_scale")) if eight else None,
    )


@cache
def _books(device: torch.device) -> Codebooks:
    cpu = torch.device("cpu")
    return books_of(codebook(True, cpu), codebook(False, cpu), device)


def adamw(items: Sequence[ParameterState], group: Mapping[str, Any], dice: RoundingBits) -> None:
    """One update of each."""
    if not items:
        return
    torch._foreach_add_([one.state["step"] for one in items], 1.0)
    for bucket in _buckets(items):
        weights = [opened(rows.of(rows.one.weight)) for rows in bucket]
        gradients = [opened(rows.of(rows.one.gradient)) for rows in bucket]
        moments = [rows.moments() for rows in bucket]
        means, squares = [mean for mean, _ in moments], [square for _, square in moments]
        filled = [[_filled(tensor) for tensor in some] for some in (weights, gradients, means, squares)]
        torch._fused_adamw_(
            *filled,
            [],
            [rows.one.state["step"] for rows in bucket],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        for rows, *kept in zip(bucket, weights, means, squares, filled[0], filled[2], filled[3], strict=True):
            for tensor, made in zip(kept[:3], kept[3:], strict=True):
                if made is not tensor:
                    tensor.copy_(made[: tensor.numel()].view_as(tensor))
            rows.put(*kept[:3], dice)


def _filled(tensor: Tensor) -> Tensor:
    """A tensor of the CPU with zeros behind it, up to a whole register; itself where it has one."""
    missing = -tensor.numel() % REGISTER if tensor.device.type == "cpu" else 0
    return torch.nn.functional.pad(tensor.reshape(-1), (0, missing)) if missing else tensor


def _buckets(items: Sequence[ParameterState]) -> Iterator[list[_Rows]]:
    """Rows that fit into a bucket together; a row that does not fit goes alone."""
    bucket, held = list[_Rows](), 0
    for one in items:
        rows = one.box.shape[0]
        each = one.elements // rows
        step = max(1, BUCKET_ELEMENTS // each)
        for first in range(0, rows, step):
            end = min(first + step, rows)
            if bucket and held + each * (end - first) > BUCKET_ELEMENTS:
                yield bucket
                bucket, held = [], 0
            bucket.append(_Rows(one, first, end))
            held += each * (end - first)
    if bucket:
        yield bucket
