"""Who hangs: how long each phase of a run may be silent, learnt from the run itself, and who holds the others up.

    limit_s(longest, ...)     how long a worker may make no mark in a phase
    stalled(sights, ...)      the worker that holds the others up, once it has been silent for longer than that

Both are pure. `Watcher` looks at the workers' marks (track/heartbeat.py) and counts their silence. There is one rule for
every phase, and no number to set: a phase may take FACTOR times as long as the longest gap between two marks that this
run has seen in it. A phase that has never ended yet (the first step, the first evaluation) has the recipe's
train.timeout_s.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.track.heartbeat import PHASES, Heartbeat, HeartbeatPages, Phase

__all__ = ["LEAST_S", "HangDetector", "HeartbeatSample", "Stall", "find_stall", "limit_s", "process_state"]

FACTOR = 5.0
LEAST_S = 2.5
"""A machine that is short of cores stands still for a second now and then."""
CERTAIN = 2.0
"""Silent for so many times the limit, a worker is taken for lost; between, it is named and may still come back."""
GLANCE_S = 0.5
"""Silence between two looks counts this much at most: when the agent itself was held up, perhaps everybody was."""


UNSEEN = Heartbeat(0, "start", 0, 0, 0, 0, dict.fromkeys(PHASES, 0))
"""A worker that has made no mark yet."""


@dataclass(frozen=True)
class HeartbeatSample:
    """A worker as it was last seen."""

    rank: int
    pulse: Heartbeat
    silent_s: float
    """Since its last mark, as long as nobody is further behind: whoever is ahead of another may only be waiting."""


@dataclass(frozen=True)
class Stall:
    """A worker that holds the others up."""

    rank: int
    step: int
    phase: Phase
    module: int
    silent_s: float
    limit_s: float
    alone: bool
    """Whether others are ahead of it and wait; if not, nobody can say whose fault it is."""

    @property
    def certain(self) -> bool:
        """Whether it has been silent for so long that it will not come back."""
        return self.silent_s > CERTAIN * self.limit_s

    @property
    def where(self) -> str:
        """The place in words."""
        if not self.step:
            return f"before its first step, in {self.phase}"
        block = f", block {self.module}" if self.module else ""
        return f"in step {self.step}, {self.phase}{block}"


def limit_s(longest_ns: int, ceiling_s: float) -> float:
    """How long a phase may be silent whose longest gap so far was this; 0: it has never ended."""
    if not longest_ns:
        return ceiling_s
    return min(max(LEAST_S, FACTOR * longest_ns / 1e9), ceiling_s)


def find_stall(sights: Sequence[HeartbeatSample], longest_ns: Mapping[Phase, int], ceiling_s: float) -> Stall | None:
    """The worker that is furthest behind, if its own phase has been silent for too long.

    The others' silence does not count: they wait, and cannot know for what. A worker that compiles or saves for the
    first time keeps all the others waiting, and is no hang.
    """
    if not sights:
        return None
    last = min(sights, key=lambda sight: (*sight.pulse.progress, sight.pulse.at_ns))
    limit = limit_s(longest_ns.get(last.pulse.phase, 0), ceiling_s)
    if last.silent_s <= limit:
        return None
    ahead = [sight for sight in sights if sight.pulse.progress > last.pulse.progress]
    pulse = last.pulse
    return Stall(last.rank, pulse.step, pulse.phase, pulse.module, last.silent_s, limit, alone=bool(ahead))


@dataclass
class HangDetector:
    """Looks at the marks of an attempt's workers again and again; remembers what gaps this run has seen."""

    ceiling_s: float
    clock: Callable[[], float] = time.monotonic
    longest_ns: dict[Phase, int] = field(default_factory=dict)
    """By phase: of the last few hundred steps, or where this attempt has not had it yet, its first time in others."""
    _first_ns: dict[Phase, int] = field(default_factory=dict)
    """What a phase took when an attempt had it for the first time."""
    _ended: set[Phase] = field(default_factory=set)
    """Phases that have ended in this attempt."""
    _silent: dict[int, tuple[int, float]] = field(default_factory=dict)
    _looked: float = 0.0

    def begin(self) -> None:
        """Another attempt begins; its first step is held against other first steps."""
        self._silent, self._ended, self._looked = {}, set(), self.clock()
        self.longest_ns = dict(self._first_ns)

    def look(self, pulses: HeartbeatPages, ranks: Sequence[int]) -> list[HeartbeatSample]:
        """Every worker, and for how long it has made no mark."""
        now = self.clock()
        passed, self._looked = min(now - self._looked, GLANCE_S), now
        found = {rank: pulses.read(rank) or UNSEEN for rank in ranks}
        behind = min((pulse.progress for pulse in found.values()), default=None)
        for rank, pulse in found.items():
            at_ns, silent = self._silent.get(rank, (0, 0.0))
            goes_on = at_ns != pulse.at_ns or pulse.progress != behind
            self._silent[rank] = pulse.at_ns, 0.0 if goes_on else silent + passed
        for phase in PHASES:
            self._learn(phase, max((pulse.longest_ns[phase] for pulse in found.values()), default=0))
        return [HeartbeatSample(rank, pulse, self._silent[rank][1]) for rank, pulse in found.items()]

    def restart_silence(self, rank: int) -> None:
        """A worker was woken: the time until its next mark counts from here."""
        self._silent[rank] = self._silent[rank][0], 0.0

    def _learn(self, phase: Phase, longest_ns: int) -> None:
        if not longest_ns:
            return
        if phase not in self._ended:
            self._ended.add(phase)
            self._first_ns[phase] = max(longest_ns, self._first_ns.get(phase, 0))
        self.longest_ns[phase] = longest_ns

    def stalled(self, sights: Sequence[HeartbeatSample]) -> Stall | None:
        """See the function of that name."""
        return find_stall(sights, self.longest_ns, self.ceiling_s)


def process_state(pid: int) -> str:
    """The kernel's letter for what a process does: R, S, D, T (stopped), t (traced), Z; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
