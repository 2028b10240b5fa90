"""Products of one row with weights: decoding of a single sequence, which reads every weight once and nothing else.

    linear           norm(x) @ w.T (+ bias), one output of several weights
    gated_linear     silu(norm(x) @ gate.T) * (norm(x) @ up.T)
    linear_into      stream += x @ w.T (+ bias)

A program has a few outputs, and all their weights in registers at once, 16 to 64 KB: with several programs per
multiprocessor, enough is in flight to keep memory busy. With `early` (programmatic dependent launch) it loads them
while the kernels before it still run, so that reading goes on across kernels; then it waits for its row. The norm
before a product is computed by every program: it takes less time than a kernel of its own.

Sums are in another order than those of `sequential_linear.py`, which exact mode uses.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.triton_compat import runs_on, tl, triton

MOST_INPUTS = 16384


def takes(x: Tensor, *weights: Tensor) -> bool:
    """Whether the kernel takes products with these weights."""
    return runs_on(x.device) and all(
        w.dtype == x.dtype and w.is_contiguous() and w.shape[1] % 8 == 0 and w.shape[1] <= MOST_INPUTS for w in weights
    )


def cut(inputs: int, gated: bool) -> tuple[int, int]:
    """Choose outputs and warps of a program, measured on an H200: 16 KB of weights for short rows, 32 KB from 4,096
    inputs on, 64 KB beyond 8,192, at 128 to 256 bytes a thread."""
    block = _power_of_two(inputs)
    weights = 8192 if block < 4096 else 16384 if block <= 8192 else 32768
    outputs = min(16, weights // block)
    return max(1, outputs // 2) if gated else outputs, 4 if block <= 8192 else 8


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


# -- the kernel


@triton.jit
def _weights(w_ptr, column, inner, K: tl.constexpr, BLOCK: tl.constexpr):
    at = w_ptr + column.to(tl.int64)[:, None] * K + inner[None, :]
    if K == BLOCK:
        return tl.load(at)
    return tl.load(at, mask=(inner < K)[None, :], other=0.0)


@triton.jit
def _vector_kernel(
    x_ptr, norm_ptr, w0_ptr, w1_ptr, w2_ptr, b0_ptr, b1_ptr, b2_ptr, stream_ptr, out_ptr, eps,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    ADDS: tl.constexpr, NORMED: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    w_ptr, b_ptr, outputs, before = w0_ptr, b0_ptr, N0, 0
    if not GATED:  # noqa: SIM102  (one is known when compiled)
        if N1 > 0:  # noqa: SIM102
            if block >= (N0 + OUTPUTS - 1) // OUTPUTS:
                block -= (N0 + OUTPUTS - 1) // OUTPUTS
                w_ptr, b_ptr, outputs, before = w1_ptr, b1_ptr, N1, N0
                if block >= (N1 + OUTPUTS - 1) // OUTPUTS:
                    block -= (N1 + OUTPUTS - 1) // OUTPUTS
                    w_ptr, b_ptr, outputs, before = w2_ptr, b2_ptr, N2, N0 + N1
    w_ptr = tl.multiple_of(w_ptr, 16)
    column = block * OUTPUTS + tl.arange(0, OUTPUTS)
    safe = tl.minimum(column, outputs - 1)
    inner = tl.arange(0, BLOCK)
    dtype = x_ptr.dtype.element_ty
    w = _weights(w_ptr, safe, inner, K, BLOCK)
    up = w
    if GATED:
        up = _weights(w1_ptr, safe, inner, K, BLOCK)
    scale = tl.zeros([BLOCK], tl.float32)
    if NORMED:
        scale = tl.load(norm_ptr + inner, mask=inner < K, other=0.0).to(dtype).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + inner, mask=inner < K, other=0.0).to(tl.float32)
    if NORMED:
        x = (x * tl.rsqrt(tl.sum(x * x, 0) / K + eps) * scale).to(dtype).to(tl.float32)
    y = tl.sum(w.to(tl.float32) * x[None, :], 1)
    if GATED:
        gate = y.to(dtype).to(tl.float32)
        y = gate * tl.sigmoid(gate) * tl.sum(up.to(tl.float32) * x[None, :], 1).to(dtype).to(tl.float32)
    if BIASED:
        y += tl.load(b_ptr + safe).to(tl.float32)
    inside = column < outputs
    if ADDS:
        y = tl.load(stream_ptr + before + column, mask=inside, other=0.0).to(tl.float32) + y.to(dtype).to(tl.float32)
    tl.store(out_ptr + before + column, y, mask=inside)


# -- launches

Norm = tuple[Tensor, float]
"""Weight and epsilon of a norm before a product."""


def linear(
    x_1D: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    norm: Norm | None = None,
    dtype: torch.dtype | None = None,
    early: bool = False,
) -> Tensor:
    """Return norm(x) @ weight.T + bias of up to three weights side by side, by default in x's dtype."""
    out = torch.empty(1, sum(len(w) for w in weights), dtype=dtype or x_1D.dtype, device=x_1D.device)
    return _launch(x_1D, weights, biases, out, norm, early, gated=False, adds=False)


