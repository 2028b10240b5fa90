"""Detection of non-finite values and loss spikes. Pure.

A loss is compared with the median of the last good ones, in robust standard deviations: 1.4826 times their median
absolute deviation (the standard deviation of normal noise), but at least 1 % of the median, so that a flat loss may
vary a little. Only upward: a falling loss is the goal of training.

Every worker has the same numbers, since they are sums over all workers, so all reach the same verdict at the same step.
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
from headway.track import RunFolder

NORMAL = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""
LEAST = 0.01
"""The least spread, as a share of the median."""


@dataclass(frozen=True)
class BadStep:
    """A step with bad numerics."""

    kind: Literal["not finite", "spike"]
    step: int
    value: float
    what: Literal["loss", "gradient norm"] = "loss"
    usual: float = 0.0
    """The median of the preceding losses; 0 for a non-finite value."""
    spread: float = 0.0
    """Their robust standard deviation."""

    @property
    def z(self) -> float:
        """Robust standard deviations above the median."""
        return (self.value - self.usual) / self.spread if self.spread else math.inf


class BadNumbers(HeadwayError):
    """A step has bad numerics; `cursor` is its first sample."""

    def __init__(self, bad: BadStep, cursor: int, batch: int, run: RunFolder) -> None:
        message = f"the {bad.what} of step {bad.step} is {bad.value:.6g}"
        if bad.kind == "spike":
            message += f", far above the usual {bad.usual:.4g} (z = {bad.z:.3g})"
        key = "health.if_spike" if bad.kind == "spike" else "health.if_not_finite"
        skip = run.command("resume", f"--set {key}=skip")
        super().__init__(message, hint=f"{skip} skips its samples; a lower train.lr in a new run may help, too")
        self.kind, self.step, self.value, self.cursor = bad.kind, bad.step, bad.value, cursor
        self.usual, self.spread = bad.usual, bad.spread
        window = (cursor, cursor + batch)
        self.facts = {"trouble": bad.kind, "step": bad.step, "value": bad.value, "usual": bad.usual,
                      "spread": bad.spread, "window": window}  # fmt: skip


class NumericsMonitor:
    """Checks every step's numbers, in order, at a cost of one or two microseconds per step.

    `judge` is a step that was a spike in an earlier attempt: it is compared with the same reference as then. Spikes of
    steps in `accept` are accepted, and later losses are compared with those after them.
    """

    def __init__(self, health: Health, judge: SpikeReference | None = None, accept: Collection[int] = ()) -> None:
        self._z, self._length = health.spike_z, health.spike_window
        self._judge, self._accept = judge, frozenset(accept)
        self._last = deque[float]()
        self._sorted = list[float]()

    def look(self, step: int, loss: float, norm: float) -> BadStep | None:
        """Return what is wrong with a step, if anything."""
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
        bad = self._spike(step, loss)
        if bad is None:
            self._take(loss)
        return bad

    def _spike(self, step: int, loss: float) -> BadStep | None:
        if self._judge is not None and step == self._judge.step:
            usual, spread = self._judge.usual, self._judge.spread
        elif len(self._last) < self._length:
            return None
        else:
            usual = median(self._sorted)
            if loss - usual <= self._z * (LEAST * abs(usual)):  # fast path of nearly all steps: no spread needed
                return None
            spread = spread_of(self._sorted, usual)
        return BadStep("spike", step, loss, usual=usual, spread=spread) if loss - usual > self._z * spread else None

    def _take(self, loss: float) -> None:
        """Replace the oldest loss."""
        if len(self._last) == self._length:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]
        self._last.append(loss)
        insort(self._sorted, loss)


def median(ordered: Sequence[float]) -> float:
    """Return the median of sorted numbers."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def spread_of(ordered: Sequence[float], middle: float) -> float:
    """Return the robust standard deviation, at least 1 % of the median."""
    return max(NORMAL * median(sorted(abs(value - middle) for value in ordered)), LEAST * abs(middle))
