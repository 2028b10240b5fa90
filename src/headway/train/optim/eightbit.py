"""Moments in eight bits: blockwise dynamic quantization of 256 neighbours in a row.

Per block the largest absolute value is stored in float32, and per element the code of the nearest of 256 numbers
between -1 and 1 (or 0 and 1), which are denser near zero: seven powers of ten, and within each as many steps as bits
remain (Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization). The second moment is stored as its square
root: the seven powers of ten then cover fourteen of the squares, and no square underflows before its first moment.

Blocks run along the last dim of the whole tensor, so that a mesh that splits other dims, or that one between blocks,
has the same codes as one worker.
"""

from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 256
POWERS = 7


def blocks(length: int) -> int:
    """Return the number of blocks per row; the last may be shorter."""
    return -(-length // BLOCK)


@lru_cache(maxsize=8)
def codebook(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 numbers, ascending."""
    numbers = [0.0, 1.0]
    for power in range(POWERS):
        steps = 2 ** (power if signed else power + 1)
        # midpoints of equal parts between a tenth and one
        middles = [0.1 + 0.9 * (step + 0.5) / steps for step in range(steps)]
        positive = [10.0 ** (power - POWERS + 1) * middle for middle in middles]
        numbers += positive + ([-number for number in positive] if signed else [])
    return torch.tensor(sorted(numbers), dtype=torch.float64).to(torch.float32).to(device)


@lru_cache(maxsize=8)
def _borders(signed: bool, device: torch.device) -> Tensor:
    """Return the midpoints between neighbours."""
    numbers = codebook(signed, torch.device("cpu")).double()
    return ((numbers[1:] + numbers[:-1]) / 2).to(torch.float32).to(device)


def encode(value: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes of the tensor's shape, and scales, one per block of its last dim."""
    length = value.shape[-1]
    padded = torch.nn.functional.pad(value, (0, blocks(length) * BLOCK - length))
    rows = padded.view(*value.shape[:-1], -1, BLOCK)
    scales = rows.abs().amax(dim=-1)
    shares = rows * scales.clamp(min=torch.finfo(torch.float32).tiny).reciprocal().unsqueeze(-1)
    codes = torch.bucketize(shares, _borders(signed, value.device), out_int32=True).to(torch.uint8)
    return codes.flatten(-2)[..., :length], scales


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return the float32 values of codes and scales."""
    numbers = codebook(signed, codes.device)[codes.int()]
    return (
        numbers * scales.repeat_interleave(BLOCK, dim=-1, output_size=scales.shape[-1] * BLOCK)[..., : codes.shape[-1]]
    )