def gated_linear(
    x_1D: Tensor, gate_FD: Tensor, up_FD: Tensor, *, norm: Norm | None = None, early: bool = False
) -> Tensor:
    """Return silu(norm(x) @ gate.T) * (norm(x) @ up.T)."""
    out = torch.empty(1, len(gate_FD), dtype=x_1D.dtype, device=x_1D.device)
    return _launch(x_1D, (gate_FD, up_FD), None, out, norm, early, gated=True, adds=False)


def linear_into(
    stream_1O: Tensor, x_1D: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None, *, early: bool = False
) -> Tensor:
    """Add x @ weight.T + bias to a stream in place, and return it."""
    return _launch(x_1D, (weight_OD,), (bias_O,), stream_1O, None, early, gated=False, adds=True)


def _launch(
    x_1D: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    out: Tensor,
    norm: Norm | None,
    early: bool,
    *,
    gated: bool,
    adds: bool,
) -> Tensor:
    assert len(x_1D) == 1, "one row"
    inputs = x_1D.shape[1]
    outputs, warps = cut(inputs, gated)
    sizes = [len(weight) for weight in weights] + [0, 0]
    first, second, third = [*weights, *[weights[0]] * 2][:3]
    given = [b for b in biases or () if b is not None]
    assert len(given) in (0, len(weights)), "all have a bias, or none"
    padded = [*(given or [first]), *[(given or [first])[0]] * 2]
    weight, eps = norm or (first, 0.0)
    options = {"launch_pdl": True} if early else {}
    _vector_kernel[(sum(-(-size // outputs) for size in (sizes[:1] if gated else sizes)),)](
        x_1D, weight, first, second, third, *padded[:3], out, out, eps, N0=sizes[0], N1=0 if gated else sizes[1],
        N2=0 if gated else sizes[2], K=inputs, GATED=gated, BIASED=bool(given), ADDS=adds, NORMED=norm is not None,
        OUTPUTS=outputs, BLOCK=_power_of_two(inputs), EARLY=early, num_warps=warps, **options,
    )  # fmt: skip
    return out


def _ahead(name: str, outputs: tuple[int, int, int], inputs: int, **flags: bool) -> LaunchSpec:
    gated = flags.get("GATED", False)
    columns, warps = cut(inputs, gated)
    pointers = ("x", "norm", "w0", "w1", "w2", "b0", "b1", "b2", "stream", "out")
    types = {f"{pointer}_ptr": "*bf16" for pointer in pointers} | {"eps": "fp32"}
    constants = {
        "N0": outputs[0], "N1": 0 if gated else outputs[1], "N2": 0 if gated else outputs[2], "K": inputs,
        "GATED": gated, "BIASED": False, "ADDS": flags.get("ADDS", False), "NORMED": flags.get("NORMED", False),
        "OUTPUTS": columns, "BLOCK": _power_of_two(inputs), "EARLY": True,
    }  # fmt: skip
    return LaunchSpec(f"vector.{name}", _vector_kernel, types, constants, warps)


AHEAD = (
    _ahead("qkv", (2048, 512, 512), 2048, NORMED=True),
    _ahead("gated", (14336, 14336, 0), 4096, GATED=True, NORMED=True),
    _ahead("down", (4096, 0, 0), 14336, ADDS=True),
)
