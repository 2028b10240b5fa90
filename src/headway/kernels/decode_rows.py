"""The state of decoding on the device: a row of integers per sequence, which a pass reads and advances by one token.

So several passes can follow each other without the host. Columns are int32; a seed takes two, temperatures are the bits
of float32 numbers. A row that has no pass left, as its sequence ends before others do, fills up the batch: it attends
to one token, and writes to the scratch page.
"""

import torch
from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.triton_compat import tl, triton

TOKEN, SOURCE, POSITION, ADAPTER, SEED, GENERATED, DRAW, LOGPROB, LEFT, STEP, PAGES = (*range(5), *range(6, 12))
"""Token, or the row of the last pass that sampled it; position; number of the adapter; seed; tokens generated so far;
temperatures of sampling and of log-probabilities; passes left before the host writes it again; passes since the host
wrote the rows, in the first row; and pages."""


@triton.jit(do_not_specialize=["stride", "scratch"])
def _begin_kernel(
    rows_ptr, last_ptr, tokens_ptr, positions_ptr, slots_ptr, lengths_ptr, draws_ptr, stride, scratch,
    PAGE: tl.constexpr, TOKEN: tl.constexpr, SOURCE: tl.constexpr, POSITION: tl.constexpr, GENERATED: tl.constexpr,
    LEFT: tl.constexpr, STEP: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    row = rows_ptr + number.to(tl.int64) * stride
    source = tl.load(row + SOURCE)
    token = tl.load(row + TOKEN).to(tl.int64)
    sampled = tl.load(last_ptr + tl.maximum(source, 0))
    tl.store(tokens_ptr + number, tl.where(source < 0, token, sampled))
    position = tl.load(row + POSITION)
    left = tl.load(row + LEFT)
    advance = (left > 0).to(tl.int32)
    here = tl.where(left > 0, position, 0)
    page = tl.load(row + PAGES + here // PAGE, mask=left > 0, other=scratch).to(tl.int64)
    tl.store(positions_ptr + number, here.to(tl.int64))
    tl.store(slots_ptr + number, page * PAGE + here % PAGE)
    tl.store(lengths_ptr + number, here + 1)
    generated = tl.load(row + GENERATED)
    tl.store(draws_ptr + number, generated)
    tl.store(row + POSITION, position + advance)
    tl.store(row + GENERATED, generated + advance)
    tl.store(row + LEFT, left - advance)
    tl.store(row + SOURCE, tl.where(left > 0, number, source))
    tl.store(row + STEP, tl.load(row + STEP) + 1)


@triton.jit
def _keep_kernel(
    rows_ptr, tokens_ptr, logprobs_ptr, all_tokens_ptr, all_logprobs_ptr, count, stride,
    STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    step = tl.load(rows_ptr + STEP) - 1
    row = tl.arange(0, BLOCK)
    inside = row < count
    tl.store(all_tokens_ptr + step * stride + row, tl.load(tokens_ptr + row, mask=inside), mask=inside)
    tl.store(all_logprobs_ptr + step * stride + row, tl.load(logprobs_ptr + row, mask=inside), mask=inside)


def begin(
    rows: Tensor, last: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, lengths: Tensor, draws: Tensor,
    page: int, scratch: int,
) -> None:  # fmt: skip
    """Write what a pass computes, and advance the rows to the next one; `scratch` is the page of rows that do not."""
    _begin_kernel[(len(rows),)](
        rows, last, tokens, positions, slots, lengths, draws, rows.stride(0), scratch, PAGE=page, TOKEN=TOKEN,
        SOURCE=SOURCE, POSITION=POSITION, GENERATED=GENERATED, LEFT=LEFT, STEP=STEP, PAGES=PAGES, num_warps=1,
    )  # fmt: skip


def keep(rows: Tensor, tokens: Tensor, logprobs: Tensor, all_tokens: Tensor, all_logprobs: Tensor) -> None:
    """Copy what a pass sampled to the line of its number."""
    _keep_kernel[(1,)](
        rows, tokens, logprobs, all_tokens, all_logprobs, len(tokens), all_tokens.stride(0), STEP=STEP,
        BLOCK=max(16, 1 << (len(tokens) - 1).bit_length()), num_warps=4,
    )  # fmt: skip


def views(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the temperatures [R, 2], seeds [R] as int64, and pages [R, P] of rows."""
    return rows.view(torch.float32)[:, DRAW : LOGPROB + 1], rows.view(torch.int64)[:, SEED // 2], rows[:, PAGES:]


AHEAD = (
    LaunchSpec(
        "decode_rows.begin",
        _begin_kernel,
        {"rows_ptr": "*i32", "last_ptr": "*i64", "tokens_ptr": "*i64", "positions_ptr": "*i64", "slots_ptr": "*i64"}
        | {"lengths_ptr": "*i32", "draws_ptr": "*i32", "stride": "i32", "scratch": "i32"},
        {"PAGE": 64, "TOKEN": TOKEN, "SOURCE": SOURCE, "POSITION": POSITION, "GENERATED": GENERATED}
        | {"LEFT": LEFT, "STEP": STEP, "PAGES": PAGES},
        1,
        odd=frozenset({"stride", "scratch"}),
    ),
    LaunchSpec(
        "decode_rows.keep",
        _keep_kernel,
        {"rows_ptr": "*i32", "tokens_ptr": "*i64", "logprobs_ptr": "*fp32", "all_tokens_ptr": "*i64"}
        | {"all_logprobs_ptr": "*fp32", "count": "i32", "stride": "i32"},
        {"STEP": STEP, "BLOCK": 256},
    ),
)
