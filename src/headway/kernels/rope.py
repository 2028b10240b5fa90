"""Rotary position embedding of queries and keys in one launch.

    low'  = low * cos - high * sin          low = x[i], high = x[i + R], for i < R
    high' = high * cos + low * sin          dims beyond 2R stay

The gradient is the rotation by the negative angle: the same kernel with the sign of sin flipped. Arithmetic is float32
and results are rounded once, as in PyTorch; products may be fused with the sum, so that float32 results can differ in
the last bit.

It is memory-bound: six operations per pair. Queries and keys are read once, with any strides, and written once. A
program rotates all heads of one token (or an equal share of both kinds, if there are very many) by one row of the
table. The table, float32 and shared by all sequences of a batch, adds a few percent, mostly from the L2 cache.

Saved for backward: the table.

Shapes, as in `models/`: B sequences, L tokens, N query heads, K key heads, H size of a head, R half of the rotary dims.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.eager_op import eager_op_with_gradients
from headway.kernels.triton_compat import launchable, tl, triton, triton_op

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def reference_one(x_BLNH: Tensor, table_2LR: Tensor) -> Tensor:
    """Rotate one tensor, in PyTorch."""
    cos_L1R, sin_L1R = table_2LR.unsqueeze(2)
    size = table_2LR.shape[-1]
    low, high, rest = x_BLNH.split((size, size, x_BLNH.shape[-1] - 2 * size), dim=-1)
    low, high = low.float(), high.float()
    turned = torch.cat((low * cos_L1R - high * sin_L1R, high * cos_L1R + low * sin_L1R), dim=-1).to(x_BLNH.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def reference(q_BLNH: Tensor, k_BLKH: Tensor, table_2LR: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate both, in PyTorch."""
    return reference_one(q_BLNH, table_2LR), reference_one(k_BLKH, table_2LR)


