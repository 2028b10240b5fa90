"""What workers mark in shared memory is what the agent reads, and marking asks nothing of the kernel."""

import ctypes
import os
import platform
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.track import heartbeat as pulse_module
from headway.track.heartbeat import PHASES, Arrival, Heartbeat, HeartbeatPages, HeartbeatWriter
from thinned import examples

WINDOW = 128
TURNS = 64
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
WRITE = {"x86_64": 1, "aarch64": 64}[platform.machine()]

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork, where threads were started


class Clock:
    """A clock that tests set."""

    def __init__(self, now: int = 1) -> None:
        self.now = now

    def monotonic_ns(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(pulse_module, "time", fake)
    return fake


def in_child(work: Callable[[], None]) -> int:
    """Do something in another process; how it ended."""
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def read(pulses: HeartbeatPages, rank: int = 0) -> Heartbeat:
    heartbeat = pulses.read(rank)
    assert heartbeat is not None
    return heartbeat


# -- from one process to another


def test_heartbeat_is_readable_from_another_process() -> None:
    """Two workers that have nothing but the descriptor, and a third that has not come yet."""
    pulses = HeartbeatPages(3)
    assert [pulses.read(rank) for rank in range(3)] == [None, None, None]

    def work(rank: int) -> None:
        beat = HeartbeatWriter(HeartbeatPages(3, os.dup(pulses.descriptor)).page(rank))
        beat.enter("join")
        if rank:
            beat.step(7)
            beat.ready()
            beat.mark(5)

    before = time.monotonic_ns()
    assert [in_child(lambda rank=rank: work(rank)) for rank in (0, 1)] == [0, 0]
    after = time.monotonic_ns()
    first, second = read(pulses, 0), read(pulses, 1)
    assert (first.step, first.phase, first.module, first.marks, first.usual_marks) == (0, "join", 0, 1, 0)
    assert (second.step, second.phase, second.module, second.marks, second.usual_marks) == (7, "compute", 5, 3, 1)
    assert before < first.at_ns < second.at_ns < after
    assert pulses.read(2) is None
    (arrival,) = pulses.arrivals(1)
    assert arrival.step == 7
    assert before < arrival.data_ns < after
    assert arrival.forward_ns == 0, "not yet"
    assert (pulses.arrivals(0), pulses.arrivals(2)) == ([], [])

    pulses.clear()
    assert [pulses.read(rank) for rank in range(3)] == [None, None, None]
    assert pulses.arrivals(1) == []
    pulses.close()


def test_heartbeat_memory_outlives_its_creator_while_a_descriptor_is_open() -> None:
    pulses = HeartbeatPages(1)
    HeartbeatWriter(pulses.page(0)).enter("restore")
    mine = os.dup(pulses.descriptor)
    pulses.close()
    again = HeartbeatPages(1, mine)
    assert read(again).phase == "restore"
    again.close()


def test_pages_of_workers_are_independent() -> None:
    pulses = HeartbeatPages(2)
    beat = HeartbeatWriter(pulses.page(0))
    for step in range(1, 1000):
        beat.step(step)
        beat.ready()
        beat.forward()
    assert bytes(pulses.page(1)) == bytes(4096)
    pulses.close()


# -- what is in it


def test_heartbeat_follows_the_phases_of_a_step(clock: Clock) -> None:
    """A story with its numbers written down by hand. A gap counts when the phase that it lies in has ended."""
    pulses, clock.now = HeartbeatPages(1), 100
    beat = HeartbeatWriter(pulses.page(0))
    assert read(pulses).at_ns == 100

    def at(now: int, deed: Callable[..., None], *args: object) -> Heartbeat:
        clock.now = now
        deed(*args)
        return read(pulses)

    assert at(150, beat.enter, "join").phase == "join"
    assert at(250, beat.enter, "build").longest_ns["join"] == 100
    seen = at(300, beat.step, 1)
    assert (seen.step, seen.phase, seen.marks, seen.usual_marks, seen.at_ns) == (1, "data", 1, 2, 300)
    seen = at(310, beat.ready)
    assert (seen.phase, seen.marks, seen.longest_ns["data"]) == ("compute", 2, 10)
    assert at(317, beat.mark, 1).module == 1
    assert at(340, beat.mark, 2).longest_ns["compute"] == 0, "nobody knows yet how long what comes next may take"
    seen = at(345, beat.forward)
    assert (seen.module, seen.longest_ns["compute"], seen.marks) == (0, 0, 5)
    at(360, beat.mark, 2)
    at(370, beat.forward)  # a second microbatch
    seen = at(380, beat.enter, "optimizer")
    assert (seen.phase, seen.module, seen.marks, seen.longest_ns["compute"]) == ("optimizer", 0, 8, 23)
    seen = at(400, beat.step, 2)
    assert (seen.step, seen.phase, seen.marks, seen.usual_marks) == (2, "data", 1, 8)
    want = {"join": 100, "build": 50, "data": 10, "compute": 23, "optimizer": 20}
    assert seen.longest_ns == dict.fromkeys(PHASES, 0) | want
    at(405, beat.ready)
    assert at(450, beat.enter, "optimizer").longest_ns["compute"] == 45
    at(455, beat.enter, "compute")
    assert at(457, beat.enter, "optimizer").longest_ns["compute"] == 45, "a shorter one changes nothing"
    assert pulses.arrivals(0) == [Arrival(1, 310, 370), Arrival(2, 405, 0)]
    pulses.close()


def test_progress_orders_by_step_phase_and_share_of_marks() -> None:
    def progress(step: int, phase: str, marks: int, usual: int) -> tuple[object, ...]:
        return Heartbeat(step, phase, 0, marks, usual, 1, {}).progress

    in_order = [
        progress(0, "start", 0, 0),
        progress(0, "join", 90, 0),
        progress(0, "build", 1, 0),
        progress(0, "restore", 1, 0),
        progress(3, "data", 1, 10),
        progress(3, "compute", 2, 10),
        progress(3, "compute", 9, 10),
        progress(3, "compute", 10, 10),
        progress(3, "compute", 30, 10),  # an evaluation between made more of them than usual
        progress(3, "optimizer", 3, 10),
        progress(3, "record", 4, 10),
        progress(3, "evaluate", 5, 10),
        progress(3, "save", 6, 10),
        progress(4, "data", 1, 10),
        progress(4, "end", 1, 10),
    ]
    assert in_order == sorted(in_order)
    assert len(set(in_order)) == len(in_order)
    assert progress(3, "compute", 20, 40) == progress(3, "compute", 5, 10), "pipeline stages differ in their blocks"


def test_being_alive_breaks_a_silence_and_is_no_progress(clock: Clock) -> None:
    """Workers sample and score answers of different lengths: none of them is behind by that."""
    pulses, clock.now = HeartbeatPages(1), 100
    beat = HeartbeatWriter(pulses.page(0))
    beat.step(1)
    beat.enter("generate")
    before = read(pulses)
    for _ in range(3):
        clock.now += 50
        beat.alive()
    after = read(pulses)
    assert (after.at_ns, after.progress) == (before.at_ns + 150, before.progress)
    clock.now += 10
    beat.enter("gather")
    assert read(pulses).longest_ns["generate"] == 50


def test_arrivals_cover_the_last_steps(clock: Clock) -> None:
    pulses = HeartbeatPages(1)
    beat = HeartbeatWriter(pulses.page(0))
    for step in range(1, 200):
        clock.now = 1000 * step
        beat.step(step)
        assert pulses.arrivals(0)[-1] == Arrival(step, 0, 0)
        clock.now += 7
        beat.ready()
        assert pulses.arrivals(0)[-1] == Arrival(step, clock.now, 0)
        for late in (50, 60 + step):
            clock.now = 1000 * step + late
            beat.forward()
        last = range(max(1, step - TURNS + 1), step + 1)
        assert pulses.arrivals(0) == [Arrival(step, 1000 * step + 7, 1000 * step + 60 + step) for step in last]
    pulses.close()


def test_outlier_gap_expires(clock: Clock) -> None:
    """It counts for as many steps as a window has, and not for more than two."""
    for bad in (1, 100, 127, 128, 200, 255, 256):
        pulses, clock.now = HeartbeatPages(1), 1
        beat = HeartbeatWriter(pulses.page(0))
        remembered = []
        for step in range(1, bad + 2 * WINDOW + 2):
            beat.step(step)
            clock.now += 10_000 if step == bad else 5
            beat.ready()
            clock.now += 3
            if read(pulses).longest_ns["data"] == 10_000:
                remembered.append(step)
        assert remembered == list(range(bad, remembered[-1] + 1))
        assert bad + WINDOW - 1 <= remembered[-1] < bad + 2 * WINDOW
        assert read(pulses).longest_ns == dict.fromkeys(PHASES, 0) | {"data": 5, "compute": 3}
        pulses.close()


@dataclass
class Visit:
    """A stay in a phase."""

    phase: str
    gaps: list[int] = field(default_factory=list)
    windows: int = 0


DEEDS = ("mark", "enter", "step", "ready", "forward", "steps")


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(DEEDS), st.sampled_from(PHASES), st.integers(0, 1000)), max_size=60),
    st.sampled_from([0, 100, WINDOW - 3, WINDOW - 1, WINDOW, 5 * WINDOW - 2]),
)
def test_longest_gaps_match_a_list_of_all_phases(deeds: list[tuple[str, str, int]], first: int) -> None:
    """The truth: every stay in a phase with its gaps, and how many windows have ended since it did."""
    clock, pulses = Clock(5), HeartbeatPages(1)
    before, pulse_module.time = pulse_module.time, clock
    try:
        beat = HeartbeatWriter(pulses.page(0))
        visits, last, step = [Visit("join")], 5, first
        for deed, other, gap in deeds:
            for _ in range(60 if deed == "steps" else 0):
                step += 1
                visits[-1].gaps.append(0)
                beat.step(step)
                for visit in visits if step % WINDOW == 0 else ():
                    visit.windows += 1
                visits.append(Visit("data"))
            clock.now += gap
            visits[-1].gaps.append(clock.now - last)
            last = clock.now
            match deed:
                case "steps":
                    beat.mark()
                case "mark":
                    beat.mark(3)
                case "enter":
                    beat.enter(other)
                    visits.append(Visit(other))
                case "step":
                    step += 1
                    beat.step(step)
                    for visit in visits if step % WINDOW == 0 else ():
                        visit.windows += 1
                    visits.append(Visit("data"))
                case "ready":
                    beat.ready()
                    visits.append(Visit("compute"))
                case "forward":
                    beat.forward()
            longest = dict.fromkeys(PHASES, 0)
            for visit in visits[:-1]:
                if visit.windows < 2:
                    longest[visit.phase] = max(longest[visit.phase], *visit.gaps)
            seen = read(pulses)
            shown = visits[-1].phase if len(visits) > 1 else "start"
            assert (seen.phase, seen.at_ns, seen.longest_ns) == (shown, last, longest)
    finally:
        pulse_module.time = before
        pulses.close()


