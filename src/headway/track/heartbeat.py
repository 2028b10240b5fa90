"""What every worker is doing at this instant, in memory that the agent shares: step, phase, mark, time.

A worker writes a few numbers wherever its work moves on, without a system call; the agent looks at them now and then.
Each worker has a page of its own:

    step, phase, module, marks (in this step), at (when the last was made), longest gap by phase (now and before),
    and when it was ready with the data and with the forward pass of its last steps

A mark says "I got here". The gap to the next one is how long the work between them took, and the longest gap that
ended well says how long a later one may take before it is called a hang (agent/supervise/hang_detector.py).
"""

import mmap
import os
import time
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["PHASES", "Arrival", "Heartbeat", "HeartbeatPages", "HeartbeatWriter", "Phase"]

Phase = Literal[
    "start", "join", "build", "restore", "compile", "data", "compute", "optimizer", "record", "evaluate", "save", "end"
]
"""In the order in which a step passes them: of two workers at the same step the one in the earlier phase is behind. One
that compiles keeps the others waiting wherever they are, and is behind them all."""
PHASES: tuple[Phase, ...] = get_args(Phase)

PAGE = 4096
WINDOW = 128
"""Steps after which the longest gap so far is only remembered for as many more: one bad moment does not count for
ever."""
TURNS = 64
"""Steps whose arrivals are kept."""

_STEP, _PHASE, _MODULE, _MARKS, _AT, _USUAL = range(6)
_NOW = 8
_BEFORE = _NOW + len(PHASES)
_ARRIVALS = _BEFORE + len(PHASES)
assert (_ARRIVALS + 3 * TURNS) * 8 <= PAGE, "a worker's numbers fit onto its page"


@dataclass(frozen=True)
class Arrival:
    """When a worker was ready with a step's data and its forward pass (monotonic ns; 0: not yet)."""

    step: int
    data_ns: int
    forward_ns: int


@dataclass(frozen=True)
class Heartbeat:
    """A worker as the agent sees it."""

    step: int
    """The step under way; 0 before the first."""
    phase: Phase
    module: int
    """The block that it has entered, from 1; 0 where it is in none."""
    marks: int
    """Made in this step so far."""
    usual_marks: int
    """Made in the step before."""
    at_ns: int
    """When the last one was made (monotonic)."""
    longest_ns: dict[Phase, int]
    """The longest gap by phase, in those that ended; 0: none has."""

    @property
    def progress(self) -> tuple[int, int, float]:
        """How far it has come: the step, the phase, and which share of a step's marks."""
        return self.step, PHASES.index(self.phase), self.marks / max(self.usual_marks, 1)


class HeartbeatWriter:
    """A worker's own page."""

    def __init__(self, memory: memoryview) -> None:
        self._numbers = memory.cast("Q")
        self._phase = PHASES.index("join")
        self._at = time.monotonic_ns()
        self._marks = self._gap = 0
        self._arrival = _ARRIVALS
        self._numbers[_AT] = self._at

    def mark(self, module: int = 0) -> None:
        """The work has moved on."""
        now, numbers = time.monotonic_ns(), self._numbers
        if now - self._at > self._gap:
            self._gap = now - self._at
        self._at = now
        self._marks += 1
        numbers[_MODULE] = module
        numbers[_MARKS] = self._marks
        numbers[_AT] = now

    def enter(self, phase: Phase) -> None:
        """Another phase begins; what the one before has shown counts from now on."""
        self.mark()
        numbers, place = self._numbers, _NOW + self._phase
        if self._gap > numbers[place]:
            numbers[place] = self._gap
        self._gap = 0
        self._phase = PHASES.index(phase)
        numbers[_PHASE] = self._phase

    @property
    def phase(self) -> Phase:
        """The phase it is in."""
        return PHASES[self._phase]

    def step(self, step: int) -> None:
        """A step begins."""
        numbers = self._numbers
        numbers[_USUAL] = self._marks
        self._marks = 0
        self.enter("data")
        numbers[_STEP] = step
        if step % WINDOW == 0:
            numbers[_BEFORE:_ARRIVALS] = numbers[_NOW:_BEFORE]
            for place in range(_NOW, _BEFORE):
                numbers[place] = 0
        self._arrival = place = _ARRIVALS + 3 * (step % TURNS)
        numbers[place + 1] = numbers[place + 2] = 0
        numbers[place] = step

    def ready(self) -> None:
        """The data is there."""
        self.enter("compute")
        self._numbers[self._arrival + 1] = self._at

    def forward(self) -> None:
        """A forward pass is done; the step's last one counts."""
        self.mark()
        self._numbers[self._arrival + 2] = self._at


class HeartbeatPages:
    """The pages of all workers, as the agent has them; `descriptor` is handed to each worker."""

    def __init__(self, workers: int, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("headway-pulse", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, workers * PAGE)
        self.descriptor, self.workers = descriptor, workers
        self._memory = memoryview(mmap.mmap(descriptor, workers * PAGE))

    def page(self, rank: int) -> memoryview:
        """One worker's page."""
        return self._memory[rank * PAGE : (rank + 1) * PAGE]

    def read(self, rank: int) -> Heartbeat | None:
        """What a worker has written; None as long as it has written nothing."""
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

    def arrivals(self, rank: int) -> list[Arrival]:
        """When a worker was ready, step by step, for as many steps as are kept."""
        numbers = self.page(rank).cast("Q")
        found = [Arrival(*numbers[place : place + 3]) for place in range(_ARRIVALS, _ARRIVALS + 3 * TURNS, 3)]
        return sorted((arrival for arrival in found if arrival.step), key=lambda arrival: arrival.step)

    def clear(self) -> None:
        """Forget everything, for the next attempt."""
        self._memory[:] = bytes(len(self._memory))

    def close(self) -> None:
        """Give the descriptor up."""
        os.close(self.descriptor)
