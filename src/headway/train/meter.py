"""Results and timing of a step, read without blocking the step.

On a CPU the numbers are ready when the step ends. On a GPU the host runs ahead of the device: values are copied
asynchronously into pinned memory, phases are timed by device events, and a step is read a few steps later, which also
bounds how far the host may run ahead. Both meters return steps in order; `drain` waits for the rest.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class MeasuredStep:
    """One step: the caller's notes, the computed values, and when it ran (monotonic ns)."""

    note: Any
    values: list[float]
    end_ns: int
    data_ns: int
    compute_ns: int


class Meter(ABC):
    """Called at three points of a step: start, data ready, end."""

    @abstractmethod
    def begin(self) -> None:
        """The step starts waiting for its data."""

    @abstractmethod
    def compute(self) -> None:
        """The data is ready; compute starts."""

    @abstractmethod
    def end(self, note: Any, values: Tensor) -> list[MeasuredStep]:
        """The step is done, or enqueued on the device; return the steps that are readable by now."""

    @abstractmethod
    def drain(self) -> list[MeasuredStep]:
        """Wait for the device; return all remaining steps."""


class HostMeter(Meter):
    """For synchronous devices."""

    def begin(self) -> None:
        """See Meter."""
        self._begin = time.monotonic_ns()

    def compute(self) -> None:
        """See Meter."""
        self._compute = time.monotonic_ns()

    def end(self, note: Any, values: Tensor) -> list[MeasuredStep]:
        """See Meter."""
        numbers = values.tolist()
        now = time.monotonic_ns()
        return [MeasuredStep(note, numbers, now, self._compute - self._begin, now - self._compute)]

    def drain(self) -> list[MeasuredStep]:
        """See Meter."""
        return []


@dataclass(frozen=True)
class _Pending:
    note: Any
    values: Tensor
    host_data_ns: int
    compute: torch.cuda.Event
    end: torch.cuda.Event


class DeviceMeter(Meter):
    """For CUDA devices: the device's timeline, synchronized with the host's clock whenever the host has waited."""

    LAG = 3
    """Steps the host may run ahead: enough to hide its work, few enough to stop soon."""

    def __init__(self) -> None:
        self._pending = deque[_Pending]()
        torch.cuda.synchronize()  # work left from building belongs to start-up

    def begin(self) -> None:
        """See Meter."""
        if not self._pending:
            self._anchor()
        self._begin = time.monotonic_ns()

    def compute(self) -> None:
        """See Meter."""
        self._host_data_ns = time.monotonic_ns() - self._begin
        self._compute = torch.cuda.Event(enable_timing=True)
        self._compute.record()

    def end(self, note: Any, values: Tensor) -> list[MeasuredStep]:
        """See Meter."""
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        pinned.copy_(values, non_blocking=True)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._pending.append(_Pending(note, pinned, self._host_data_ns, self._compute, event))
        return [self._read()] if len(self._pending) > self.LAG else []

    def drain(self) -> list[MeasuredStep]:
        """See Meter."""
        return [self._read() for _ in range(len(self._pending))]

    def _anchor(self) -> None:
        torch.cuda.synchronize()
        self._last_end = torch.cuda.Event(enable_timing=True)
        self._last_end.record()
        self._last_end.synchronize()
        self._last_end_ns = time.monotonic_ns()

    def _read(self) -> MeasuredStep:
        step = self._pending.popleft()
        step.end.synchronize()
        # The device idles from the end of a step to the next step's first kernel; of that, what the host spent on data
        # is a data stall.
        idle_ns = int(self._last_end.elapsed_time(step.compute) * 1e6)
        compute_ns = int(step.compute.elapsed_time(step.end) * 1e6)
        self._last_end_ns += idle_ns + compute_ns
        self._last_end = step.end
        data_ns = min(idle_ns, step.host_data_ns)
        return MeasuredStep(step.note, step.values.tolist(), self._last_end_ns, data_ns, compute_ns)


def make_meter(device: torch.device) -> Meter:
    """Return the meter for a kind of device."""
    return DeviceMeter() if device.type == "cuda" else HostMeter()
