"""Notices a run whose loss has risen and stays high: `find_divergence(losses)`, pure."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

WINDOW = 16
"""A level is the median of so many losses: spikes of up to half as many steps do not move it."""
FIRST_RISE = 3.0
"""A level is high above the first loss, that of the weights before any update, by FACTOR and by this much: a loss may
explode before a level is known, and one batch is noisy (fine-tuning begins low, its batches differ by two or so)."""
FACTOR, RISE, SPREADS = 1.5, 0.5, 3.0
"""A level is high above the best one by this factor, by this much, and by so many spreads of the losses there: the
medians of a noisy but steady loss range over less (the largest of 20,000 is two spreads above the smallest)."""


@dataclass(frozen=True)
class Divergence:
    """A loss that has risen and stays high."""

    step: int
    """The step at which it was noticed."""
    level: float
    """The usual loss of the last steps."""
    best: float
    """What it was at best."""

    @property
    def text(self) -> str:
        """It in one sentence."""
        return (
            f"the loss diverges: about {self.level:.4g} up to step {self.step}, {self.best:.4g} at best; "
            "lower train.lr, raise train.warmup_steps, or lower train.clip"
        )


@dataclass
class LossMonitor:
    """The same loss by loss."""

    is_high: bool = False
    """Whether the loss is high now."""
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _ordered: list[float] = field(default_factory=list)
    """The same, sorted: sorting them anew took most of the time of a long run's report."""
    _first: float | None = None
    _best: float = math.inf
    _spread: float = 0.0

    def add(self, step: int, loss: float | None) -> Divergence | None:
        """Take the loss of a step; return a divergence when it begins. One that is not finite says nothing here."""
        if loss is None or not math.isfinite(loss):
            return None
        if len(self._recent) == WINDOW:
            del self._ordered[bisect_left(self._ordered, self._recent[0])]
        self._recent.append(loss)
        insort(self._ordered, loss)
        if self._first is None:
            self._first = loss
        if len(self._recent) < WINDOW:
            return None
        level, was_high = self._ordered[(WINDOW - 1) // 2], self.is_high  # the lower median
        best = min(self._first, self._best)
        limit = self._first + max((FACTOR - 1) * abs(self._first), FIRST_RISE)
        if math.isfinite(self._best):
            limit = min(limit, self._best + max((FACTOR - 1) * abs(self._best), RISE, SPREADS * self._spread))
        self.is_high = level > limit
        if not self.is_high and level <= self._best:
            self._best = level
            self._spread = 1.4826 * sorted([abs(value - level) for value in self._recent])[(WINDOW - 1) // 2]
        return Divergence(step, level, best) if self.is_high and not was_high else None


def find_divergence(losses: Iterable[tuple[int, float | None]]) -> Divergence | None:
    """Return the last divergence of a run's losses, in the order of its steps, unless the loss has come down again."""
    monitor, last = LossMonitor(), None
    for step, loss in losses:
        begun = monitor.add(step, loss)
        last = begun or (last if monitor.is_high else None)
    return last
