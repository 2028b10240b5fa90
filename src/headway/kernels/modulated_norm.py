"""Residual additions and shifted, scaled LayerNorms of diffusion transformers, each direction in one pass.

    s = x + branch * gate                               a stream and what a branch adds to it; s = x without a branch
    y = u * (base + scale) + shift                      u = (s - mean(s)) / sqrt(var(s) + eps)

    with g and h the gradients of y and s, and d = g * (base + scale):
    ds = h + rstd * (d - mean(d) - u * mean(d * u))     the gradient of x too
    dbranch = ds * gate       dgate = sum ds * branch       dscale = sum g * u       dshift = sum g

Gates, scales and shifts belong to a sample [B, D]; sums are over its tokens. A branch ends in a linear map, whose bias
has the gradient sum(ds * gate) = sum over samples of gate * sum(ds): it costs no further pass over memory. A compiler
makes each of these sums a pass of its own, and keeps ds in float32 between them.

Arithmetic is float32. The sum s is rounded to the stream's precision before it is normalized, and each result once.

It is memory-bound: forward reads x and branch and writes s and y, backward reads g, h, s and branch and writes ds and
dbranch. A program of the backward pass takes every n-th token of a sample and accumulates its own float32 sums
(`partial_sums.py`). Without a branch the stream is returned, too: the gradient of what else uses it is added in the
same pass.

A gated branch is read in the backward pass anyway. There x is read in place of s, which is added up again to the same
bits: in a block, x is what an earlier norm has saved, so that s need not outlive the forward pass.

Saved for backward: x if the branch is gated and there is a norm, else s; branch, gate, scale, and the mean and rstd of
each token in float32.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.partial_sums import sum_partials
from headway.kernels.triton_compat import tl, triton

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_WIDTH = 4096
"""A token must fit in the registers of one program, with the sums."""
PROGRAMS = 264
"""Of a backward pass, at least: two per multiprocessor of an H200, and the same on all chips, so that sums have the
same order."""
FORWARD_PROGRAMS = 4224
"""Of a forward pass, at least, where a program has more than one token."""
STAGES = 3
"""Tokens whose loads are under way at a time."""
REGISTERS, COLUMNS = 128, 12
"""Per thread of a backward pass with 16 warps per multiprocessor, and the columns of a token that fit in those. For a
gated branch of 1,152 Triton 3.6 takes 163 by itself, and every fourth program would wait for another to end."""
LEAST_BLOCK = 1024
"""Columns of the first of two tiles, at least."""
SUMS = 4
"""Sums of a backward pass: of shift, scale, gate and of the stream's gradient."""


class Modulation(NamedTuple):
    """What shifts and scales the norm of a sample's tokens."""

    shift_BD: Tensor
    scale_BD: Tensor
    base: float = 1.0
    """Added to the scale."""


class ResidualBranch(NamedTuple):
    """What a branch adds to the stream."""

    out_BLD: Tensor
    gate_BD: Tensor | None = None
    bias_D: Tensor | None = None
    """Part of `out_BLD` already; its gradient is computed here."""


def reference_add(x_BLD: Tensor, branch: ResidualBranch) -> Tensor:
    """Add a branch to the stream, in PyTorch."""
    if branch.gate_BD is None:
        return x_BLD + branch.out_BLD
    gated = branch.out_BLD.float() * branch.gate_BD.float().unsqueeze(1)
    return (x_BLD.float() + gated).to(x_BLD.dtype)


def reference_norm(x_BLD: Tensor, modulation: Modulation, eps: float) -> Tensor:
    """Normalize, shift and scale, in PyTorch."""
    normal = torch.nn.functional.layer_norm(x_BLD.float(), x_BLD.shape[-1:], eps=eps)
    shift, scale = (x.float().unsqueeze(1) for x in modulation[:2])
    return (normal * (modulation.base + scale) + shift).to(x_BLD.dtype)


