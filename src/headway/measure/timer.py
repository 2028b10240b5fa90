"""Times work on a device: by CUDA events with the host kept ahead, or by the host clock on a CPU."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

Work = Callable[[int], object]
"""Runs the work once on one of several sets of inputs."""

SPIN_HZ = 2.0e9
"""Assumed clock of a spinning device: an upper bound, so that spins are never too short."""


@dataclass(frozen=True)
class DeviceTimer:
    """Times work on a device: medians over groups of repetitions."""

    device: torch.device
    groups: int = 5
    """Groups per median."""
    group_s: float = 2e-3
    """Target time per group; at least two repetitions."""
    budget_s: float = 0.5
    """Time for all groups; long work gets fewer, at least three."""

    @property
    def kind(self) -> str:
        """Source of the times."""
        return "device events" if self.device.type == "cuda" else "host clock"

    def seconds(self, work: Work) -> float:
        """Device seconds per call: median over groups of back-to-back repetitions."""
        for i in range(2):
            work(i)
        host, once = self._estimate(work)
        repeats = max(2, min(20, round(self.group_s / max(once, 1e-7))))
        groups = max(3, min(self.groups, round(self.budget_s / (once * repeats))))
        return median(self._group(work, repeats, host) for _ in range(groups))

    def repeated_seconds(self, work: Work, repeats: int) -> float:
        """Seconds per call in one group of `repeats`, for work that all ranks must repeat equally often."""
        return self._group(work, repeats, host=1e-4)

    def host_seconds(self, work: Work, repeats: int = 30) -> float:
        """Host seconds to launch the work."""
        taken = []
        for i in range(repeats + 3):
            self.wait()
            started = time.perf_counter()
            work(i)
            taken.append(time.perf_counter() - started)
        self.wait()
        return median(taken[3:])

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _estimate(self, work: Work) -> tuple[float, float]:
        """Rough host and total seconds of one call."""
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
        # The device spins while the host launches the work: short kernels then run without gaps, as in a training step
        # whose host is ahead.
        torch.cuda._sleep(int(SPIN_HZ * min(0.05, 2e-4 + 1.5 * host * repeats)))
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(repeats):
            work(i)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / repeats
