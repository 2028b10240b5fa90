"""Waiting for a condition: the one way in which tests wait for other processes and threads.

The ceiling is generous on purpose. A test that passes never waits for it, and on a busy machine a process may get no
core for many seconds; only a condition that never comes true costs the whole ceiling.
"""

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["CEILING_S", "eventually"]

CEILING_S = 300.0
POLL_S = 0.01

T = TypeVar("T")


def eventually(
    condition: Callable[[], T],
    describe: Callable[[], object] | None = None,
    *,
    ceiling_s: float = CEILING_S,
    poll_s: float = POLL_S,
) -> T:
    """Call `condition` until it returns something true, and return that.

    Fails after `ceiling_s` with what `describe` returns: logs of the processes waited for, the last status. An
    AssertionError that `condition` raises itself ends the wait at once: for what can no longer come true.
    """
    deadline = time.monotonic() + ceiling_s
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"not true after {ceiling_s:g} s: {describe() if describe else condition}")
        time.sleep(poll_s)
    return value