def modulated_norm(x_BLD: Tensor, modulation: Modulation, eps: float) -> tuple[Tensor, Tensor]:
    """Return the stream as it is, for all later uses, and it normalized, shifted and scaled."""
    x_BLD = _checked(x_BLD)
    shift, scale = _samples(x_BLD, modulation.shift_BD), _samples(x_BLD, modulation.scale_BD)
    both: tuple[Tensor, Tensor] = _Norm.apply(x_BLD, shift, scale, modulation.base, eps)
    return both


def add_modulated_norm(
    x_BLD: Tensor, branch: ResidualBranch, modulation: Modulation, eps: float
) -> tuple[Tensor, Tensor]:
    """Add a branch to the stream; return the stream, and it normalized, shifted and scaled."""
    x_BLD = _checked(x_BLD)
    shift, scale = _samples(x_BLD, modulation.shift_BD), _samples(x_BLD, modulation.scale_BD)
    out, gate, bias = _parts(x_BLD, branch)
    total, y, _ = _norm(x_BLD, out, gate, bias, shift, scale, modulation.base, eps)
    return total, y


def add(x_BLD: Tensor, branch: ResidualBranch) -> Tensor:
    """Add a branch to the stream."""
    x_BLD = _checked(x_BLD)
    total: Tensor = _norm(x_BLD, *_parts(x_BLD, branch), None, None, 0.0, 0.0)[0]
    return total


def _checked(x_BLD: Tensor) -> Tensor:
    if x_BLD.dtype not in DTYPES or x_BLD.ndim != 3 or not 0 < x_BLD.shape[2] <= MAX_WIDTH:
        raise ValueError(
            f"expected a stream [B, L, D] of 1 to {MAX_WIDTH} floats per token, got {x_BLD.dtype} {tuple(x_BLD.shape)}"
        )
    return x_BLD.contiguous()


def _samples(x_BLD: Tensor, numbers: Tensor) -> Tensor:
    """Return numbers of each sample [B, D] in float32; one row is that of all."""
    if numbers.ndim != 2 or numbers.shape[1] != x_BLD.shape[2] or numbers.shape[0] not in (1, x_BLD.shape[0]):
        raise ValueError(f"a stream of {tuple(x_BLD.shape)} cannot take numbers per sample of {tuple(numbers.shape)}")
    return numbers.float().expand(x_BLD.shape[0], -1).contiguous()


def _parts(x_BLD: Tensor, branch: ResidualBranch) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if branch.out_BLD.shape != x_BLD.shape or branch.out_BLD.dtype not in DTYPES:
        shape = f"{branch.out_BLD.dtype} {tuple(branch.out_BLD.shape)}"
        raise ValueError(f"a stream of {tuple(x_BLD.shape)} cannot take a branch of {shape}")
    gate = None if branch.gate_BD is None else _samples(x_BLD, branch.gate_BD)
    return branch.out_BLD.contiguous(), gate, branch.bias_D


# -- tiling


class ModulationTiling(NamedTuple):
    """How tokens are divided over programs."""

    block: int
    """Columns of a token in the first of two tiles, a power of two."""
    rest: int
    """Columns of the second tile, a power of two; 0 where the first takes all. A token of 1,152 in one tile would be
    one of 2,048, whose kernels compute 44 % for nothing and are bound by it."""
    tokens: int
    """Consecutive tokens of a program of the forward pass, which reads a sample's modulation once for all of them."""
    chunks: int
    """Programs of the backward pass per sample."""
    forward_warps: int
    """Of a program of the forward pass."""
    warps: int
    """Of a program of the backward pass."""

    @property
    def registers(self) -> int | None:
        """Per thread of the backward pass, at most, so that 16 warps fit; None for tokens that do not fit in those."""
        return REGISTERS if self.block + self.rest <= COLUMNS * 32 * self.warps else None