# -- what it costs


def only_writes() -> None:
    """From here on the kernel kills this process at its first system call that is no write.

    By a filter of its own: the kernel's strict mode forbids x86 its clock too, which is read without a call.
    """
    load, if_equal, answer = 0x20, 0x15, 0x06
    allow, kill = 0x7FFF0000, 0x80000000
    lines = [(load, 0, 0, 0), (if_equal, 0, 1, WRITE), (answer, 0, 0, allow), (answer, 0, 0, kill)]
    program = b"".join(struct.pack("HBBI", *line) for line in lines)
    there = ctypes.create_string_buffer(program)
    described = struct.pack("HP", len(lines), ctypes.addressof(there))
    prctl = ctypes.CDLL(None).prctl
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, described, 0, 0):
        os._exit(2)


def while_only_writing(work: Callable[[], object]) -> bytes:
    """Do something in a process that may only write; what it says then.

    The end of a process is a call too, so that it always ends by the signal; but only one that gets there writes.
    """
    reads, writes = os.pipe()

    def child() -> None:
        only_writes()
        work()
        os.write(writes, b"done")

    status = in_child(child)
    os.close(writes)
    answer = os.read(reads, 100)
    os.close(reads)
    assert status == -signal.SIGSYS
    return answer


def test_marks_make_no_system_calls() -> None:
    """Of thousands of steps that make every kind of mark; the same with one call among them is caught."""
    pulses = HeartbeatPages(1)
    beat = HeartbeatWriter(pulses.page(0))

    def steps() -> None:
        for step in range(1, 3000):
            beat.step(step)
            beat.ready()
            beat.mark(7)
            beat.forward()
            for phase in ("optimizer", "record", "evaluate", "save"):
                beat.enter(phase)

    steps()  # what Python makes room for the first time
    pulses.clear()
    assert while_only_writing(steps) == b"done"
    assert read(pulses).step == 2999
    assert while_only_writing(lambda: (steps(), os.getppid())) == b""
    pulses.close()
