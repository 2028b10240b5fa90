"""What people and schedulers ask of a running agent, by signals.

SIGINT, SIGTERM and SIGHUP (a terminal that closes): the first has the run save and stop, the second stops it at once.
SIGUSR1 (a batch system that will take the machine away): save and stop; however often it comes, it never hurries.
"""

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["STOPS", "Wishes", "listen"]

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Wishes:
    """How often somebody has asked the run to stop."""

    asked: int = 0
    """0: nobody; 1: save and stop; 2 or more: stop at once."""

    def hear(self, number: int) -> None:
        """Take a signal in."""
        self.asked = self.asked + 1 if number in STOPS else max(self.asked, 1)


@contextlib.contextmanager
def listen() -> Iterator[Wishes]:
    """Count signals instead of dying of them."""
    wishes = Wishes()
    numbers = (*STOPS, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda received, _: wishes.hear(received)) for number in numbers}
    try:
        yield wishes
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
