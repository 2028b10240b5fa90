"""How long work takes: on a GPU by its own events with the host kept ahead, on a CPU by the host's clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

__all__ = ["DeviceTimer"]

Work = Callable[[int], object]
"""Does the work once; the number says which of several sets of inputs to take."""

SPIN_HZ = 2.0e9
"""Cycles a second to count on for a spinning device: no chip here clocks higher, so spins are never too short."""


@dataclass(frozen=True)
class DeviceTimer:
    """Times work on one device; medians over groups of repetitions."""

    device: torch.device
    groups: int = 5
    """Groups a median is taken over."""
    group_s: float = 2e-3
    """Time a group should fill; long work fills it with two repetitions at least."""
    budget_s: float = 0.5
    """Time all groups may take; very long work gets fewer groups, three at least."""

    @property
    def kind(self) -> str:
        """What the times are read from."""
        return "device events" if self.device.type == "cuda" else "host clock"

    def seconds(self, work: Work) -> float:
        """Device seconds of one piece of work, the median over groups of back-to-back repetitions."""
        for i in range(2):
            work(i)
        host, once = self._estimate(work)
        repeats = max(2, min(20, round(self.group_s / max(once, 1e-7))))
        groups = max(3, min(self.groups, round(self.budget_s / (once * repeats))))
        return median(self._group(work, repeats, host) for _ in range(groups))

    def repeated_seconds(self, work: Work, repeats: int) -> float:
        """Seconds of one piece of work in a group of so many: for work that others must do as often."""
        return self._group(work, repeats, host=1e-4)

    def host_seconds(self, work: Work, repeats: int = 30) -> float:
        """Seconds the host needs to hand the work over, whatever the device does with it."""
        taken = []
        for i in range(repeats + 3):
            self.wait()
            started = time.perf_counter()
            work(i)
            taken.append(time.perf_counter() - started)
        self.wait()
        return median(taken[3:])

    def wait(self) -> None:
        """Return when the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _estimate(self, work: Work) -> tuple[float, float]:
        """Host seconds and whole seconds of one piece of work, roughly."""
        self.wait()
        started = time.perf_counter()
        work(2)
        host = time.perf_counter() - started
        self.wait()
        return host, time.perf_counter() - started

    def _group(self, work: Work, repeats: int, host: float) -> float:
        if self.device.type != "cuda":
            started = time.perf_counter()
            for i in range(repeats):
                work(i)
            return (time.perf_counter() - started) / repeats
        # The device spins while the host hands the work over: short kernels then follow each other without gaps,
        # as they do in a training step whose host is ahead.
        torch.cuda._sleep(int(SPIN_HZ * min(0.05, 2e-4 + 1.5 * host * repeats)))
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(repeats):
            work(i)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / repeats
