"""Who is called a hang, and who is not."""

import os
import signal
import subprocess
import sys
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
    process_state,
)
from headway.agent.supervise.stack_dumps import Frame, StackDump, WorkerStack
from headway.agent.supervise.worker_monitor import WorkerMonitor
from headway.recipe import FaultPlan
from headway.track import RunFolder
from headway.track import heartbeat as pulse_module
from headway.track.heartbeat import PHASES, Heartbeat, HeartbeatPages, HeartbeatWriter
from thinned import examples

CEILING_S = 600.0


def seconds(value: float) -> int:
    return round(value * 1e9)


# -- how long


@pytest.mark.parametrize(
    ("longest_s", "ceiling_s", "want"),
    [
        (0, 600, 600),  # it has never ended: nothing is known
        (1e-9, 600, 2.5),  # a machine that is short of cores stands still now and then
        (0.02, 600, 2.5),
        (0.5, 600, 2.5),
        (0.6, 600, 3.0),  # five times as long as ever
        (20, 600, 100),
        (119, 600, 595),
        (121, 600, 600),  # never longer than the recipe says
        (0.02, 1, 1),
        (3, 1, 1),
    ],
)
def test_how_long_a_phase_may_be_silent(longest_s, ceiling_s, want):
    assert limit_s(seconds(longest_s), ceiling_s) == pytest.approx(want)


# -- who


def sight(rank, step=5, phase="compute", marks=5, silent=0.0, usual=10, at=1, module=0):
    return HeartbeatSample(rank, Heartbeat(step, phase, module, marks, usual, at, dict.fromkeys(PHASES, 0)), silent)


SEEN = dict.fromkeys(PHASES, seconds(0.1))
"""All phases have ended before, none took long: each may be silent for 2.5 s."""
SLOW_SAVES = SEEN | {"save": seconds(10)}
NO_SAVE_YET = {phase: gap for phase, gap in SEEN.items() if phase != "save"}

TABLE = [
    ("nobody there", [], SEEN, None),
    ("all at work", [sight(0), sight(1)], SEEN, None),
    ("as long as it may be", [sight(0, silent=2.5), sight(1, silent=2.5)], SEEN, None),
    ("one alone in the world", [sight(0, silent=2.6)], SEEN, (0, False)),
    ("the one in an earlier step", [sight(0, step=6, marks=1, silent=3), sight(1, silent=3)], SEEN, (1, True)),
    ("the one in an earlier phase", [sight(0, phase="data", silent=3), sight(1, silent=3)], SEEN, (0, True)),
    ("the one with fewer marks", [sight(0, marks=6, silent=3), sight(1, marks=5, silent=3)], SEEN, (1, True)),
    ("by share of its marks", [sight(0, marks=12, usual=40, silent=3), sight(1, marks=8, silent=3)], SEEN, (0, True)),
    ("the older mark of two at one place", [sight(0, at=9, silent=3), sight(1, at=8, silent=3)], SEEN, (1, False)),
    ("three of four wait",
     [*(sight(rank, marks=7, silent=9) for rank in (0, 1, 3)), sight(2, marks=6, silent=9)], SEEN, (2, True)),
    # the others' silence does not count
    ("the laggard works", [sight(0, silent=100), sight(1, marks=4, silent=0.1)], SEEN, None),
    ("the laggard saves, which may take long",
     [sight(0, step=6, phase="data", silent=40), sight(1, phase="save", silent=40)], SLOW_SAVES, None),
    ("but not for ever",
     [sight(0, step=6, phase="data", silent=60), sight(1, phase="save", silent=60)], SLOW_SAVES, (1, True)),
    ("the laggard saves for the first time",
     [sight(0, step=6, phase="data", silent=599), sight(1, phase="save", silent=599)], NO_SAVE_YET, None),
    ("for longer than the recipe allows",
     [sight(0, step=6, phase="data", silent=601), sight(1, phase="save", silent=601)], NO_SAVE_YET, (1, True)),
    ("the laggard compiles, wherever the others wait",
     [sight(0, silent=30), sight(1, phase="compile", silent=30)], SEEN | {"compile": seconds(20)}, None),
    ("one has not come yet",
     [sight(0, step=0, phase="join", silent=599), sight(1, 0, "start", 0, 599, 0, 0)], {}, None),
    ("one never comes",
     [sight(0, step=0, phase="join", silent=601), sight(1, 0, "start", 0, 601, 0, 0)], {}, (1, True)),
]  # fmt: skip


