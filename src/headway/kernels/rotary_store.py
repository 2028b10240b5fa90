"""Queries and keys of a pass on the way from their product to attention: head norms, rotation, and the paged cache.

One program per token, for which modules take a norm of queries, one of keys, two rotations and two indexed copies. Each
step rounds as its module does, and sums as `rms_norm.py` does, so that the bits are those of training.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.rms_norm import forward_cut
from headway.kernels.rope import turned
from headway.kernels.triton_compat import tl, triton


class HeadShape(NamedTuple):
    """Heads of a layer."""

    queries: int
    keys: int
    size: int


@triton.jit
def _rotated(x_ptr, at, weight_ptr, rstd, cos, sin, PAIRS: tl.constexpr, NORMED: tl.constexpr, ROTATES: tl.constexpr,
             mask, pair):  # fmt: skip
    """Return both halves of heads, after the norm and the rotation."""
    low = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + at + PAIRS, mask=mask, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    if NORMED:
        low_weight = tl.load(weight_ptr + pair).to(dtype).to(tl.float32)[None, :]
        high_weight = tl.load(weight_ptr + PAIRS + pair).to(dtype).to(tl.float32)[None, :]
        low = (low * rstd[:, None] * low_weight).to(dtype).to(tl.float32)
        high = (high * rstd[:, None] * high_weight).to(dtype).to(tl.float32)
    if ROTATES:
        low, high = turned(low, high, cos, sin)
    return low, high


@triton.jit
def _rstd(x_ptr, head, heads, eps, HEAD: tl.constexpr):
    size = tl.arange(0, HEAD)
    x = tl.load(x_ptr + head[:, None] * HEAD + size[None, :], mask=(head < heads)[:, None], other=0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) / HEAD + eps)


@triton.jit
def _store_kernel(
    q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, table_ptr, positions_ptr, slots_ptr, q_out_ptr, k_out_ptr,
    keys_ptr, values_ptr, eps, q_stride, k_stride, v_stride, table_half, key_stride_p, key_stride_z, key_stride_k,
    value_stride_p, value_stride_z, value_stride_k,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, NORMED: tl.constexpr, ROTATES: tl.constexpr, KEEPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    PAIRS: tl.constexpr = HEAD // 2
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    pair = tl.arange(0, PAIRS)
    cos, sin = 1.0, 0.0
    if ROTATES:
        cos = tl.load(table_ptr + position * PAIRS + pair)[None, :]
        sin = tl.load(table_ptr + table_half + position * PAIRS + pair)[None, :]
    q_ptr += token * q_stride
    q_head = tl.arange(0, Q_BLOCK)
    q_inside = (q_head < QUERIES)[:, None]
    q_rstd = q_head.to(tl.float32)
    if NORMED:
        q_rstd = _rstd(q_ptr, q_head, QUERIES, eps, HEAD)
    q_at = q_head[:, None] * HEAD + pair[None, :]
    low, high = _rotated(q_ptr, q_at, q_weight_ptr, q_rstd, cos, sin, PAIRS, NORMED, ROTATES, q_inside, pair)
    q_out_ptr += token * (QUERIES * HEAD)
    tl.store(q_out_ptr + q_at, low, mask=q_inside)
    tl.store(q_out_ptr + q_at + PAIRS, high, mask=q_inside)

    k_ptr += token * k_stride
    k_head = tl.arange(0, K_BLOCK)
    k_inside = (k_head < KEYS)[:, None]
    k_rstd = k_head.to(tl.float32)
    if NORMED:
        k_rstd = _rstd(k_ptr, k_head, KEYS, eps, HEAD)
    k_at = k_head[:, None] * HEAD + pair[None, :]
    low, high = _rotated(k_ptr, k_at, k_weight_ptr, k_rstd, cos, sin, PAIRS, NORMED, ROTATES, k_inside, pair)
    if KEEPS:
        k_out_ptr += token * (KEYS * HEAD)
        tl.store(k_out_ptr + k_at, low, mask=k_inside)
        tl.store(k_out_ptr + k_at + PAIRS, high, mask=k_inside)
    page, place = slot // PAGE, slot % PAGE
    keys_ptr += page * key_stride_p + place * key_stride_z + k_head[:, None] * key_stride_k + pair[None, :]
    tl.store(keys_ptr, low, mask=k_inside)
    tl.store(keys_ptr + PAIRS, high, mask=k_inside)

    v_ptr += token * v_stride
    size = tl.arange(0, HEAD)
    value = tl.load(v_ptr + k_head[:, None] * HEAD + size[None, :], mask=k_inside, other=0.0)
    values_ptr += page * value_stride_p + place * value_stride_z + k_head[:, None] * value_stride_k + size[None, :]
    tl.store(values_ptr, value, mask=k_inside)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _blocks(heads: HeadShape) -> tuple[int, int]:
    """Heads of a program's tiles: at least so many that a row is shared out among threads as in `rms_norm.py`."""
    least = 2048 // heads.size
    return max(least, _power_of_two(heads.queries)), max(least, _power_of_two(heads.keys))


