"""Stochastic rounding with random bits that are a pure function of (seed, step, tensor, position in the whole tensor).

A value between two bfloat16 neighbours is rounded to either, with probabilities that preserve the mean: updates too
small for the format still accumulate. The bits come from a counter-based hash, so that every mesh, and every replay,
gets the same bits for the same element.

    row, column   of the element: its flat index in the whole tensor, divided by the length of the last dim
    k0 .. k3      the first four words of sha256("seed/step/name"), by the parameter's name
    word          mix(mix(mix(row ^ k0) ^ k1) + mix(mix(column ^ k2) ^ k3)), of 32 bits

Sixteen bits round a number, and one word serves all numbers of an element: its lower half rounds the weight (or Muon's
momentum), its upper half the first moment, and the upper half of its product with an odd number the second moment. All
operations are on wrapping int32, which CPUs and GPUs do alike.
"""

import hashlib
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.state.box import Box

OTHER = 0x9E3779B1 - 2**32
"""An odd number: the upper half of a product with it depends on all bits of the other factor."""


@dataclass(frozen=True)
class RoundingBits:
    """The random bits of one step of a run."""

    seed: int
    step: int

    def key(self, name: str) -> bytes:
        """Return the hash keys of a parameter."""
        return hashlib.sha256(f"{self.seed}/{self.step}/{name}".encode()).digest()[:16]

    def bits(self, name: str, box: Box, shape: tuple[int, ...], device: torch.device, kept: str = "weight") -> Tensor:
        """Return the bits of a box of a parameter of this name and whole shape, or of a state of it: an int32 per
        element, of which the lower 16 bits count."""
        k0, k1, k2, k3 = struct.unpack("<4i", self.key(name))
        rows = _mix(_mix(_rows(box, shape, device) ^ k0) ^ k1)
        columns = torch.arange(box.start[-1], box.stop[-1], dtype=torch.int32, device=device)
        word = _mix(rows.unsqueeze(-1) + _mix(_mix(columns ^ k2) ^ k3))
        match kept:
            case "exp_avg":
                return word >> 16
            case "exp_avg_sq":
                return word.mul_(OTHER) >> 16
            case _:
                return word


def to_bfloat16(value: Tensor, bits: Tensor) -> Tensor:
    """Round float32 up or down by its bits, which are overwritten; non-finite values stay."""
    raw = value.view(torch.int32)
    rounded = bits.bitwise_and_(0xFFFF).add_(raw).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value).to(torch.bfloat16)


def _rows(box: Box, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the row numbers of a box in the whole tensor."""
    rows, stride = torch.zeros((), dtype=torch.int64, device=device), 1
    for dim in reversed(range(len(shape) - 1)):
        indices = torch.arange(box.start[dim], box.stop[dim], device=device) * stride
        rows = rows + indices.view(-1, *[1] * (len(shape) - 2 - dim))
        stride *= shape[dim]
    return rows.to(torch.int32)


def _mix(x: Tensor) -> Tensor:
    """Mix 32-bit words bijectively, in place."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> 15).bitwise_and_((1 << 17) - 1))
