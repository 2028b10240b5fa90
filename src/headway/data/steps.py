"""The first sample of a step, when batches grow and samples are skipped."""

from collections.abc import Sequence

from headway.data.order import after_skips

Batches = Sequence[tuple[int, int]]
"""(first step, sequences per batch); the first entry is for step 1."""


def first_sample(step: int, batches: Batches, skips: Sequence[tuple[int, int]]) -> int:
    """Return the number of the first sample of a step; steps count from 1.

    No step is replayed: stretches of equal batches between skipped ranges are arithmetic. A range that is added during
    a run moves no step that began before it.
    """
    cursor = 0
    for index, (first, batch) in enumerate(batches):
        last = batches[index + 1][0] if index + 1 < len(batches) else step + 1
        if step < last:
            return after_skips(_after(cursor, batch, step - first, skips), batch, skips)
        cursor = _after(cursor, batch, last - first, skips)
    raise AssertionError("the last batch has no end")


def _after(cursor: int, batch: int, steps: int, skips: Sequence[tuple[int, int]]) -> int:
    """Return the cursor after so many steps of one batch size."""
    for first, end in skips:
        if end <= cursor:
            continue
        before = max(0, first - cursor) // batch
        if steps <= before:
            break
        cursor, steps = end, steps - before
    return cursor + steps * batch
