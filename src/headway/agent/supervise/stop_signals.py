"""What people and schedulers ask of a running agent, by signals.

SIGINT, SIGTERM and SIGHUP (a terminal that closes): the first has the run save and stop, the second stops it at once.
The same one again within a second is the same wish: `timeout` tells the command and then its whole group.
SIGUSR1 (a batch system that will take the machine away): save and stop; however often it comes, it never hurries.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

__all__ = ["STOPS", "StopSignals", "count_stop_signals"]

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONCE_S = 1.0
"""A signal that comes again so soon is one wish."""


@dataclass
class StopSignals:
    """How often somebody has asked the run to stop."""

    asked: int = 0
    """0: nobody; 1: save and stop; 2 or more: stop at once."""
    _counted: dict[int, float] = field(default_factory=dict)

    def hear(self, number: int, now: float) -> None:
        """Take a signal in, at a time in seconds."""
        if number not in STOPS:
            self.asked = max(self.asked, 1)
        elif number not in self._counted or now - self._counted[number] > ONCE_S:
            self._counted[number] = now
            self.asked += 1


@contextlib.contextmanager
def count_stop_signals() -> Iterator[StopSignals]:
    """Count signals instead of dying of them."""
    wishes = StopSignals()
    numbers = (*STOPS, signal.SIGUSR1)
    before = {number: signal.signal(number, _hear(wishes)) for number in numbers}
    try:
        yield wishes
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hear(wishes: StopSignals) -> Callable[[int, object], None]:
    return lambda received, _frame: wishes.hear(received, time.monotonic())
