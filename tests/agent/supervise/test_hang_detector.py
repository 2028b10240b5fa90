"""Which workers count as hung."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventually import eventually
from headway.agent import Attempt
from headway.agent.fd_store import FdStore
from headway.agent.supervise.hang_detector import (
    HangDetector,
    HeartbeatSample,
    Stall,
    find_stall,
    limit_s,
)
from headway.agent.supervise.worker_monitor import WorkerMonitor
from headway.agent.supervise.worker_stacks import Frame, StackDump, WorkerStack
from headway.recipe import FaultPlan
from headway.track import RunFolder
from headway.track import heartbeat as heartbeat_module
from headway.track.heartbeat import PHASES, Heartbeat, HeartbeatPages, HeartbeatWriter
from headway.track.process_state import process_state
from thinned import examples

CEILING_S = 600.0


def seconds(value: float) -> int:
    return round(value * 1e9)


# -- limits


@pytest.mark.parametrize(
    ("longest_s", "ceiling_s", "want"),
    [
        (0, 600, 600),  # it has never ended: nothing is known
        (1e-9, 600, 2.5),  # a machine short of cores stalls now and then
        (0.02, 600, 2.5),
        (0.5, 600, 2.5),
        (0.6, 600, 3.0),  # five times the longest gap
        (20, 600, 100),
        (119, 600, 595),
        (121, 600, 600),  # never longer than train.timeout_s
        (0.02, 1, 1),
        (3, 1, 1),
    ],
)
def test_limit_of_a_phase(longest_s, ceiling_s, want):
    assert limit_s(seconds(longest_s), ceiling_s) == pytest.approx(want)


# -- which worker


def sample(rank, step=5, phase="compute", marks=5, silent=0.0, usual=10, at=1, module=0):
    return HeartbeatSample(rank, Heartbeat(step, phase, module, marks, usual, at, dict.fromkeys(PHASES, 0)), silent)


GAPS = dict.fromkeys(PHASES, seconds(0.1))
"""All phases have ended before, none took long: each may be silent for 2.5 s."""
SLOW_SAVES = GAPS | {"save": seconds(10)}
NO_SAVE_YET = {phase: gap for phase, gap in GAPS.items() if phase != "save"}

TABLE = [
    ("no workers", [], GAPS, None),
    ("all make progress", [sample(0), sample(1)], GAPS, None),
    ("silent up to the limit", [sample(0, silent=2.5), sample(1, silent=2.5)], GAPS, None),
    ("a single worker", [sample(0, silent=2.6)], GAPS, (0, False)),
    ("earlier step", [sample(0, step=6, marks=1, silent=3), sample(1, silent=3)], GAPS, (1, True)),
    ("earlier phase", [sample(0, phase="data", silent=3), sample(1, silent=3)], GAPS, (0, True)),
    ("fewer marks", [sample(0, marks=6, silent=3), sample(1, marks=5, silent=3)], GAPS, (1, True)),
    ("by share of its marks", [sample(0, marks=12, usual=40, silent=3), sample(1, marks=8, silent=3)], GAPS, (0, True)),
    ("same progress, older heartbeat", [sample(0, at=9, silent=3), sample(1, at=8, silent=3)], GAPS, (1, False)),
    ("three of four wait",
     [*(sample(rank, marks=7, silent=9) for rank in (0, 1, 3)), sample(2, marks=6, silent=9)], GAPS, (2, True)),
    # silence of the others does not count
    ("the last one makes progress", [sample(0, silent=100), sample(1, marks=4, silent=0.1)], GAPS, None),
    ("one scores its answers and the other, which has none left, waits",
     [sample(0, phase="gather", silent=100), sample(1, phase="generate", marks=900, silent=0.1)], GAPS, None),
    ("one has answered its questions and waits",
     [sample(0, phase="scores", marks=5, silent=100), sample(1, phase="tasks", marks=900, silent=0.1)], GAPS, None),
    ("the first tasks take longer than held-out rows",
     [sample(0, phase="tasks", silent=60)], {"evaluate": seconds(0.1)}, None),
    ("the last one saves, and saves are slow",
     [sample(0, step=6, phase="data", silent=40), sample(1, phase="save", silent=40)], SLOW_SAVES, None),
    ("a slow save has a limit too",
     [sample(0, step=6, phase="data", silent=60), sample(1, phase="save", silent=60)], SLOW_SAVES, (1, True)),
    ("the last one saves for the first time",
     [sample(0, step=6, phase="data", silent=599), sample(1, phase="save", silent=599)], NO_SAVE_YET, None),
    ("a first save longer than train.timeout_s",
     [sample(0, step=6, phase="data", silent=601), sample(1, phase="save", silent=601)], NO_SAVE_YET, (1, True)),
    ("the last one compiles while others wait",
     [sample(0, silent=30), sample(1, phase="compile", silent=30)], GAPS | {"compile": seconds(20)}, None),
    ("one has not joined yet",
     [sample(0, step=0, phase="join", silent=599), sample(1, 0, "start", 0, 599, 0, 0)], {}, None),
    ("one never joins",
     [sample(0, step=0, phase="join", silent=601), sample(1, 0, "start", 0, 601, 0, 0)], {}, (1, True)),
]  # fmt: skip


@pytest.mark.parametrize(("samples", "longest", "want"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_find_stall(samples, longest, want):
    for order in (samples, samples[::-1]):
        stall = find_stall(order, longest, CEILING_S)
        assert (None if stall is None else (stall.rank, stall.others_wait)) == want


def test_stall_location_and_certainty():
    stall = find_stall([sample(0, marks=9, silent=4), sample(1, module=2, silent=4.0)], GAPS, CEILING_S)
    assert stall == Stall(1, 5, "compute", 2, 4.0, 2.5, others_wait=True)
    assert stall.location == "in step 5, compute, block 2"
    assert Stall(0, 5, "optimizer", 0, 4.0, 2.5, others_wait=True).location == "in step 5, optimizer"
    assert Stall(0, 0, "join", 0, 4.0, 2.5, others_wait=True).location == "before its first step, in join"
    assert [Stall(0, 5, "data", 0, silent, 2.5, True).certain for silent in (2.6, 5.0, 5.1)] == [False, False, True]


heartbeats = st.builds(
    Heartbeat,
    st.integers(0, 3),
    st.sampled_from(PHASES),
    st.integers(0, 2),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(1, 5),
    st.just(dict.fromkeys(PHASES, 0)),
)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(heartbeats, st.floats(0, 700)), min_size=1, max_size=5),
    st.dictionaries(st.sampled_from(PHASES), st.integers(1, seconds(200))),
)
def test_only_the_last_worker_stalls_and_only_by_its_own_phase(drawn, longest):
    samples = [HeartbeatSample(rank, heartbeat, silent) for rank, (heartbeat, silent) in enumerate(drawn)]
    stall = find_stall(samples, longest, CEILING_S)
    behind = [
        sample
        for sample in samples
        if not any(other.heartbeat.progress < sample.heartbeat.progress for other in samples)
    ]
    if stall is None:
        # one of those furthest behind is within its limit
        assert any(sample.silent_s <= limit_s(longest.get(sample.heartbeat.phase, 0), CEILING_S) for sample in behind)
        return
    (last,) = [sample for sample in samples if sample.rank == stall.rank]
    assert last in behind
    assert stall.silent_s == last.silent_s > stall.limit_s
    if last.heartbeat.phase not in longest:
        assert last.silent_s > CEILING_S
    # whatever the others do, as long as they are not behind it
    others_active = [replace(sample, silent_s=0.0) if sample.rank != last.rank else sample for sample in samples]
    again = find_stall(others_active, longest, CEILING_S)
    assert again is not None
    assert again.rank == stall.rank


# -- counting silence


class Clock:
    """The machine's clock, for the workers and for the agent."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return seconds(self.now)


