"""Worker heartbeats in memory shared with the agent: step, phase, mark, time.

A worker writes a few numbers whenever it makes progress, without a system call; the agent polls them. One page per
worker:

    step, phase, module, marks (in this step), at (time of the last mark), how long its records could not be written and
    why, longest gap by phase (current and previous window), and when its last steps had their data ready and their
    forward pass done

The gap between two marks is how long the work between them took; the longest completed gap bounds how long a later one
may take before it counts as a hang (agent/supervise/hang_detector.py).
"""

import mmap
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal[
    "start",
    "join",
    "build",
    "restore",
    "compile",
    "data",
    "generate",
    "gather",
    "compute",
    "optimizer",
    "record",
    "evaluate",
    "tasks",
    "scores",
    "save",
    "end",
]
"""In the order of a step: of two workers in the same step, the one in the earlier phase is behind. A compiling worker
blocks the others in any phase, and is behind them all."""
PHASES: tuple[Phase, ...] = get_args(Phase)

PAGE = 4096
WINDOW = 128
"""Steps per window of longest gaps; only the current and the previous window count, so that an outlier expires."""
TURNS = 64
"""Number of steps whose arrivals are stored."""

_STEP, _PHASE, _MODULE, _MARKS, _AT, _USUAL, _UNRECORDED, _ERRNO = range(8)
_NOW = 8
_BEFORE = _NOW + len(PHASES)
_ARRIVALS = _BEFORE + len(PHASES)
assert (_ARRIVALS + 3 * TURNS) * 8 <= PAGE, "a worker's numbers fit on its page"


@dataclass(frozen=True)
class Arrival:
    """When a worker had a step's data and finished its forward pass (monotonic ns; 0: not yet)."""

    step: int
    data_ns: int
    forward_ns: int


@dataclass(frozen=True)
class Heartbeat:
    """A worker as the agent sees it."""

    step: int
    """The current step; 0 before the first."""
    phase: Phase
    module: int
    """The current block, from 1; 0 outside of blocks."""
    marks: int
    """Marks in this step so far."""
    usual_marks: int
    """Marks in the previous step."""
    at_ns: int
    """Time of the last mark (monotonic)."""
    longest_ns: dict[Phase, int]
    """The longest completed gap by phase; 0 for none."""

    @property
    def progress(self) -> tuple[int, int, float]:
        """Sort key of progress: step, phase, share of a step's marks."""
        return self.step, PHASES.index(self.phase), self.marks / max(self.usual_marks, 1)


class HeartbeatWriter:
    """Writes a worker's heartbeat to its page."""

    def __init__(self, memory: memoryview) -> None:
        self._numbers = memory.cast("Q")
        self._phase = PHASES.index("join")
        self._at = time.monotonic_ns()
        self._marks = self._gap = 0
        self._arrival = _ARRIVALS
        self._numbers[_AT] = self._at

    def mark(self, module: int = 0) -> None:
        """Record progress."""
        numbers = self._numbers
        self._marks += 1
        numbers[_MODULE] = module
        numbers[_MARKS] = self._marks
        self.alive()

    def alive(self) -> None:
        """Record that there is progress, in work of which workers do different amounts: it is not compared."""
        now = time.monotonic_ns()
        if now - self._at > self._gap:
            self._gap = now - self._at
        self._at = now
        self._numbers[_AT] = now

    def enter(self, phase: Phase) -> None:
        """Enter another phase, and publish the previous phase's longest gap."""
        self.mark()
        numbers, slot = self._numbers, _NOW + self._phase
        if self._gap > numbers[slot]:
            numbers[slot] = self._gap
        self._gap = 0
        self._phase = PHASES.index(phase)
        numbers[_PHASE] = self._phase

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return PHASES[self._phase]

    def step(self, step: int) -> None:
        """Start a step."""
        numbers = self._numbers
        numbers[_USUAL] = self._marks
        self._marks = 0
        self.enter("data")
        numbers[_STEP] = step
        if step % WINDOW == 0:
            numbers[_BEFORE:_ARRIVALS] = numbers[_NOW:_BEFORE]
            for slot in range(_NOW, _BEFORE):
                numbers[slot] = 0
        self._arrival = slot = _ARRIVALS + 3 * (step % TURNS)
        numbers[slot + 1] = numbers[slot + 2] = 0
        numbers[slot] = step

    def ready(self) -> None:
        """Record that the step's data has arrived."""
        self.enter("compute")
        self._numbers[self._arrival + 1] = self._at

    def unrecorded(self, nanoseconds: int, errno: int) -> None:
        """Publish how long the worker's records could not be written, and why; 0 if they are. In any thread."""
        self._numbers[_ERRNO] = errno
        self._numbers[_UNRECORDED] = nanoseconds

    def forward(self) -> None:
        """Record the end of a forward pass; the last of a step counts."""
        self.mark()
        self._numbers[self._arrival + 2] = self._at


@dataclass(frozen=True)
class UnrecordedWorker:
    """A worker whose records cannot be written."""

    rank: int
    seconds: float
    errno: int

    @property
    def text(self) -> str:
        """It in one sentence."""
        return f"cannot write the records of worker {self.rank}: {os.strerror(self.errno)}"


class HeartbeatPages:
    """The pages of all workers, on the agent's side; each worker inherits `descriptor`."""

    def __init__(self, workers: int, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("headway-pulse", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, workers * PAGE)
        self.descriptor, self.workers = descriptor, workers
        self._memory = memoryview(mmap.mmap(descriptor, workers * PAGE))

    def page(self, rank: int) -> memoryview:
        """Return a worker's page."""
        return self._memory[rank * PAGE : (rank + 1) * PAGE]

    def read(self, rank: int) -> Heartbeat | None:
        """Return a worker's heartbeat; None before its first."""
        numbers = self.page(rank).cast("Q")
        if not numbers[_AT]:
            return None
        longest = {phase: max(numbers[_NOW + index], numbers[_BEFORE + index]) for index, phase in enumerate(PHASES)}
        return Heartbeat(
            numbers[_STEP],
            PHASES[min(numbers[_PHASE], len(PHASES) - 1)],
            numbers[_MODULE],
            numbers[_MARKS],
            numbers[_USUAL],
            numbers[_AT],
            longest,
        )

    def unrecorded(self, ranks: Iterable[int]) -> UnrecordedWorker | None:
        """Return the worker whose records could not be written for the longest time; None if all are."""
        pages = {rank: self.page(rank).cast("Q") for rank in ranks}
        waiting = [(numbers[_UNRECORDED], -rank, numbers[_ERRNO]) for rank, numbers in pages.items()]
        longest, rank, errno = max(waiting, default=(0, 0, 0))
        return UnrecordedWorker(-rank, longest / 1e9, errno) if longest else None

    def arrivals(self, rank: int) -> list[Arrival]:
        """Return a worker's arrivals, by step, for the last `TURNS` steps."""
        numbers = self.page(rank).cast("Q")
        arrivals = [Arrival(*numbers[slot : slot + 3]) for slot in range(_ARRIVALS, _ARRIVALS + 3 * TURNS, 3)]
        return sorted((arrival for arrival in arrivals if arrival.step), key=lambda arrival: arrival.step)

    def clear(self) -> None:
        """Zero all pages, for the next attempt."""
        self._memory[:] = bytes(len(self._memory))

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)
