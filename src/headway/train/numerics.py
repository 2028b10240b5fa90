"""Numbers gone wrong: a loss or norm that is no number, and a loss far above those before it. Pure.

A loss is held against the median of the last fine ones, in robust standard deviations: 1.4826 times the median of
their distances from it, which for normal noise is the standard deviation, and 1 % of the median at least, for a loss
that hardly moves may move a little. Only upwards: a loss that falls is what training is for.

Every worker has the same numbers, for they are sums over all, so all come to the same verdict at the same step.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from headway.errors import HeadwayError
from headway.recipe.assignment import SpikeReference
from headway.recipe.schema import Health

__all__ = ["BadNumbers", "BadStep", "NumericsMonitor", "median", "spread_of"]

NORMAL = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""
LEAST = 0.01
"""The least spread, as a share of the median."""


@dataclass(frozen=True)
class BadStep:
    """What is wrong with a step's numbers."""

    kind: Literal["not finite", "spike"]
    step: int
    value: float
    what: Literal["loss", "gradient norm"] = "loss"
    usual: float = 0.0
    """The median of the losses before it; 0 for what is not finite."""
    spread: float = 0.0
    """Their robust standard deviation."""

    @property
    def z(self) -> float:
        """How many of those the loss is above it."""
        return (self.value - self.usual) / self.spread if self.spread else math.inf


class BadNumbers(HeadwayError):
    """A step's numbers have gone wrong; `cursor` is where its samples begin."""

    def __init__(self, bad: BadStep, cursor: int, batch: int) -> None:
        told = f"the {bad.what} of step {bad.step} is {bad.value:.6g}"
        if bad.kind == "spike":
            told += f", far above the {bad.usual:.4g} of the steps before it (z = {bad.z:.3g})"
        key = "health.if_spike" if bad.kind == "spike" else "health.if_not_finite"
        super().__init__(
            told, hint=f"when it comes again after a replay, {key} decides: headway resume RUN --set {key}=skip"
        )
        self.kind, self.step, self.value, self.cursor = bad.kind, bad.step, bad.value, cursor
        self.usual, self.spread = bad.usual, bad.spread
        window = (cursor, cursor + batch)
        self.facts = {"trouble": bad.kind, "step": bad.step, "value": bad.value, "usual": bad.usual,
                      "spread": bad.spread, "window": window}  # fmt: skip


class NumericsMonitor:
    """Looks at every step's numbers, in order; costs a microsecond or two a step.

    `judge` is a step that was a spike in an attempt before this one: it is held against the same numbers as then.
    Spikes of the steps in `accept` are taken as they are, and what comes after is held against what comes after.
    """

    def __init__(self, health: Health, judge: SpikeReference | None = None, accept: Collection[int] = ()) -> None:
        self._z, self._length = health.spike_z, health.spike_window
        self._judge, self._accept = judge, frozenset(accept)
        self._last = deque[float]()
        self._sorted = list[float]()

    def look(self, step: int, loss: float, norm: float) -> BadStep | None:
        """What is wrong with a step, if anything is."""
        if not math.isfinite(loss):
            return BadStep("not finite", step, loss)
        if not math.isfinite(norm):
            return BadStep("not finite", step, norm, "gradient norm")
        if not self._z:
            return None
        if step in self._accept:
            self._last.clear()
            self._sorted.clear()
            return None
        found = self._spike(step, loss)
        if found is None:
            self._take(loss)
        return found

    def _spike(self, step: int, loss: float) -> BadStep | None:
        if self._judge is not None and step == self._judge.step:
            usual, spread = self._judge.usual, self._judge.spread
        elif len(self._last) < self._length:
            return None
        else:
            usual = median(self._sorted)
            if loss - usual <= self._z * (LEAST * abs(usual)):  # whatever the spread is: the way of nearly all steps
                return None
            spread = spread_of(self._sorted, usual)
        return BadStep("spike", step, loss, usual=usual, spread=spread) if loss - usual > self._z * spread else None

    def _take(self, loss: float) -> None:
        """Put a fine loss in the place of the oldest."""
        if len(self._last) == self._length:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]
        self._last.append(loss)
        insort(self._sorted, loss)


def median(ordered: Sequence[float]) -> float:
    """The middle of numbers in order, or the middle between two."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def spread_of(ordered: Sequence[float], middle: float) -> float:
    """A standard deviation that a few outliers cannot move, a hundredth of the middle at least."""
    return max(NORMAL * median(sorted(abs(value - middle) for value in ordered)), LEAST * abs(middle))