class Simulation:
    """Workers with heartbeats, a hang detector, and a clock."""

    def __init__(self, workers: int, clock: Clock) -> None:
        self.clock, self.pages = clock, HeartbeatPages(workers)
        self.beats = [HeartbeatWriter(self.pages.page(rank)) for rank in range(workers)]
        self.detector = HangDetector(CEILING_S, clock.monotonic)
        self.detector.begin()

    def pass_time(self, duration: float, working: tuple[int, ...] = (), glance: float = 0.1) -> Stall | None:
        """Let time pass while some workers make progress; return the stall at its end."""
        stall = None
        for _ in range(round(duration / glance)):
            self.clock.now += glance
            for rank in working:
                self.beats[rank].mark()
            stall = self.look()
        return stall

    def look(self) -> Stall | None:
        return self.detector.find_stall(self.detector.sample(self.pages, range(len(self.beats))))

    def steps(self, first: int, end: int, gap: float = 0.1) -> None:
        """Complete steps of all workers: `gap` seconds of data, 0.01 s for every other phase."""
        for step in range(first, end):
            for beat in self.beats:
                beat.step(step)
            self.clock.now += gap
            for mark in ("ready", "forward"):
                for beat in self.beats:
                    getattr(beat, mark)()
                self.clock.now += 0.01
            for phase in ("optimizer", "record"):
                for beat in self.beats:
                    beat.enter(phase)
                self.clock.now += 0.01
            assert self.look() is None


