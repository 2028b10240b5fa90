"""Sampling from rows of logits, and log-probabilities, with the same sums for both.

Each row is cut into chunks of `CHUNK` logits. `_chunk_kernel` has one program per row and chunk, and keeps the chunk's
largest logit, its sums of exponentials and its best token; `_draw_kernel` has one per row: it joins the sums, finds the
chunk in which the cumulative probability passes the row's random number, and in it the token. So a row of 152k logits
is read once, by many programs, and a token depends on its own logits, number and temperature alone.

Log-probabilities come from the same joined sums, in a sampler and in a trainer: their bits agree where logits do.

Random numbers are those of `inference/sampler.py`: splitmix64 of a seed and a position, made on the device so that
several steps can follow each other without the host.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.triton_compat import tl, triton

CHUNK = 2048
WARPS = 4


class LogitSums(NamedTuple):
    """Of each chunk of each row of logits [R, C]."""

    peaks_RC: Tensor
    """Largest logit, before temperatures."""
    sampled_RC: Tensor
    """Sum of exp((z - peak) / temperature) over the tokens that may be sampled."""
    counted_RC: Tensor
    """The same over all tokens, at the temperature of log-probabilities."""
    best_RC: Tensor
    """The first of the largest logits that may be sampled, and -1 where there is none."""


# -- kernels


@triton.jit(do_not_specialize=["vocabulary", "width"])
def _chunk_kernel(
    logits_ptr, draw_temperature_ptr, logprob_temperature_ptr, peaks_ptr, sampled_ptr, counted_ptr, best_ptr,
    row_stride, vocabulary, width, chunks, temperature_stride,
    CHUNK: tl.constexpr, DRAWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    z = tl.load(logits_ptr + row * row_stride + column, mask=column < width, other=-float("inf")).to(tl.float32)
    peak = tl.max(z, 0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    colder = 1.0 / tl.load(logprob_temperature_ptr + row * temperature_stride)  # products are cheaper than divisions
    place = row * chunks + chunk
    tl.store(peaks_ptr + place, peak)
    tl.store(counted_ptr + place, tl.sum(tl.exp((z - base) * colder), 0))
    if DRAWS:
        drawn = tl.load(draw_temperature_ptr + row * temperature_stride)
        drawn = 1.0 / tl.where(drawn > 0, drawn, 1.0)
        allowed = column < vocabulary
        tl.store(sampled_ptr + place, tl.sum(tl.where(allowed, tl.exp((z - base) * drawn), 0.0), 0))
        within = tl.where(allowed, z, -float("inf"))
        highest = tl.max(within, 0)
        first = tl.min(tl.where((within == highest) & allowed, column, 2147483647), 0)
        tl.store(best_ptr + place, tl.where(highest > -float("inf"), first, -1))


@triton.jit
def _joined(peaks, sums, temperature):
    """Return the largest logit of a row, and its sum of exponentials."""
    peak = tl.max(peaks, 0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    return base, tl.sum(sums * tl.exp((peaks - base) / temperature), 0)


@triton.jit
def _logprob(z, base, total, temperature):
    return (z - base) / temperature - tl.log(total)


@triton.jit
def _mixed(number):
    """splitmix64."""
    number += 0x9E3779B97F4A7C15
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB
    return number ^ (number >> 31)


@triton.jit(do_not_specialize=["vocabulary", "chunks"])
def _draw_kernel(
    logits_ptr, draw_temperature_ptr, logprob_temperature_ptr, seeds_ptr, positions_ptr,
    peaks_ptr, sampled_ptr, counted_ptr, best_ptr, tokens_ptr, logprobs_ptr,
    row_stride, vocabulary, chunks, temperature_stride, seed_stride, position_stride, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    real = chunk < chunks
    peaks = tl.load(peaks_ptr + row * chunks + chunk, mask=real, other=-float("inf"))
    counted = tl.load(counted_ptr + row * chunks + chunk, mask=real, other=0.0)
    sampled = tl.load(sampled_ptr + row * chunks + chunk, mask=real, other=0.0)
    temperature = tl.load(draw_temperature_ptr + row * temperature_stride)
    greedy = temperature == 0
    temperature = tl.where(greedy, 1.0, temperature)
    logprob_temperature = tl.load(logprob_temperature_ptr + row * temperature_stride)
    base, total = _joined(peaks, counted, logprob_temperature)

    # The best token of all: that of the first chunk that has it.
    best = tl.load(best_ptr + row * chunks + chunk, mask=real, other=-1)
    best_z = tl.load(logits_ptr + row * row_stride + best, mask=best >= 0, other=-float("inf")).to(tl.float32)
    highest = tl.max(best_z, 0)
    greedy_token = tl.min(tl.where((best_z == highest) & (best >= 0), best, 2147483647), 0)

    seed = tl.load(seeds_ptr + row * seed_stride).to(tl.uint64)
    position = tl.load(positions_ptr + row * position_stride).to(tl.uint64)
    number = (_mixed(seed + position) >> 40).to(tl.float32) * 5.9604644775390625e-08
    shares = sampled * tl.exp((peaks - base) / temperature)
    shares = tl.where(real, shares, 0.0)
    ends = tl.cumsum(shares, 0)
    whole = tl.sum(tl.where(chunk == chunks - 1, ends, 0.0), 0)
    target = number * whole
    # Rounding must not lead past the last chunk with a token that may be drawn.
    last = tl.max(tl.where(shares > 0, chunk, 0), 0)
    chosen = tl.minimum(tl.sum(((ends <= target) & real).to(tl.int32), 0), last)
    before = tl.sum(tl.where(chunk == chosen - 1, ends, 0.0), 0)
    column = chosen * CHUNK + tl.arange(0, CHUNK)
    allowed = column < vocabulary
    z = tl.load(logits_ptr + row * row_stride + column, mask=allowed, other=-float("inf")).to(tl.float32)
    weights = tl.where(allowed, tl.exp((z - base) / temperature), 0.0)
    passed = (before + tl.cumsum(weights, 0) <= target) & allowed
    last_column = tl.max(tl.where(weights > 0, column, 0), 0)
    drawn = tl.minimum(chosen * CHUNK + tl.sum(passed.to(tl.int32), 0), last_column)
    token = tl.where(greedy, greedy_token, drawn)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    z_token = tl.load(logits_ptr + row * row_stride + token).to(tl.float32)
    tl.store(logprobs_ptr + row, _logprob(z_token, base, total, logprob_temperature))


@triton.jit(do_not_specialize=["width", "chunks"])
def _label_kernel(
    logits_ptr, labels_ptr, temperature_ptr, peaks_ptr, counted_ptr, logprobs_ptr, row_stride, width, chunks,
    temperature_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    real = chunk < chunks
    peaks = tl.load(peaks_ptr + row * chunks + chunk, mask=real, other=-float("inf"))
    counted = tl.load(counted_ptr + row * chunks + chunk, mask=real, other=0.0)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    base, total = _joined(peaks, counted, temperature)
    label = tl.load(labels_ptr + row)
    inside = (label >= 0) & (label < width)
    z = tl.load(logits_ptr + row * row_stride + label, mask=inside, other=0.0).to(tl.float32)
    tl.store(logprobs_ptr + row, tl.where(inside, _logprob(z, base, total, temperature), 0.0))


# -- launches


def new_sums(rows: int, width: int, device: torch.device, *, draws: bool = True) -> LogitSums:
    """Allocate the sums of rows of logits."""
    shape = rows, -(-width // CHUNK)
    floats = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(3 if draws else 2)]
    best = torch.empty(shape, dtype=torch.int32, device=device) if draws else floats[0]
    return LogitSums(floats[0], floats[2] if draws else floats[0], floats[1], best)


def _block(chunks: int) -> int:
    return max(16, 1 << (chunks - 1).bit_length())


def draw(
    logits_RV: Tensor,
    vocabulary: int,
    width: int,
    temperatures_R2: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    tokens_R: Tensor,
    logprobs_R: Tensor,
    sums: LogitSums | None = None,
    *,
    early: bool = False,
) -> None:
    """Sample a token of each row below `vocabulary`, greedily at a temperature of 0; write it and its log-probability.

    The latter counts the first `width` tokens.

    `temperatures_R2` has those of drawing and of log-probabilities; `seeds_R` mixed seeds as int64 (`mixed_seeds`).
    """
    rows = len(logits_RV)
    sums = sums or new_sums(rows, width, logits_RV.device)
    chunks = -(-width // CHUNK)
    options = {"launch_pdl": True} if early else {}
    _chunk_kernel[(chunks, rows)](
        logits_RV, temperatures_R2, temperatures_R2[:, 1], *sums, logits_RV.stride(0), vocabulary, width, chunks,
        temperatures_R2.stride(0), CHUNK=CHUNK, DRAWS=True, EARLY=early, num_warps=WARPS, **options,
    )  # fmt: skip
    _draw_kernel[(rows,)](
        logits_RV, temperatures_R2, temperatures_R2[:, 1], seeds_R, positions_R, *sums, tokens_R, logprobs_R,
        logits_RV.stride(0), vocabulary, chunks, temperatures_R2.stride(0), seeds_R.stride(0), positions_R.stride(0),
        BLOCK=_block(chunks), CHUNK=CHUNK, EARLY=early, num_warps=WARPS, **options,
    )  # fmt: skip


def label_logprobs(logits_TV: Tensor, labels_T: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Return the log-probability of each row's label at a temperature, or at one of each row, with the bits of `draw`;
    0 for labels out of range."""
    rows, width = logits_TV.shape
    chunks = -(-width // CHUNK)
    out = torch.empty(rows, dtype=torch.float32, device=logits_TV.device)
    if rows == 0:
        return out
    sums = new_sums(rows, width, logits_TV.device, draws=False)
    if isinstance(temperature, Tensor):
        temperatures, each = temperature, temperature.stride(0)
    else:
        temperatures, each = torch.full((1,), temperature, dtype=torch.float32, device=logits_TV.device), 0
    _chunk_kernel[(chunks, rows)](
        logits_TV, temperatures, temperatures, *sums, logits_TV.stride(0), width, width, chunks, each,
        CHUNK=CHUNK, DRAWS=False, EARLY=False, num_warps=WARPS,
    )  # fmt: skip
    _label_kernel[(rows,)](
        logits_TV, labels_T, temperatures, sums.peaks_RC, sums.counted_RC, out, logits_TV.stride(0), width, chunks,
        each,
        BLOCK=_block(chunks), num_warps=WARPS,
    )  # fmt: skip
    return out


_TYPES = {"logits_ptr": "*fp32", "draw_temperature_ptr": "*fp32", "logprob_temperature_ptr": "*fp32"}
_SUMS = {"peaks_ptr": "*fp32", "sampled_ptr": "*fp32", "counted_ptr": "*fp32", "best_ptr": "*i32"}
_COUNTS = {"vocabulary": "i32", "chunks": "i32", "temperature_stride": "i32"}

AHEAD = (
    LaunchSpec(
        "sampling.chunks",
        _chunk_kernel,
        _TYPES | _SUMS | {"row_stride": "i32", "width": "i32"} | _COUNTS,
        {"CHUNK": CHUNK, "DRAWS": True, "EARLY": True},
        WARPS,
        odd=frozenset({"vocabulary", "width", "chunks"}),
    ),
    LaunchSpec(
        "sampling.draw",
        _draw_kernel,
        _TYPES
        | {"seeds_ptr": "*i64", "positions_ptr": "*i32"}
        | _SUMS
        | {"tokens_ptr": "*i64", "logprobs_ptr": "*fp32", "row_stride": "i32", "seed_stride": "i32"}
        | {"position_stride": "i32"}
        | _COUNTS,
        {"BLOCK": 128, "CHUNK": CHUNK, "EARLY": True},
        WARPS,
        odd=frozenset({"vocabulary", "chunks"}),
    ),
)
