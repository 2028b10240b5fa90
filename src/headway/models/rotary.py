"""Rotary position embeddings (RoPE): scaled frequencies, cos/sin tables, and the rotation."""

import math

import torch
from torch import Tensor

from headway.kernels.dispatch import exact_triton, uses_triton
from headway.kernels.rope import rope_one
from headway.recipe.rope import RopeScaling


def rotary_table(
    positions_L: Tensor, dim: int, theta: float, scaling: RopeScaling | None = None, long: Tensor | bool = False
) -> Tensor:
    """Return cosines and sines [2, L, R] of positions, in float32; `long` as in `scaled`."""
    turns_R, factor = scaled(frequencies(dim, theta, positions_L.device), theta, scaling, long)
    angles_LR = positions_L.to(torch.float32).unsqueeze(1) * turns_R
    table = torch.stack((angles_LR.cos(), angles_LR.sin()))
    return table if factor == 1 else table * factor


def frequencies(dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Return the frequency of each pair, in radians per position."""
    exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
    return 1.0 / theta**exponents


def scaled(
    plain_R: Tensor, theta: float, scaling: RopeScaling | None, long: Tensor | bool = False
) -> tuple[Tensor, float]:
    """Return scaled frequencies, and the factor of cosines and sines.

    `long` matters to longrope: whether a sequence is longer than the original length; a tensor [L] has it by token, and
    frequencies are then [L, R].
    """
    match scaling:
        case None:
            return plain_R, 1.0
        case RopeScaling(kind="linear"):
            return plain_R / scaling.factor, 1.0
        case RopeScaling(kind="llama3"):
            return _llama3(plain_R, scaling), 1.0
        case RopeScaling(kind="yarn"):
            return _yarn(plain_R, theta, scaling), _yarn_factor(scaling)
    assert scaling.original is not None
    default = math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original)) if scaling.factor > 1 else 1.0
    factor = scaling.attention or default
    if isinstance(long, Tensor):
        long_R, short_R = (
            1.0 / (plain_R.new_tensor(f) / plain_R) for f in (scaling.long_factors, scaling.short_factors)
        )
        return torch.where(long.unsqueeze(1), long_R, short_R), factor
    return 1.0 / (plain_R.new_tensor(scaling.long_factors if long else scaling.short_factors) / plain_R), factor


def _llama3(plain_R: Tensor, scaling: RopeScaling) -> Tensor:
    """llama3: scale low frequencies, keep high ones, with a ramp between, by rotations in the original length."""
    assert scaling.original is not None
    turns_R = scaling.original * plain_R / (2 * math.pi)
    kept_R = ((turns_R - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return (1 - kept_R) * plain_R / scaling.factor + kept_R * plain_R


def _yarn(plain_R: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """YaRN: the same with a ramp over dims, from the pair that rotates `fast` times to the one that rotates `slow`
    times."""
    assert scaling.original is not None
    count, length = len(plain_R), scaling.original

    def dim_of(turns: float) -> float:
        return count * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    low, high = dim_of(scaling.fast), dim_of(scaling.slow)
    if scaling.whole_dims:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    ramp_R = (torch.arange(count, device=plain_R.device, dtype=torch.float32) - low) / max(high - low, 0.001)
    kept_R = 1 - ramp_R.clamp(0, 1)
    return (1 - kept_R) * plain_R / scaling.factor + kept_R * plain_R


def _yarn_factor(scaling: RopeScaling) -> float:
    if scaling.attention is not None:
        return scaling.attention
    if scaling.mscale and scaling.mscale_all:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all)
    return yarn_mscale(scaling.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention factor for sequences `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate(x_BLNH: Tensor, table_2LR: Tensor, *, exact: bool = False) -> Tensor:
    """Rotate each pair (i, i + R) of a head by its position's angle, in float32; dims beyond 2R stay.

    The table is of all rows, [2, L, R], or of each, [2, B, L, R]. In exact mode the kernel is the same for any size.
    """
    if exact and exact_triton(x_BLNH.device):
        if table_2LR.dim() == 3:
            return rope_one(x_BLNH, table_2LR)
        return rope_one(x_BLNH.flatten(0, 1).unsqueeze(0), table_2LR.flatten(1, 2)).view(x_BLNH.shape)
    if uses_triton("rope", x_BLNH):
        return rope_one(x_BLNH, table_2LR)
    cos_L1R, sin_L1R = table_2LR.unsqueeze(-2).unbind(0)
    turned, rest = x_BLNH, None
    if x_BLNH.shape[-1] > 2 * cos_L1R.shape[-1]:
        turned, rest = x_BLNH.split((2 * cos_L1R.shape[-1], x_BLNH.shape[-1] - 2 * cos_L1R.shape[-1]), dim=-1)
    low_BLNR, high_BLNR = turned.float().chunk(2, dim=-1)
    pairs = (low_BLNR * cos_L1R - high_BLNR * sin_L1R, high_BLNR * cos_L1R + low_BLNR * sin_L1R)
    done = torch.cat(pairs, dim=-1).to(x_BLNH.dtype)
    return done if rest is None else torch.cat((done, rest), dim=-1)


def rotate_pairs(x_BLNH: Tensor, table_2LR: Tensor) -> Tensor:
    """The same for interleaved pairs (2i, 2i + 1), which are returned as (i, i + R)."""
    pairs = x_BLNH.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotate(pairs, table_2LR)