@pytest.fixture
def simulate(monkeypatch):
    clock, simulations = Clock(), []
    monkeypatch.setattr(heartbeat_module, "time", clock)

    def make(workers: int) -> Simulation:
        simulations.append(Simulation(workers, clock))
        return simulations[-1]

    yield make
    for simulation in simulations:
        simulation.pages.close()


def test_silent_worker_is_reported_and_then_given_up(simulate):
    two = simulate(2)
    two.steps(1, 5)
    for beat in two.beats:
        beat.step(5)
    two.beats[1].ready()
    two.look()
    assert two.pass_time(2.4) is None
    stall = two.pass_time(0.4)
    assert (stall.rank, stall.step, stall.phase, stall.others_wait, stall.certain) == (0, 5, "data", True, False)
    assert two.pass_time(2.0).certain is False
    stall = two.pass_time(0.6)
    assert (stall.rank, stall.certain) == (0, True)
    two.beats[0].ready()
    assert two.look() is None, "it has caught up with the other, which only waited"
    two.beats[0].mark()
    assert two.look() is None, "even if the other is last now"
    assert two.pass_time(2.4) is None
    assert two.pass_time(0.4).rank == 1, "but then the other has a limit too"


def test_worker_that_makes_progress_is_never_reported(simulate):
    two = simulate(2)
    two.steps(1, 5)
    assert two.pass_time(500, working=(0, 1), glance=0.5) is None
    two.beats[1].step(5)
    assert two.pass_time(500, working=(0,), glance=0.5) is None, "the last one makes progress"


def test_suspended_agent_reports_nobody(simulate):
    """All workers may have been suspended with it: time it did not observe counts for half a second."""
    two = simulate(2)
    two.steps(1, 5)
    two.look()
    two.clock.now += 3600
    assert two.look() is None
    two.clock.now += 3600
    assert two.look() is None
    for _ in range(5):
        stall = two.pass_time(3600, glance=3600)
    assert stall is not None, "but not after many samples"
    assert stall.silent_s == pytest.approx(3.5)


def test_phase_that_never_ended_gets_the_recipe_timeout(simulate):
    """In the first step, heartbeats within a phase do not predict how long the rest of it takes."""
    two = simulate(2)
    for beat in two.beats:
        beat.enter("join")
    assert two.pass_time(599, glance=0.5) is None
    for beat in two.beats:
        beat.enter("build")
        beat.step(1)
        beat.ready()
    two.pass_time(1.0, working=(0, 1))  # blocks in quick succession
    assert two.pass_time(100, glance=0.5) is None, "the first backward pass may load code"
    two.pass_time(1.0, working=(0, 1))
    for beat in two.beats:
        beat.enter("optimizer")
        beat.step(2)
        beat.ready()
    assert two.pass_time(499, glance=0.5) is None, "it took 100 s the first time"
    for beat in two.beats:
        beat.enter("evaluate")
    assert two.pass_time(599, glance=0.5) is None
    assert two.pass_time(2).phase == "evaluate"


