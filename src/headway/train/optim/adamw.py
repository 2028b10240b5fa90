"""AdamW, for any precision of moments and weights.

`adamw` uses the fused kernel of torch.optim, on buckets of rows. float32 tensors are updated in place, bitwise as by
torch.optim.AdamW, except for the last few elements of a tensor that does not fill whole CPU registers: PyTorch rounds
those differently, and which are last depends on the mesh. `fused_adamw` uses Triton, on GPUs: one pass over all tensors
that includes clipping. Both use the same random bits for rounding.
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

REGISTER = 16
"""float32 lanes of the widest CPU register."""
BUCKET_ELEMENTS = 1 << 25
"""Size of temporary float32 copies of lower-precision weights, gradients and moments."""
ROOT = "exp_avg_root"
"""Square root of the second moment, which is what eight bits store."""


def adamw_states(item: ParameterState, dtype: torch.dtype) -> State:
    """Return two zero moments, allocated at the start: saved shapes never change."""
    return _step(item) | {key: zeros_like(item.parameter, dtype) for key in ("exp_avg", "exp_avg_sq")}


def eightbit_states(item: ParameterState) -> State:
    """Return two 8-bit moments; raise ModelError if the mesh splits a quantization block."""
    for box in item.boxes.values():
        inside = [edge for edge in (box.start[-1], box.stop[-1]) if edge % BLOCK and edge != item.shape[-1]]
        if inside and box.volume:
            raise ModelError(
                f"{item.name} is split at column {inside[0]}, inside a quantization block of {BLOCK} of adamw-8bit",
                hint=f"use a tensor axis that leaves each worker a multiple of {BLOCK} columns, or another optimizer",
            )
    here = (*item.box.shape[:-1], blocks(item.box.shape[-1]))
    scales_shape = (*item.shape[:-1], blocks(item.shape[-1]))
    state = _step(item)
    for key in ("exp_avg", ROOT):
        signed, device = key == "exp_avg", item.weight.device
        codes, _ = encode(torch.zeros(1, device=device), signed)
        state[key] = zeros_like(item.parameter, torch.uint8).fill_(int(codes))
        state[f"{key}_scale"] = laid_out(torch.zeros(here, device=device), scales_shape, item.parameter)
    return state


def _step(item: ParameterState) -> State:
    return {"step": torch.zeros((), dtype=torch.float32, device=item.weight.device)}


@dataclass(frozen=True)
class _Rows:
    """Some rows of this worker's part of a parameter."""

    item: ParameterState
    first: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor[self.first : self.end]

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return both moments in float32."""
        if ROOT not in self.item.state:
            return opened(self.of(self.item.moment("exp_avg"))), opened(self.of(self.item.moment("exp_avg_sq")))
        mean, root = (
            decode(self.of(self.item.moment(key)), self.of(self.item.moment(f"{key}_scale")), key == "exp_avg")
            for key in ("exp_avg", ROOT)
        )
        return mean, root.square_()

    def put(self, weight: Tensor, mean: Tensor, square: Tensor, dice: RoundingBits) -> None:
        """Store all results."""
        item = self.item
        item.put("weight", self.of(item.weight), weight, dice, self.first)
        if ROOT not in item.state:
            item.put("exp_avg", self.of(item.moment("exp_avg")), mean, dice, self.first)
            item.put("exp_avg_sq", self.of(item.moment("exp_avg_sq")), square, dice, self.first)
            return
        for key, value in (("exp_avg", mean), (ROOT, square.sqrt_())):
            codes, scales = encode(value, signed=key == "exp_avg")
            self.of(item.moment(key)).copy_(codes)
            self.of(item.moment(f"{key}_scale")).copy_(scales)


def fused_adamw(
    items: Sequence[ParameterState],
    group: Mapping[str, Any],
    dice: RoundingBits,
    factor: Tensor | None,
    before: AdamwTable | None,
) -> AdamwTable | None:
    """Update each parameter, and the bfloat16 copy of master weights; gradients are multiplied by the factor.

    Return the table of addresses, to pass to the next call.
    """
    if not items:
        return before
    torch._foreach_add_([item.state["step"] for item in items], 1.0)
    parts = [_part(item) for item in items]
    rates = {"lr": group["lr"], "betas": group["betas"], "eps": group["eps"], "weight_decay": group["weight_decay"]}
    if ROOT not in items[0].state:
        return kernels.adamw(parts, **rates, factor=factor, draw=dice.key, before=before)
    books = _books(items[0].weight.device)
    return adamw_8bit(parts, books, **rates, factor=factor, draw=dice.key, before=before)


def _part(item: ParameterState) -> kernels.AdamwPart:
    eight = ROOT in item.state
    return kernels.AdamwPart(
        weight=item.weight.detach(),
        gradient=item.gradient.contiguous(),
        mean=item.moment("exp_avg"),
        square=item.moment(ROOT if eight else "exp_avg_sq"),
        step=item.state["step"],
        name=item.name,
        box=item.box,
        shape=item.shape,
        shown=item.shown,
        scales=(item.moment("exp_avg_scale"), item.moment(f"{ROOT}_scale")) if eight else None,
    )


@cache
def _books(device: torch.device) -> Codebooks:
    cpu = torch.device("cpu")
    return books_of(codebook(True, cpu), codebook(False, cpu), device)


def adamw(items: Sequence[ParameterState], group: Mapping[str, Any], dice: RoundingBits) -> None:
    """Update each parameter."""
    if not items:
        return
    torch._foreach_add_([item.state["step"] for item in items], 1.0)
    for bucket in _buckets(items):
        weights = [opened(rows.of(rows.item.weight)) for rows in bucket]
        gradients = [opened(rows.of(rows.item.gradient)) for rows in bucket]
        moments = [rows.moments() for rows in bucket]
        means, squares = [mean for mean, _ in moments], [square for _, square in moments]
        filled = [[_filled(tensor) for tensor in some] for some in (weights, gradients, means, squares)]
        torch._fused_adamw_(
            *filled,
            [],
            [rows.item.state["step"] for rows in bucket],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        for rows, *tensors in zip(bucket, weights, means, squares, filled[0], filled[2], filled[3], strict=True):
            for tensor, filled_tensor in zip(tensors[:3], tensors[3:], strict=True):
                if filled_tensor is not tensor:
                    tensor.copy_(filled_tensor[: tensor.numel()].view_as(tensor))
            rows.put(*tensors[:3], dice)


def _filled(tensor: Tensor) -> Tensor:
    """Return a CPU tensor padded with zeros to whole registers; itself if it needs no padding."""
    missing = -tensor.numel() % REGISTER if tensor.device.type == "cpu" else 0
    return torch.nn.functional.pad(tensor.reshape(-1), (0, missing)) if missing else tensor


def _buckets(items: Sequence[ParameterState]) -> Iterator[list[_Rows]]:
    """Yield rows that fit into a bucket together; a larger row is alone."""
    bucket, held = list[_Rows](), 0
    for item in items:
        rows = item.box.shape[0]
        each = item.elements // rows
        step = max(1, BUCKET_ELEMENTS // each)
        for first in range(0, rows, step):
            end = min(first + step, rows)
            if bucket and held + each * (end - first) > BUCKET_ELEMENTS:
                yield bucket
                bucket, held = [], 0
            bucket.append(_Rows(item, first, end))
            held += each * (end - first)
    if bucket:
        yield bucket
