"""Signals by which people and schedulers ask an agent to stop, as a count.

SIGINT, SIGTERM and SIGHUP (a closed terminal): the first has the run save and stop, the second stops it at once. The
same signal again within a second is the same request: `timeout` signals the command and then its whole group.
SIGUSR1 (a batch system about to take the machine away): save and stop, however often it comes.
"""

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONCE_S = 1.0
"""A signal repeated within this time is one request."""


@dataclass
class StopSignals:
    """How often the run was asked to stop."""

    asked: int = 0
    """0: never; 1: save and stop; 2 or more: stop at once."""
    _counted: dict[int, float] = field(default_factory=dict)

    def receive(self, number: int, now: float) -> None:
        """Count a signal received at `now`, in seconds."""
        if number not in STOPS:
            self.asked = max(self.asked, 1)
        elif number not in self._counted or now - self._counted[number] > ONCE_S:
            self._counted[number] = now
            self.asked += 1


@contextlib.contextmanager
def count_stop_signals() -> Iterator[StopSignals]:
    """Count signals instead of dying of them."""
    stop_signals = StopSignals()

    def receive(number: int, _frame: object) -> None:
        stop_signals.receive(number, time.monotonic())

    before = {number: signal.signal(number, receive) for number in (*STOPS, signal.SIGUSR1)}
    try:
        yield stop_signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
