"""Token buckets: how many requests each caller may make. The clock is an argument."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MOST_CALLERS = 10_000
"""Buckets that are remembered; the one that was used longest ago is forgotten first."""


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float


class RateLimiter:
    """A bucket per caller: it holds `burst` requests, and is refilled with `per_s` of them per second."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float]) -> None:
        """`clock` returns seconds that never go back."""
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def admit(self, caller: str) -> float:
        """Take a request from the caller's bucket and return 0; if it is empty, return the seconds until it is not."""
        now = self._clock()
        bucket = self._buckets.setdefault(caller, _Bucket(self._burst, now))
        self._buckets.move_to_end(caller)
        if len(self._buckets) > MOST_CALLERS:
            self._buckets.popitem(last=False)
        bucket.left = min(self._burst, bucket.left + (now - bucket.at) * self._per_s)
        bucket.at = now
        if bucket.left < 1:
            return (1 - bucket.left) / self._per_s
        bucket.left -= 1
        return 0.0