@pytest.mark.parametrize(("sights", "longest", "want"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_who_holds_the_others_up(sights, longest, want):
    for order in (sights, sights[::-1]):
        stall = find_stall(order, longest, CEILING_S)
        assert (None if stall is None else (stall.rank, stall.alone)) == want


def test_what_is_said_of_it():
    stall = find_stall([sight(0, marks=9, silent=4), sight(1, module=2, silent=4.0)], SEEN, CEILING_S)
    assert stall == Stall(1, 5, "compute", 2, 4.0, 2.5, alone=True)
    assert stall.where == "in step 5, compute, block 2"
    assert Stall(0, 5, "optimizer", 0, 4.0, 2.5, alone=True).where == "in step 5, optimizer"
    assert Stall(0, 0, "join", 0, 4.0, 2.5, alone=True).where == "before its first step, in join"
    assert [Stall(0, 5, "data", 0, silent, 2.5, True).certain for silent in (2.6, 5.0, 5.1)] == [False, False, True]


pulses_seen = st.builds(
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
    st.lists(st.tuples(pulses_seen, st.floats(0, 700)), min_size=1, max_size=5),
    st.dictionaries(st.sampled_from(PHASES), st.integers(1, seconds(200))),
)
def test_only_the_last_is_ever_named_and_only_by_its_own_phase(told, longest):
    sights = [HeartbeatSample(rank, pulse, silent) for rank, (pulse, silent) in enumerate(told)]
    stall = find_stall(sights, longest, CEILING_S)
    behind = [one for one in sights if not any(other.pulse.progress < one.pulse.progress for other in sights)]
    if stall is None:
        # one of those that are furthest behind is not silent for too long
        assert any(one.silent_s <= limit_s(longest.get(one.pulse.phase, 0), CEILING_S) for one in behind)
        return
    (named,) = [one for one in sights if one.rank == stall.rank]
    assert named in behind
    assert stall.silent_s == named.silent_s > stall.limit_s
    if named.pulse.phase not in longest:
        assert named.silent_s > CEILING_S
    # whatever the others do, as long as they are not behind it
    alone = [HeartbeatSample(one.rank, one.pulse, 0.0) if one.rank != named.rank else one for one in sights]
    again = find_stall(alone, longest, CEILING_S)
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


class Stage:
    """Workers that mark, an agent that looks, and a clock."""

    def __init__(self, workers: int, clock: Clock) -> None:
        self.clock, self.pulses = clock, HeartbeatPages(workers)
        self.beats = [HeartbeatWriter(self.pulses.page(rank)) for rank in range(workers)]
        self.watcher = HangDetector(CEILING_S, clock.monotonic)
        self.watcher.begin()

    def pass_time(self, duration: float, working: tuple[int, ...] = (), glance: float = 0.1) -> Stall | None:
        """Let time pass in which some workers make marks; the stall that is seen at its end."""
        stall = None
        for _ in range(round(duration / glance)):
            self.clock.now += glance
            for rank in working:
                self.beats[rank].mark()
            stall = self.look()
        return stall

    def look(self) -> Stall | None:
        return self.watcher.stalled(self.watcher.look(self.pulses, range(len(self.beats))))

    def steps(self, first: int, end: int, gap: float = 0.1) -> None:
        """Whole steps of all workers, whose data takes so long and everything else a hundredth of a second."""
        for step in range(first, end):
            for beat in self.beats:
                beat.step(step)
            self.clock.now += gap
            for deed in ("ready", "forward"):
                for beat in self.beats:
                    getattr(beat, deed)()
                self.clock.now += 0.01
            for phase in ("optimizer", "record"):
                for beat in self.beats:
                    beat.enter(phase)
                self.clock.now += 0.01
            assert self.look() is None


@pytest.fixture
def stage(monkeypatch):
    clock, made = Clock(), []
    monkeypatch.setattr(pulse_module, "time", clock)

    def make(workers: int) -> Stage:
        made.append(Stage(workers, clock))
        return made[-1]

    yield make
    for one in made:
        one.pulses.close()


def test_a_worker_that_makes_no_mark_is_named_and_then_given_up(stage):
    two = stage(2)
    two.steps(1, 5)
    for beat in two.beats:
        beat.step(5)
    two.beats[1].ready()
    two.look()
    assert two.pass_time(2.4) is None
    stall = two.pass_time(0.4)
    assert (stall.rank, stall.step, stall.phase, stall.alone, stall.certain) == (0, 5, "data", True, False)
    assert two.pass_time(2.0).certain is False
    stall = two.pass_time(0.6)
    assert (stall.rank, stall.certain) == (0, True)
    two.beats[0].ready()
    assert two.look() is None, "it is making progress again, and is where the other waits, who has no part in it"
    two.beats[0].mark()
    assert two.look() is None, "even if that one is last now"
    assert two.pass_time(2.4) is None
    assert two.pass_time(0.4).rank == 1, "but it had better come along"


def test_a_worker_that_marks_is_never_named(stage):
    two = stage(2)
    two.steps(1, 5)
    assert two.pass_time(500, working=(0, 1), glance=0.5) is None
    two.beats[1].step(5)
    assert two.pass_time(500, working=(0,), glance=0.5) is None, "the one that is behind works"


def test_an_agent_that_was_frozen_accuses_nobody(stage):
    """All may have been frozen with it: what it did not see counts for half a second."""
    two = stage(2)
    two.steps(1, 5)
    two.look()
    two.clock.now += 3600
    assert two.look() is None
    two.clock.now += 3600
    assert two.look() is None
    for _ in range(5):
        stall = two.pass_time(3600, glance=3600)
    assert stall is not None, "but an hour at each of many looks is no accident"
    assert stall.silent_s == pytest.approx(3.5)


def test_what_has_not_ended_yet_has_all_the_time_in_the_world(stage):
    """The first step: marks within a phase do not tell how long the rest of it takes."""
    two = stage(2)
    for beat in two.beats:
        beat.enter("join")
    assert two.pass_time(599, glance=0.5) is None
    for beat in two.beats:
        beat.enter("build")
        beat.step(1)
        beat.ready()
    two.pass_time(1.0, working=(0, 1))  # blocks, quickly one after the other
    assert two.pass_time(100, glance=0.5) is None, "the backward pass loads what it has never needed before"
    two.pass_time(1.0, working=(0, 1))
    for beat in two.beats:
        beat.enter("optimizer")
        beat.step(2)
        beat.ready()
    assert two.pass_time(499, glance=0.5) is None, "which took 100 s the first time"
    for beat in two.beats:
        beat.enter("evaluate")
    assert two.pass_time(599, glance=0.5) is None
    assert two.pass_time(2).phase == "evaluate"


def test_a_slow_moment_is_forgotten(stage):
    """One gap of 10 s among short ones allows for silence of 50 s, and of 2.5 s two windows later."""
    one = stage(1)
    one.steps(1, 10)
    one.steps(10, 11, gap=10.0)
    one.steps(11, 12)
    assert one.watcher.longest_ns["data"] == seconds(10)
    one.beats[0].step(12)
    assert one.pass_time(49) is None
    assert one.pass_time(2).limit_s == pytest.approx(50)
    one.steps(13, 10 + 2 * 128)
    one.beats[0].step(10 + 2 * 128)
    one.look()
    assert one.pass_time(2.4) is None
    assert one.pass_time(0.3).limit_s == 2.5


def test_another_attempt_knows_what_the_one_before_has_seen(stage):
    """What it has not seen itself, be it less or more."""
    two = stage(2)
    two.steps(1, 5, gap=2.0)
    two.pulses.clear()
    two.watcher.begin()
    two.beats = [HeartbeatWriter(two.pulses.page(rank)) for rank in range(2)]
    for beat in two.beats:
        beat.enter("join")
    assert two.pass_time(100, glance=0.5) is None
    for beat in two.beats:
        beat.step(1)
    assert two.pass_time(9.9) is None
    assert two.pass_time(0.4).limit_s == pytest.approx(10)


def test_silence_of_one_attempt_does_not_count_in_the_next(stage):
    one = stage(1)
    one.steps(1, 5)
    one.beats[0].step(5)
    assert one.pass_time(3) is not None
    one.watcher.begin()
    assert one.look() is None
    assert one.pass_time(2.4) is None


def test_one_that_never_makes_a_mark_is_seen(stage):
    two = stage(2)
    two.pulses.clear()
    two.beats[0] = HeartbeatWriter(two.pulses.page(0))
    two.beats[0].enter("join")
    assert two.pass_time(599, glance=0.5) is None
    stall = two.pass_time(2)
    assert (stall.rank, stall.where) == (1, "before its first step, in start")


# -- what is done about it


class Watched(Stage):
    """Two workers of a run that is looked at as the agent does it; what they are told and what is recorded."""

    def __init__(self, run: Path, clock: Clock) -> None:
        recipe = SimpleNamespace(train=SimpleNamespace(timeout_s=CEILING_S), parallel=None)
        self.lookout = WorkerMonitor(RunFolder(run), recipe, 2, FaultPlan(), FdStore(), clock.monotonic)
        self.clock, self.pulses = clock, self.lookout.pulses
        self.beats = [HeartbeatWriter(self.pulses.page(rank)) for rank in range(2)]
        self.attempt = Attempt(run=run, number=1, workers=2, device="cpu", threads=1)
        self.states, self.events, self.signals, self.taken = ["S", "S"], [], [], []
        self.lookout.begin()
        for rank in range(2):
            self.beats[rank] = HeartbeatWriter(self.pulses.page(rank))

    def look(self):
        return self.lookout.look(self.attempt, self, self)

    def told(self, kind: str) -> list[dict]:
        return [fields for name, fields in self.events if name == kind]

    def hold_up(self, rank: int) -> None:
        """All begin step 5, and this one does not come out of its data."""
        self.steps(1, 5)
        for beat in self.beats:
            beat.step(5)
        self.beats[1 - rank].ready()
        self.look()

    # -- as workers

    def pids(self) -> dict[int, int]:
        return {0: 100, 1: 101}

    def state(self, rank: int) -> str:
        return self.states[rank]

    def signal(self, number: signal.Signals, ranks: list[int]) -> None:
        self.signals.append((number, ranks))
        for rank in ranks:
            self.states[rank] = "S"

    def stacks(self, _folder: Path, _attempt: int, native: bool = True) -> StackDump:
        self.taken.append(native)
        frames = (Frame("read", "/x/src/headway/data/loader.py", 88),)
        return StackDump(
            None, [WorkerStack(rank, pid, self.states[rank], frames=frames) for rank, pid in self.pids().items()]
        )

    # -- as recorder

    def event(self, kind: str, **fields) -> None:
        self.events.append((kind, fields))


@pytest.fixture
def watched(stage, monkeypatch, tmp_path):
    clock = Clock()
    monkeypatch.setattr(pulse_module, "time", clock)
    made = Watched(tmp_path, clock)
    yield made
    made.lookout.close()


def test_who_hangs_is_named_with_its_line_and_given_up_later(watched):
    watched.hold_up(1)
    assert watched.pass_time(2.4) is None
    assert watched.events == []
    assert watched.pass_time(0.4) is None, "it is named first, and may still come back"
    (named,) = watched.told("hang")
    line = "headway/data/loader.py:88 in read"
    assert (named["rank"], named["step"], named["phase"], named["ends"]) == (1, 5, "data", False)
    assert (named["line"], named["text"]) == (line, f"worker 1 hangs in step 5, data (sleeping): {line}")
    assert watched.pass_time(2.1) is None
    lost = next(filter(None, (watched.pass_time(0.1) for _ in range(3))))
    assert (lost.stall.rank, lost.text) == (1, named["text"])
    assert [event["ends"] for event in watched.told("hang")] == [False, True]
    assert watched.taken == [False, True], "what lies below Python is looked at in the end"
    assert watched.signals == []


def test_who_was_named_and_comes_back_is_left_alone(watched):
    watched.hold_up(1)
    watched.pass_time(3.0)
    for beat in watched.beats:
        beat.mark()
    assert watched.pass_time(1.0, working=(0, 1)) is None
    (named,) = watched.told("hang")
    (woken,) = watched.told("woken")
    assert (named["ends"], woken["rank"]) == (False, 1)
    assert watched.signals == []


@pytest.mark.parametrize("state", ["t", "Z", ""], ids=["debugged", "dead", "gone"])
def test_who_does_not_work_is_not_named(watched, state):
    watched.hold_up(1)
    watched.states[1] = state
    assert watched.pass_time(60) is None
    assert watched.events == []


def test_who_was_stopped_is_woken_three_times_and_then_given_up(watched):
    watched.hold_up(1)
    for count in (1, 2, 3):
        watched.states[1] = "T"
        assert watched.pass_time(2.4) is None
        assert len(watched.signals) == count - 1
        assert watched.pass_time(0.3) is None
        assert watched.signals == [(signal.SIGCONT, [1])] * count
        assert watched.pass_time(2.0) is None, "it has as long as any other from here on"
        assert watched.told("hang") == []
        watched.beats[1].mark()
        watched.look()
    text = "worker 1 was stopped by a signal in step 5, data; woken"
    assert [(event["rank"], event["text"]) for event in watched.told("woken")] == [(1, text)] * 3
    watched.states[1] = "T"
    lost = watched.pass_time(5.2)
    assert lost.text.startswith("worker 1 hangs in step 5, data (stopped by a signal)")
    assert len(watched.signals) == 3


# -- what the kernel says


def test_the_state_of_a_process():
    """Sleeping, stopped, dead but not waited for, gone; its name may look like the end of it."""
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