def rope(q_BLNH: Tensor, k_BLKH: Tensor, table_2LR: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each pair (i, i + R) of every head by its position's angle, into new contiguous tensors."""
    _check(q_BLNH, table_2LR)
    _check(k_BLKH, table_2LR)
    if (q_BLNH.dtype, *q_BLNH.shape[:2], q_BLNH.shape[3]) != (k_BLKH.dtype, *k_BLKH.shape[:2], k_BLKH.shape[3]):
        raise ValueError(
            f"queries {q_BLNH.dtype} {tuple(q_BLNH.shape)} and keys {k_BLKH.dtype} {tuple(k_BLKH.shape)} differ in "
            "more than their heads"
        )
    rotated: tuple[Tensor, Tensor] = _both_op(q_BLNH, k_BLKH, table_2LR, False)
    return rotated


def rope_one(x_BLNH: Tensor, table_2LR: Tensor) -> Tensor:
    """Rotate one tensor alone."""
    _check(x_BLNH, table_2LR)
    rotated: Tensor = _one_op(x_BLNH, table_2LR, False)
    return rotated


def _check(x_BLNH: Tensor, table_2LR: Tensor) -> None:
    if x_BLNH.dtype not in DTYPES:
        raise ValueError(f"expected heads in float32, float16 or bfloat16, got {x_BLNH.dtype}")
    if x_BLNH.ndim != 4 or x_BLNH.shape[2] == 0:
        raise ValueError(f"expected heads [B, L, N, H], got {tuple(x_BLNH.shape)}")
    if table_2LR.dtype != torch.float32 or table_2LR.ndim != 3 or table_2LR.shape[:2] != (2, x_BLNH.shape[1]):
        raise ValueError(
            f"a table of {x_BLNH.shape[1]} positions is float32 [2, L, R], not {table_2LR.dtype} "
            f"{tuple(table_2LR.shape)}"
        )
    if not 0 < 2 * table_2LR.shape[2] <= x_BLNH.shape[3]:
        raise ValueError(f"cannot rotate {table_2LR.shape[2]} pairs of a head of size {x_BLNH.shape[3]}")


# -- tiling


class RopeTiling(NamedTuple):
    """A program's share of one token: heads of each kind."""

    queries: int
    keys: int
    shares: int
    """Programs per token."""
    warps: int


def cut(queries: int, keys: int, size: int) -> RopeTiling:
    """At most 8192 elements per program and about 16 per thread: two 16-byte loads of bfloat16 in flight."""
    shares = 1
    while _numbers(queries, keys, size, shares) > 8192 and shares < queries:
        shares *= 2
    warps = min(8, max(1, _numbers(queries, keys, size, shares) // 512))
    return RopeTiling(-(-queries // shares), -(-keys // shares), shares, 1 << (warps.bit_length() - 1))


def _numbers(queries: int, keys: int, size: int, shares: int) -> int:
    return (_power_of_two(-(-queries // shares)) + _power_of_two(-(-keys // shares))) * size


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length() if number else 0


# -- the kernel


@triton.jit
def _load(x_ptr, head, head_stride, size, heads_end, FIRST: tl.constexpr, COUNT: tl.constexpr):
    inside = (head < heads_end)[:, None] & (size < COUNT)[None, :]
    return tl.load(x_ptr + FIRST + head[:, None] * head_stride + size[None, :], mask=inside, other=0)


@triton.jit
def _store(out_ptr, value, head, size, heads_end, SIZE: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    inside = (head < heads_end)[:, None] & (size < COUNT)[None, :]
    tl.store(out_ptr + FIRST + head[:, None] * SIZE + size[None, :], value, mask=inside)


@triton.jit
def turned(low, high, cos, sin):
    """Rotate pairs [N, R] by the angle of a row [1, R].

    The second product of each sum is the fused one, said here: left to the compiler, bits would differ by kernel.
    """
    cos, sin = tl.zeros_like(low) + cos, tl.zeros_like(low) + sin
    return tl.fma(-high, sin, low * cos), tl.fma(low, sin, high * cos)


@triton.jit
def _turn_kernel(
    q_ptr,
    k_ptr,
    table_ptr,
    q_out_ptr,
    k_out_ptr,
    length,
    q_stride_b,
    q_stride_l,
    q_stride_n,
    k_stride_b,
    k_stride_l,
    k_stride_n,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    INVERSE: tl.constexpr,
    Q_SHARE: tl.constexpr,
    K_SHARE: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    sequence, position = token // length, token % length
    share = tl.program_id(1)
    pair = tl.arange(0, PAIR_BLOCK)

    # All loads before the first store: the compiler cannot know that outputs do not alias inputs.
    q_ptr += sequence * q_stride_b + position * q_stride_l
    q_head = share * Q_SHARE + tl.arange(0, Q_BLOCK)
    q_end = tl.minimum(share * Q_SHARE + Q_SHARE, QUERIES)
    q_low = _load(q_ptr, q_head, q_stride_n, pair, q_end, 0, PAIRS).to(tl.float32)
    q_high = _load(q_ptr, q_head, q_stride_n, pair, q_end, PAIRS, PAIRS).to(tl.float32)
    if KEYS > 0:
        k_ptr += sequence * k_stride_b + position * k_stride_l
        k_head = share * K_SHARE + tl.arange(0, K_BLOCK)
        k_end = tl.minimum(share * K_SHARE + K_SHARE, KEYS)
        k_low = _load(k_ptr, k_head, k_stride_n, pair, k_end, 0, PAIRS).to(tl.float32)
        k_high = _load(k_ptr, k_head, k_stride_n, pair, k_end, PAIRS, PAIRS).to(tl.float32)
    cos = tl.load(table_ptr + position * PAIRS + pair, mask=pair < PAIRS, other=0)[None, :]
    sin = tl.load(table_ptr + (length + position) * PAIRS + pair, mask=pair < PAIRS, other=0)[None, :]
    if INVERSE:
        sin = -sin

    q_out_ptr += token * (QUERIES * SIZE)
    q_low, q_high = turned(q_low, q_high, cos, sin)
    _store(q_out_ptr, q_low, q_head, pair, q_end, SIZE, 0, PAIRS)
    _store(q_out_ptr, q_high, q_head, pair, q_end, SIZE, PAIRS, PAIRS)
    if KEYS > 0:
        k_out_ptr += token * (KEYS * SIZE)
        k_low, k_high = turned(k_low, k_high, cos, sin)
        _store(k_out_ptr, k_low, k_head, pair, k_end, SIZE, 0, PAIRS)
        _store(k_out_ptr, k_high, k_head, pair, k_end, SIZE, PAIRS, PAIRS)

    if SIZE > 2 * PAIRS:
        rest = tl.arange(0, REST_BLOCK)
        q_rest = _load(q_ptr, q_head, q_stride_n, rest, q_end, 2 * PAIRS, SIZE - 2 * PAIRS)
        _store(q_out_ptr, q_rest, q_head, rest, q_end, SIZE, 2 * PAIRS, SIZE - 2 * PAIRS)
        if KEYS > 0:
            k_rest = _load(k_ptr, k_head, k_stride_n, rest, k_end, 2 * PAIRS, SIZE - 2 * PAIRS)
            _store(k_out_ptr, k_rest, k_head, rest, k_end, SIZE, 2 * PAIRS, SIZE - 2 * PAIRS)


# -- operators


def _output(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _turned_both(q_BLNH: Tensor, k_BLKH: Tensor, table_2LR: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    q_out, k_out = _output(q_BLNH), _output(k_BLKH)
    _turn((q_BLNH, k_BLKH), (q_out, k_out), table_2LR, inverse)
    return q_out, k_out


_rope = triton_op("headway::rope", mutates_args=())(_turned_both)


@_rope.register_fake
def _(q_BLNH: Tensor, k_BLKH: Tensor, _table_2LR: Tensor, _inverse: bool) -> tuple[Tensor, Tensor]:
    return _output(q_BLNH), _output(k_BLKH)


def _turned_one(x_BLNH: Tensor, table_2LR: Tensor, inverse: bool) -> Tensor:
    out = _output(x_BLNH)
    _turn((x_BLNH,), (out,), table_2LR, inverse)
    return out


_rope_one = triton_op("headway::rope_one", mutates_args=())(_turned_one)


@_rope_one.register_fake
def _(x_BLNH: Tensor, _table_2LR: Tensor, _inverse: bool) -> Tensor:
    return _output(x_BLNH)


def _turn(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], table_2LR: Tensor, inverse: bool) -> None:
    """Queries and keys, or one tensor alone."""
    inputs = tuple(x if x.stride(3) == 1 else x.contiguous() for x in inputs)
    q, k = inputs[0], inputs[-1]
    batch, length, queries, size = q.shape
    if batch * length == 0:
        return
    keys = k.shape[2] if len(inputs) == 2 else 0
    share = cut(queries, keys, size)
    launchable(_turn_kernel)[(batch * length, share.shares)](
        q,
        k,
        table_2LR.contiguous(),
        outputs[0],
        outputs[1] if keys else k,
        length,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        k.stride(0),
        k.stride(1),
        k.stride(2),
        **_constants(queries, keys, size, table_2LR.shape[2], inverse=inverse),
        num_warps=share.warps,
    )


def _constants(queries: int, keys: int, size: int, pairs: int, *, inverse: bool) -> dict[str, Any]:
    share = cut(queries, keys, size)
    return {
        "QUERIES": queries,
        "KEYS": keys,
        "SIZE": size,
        "PAIRS": pairs,
        "INVERSE": inverse,
        "Q_SHARE": share.queries,
        "K_SHARE": share.keys,
        "Q_BLOCK": _power_of_two(share.queries),
        "K_BLOCK": _power_of_two(share.keys),
        "PAIR_BLOCK": _power_of_two(pairs),
        "REST_BLOCK": _power_of_two(size - 2 * pairs),
    }


# -- gradients


def _keep(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[-2])
    ctx.inverse = inputs[-1]


def _backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
    return *_both_op(grad_q, grad_k, ctx.saved_tensors[0], not ctx.inverse), None, None


def _backward_one(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _one_op(grad, ctx.saved_tensors[0], not ctx.inverse), None, None


_both_op = eager_op_with_gradients(_rope, _turned_both, _keep, _backward)
_one_op = eager_op_with_gradients(_rope_one, _turned_one, _keep, _backward_one)


# -- launches to compile ahead of time


def _launch(dtype: str, queries: int, keys: int, size: int, pairs: int, *, inverse: bool = False) -> LaunchSpec:
    x, strides = f"*{dtype}", [f"{which}_stride_{dim}" for which in "qk" for dim in "bln"]
    types = {"q_ptr": x, "k_ptr": x, "table_ptr": "*fp32", "q_out_ptr": x, "k_out_ptr": x, "length": "i32"}
    types |= dict.fromkeys(strides, "i32")
    name = f"rope_{dtype}_{queries}_{keys}_{size}_{pairs}{'_inverse' if inverse else ''}"
    constants = _constants(queries, keys, size, pairs, inverse=inverse)
    return LaunchSpec(name, _turn_kernel, types, constants, warps=cut(queries, keys, size).warps)


AHEAD: tuple[LaunchSpec, ...] = (
    _launch("bf16", 32, 8, 64, 32),
    _launch("bf16", 32, 8, 128, 64),
    _launch("bf16", 32, 8, 128, 64, inverse=True),
    _launch("bf16", 128, 8, 128, 64),
    _launch("bf16", 32, 32, 80, 10),
    _launch("bf16", 32, 0, 128, 64),
    _launch("fp32", 9, 3, 64, 32),
)
"""Llama 3.2 1B, Llama 3.1 8B, both ways, and 405B, Pythia, one tensor alone, SmolLM2."""
