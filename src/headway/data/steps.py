"""Which sample a step begins with, when batches grow and samples are passed over."""

from collections.abc import Sequence

from headway.data.order import after_skips

__all__ = ["first_sample"]

Batches = Sequence[tuple[int, int]]
"""(step, sequences): from this step on a batch is of so many; the first from step 1 on."""


def first_sample(step: int, batches: Batches, skips: Sequence[tuple[int, int]]) -> int:
    """The number of the sample that a step's batch begins with; steps count from 1.

    No step is replayed: stretches of equal batches between skipped ranges are arithmetic. A range that is added while a
    run goes on moves no step that began before it.
    """
    cursor = 0
    for index, (first, batch) in enumerate(batches):
        last = batches[index + 1][0] if index + 1 < len(batches) else step + 1
        if step < last:
            return after_skips(_after(cursor, batch, step - first, skips), batch, skips)
        cursor = _after(cursor, batch, last - first, skips)
    raise AssertionError("the last batch has no end")


def _after(cursor: int, batch: int, steps: int, skips: Sequence[tuple[int, int]]) -> int:
    """The cursor after so many steps of one batch size."""
    for first, end in skips:
        if end <= cursor:
            continue
        whole = max(0, first - cursor) // batch
        if steps <= whole:
            break
        cursor, steps = end, steps - whole
    return cursor + steps * batch