def tiling(samples: int, tokens: int, width: int) -> ModulationTiling:
    """Forward, 16 elements per thread of one tile; backward, 16 warps per multiprocessor of an H200, but 8 to 16."""
    whole = 1 << (width - 1).bit_length()
    chunks = max(1, min(tokens, -(-PROGRAMS // samples)))
    fitting = 8 * PROGRAMS // (samples * chunks)
    warps = max(1, whole // 512, min(whole // 256, 1 << fitting.bit_length() - 1 if fitting else 1))
    forward_warps, warps = (max(1, min(16, count)) for count in (whole // 512, warps))
    block, rest = tiles(width, max(forward_warps, warps))
    per_program = max(1, min(8, samples * tokens // FORWARD_PROGRAMS))
    return ModulationTiling(block, rest, per_program, chunks, forward_warps, warps)


def tiles(width: int, warps: int) -> tuple[int, int]:
    """Return columns of two tiles, the second of two or more columns per thread: less is not loaded ahead of time."""
    whole, half = 1 << (width - 1).bit_length(), 1 << width.bit_length() - 1
    rest = max(64 * warps, 1 << (width - half - 1).bit_length()) if width > half else 0
    return (half, rest) if half >= LEAST_BLOCK and half + rest < whole else (whole, 0)


# -- kernels


@triton.jit
def _added(x, branch, gate, GATED: tl.constexpr):
    """Of both passes; one rounding, not what a compiler makes of a product and a sum."""
    return tl.fma(branch, gate, x) if GATED else x + branch


@triton.jit
def _add_pairs(a, b, c, d):
    """For two sums in one reduction: threads wait for each other once."""
    return a + c, b + d


@triton.jit
def _per_thread(x, THREADS: tl.constexpr):
    """Sum the columns of each thread, by which tiles of two sizes are added up."""
    return tl.sum(tl.reshape(x, [THREADS, x.shape[0] // THREADS]), axis=1)


@triton.jit
def _modulation(gate_ptr, shift_ptr, scale_ptr, at, inside, base, GATED: tl.constexpr, NORM: tl.constexpr):
    gate = tl.full(at.shape, 1, tl.float32)
    shift = gate
    scale = gate
    if GATED:
        gate = tl.load(gate_ptr + at, mask=inside, other=0)
    if NORM:
        shift = tl.load(shift_ptr + at, mask=inside, other=0)
        scale = base + tl.load(scale_ptr + at, mask=inside, other=0)
    return gate, shift, scale


@triton.jit
def _stream(x_ptr, branch_ptr, sum_ptr, at, inside, gate, ADD: tl.constexpr, GATED: tl.constexpr):
    """Read a tile of a token; with a branch, add it and write the sum."""
    x = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)
    if ADD:
        branch = tl.load(branch_ptr + at, mask=inside, other=0).to(tl.float32)
        rounded = _added(x, branch, gate, GATED).to(x_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    return x


@triton.jit
def _forward_kernel(
    x_ptr,
    branch_ptr,
    gate_ptr,
    shift_ptr,
    scale_ptr,
    sum_ptr,
    y_ptr,
    statistics_ptr,
    tokens,
    base,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    THREADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    STAGES: tl.constexpr,
):
    sample = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = sample * WIDTH + column
    gate, shift, scale = _modulation(gate_ptr, shift_ptr, scale_ptr, at, inside, base, GATED, NORM)
    if REST:
        column_2 = BLOCK + tl.arange(0, REST)
        inside_2 = column_2 < WIDTH
        at_2 = sample * WIDTH + column_2
        gate_2, shift_2, scale_2 = _modulation(gate_ptr, shift_ptr, scale_ptr, at_2, inside_2, base, GATED, NORM)
    first = tl.program_id(0) * TOKENS
    for token in tl.range(first, tl.minimum(first + TOKENS, tokens), num_stages=STAGES):
        row = sample * tokens + token
        at = row * WIDTH + column
        x = _stream(x_ptr, branch_ptr, sum_ptr, at, inside, gate, ADD, GATED)
        if REST:
            at_2 = row * WIDTH + column_2
            x_2 = _stream(x_ptr, branch_ptr, sum_ptr, at_2, inside_2, gate_2, ADD, GATED)
        if NORM:
            total = x
            if REST:
                total = _per_thread(x, THREADS) + _per_thread(x_2, THREADS)
            mean = tl.sum(total, axis=0) / WIDTH
            away = tl.where(inside, x - mean, 0.0)
            squares = away * away
            if REST:
                away_2 = tl.where(inside_2, x_2 - mean, 0.0)
                squares = _per_thread(squares, THREADS) + _per_thread(away_2 * away_2, THREADS)
            rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / WIDTH + eps)
            tl.store(statistics_ptr + 2 * row, mean)
            tl.store(statistics_ptr + 2 * row + 1, rstd)
            tl.store(y_ptr + at, away * rstd * scale + shift, mask=inside)
            if REST:
                tl.store(y_ptr + at_2, away_2 * rstd * scale_2 + shift_2, mask=inside_2)


@triton.jit
def _slopes(
    grad_ptr,
    grad_sum_ptr,
    stream_ptr,
    branch_ptr,
    statistics_ptr,
    row,
    at,
    inside,
    gate,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    MORE: tl.constexpr,
):
    """Read a tile of a token: both gradients, it normalized, and the branch. Outside they are 0, but for it normalized,
    which only meets gradients there."""
    dsum = tl.zeros(at.shape, dtype=tl.float32)
    grad = dsum
    normal = dsum
    branch = dsum
    if MORE:
        dsum = tl.load(grad_sum_ptr + at, mask=inside, other=0).to(tl.float32)
    if GATED:
        branch = tl.load(branch_ptr + at, mask=inside, other=0).to(tl.float32)
    if NORM:
        grad = tl.load(grad_ptr + at, mask=inside, other=0).to(tl.float32)
        x = tl.load(stream_ptr + at, mask=inside, other=0).to(tl.float32)
        if GATED:
            x = _added(x, branch, gate, GATED).to(stream_ptr.dtype.element_ty).to(tl.float32)
        normal = (x - tl.load(statistics_ptr + 2 * row)) * tl.load(statistics_ptr + 2 * row + 1)
    return dsum, grad, normal, branch


@triton.jit
def _write(dsum_ptr, dbranch_ptr, at, inside, dsum, gate, GATED: tl.constexpr, NORM: tl.constexpr):
    if GATED:
        tl.store(dbranch_ptr + at, dsum * gate, mask=inside)
    if NORM:  # else it is the gradient that was given
        tl.store(dsum_ptr + at, dsum, mask=inside)


@triton.jit
def _write_sums(out_ptr, inside, dshift, dscale, dgate, total, WIDTH: tl.constexpr):
    tl.store(out_ptr, dshift, mask=inside)
    tl.store(out_ptr + WIDTH, dscale, mask=inside)
    tl.store(out_ptr + 2 * WIDTH, dgate, mask=inside)
    tl.store(out_ptr + 3 * WIDTH, total, mask=inside)


@triton.jit
def _backward_kernel(
    grad_ptr,
    grad_sum_ptr,
    stream_ptr,
    branch_ptr,
    gate_ptr,
    scale_ptr,
    statistics_ptr,
    dsum_ptr,
    dbranch_ptr,
    partial_ptr,
    tokens,
    base,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    THREADS: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    MORE: tl.constexpr,
    SUMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    sample = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = sample * WIDTH + column
    gate, _, scale = _modulation(gate_ptr, scale_ptr, scale_ptr, at, inside, base, GATED, NORM)
    dshift = tl.zeros([BLOCK], dtype=tl.float32)
    dscale = tl.zeros([BLOCK], dtype=tl.float32)
    dgate = tl.zeros([BLOCK], dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if REST:
        column_2 = BLOCK + tl.arange(0, REST)
        inside_2 = column_2 < WIDTH
        at_2 = sample * WIDTH + column_2
        gate_2, _, scale_2 = _modulation(gate_ptr, scale_ptr, scale_ptr, at_2, inside_2, base, GATED, NORM)
        dshift_2 = tl.zeros([REST], dtype=tl.float32)
        dscale_2 = tl.zeros([REST], dtype=tl.float32)
        dgate_2 = tl.zeros([REST], dtype=tl.float32)
        total_2 = tl.zeros([REST], dtype=tl.float32)
    for token in tl.range(tl.program_id(0), tokens, tl.num_programs(0), num_stages=STAGES):
        row = sample * tokens + token
        at = row * WIDTH + column
        dsum, grad, normal, branch = _slopes(
            grad_ptr, grad_sum_ptr, stream_ptr, branch_ptr, statistics_ptr, row, at, inside, gate, GATED, NORM, MORE
        )
        if REST:
            at_2 = row * WIDTH + column_2
            dsum_2, grad_2, normal_2, branch_2 = _slopes(
                grad_ptr, grad_sum_ptr, stream_ptr, branch_ptr, statistics_ptr, row, at_2, inside_2, gate_2, GATED,
                NORM, MORE,
            )  # fmt: skip
        if NORM:
            rstd = tl.load(statistics_ptr + 2 * row + 1)
            scaled = grad * scale
            level = scaled
            slope = scaled * normal
            if REST:
                scaled_2 = grad_2 * scale_2
                level = _per_thread(level, THREADS) + _per_thread(scaled_2, THREADS)
                slope = _per_thread(slope, THREADS) + _per_thread(scaled_2 * normal_2, THREADS)
            level, slope = tl.reduce((level, slope), 0, _add_pairs)
            level = level / WIDTH
            slope = slope / WIDTH
            dsum += rstd * (scaled - level - normal * slope)
            dshift += grad
            dscale += grad * normal
            if REST:
                dsum_2 += rstd * (scaled_2 - level - normal_2 * slope)
                dshift_2 += grad_2
                dscale_2 += grad_2 * normal_2
        total += dsum
        dgate += dsum * branch
        _write(dsum_ptr, dbranch_ptr, at, inside, dsum, gate, GATED, NORM)
        if REST:
            total_2 += dsum_2
            dgate_2 += dsum_2 * branch_2
            _write(dsum_ptr, dbranch_ptr, at_2, inside_2, dsum_2, gate_2, GATED, NORM)
    out_ptr = partial_ptr + (sample * tl.num_programs(0) + tl.program_id(0)) * SUMS * WIDTH
    _write_sums(out_ptr + column, inside, dshift, dscale, dgate, total, WIDTH)
    if REST:
        _write_sums(out_ptr + column_2, inside_2, dshift_2, dscale_2, dgate_2, total_2, WIDTH)


# -- operators: opaque to a compiler, so that it neither copies what they return nor splits their passes


@torch.library.custom_op("headway::modulated_norm", mutates_args=())
def _norm(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    bias: Tensor | None,  # noqa: ARG001 (part of the branch; only its gradient is made here)
    shift: Tensor | None,
    scale: Tensor | None,
    base: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the stream, it normalized, and mean and rstd of each token; what is not asked for is empty."""
    total, y, statistics = _outputs(x, branch, shift)
    (samples, tokens, width), cut = x.shape, tiling(*x.shape)
    if x.numel():
        _forward_kernel[(triton.cdiv(tokens, cut.tokens), samples)](
            x, x if branch is None else branch, x if gate is None else gate, x if shift is None else shift,
            x if scale is None else scale, total, y, statistics, tokens, base, eps,
            WIDTH=width, BLOCK=cut.block, REST=cut.rest, THREADS=32 * cut.forward_warps, TOKENS=cut.tokens,
            ADD=branch is not None, GATED=gate is not None, NORM=shift is not None, STAGES=STAGES,
            num_warps=cut.forward_warps,
        )  # fmt: skip
    return total, y, statistics


def _outputs(x: Tensor, branch: Tensor | None, shift: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    none = x.new_empty(0)
    y = none if shift is None else torch.empty_like(x)
    statistics = x.new_empty(0 if shift is None else (*x.shape[:2], 2), dtype=torch.float32)
    return none.clone() if branch is None else torch.empty_like(x), y, statistics


@_norm.register_fake
def _(
    x: Tensor,
    branch: Tensor | None,
    _gate: Tensor | None,
    _bias: Tensor | None,
    shift: Tensor | None,
    _scale: Tensor | None,
    _base: float,
    _eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(x, branch, shift)


@torch.library.custom_op("headway::modulated_norm_backward", mutates_args=())
def _norm_backward(
    grad: Tensor | None,
    grad_sum: Tensor | None,
    stream: Tensor | None,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor | None,
    statistics: Tensor,
    base: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the stream, if there is a norm, and of a gated branch, and four sums per sample
    [B, 4, D]. The stream is that before a gated branch, or after another; it is needed for a norm."""
    dsum, dbranch, sums = _gradients(grad, grad_sum, branch, gate)
    samples, tokens, width = _either(grad, grad_sum).shape
    cut = tiling(samples, tokens, width)
    if not samples * tokens:
        return dsum, dbranch, sums.zero_()
    partial = torch.empty((samples, cut.chunks, SUMS, width), dtype=torch.float32, device=sums.device)
    given = (None if x is None else x.contiguous() for x in (grad, grad_sum))
    _backward_kernel[(cut.chunks, samples)](
        *(sums if x is None else x for x in (*given, stream, branch, gate, scale)),
        statistics, dsum, dbranch, partial, tokens, base,
        WIDTH=width, BLOCK=cut.block, REST=cut.rest, THREADS=32 * cut.warps, GATED=gate is not None,
        NORM=grad is not None, MORE=grad_sum is not None, SUMS=SUMS, STAGES=STAGES, num_warps=cut.warps,
        maxnreg=cut.registers,
    )  # fmt: skip
    sum_partials(partial, sums)
    return dsum, dbranch, sums


def _either(grad: Tensor | None, grad_sum: Tensor | None) -> Tensor:
    given = grad_sum if grad is None else grad
    assert given is not None, "some result has a gradient"
    return given


def _gradients(
    grad: Tensor | None, grad_sum: Tensor | None, branch: Tensor | None, gate: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    given = _either(grad, grad_sum)
    dsum = given.new_empty(0 if grad is None else given.shape)
    dbranch = given.new_empty(0) if branch is None or gate is None else torch.empty_like(branch)
    sums = given.new_empty((given.shape[0], SUMS, given.shape[2]), dtype=torch.float32)
    return dsum, dbranch, sums


@_norm_backward.register_fake
def _(
    grad: Tensor | None,
    grad_sum: Tensor | None,
    _stream: Tensor | None,
    branch: Tensor | None,
    gate: Tensor | None,
    _scale: Tensor | None,
    _statistics: Tensor,
    _base: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(grad, grad_sum, branch, gate)


# -- gradients


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, branch, gate, bias, shift, scale, base, _ = inputs
    total, _, statistics = output
    assert branch is not None, "`_Norm` is for those without"
    norms, gated = shift is not None, gate is not None
    stream = (x if gated else total) if norms else None
    ctx.save_for_backward(stream, branch if gated else None, gate, scale, statistics)
    ctx.adds, ctx.norms, ctx.base = branch.dtype, norms, base
    ctx.bias = None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_sum: Tensor | None, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grad = grad if ctx.norms else None
    if grad_sum is None and grad is None:
        return (None,) * 8
    stream, branch, gate, scale, statistics = ctx.saved_tensors
    dsum, dbranch, sums = _norm_backward(grad, grad_sum, stream, branch, gate, scale, statistics, ctx.base)
    if grad is None:
        dsum = grad_sum
    dshift, dscale, dgate, whole = sums.unbind(1)
    dbias = None
    if ctx.bias is not None:
        dbias = (whole if gate is None else whole * gate).sum(0).to(ctx.bias)
    norm = (dshift, dscale) if grad is not None else (None, None)
    if gate is None:
        return dsum, dsum.to(ctx.adds), None, dbias, *norm, None, None
    return dsum, dbranch, dgate, dbias, *norm, None, None


_norm.register_autograd(_backward, setup_context=_keep)


class _Norm(torch.autograd.Function):
    """A norm without a branch; the stream that it returns is a view, which an operator may not return."""

    @staticmethod
    def forward(
        ctx: Any, x_BLD: Tensor, shift_BD: Tensor, scale_BD: Tensor, base: float, eps: float
    ) -> tuple[Tensor, Tensor]:
        _, y, statistics = _norm(x_BLD, None, None, None, shift_BD, scale_BD, base, eps)
        ctx.save_for_backward(x_BLD, scale_BD, statistics)
        ctx.base = base
        return x_BLD.view_as(x_BLD), y

    @staticmethod
    def backward(ctx: Any, grad_sum: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_BLD, scale_BD, statistics = ctx.saved_tensors
        dsum, _, sums = _norm_backward(grad, grad_sum, x_BLD, None, None, scale_BD, statistics, ctx.base)
        return dsum, sums[:, 0], sums[:, 1], None, None


# -- launches to compile ahead of time


def _launches(
    width: int, dtype: str, *, gated: bool, norm: bool, add: bool = True, samples: int = 1
) -> tuple[LaunchSpec, LaunchSpec]:
    """Launches of both passes over 65,536 tokens."""
    x, single, cut = f"*{dtype}", "*fp32", tiling(samples, 65536 // samples, width)
    name = f"modulated_norm_{width}_{dtype}" + "_add" * add + "_gated" * gated + "_norm" * norm
    forward = {"x_ptr": x, "branch_ptr": x, "gate_ptr": single, "shift_ptr": single, "scale_ptr": single}
    forward |= {"sum_ptr": x, "y_ptr": x, "statistics_ptr": single, "tokens": "i32", "base": "fp32", "eps": "fp32"}
    backward = {"grad_ptr": x, "grad_sum_ptr": x, "stream_ptr": x, "branch_ptr": x, "gate_ptr": single}
    backward |= {"scale_ptr": single, "statistics_ptr": single, "dsum_ptr": x, "dbranch_ptr": x}
    backward |= {"partial_ptr": single, "tokens": "i32", "base": "fp32"}
    shared = {"WIDTH": width, "BLOCK": cut.block, "REST": cut.rest, "GATED": gated, "NORM": norm, "STAGES": STAGES}
    more = {"MORE": add, "SUMS": SUMS, "THREADS": 32 * cut.warps}
    first = {**shared, "ADD": add, "TOKENS": cut.tokens, "THREADS": 32 * cut.forward_warps}
    return (
        LaunchSpec(name, _forward_kernel, forward, first, warps=cut.forward_warps),
        LaunchSpec(
            f"{name}_backward", _backward_kernel, backward, {**shared, **more}, cut.warps, registers=cut.registers
        ),
    )


AHEAD: tuple[LaunchSpec, ...] = (
    *_launches(1152, "bf16", gated=True, norm=True, samples=256),
    *_launches(1152, "bf16", gated=False, norm=True, add=False, samples=256),
    *_launches(1152, "bf16", gated=True, norm=False, samples=256),
    *_launches(1536, "bf16", gated=True, norm=True),
    *_launches(1536, "bf16", gated=False, norm=True),
    *_launches(1536, "bf16", gated=False, norm=True, add=False),
    *_launches(1536, "bf16", gated=True, norm=False),
    *_launches(4096, "bf16", gated=True, norm=True),
    *_launches(2048, "fp32", gated=True, norm=True),
)