def takes(heads: HeadShape) -> bool:
    """Whether the kernel takes heads of this size."""
    return heads.size in (32, 64, 128, 256)


def rotate_and_store(
    q_TF: Tensor,
    k_TF: Tensor,
    v_TF: Tensor,
    heads: HeadShape,
    table_2LR: Tensor | None,
    positions_T: Tensor,
    slots_T: Tensor,
    keys_PZKH: Tensor,
    values_PZKH: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    *,
    keeps: bool = False,
    early: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Put a pass's keys and values into their pages; return its queries [T, N, H], keys and values [T, K, H].

    Queries and keys are normalized and rotated; keys are returned if asked for by `keeps`. The table has all positions:
    `positions_T` are rows of it.
    """
    tokens = len(q_TF)
    out = torch.empty(tokens, heads.queries, heads.size, dtype=q_TF.dtype, device=q_TF.device)
    k_out = out.new_empty(tokens, heads.keys, heads.size) if keeps else None
    v_TKH = v_TF.unflatten(1, (heads.keys, heads.size))
    if tokens == 0:
        return out, k_out, v_TKH
    q_weight, k_weight = norms or (q_TF, k_TF)
    table = positions_T if table_2LR is None else table_2LR
    options = {"launch_pdl": True} if early else {}
    q_block, k_block = _blocks(heads)
    _store_kernel[(tokens,)](
        q_TF, k_TF, v_TF, q_weight, k_weight, table, positions_T, slots_T, out,
        out if k_out is None else k_out, keys_PZKH, values_PZKH, eps,
        q_TF.stride(0), k_TF.stride(0), v_TF.stride(0), 0 if table_2LR is None else table_2LR.stride(0),
        *keys_PZKH.stride()[:3], *values_PZKH.stride()[:3], QUERIES=heads.queries, KEYS=heads.keys, HEAD=heads.size,
        Q_BLOCK=q_block, K_BLOCK=k_block, PAGE=keys_PZKH.shape[1], NORMED=norms is not None,
        ROTATES=table_2LR is not None, KEEPS=keeps, EARLY=early, num_warps=forward_cut(1, heads.size).warps, **options,
    )  # fmt: skip
    return out, k_out, v_TKH


def _ahead(name: str, heads: HeadShape, normed: bool) -> LaunchSpec:
    pointers = (
        "q_ptr",
        "k_ptr",
        "v_ptr",
        "q_weight_ptr",
        "k_weight_ptr",
        "q_out_ptr",
        "k_out_ptr",
        "keys_ptr",
        "values_ptr",
    )
    types = dict.fromkeys(pointers, "*bf16") | {"table_ptr": "*fp32", "positions_ptr": "*i64", "slots_ptr": "*i64"}
    types |= {"eps": "fp32"}
    strides = (
        "q_stride",
        "k_stride",
        "v_stride",
        "table_half",
        *(f"{which}_stride_{axis}" for which in ("key", "value") for axis in "pzk"),
    )
    constants = {
        "QUERIES": heads.queries, "KEYS": heads.keys, "HEAD": heads.size, "Q_BLOCK": _blocks(heads)[0],
        "K_BLOCK": _blocks(heads)[1], "PAGE": 16, "NORMED": normed, "ROTATES": True, "KEEPS": False,
        "EARLY": True,
    }  # fmt: skip
    return LaunchSpec(
        f"rotary_store.{name}", _store_kernel, types | dict.fromkeys(strides, "i32"), constants,
        forward_cut(1, heads.size).warps,
    )  # fmt: skip


AHEAD = (_ahead("64", HeadShape(32, 8, 64), False), _ahead("128.normed", HeadShape(16, 8, 128), True))
