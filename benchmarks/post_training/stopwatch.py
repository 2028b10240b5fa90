"""Clocks the steps of either side."""

import gc
import statistics
import time
from collections.abc import Sequence

import torch

CHUNKS = 4
"""Parts of the steps that are timed one by one."""


class Stopwatch:
    """Clocks steps in chunks, the device idle between them, and tells the most memory of all steps."""

    def __init__(self, warm: int, steps: int, device: torch.device) -> None:
        self.warm, self.total, self._chunk, self._device = warm, warm + steps, max(1, steps // CHUNKS), device
        self.times, self.losses = list[float](), list[float]()
        self.first_s = self.gib = 0.0
        self._done = 0

    def start(self) -> None:
        """Before the first step."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._began = self._now()

    def step(self) -> None:
        """After each step."""
        self._done += 1
        timed = self._done - self.warm
        if self._done == 1:
            self.first_s = self._now() - self._began
        if timed == 0 or (timed > 0 and timed % self._chunk == 0):
            now = self._now()
            if timed:
                self.times.append((now - self._began) / self._chunk)
            self._began = self._now()
        if self._done == self.total and self._device.type == "cuda":
            self.gib = torch.cuda.max_memory_allocated() / 2**30

    def rate(self, sizes: Sequence[float]) -> float:
        """The median of chunks, in a second; `sizes` are those of all steps, in order."""
        starts = range(self.warm, self.total - self._chunk + 1, self._chunk)
        amounts = [sum(sizes[start : start + self._chunk]) for start in starts]
        return statistics.median(
            amount / self._chunk / seconds for amount, seconds in zip(amounts, self.times, strict=True)
        )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
