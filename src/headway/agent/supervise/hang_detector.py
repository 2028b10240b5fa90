"""Hang detection: how long each phase may be silent, learnt from the run itself, and which worker blocks the others.

    limit_s(longest, ...)       how long a worker may go without a heartbeat in a phase
    find_stall(samples, ...)    the worker that blocks the others, once it has been silent for longer than that

Both are pure. `HangDetector` reads the workers' heartbeats (track/heartbeat.py) and measures their silence. One rule
covers every phase, with nothing to configure: a phase may take FACTOR times the longest gap between two heartbeats that
this run has seen in it. A phase that has never ended yet (the first step, the first evaluation) gets train.timeout_s.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headway.track.heartbeat import PHASES, Heartbeat, HeartbeatPages, Phase

FACTOR = 5.0
LEAST_S = 2.5
"""A machine that is short of cores stalls for a second now and then."""
CERTAIN = 2.0
"""A worker silent for this many times the limit is given up; before that it is reported and may still recover."""
MAX_GAP_S = 0.5
"""Silence between two samples counts at most this much: if the agent was suspended, perhaps all workers were."""

NO_HEARTBEAT = Heartbeat(0, "start", 0, 0, 0, 0, dict.fromkeys(PHASES, 0))
"""Of a worker that has not written any yet."""


@dataclass(frozen=True)
class HeartbeatSample:
    """A worker's last heartbeat."""

    rank: int
    heartbeat: Heartbeat
    silent_s: float
    """Time since it, counted only while no worker is further behind: a worker ahead of another may just be waiting."""


@dataclass(frozen=True)
class Stall:
    """A worker that blocks the others."""

    rank: int
    step: int
    phase: Phase
    module: int
    silent_s: float
    limit_s: float
    others_wait: bool
    """Whether others are ahead and wait for it; if not, the culprit is unknown."""

    @property
    def certain(self) -> bool:
        """Whether it has been silent for too long to recover."""
        return self.silent_s > CERTAIN * self.limit_s

    @property
    def location(self) -> str:
        """Step, phase and block in words."""
        if not self.step:
            return f"before its first step, in {self.phase}"
        block = f", block {self.module}" if self.module else ""
        return f"in step {self.step}, {self.phase}{block}"


def limit_s(longest_ns: int, ceiling_s: float) -> float:
    """How long a phase may be silent, from its longest gap so far; 0 means it has never ended."""
    if not longest_ns:
        return ceiling_s
    return min(max(LEAST_S, FACTOR * longest_ns / 1e9), ceiling_s)


def find_stall(samples: Sequence[HeartbeatSample], longest_ns: Mapping[Phase, int], ceiling_s: float) -> Stall | None:
    """The worker that is furthest behind, if it has been silent for longer than its phase allows.

    Silence of the others does not count: they wait. A worker that compiles or saves for the first time keeps all
    others waiting, and is not hung.
    """
    if not samples:
        return None
    last = min(samples, key=lambda sample: (*sample.heartbeat.progress, sample.heartbeat.at_ns))
    heartbeat = last.heartbeat
    limit = limit_s(longest_ns.get(heartbeat.phase, 0), ceiling_s)
    if last.silent_s <= limit:
        return None
    others_wait = any(sample.heartbeat.progress > heartbeat.progress for sample in samples)
    return Stall(last.rank, heartbeat.step, heartbeat.phase, heartbeat.module, last.silent_s, limit, others_wait)


@dataclass
class HangDetector:
    """Samples the heartbeats of an attempt's workers, and remembers the gaps that this run has seen."""

    ceiling_s: float
    clock: Callable[[], float] = time.monotonic
    longest_ns: dict[Phase, int] = field(default_factory=dict)
    """By phase: of the last few hundred steps; before this attempt's first, the first of earlier attempts."""
    _first_ns: dict[Phase, int] = field(default_factory=dict)
    """Longest first occurrence of a phase in any attempt."""
    _ended: set[Phase] = field(default_factory=set)
    """Phases that have ended in this attempt."""
    _silent: dict[int, tuple[int, float]] = field(default_factory=dict)
    _sampled: float = 0.0

    def begin(self) -> None:
        """Start a new attempt; its first step is compared with other first steps."""
        self._silent, self._ended, self._sampled = {}, set(), self.clock()
        self.longest_ns = dict(self._first_ns)

    def sample(
        self, pages: HeartbeatPages, ranks: Sequence[int], heard_at: float = float("inf")
    ) -> list[HeartbeatSample]:
        """Read every worker's heartbeat, and how long it has been silent.

        Only time up to `heard_at`, when heartbeats last came from all nodes, counts as silence: after it nothing is
        known, neither who is silent nor who waits for whom.
        """
        known = max(min(self.clock(), heard_at), self._sampled)
        passed, self._sampled = min(known - self._sampled, MAX_GAP_S), known
        heartbeats = {rank: pages.read(rank) or NO_HEARTBEAT for rank in ranks}
        behind = min((heartbeat.progress for heartbeat in heartbeats.values()), default=None)
        for rank, heartbeat in heartbeats.items():
            at_ns, silent = self._silent.get(rank, (0, 0.0))
            advances = at_ns != heartbeat.at_ns or heartbeat.progress != behind
            self._silent[rank] = heartbeat.at_ns, 0.0 if advances else silent + passed
        for phase in PHASES:
            self._learn(phase, max((heartbeat.longest_ns[phase] for heartbeat in heartbeats.values()), default=0))
        return [HeartbeatSample(rank, heartbeat, self._silent[rank][1]) for rank, heartbeat in heartbeats.items()]

    def restart_silence(self, rank: int) -> None:
        """Count a worker's silence from now: it was just continued."""
        self._silent[rank] = self._silent[rank][0], 0.0

    def _learn(self, phase: Phase, longest_ns: int) -> None:
        if not longest_ns:
            return
        if phase not in self._ended:
            self._ended.add(phase)
            self._first_ns[phase] = max(longest_ns, self._first_ns.get(phase, 0))
        self.longest_ns[phase] = longest_ns

    def find_stall(self, samples: Sequence[HeartbeatSample]) -> Stall | None:
        """Like the function, with the gaps of this run."""
        return find_stall(samples, self.longest_ns, self.ceiling_s)
