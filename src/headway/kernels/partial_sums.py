"""Sums over tokens, from those that each program of a backward pass has accumulated by itself.

Programs are added in a fixed order: bits do not depend on which of them ends first. PyTorch's own sum takes 8
microseconds on an H200 for a few hundred programs, and a launch more to clear its semaphores.
"""

from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.triton_compat import tl, triton

ROWS, COLUMNS = 128, 16
"""Of a tile: with 16 columns per program, a width of 2048 already fills all multiprocessors."""


@triton.jit
def sum_kernel(partial_ptr, out_ptr, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sums of one block of columns, of one of the parts."""
    part = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < WIDTH)[None, :]
        at = (part * count + row)[:, None] * WIDTH + column[None, :]
        total += tl.load(partial_ptr + at, mask=inside, other=0)
    tl.store(out_ptr + part * WIDTH + column, tl.sum(total, axis=0), mask=column < WIDTH)


def sum_partials(partial: Tensor, out: Tensor) -> None:
    """Write the sums over dim 1 of contiguous float32 [parts, programs, ...] to `out` [parts, ...]."""
    parts, count = partial.shape[:2]
    width = out.numel() // parts
    rows, columns = tile(count)
    sum_kernel[(triton.cdiv(width, columns), parts)](
        partial, out, count, WIDTH=width, ROWS=rows, BLOCK=columns, num_warps=4
    )


def tile(count: int) -> tuple[int, int]:
    """Return rows and columns of a tile: a warp reads whole lines where programs are few."""
    rows = min(ROWS, 1 << (count - 1).bit_length())
    return rows, ROWS * COLUMNS // rows


AHEAD: tuple[LaunchSpec, ...] = tuple(
    LaunchSpec(
        f"partial_sums_{width}_{count}",
        sum_kernel,
        {"partial_ptr": "*fp32", "out_ptr": "*fp32", "count": "i32"},
        {"WIDTH": width, "ROWS": tile(count)[0], "BLOCK": tile(count)[1]},
    )
    for width, count in ((2048, 264), (6144, 264), (4608, 2))
)
