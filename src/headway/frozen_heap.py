"""Keeps what exists already out of Python's garbage collections, while something must not be held up.

A full collection looks at every object of the process: with a model's modules and torch's own 86 ms on an H200's host,
in which the device waits, and 200 ms in a service of a large cluster, in which nobody is answered.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FULL_EVERY = 10
"""Collections of younger objects between two full ones: Python's own."""


@contextmanager
def frozen_heap(full_every: int = FULL_EVERY) -> Iterator[None]:
    """Collect only what is made meanwhile; where somebody froze the heap before, it stays as it is."""
    if gc.get_freeze_count():
        yield
        return
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], full_every)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