def test_long_gap_is_forgotten_after_two_windows(simulate):
    """One gap of 10 s among short ones allows for silence of 50 s, and of 2.5 s two windows later."""
    single = simulate(1)
    single.steps(1, 10)
    single.steps(10, 11, gap=10.0)
    single.steps(11, 12)
    assert single.detector.longest_ns["data"] == seconds(10)
    single.beats[0].step(12)
    assert single.pass_time(49) is None
    assert single.pass_time(2).limit_s == pytest.approx(50)
    single.steps(13, 10 + 2 * 128)
    single.beats[0].step(10 + 2 * 128)
    single.look()
    assert single.pass_time(2.4) is None
    assert single.pass_time(0.3).limit_s == 2.5


def test_next_attempt_starts_with_the_gaps_of_the_last(simulate):
    """For phases that it has not had itself."""
    two = simulate(2)
    two.steps(1, 5, gap=2.0)
    two.pages.clear()
    two.detector.begin()
    two.beats = [HeartbeatWriter(two.pages.page(rank)) for rank in range(2)]
    for beat in two.beats:
        beat.enter("join")
    assert two.pass_time(100, glance=0.5) is None
    for beat in two.beats:
        beat.step(1)
    assert two.pass_time(9.9) is None
    assert two.pass_time(0.4).limit_s == pytest.approx(10)


def test_silence_of_one_attempt_does_not_count_in_the_next(simulate):
    single = simulate(1)
    single.steps(1, 5)
    single.beats[0].step(5)
    assert single.pass_time(3) is not None
    single.detector.begin()
    assert single.look() is None
    assert single.pass_time(2.4) is None


def test_worker_without_any_heartbeat_is_detected(simulate):
    two = simulate(2)
    two.pages.clear()
    two.beats[0] = HeartbeatWriter(two.pages.page(0))
    two.beats[0].enter("join")
    assert two.pass_time(599, glance=0.5) is None
    stall = two.pass_time(2)
    assert (stall.rank, stall.location) == (1, "before its first step, in start")


# -- the monitor


class MonitoredRun(Simulation):
    """Two workers under a WorkerMonitor, with the signals they get and the events recorded."""

    def __init__(self, run: Path, clock: Clock) -> None:
        recipe = SimpleNamespace(train=SimpleNamespace(timeout_s=CEILING_S), parallel=None)
        self.monitor = WorkerMonitor(RunFolder(run), recipe, 2, FaultPlan(), FdStore(), clock.monotonic)
        self.clock, self.pages = clock, self.monitor.pulses
        self.beats = [HeartbeatWriter(self.pages.page(rank)) for rank in range(2)]
        self.attempt = Attempt(run=run, number=1, workers=2, device="cpu", threads=1)
        self.states, self.events, self.signals, self.dumps = ["S", "S"], [], [], []
        self.heard: float | None = None
        self.monitor.begin()
        for rank in range(2):
            self.beats[rank] = HeartbeatWriter(self.pages.page(rank))

    def look(self):
        return self.monitor.look(self.attempt, self, self)

    def recorded(self, kind: str) -> list[dict]:
        return [fields for name, fields in self.events if name == kind]

    def block(self, rank: int) -> None:
        """All begin step 5, and this rank never gets its data."""
        self.steps(1, 5)
        for beat in self.beats:
            beat.step(5)
        self.beats[1 - rank].ready()
        self.look()

    # -- as workers

    def pids(self) -> dict[int, int]:
        return {0: 100, 1: 101}

    def heard_at(self) -> float:
        return self.clock.now if self.heard is None else self.heard

    def state(self, rank: int) -> str:
        return self.states[rank]

    def signal(self, number: signal.Signals, ranks: list[int]) -> None:
        self.signals.append((number, ranks))
        for rank in ranks:
            self.states[rank] = "S"

    def stacks(self, _folder: Path, _attempt: int, native: bool = True) -> StackDump:
        self.dumps.append(native)
        frames = (Frame("read", "/x/src/headway/data/loader.py", 88),)
        return StackDump(
            None, [WorkerStack(rank, pid, self.states[rank], frames=frames) for rank, pid in self.pids().items()]
        )

    # -- as recorder

    def event(self, kind: str, **fields) -> None:
        self.events.append((kind, fields))


@pytest.fixture
def watched(monkeypatch, tmp_path):
    clock = Clock()
    monkeypatch.setattr(heartbeat_module, "time", clock)
    run = MonitoredRun(tmp_path, clock)
    yield run
    run.monitor.close()


def test_hung_worker_is_reported_with_its_line_and_given_up_later(watched):
    watched.block(1)
    assert watched.pass_time(2.4) is None
    assert watched.events == []
    assert watched.pass_time(0.4) is None, "it is reported first, and may still recover"
    (hang,) = watched.recorded("hang")
    line = "headway/data/loader.py:88 in read"
    assert (hang["rank"], hang["step"], hang["phase"], hang["ends"]) == (1, 5, "data", False)
    assert (hang["line"], hang["text"]) == (line, f"worker 1 is hung in step 5, data (sleeping): {line}")
    assert watched.pass_time(2.1) is None
    lost = next(filter(None, (watched.pass_time(0.1) for _ in range(3))))
    assert (lost.stall.rank, lost.text) == (1, hang["text"])
    assert [event["ends"] for event in watched.recorded("hang")] == [False, True]
    assert watched.dumps == [False, True], "native stacks are dumped at the end"
    assert watched.signals == []


def test_reported_worker_that_recovers_is_left_alone(watched):
    watched.block(1)
    watched.pass_time(3.0)
    for beat in watched.beats:
        beat.mark()
    assert watched.pass_time(1.0, working=(0, 1)) is None
    (hang,) = watched.recorded("hang")
    (recovered,) = watched.recorded("woken")
    assert (hang["ends"], recovered["rank"]) == (False, 1)
    assert watched.signals == []


@pytest.mark.parametrize("behind", [0, 1])
def test_no_worker_is_blamed_while_the_agent_of_a_node_is_silent(watched, behind):
    """The heartbeats of its workers do not arrive: they look hung, or the others do, and all may be training."""
    watched.block(behind)
    watched.pass_time(2.0)
    watched.heard = watched.clock.now
    assert watched.pass_time(60.0) is None
    assert (watched.events, watched.dumps) == ([], [])
    watched.heard = None
    watched.pass_time(1.0)
    assert watched.recorded("hang")[0]["rank"] == behind, "and who is hung all the same is found afterwards"


@pytest.mark.parametrize("state", ["t", "Z", ""], ids=["debugged", "dead", "gone"])
def test_debugged_or_dead_worker_is_not_reported(watched, state):
    watched.block(1)
    watched.states[1] = state
    assert watched.pass_time(60) is None
    assert watched.events == []


def test_stopped_worker_is_continued_three_times_and_then_given_up(watched):
    watched.block(1)
    for count in (1, 2, 3):
        watched.states[1] = "T"
        assert watched.pass_time(2.4) is None
        assert len(watched.signals) == count - 1
        assert watched.pass_time(0.3) is None
        assert watched.signals == [(signal.SIGCONT, [1])] * count
        assert watched.pass_time(2.0) is None, "its limit counts from here"
        assert watched.recorded("hang") == []
        watched.beats[1].mark()
        watched.look()
    text = "worker 1 was stopped by a signal in step 5, data; continued with SIGCONT"
    assert [(event["rank"], event["text"]) for event in watched.recorded("woken")] == [(1, text)] * 3
    watched.states[1] = "T"
    lost = watched.pass_time(5.2)
    assert lost.text.startswith("worker 1 is hung in step 5, data (stopped by a signal)")
    assert len(watched.signals) == 3


# -- process state


def test_process_state():
    """Sleeping, stopped, zombie, gone; the command name may look like the end of the field."""
    name = "import pathlib; pathlib.Path('/proc/self/comm').write_text('a) Z ('); "
    process = subprocess.Popen([sys.executable, "-c", name + "print(flush=True); input()"], stdin=-1, stdout=-1)
    process.stdout.read(1)

    def becomes(state: str) -> bool:
        return eventually(lambda: process_state(process.pid) == state)

    assert becomes("S")
    os.kill(process.pid, signal.SIGSTOP)
    assert becomes("T")
    os.kill(process.pid, signal.SIGCONT)
    assert becomes("S")
    process.kill()
    assert becomes("Z")
    process.communicate()
    assert process_state(process.pid) == ""
    assert process_state(os.getpid()) in ("R", "S")
