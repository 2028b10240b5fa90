"""Recorder, readers and clocks, against plain json, a hard-killed process and a full disk."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventually import eventually
from headway.errors import RunError
from headway.track import (
    FORMAT,
    Header,
    Record,
    Recorder,
    Tail,
    clock_offset,
    kept_until,
    read_ends,
    read_record,
    read_run,
    record_path,
)
from thinned import examples


class FakeClock:
    """A monotonic clock that moves only when told."""

    def __init__(self, ns: int = 5_000_000_000) -> None:
        self.ns = ns

    def __call__(self) -> int:
        return self.ns


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_record_lines_are_json_with_documented_header(tmp_path):
    clock = FakeClock()
    path = record_path(tmp_path, 1, "rank-0")
    with Recorder(path, attempt=1, process="rank-0", clock=clock, wall=lambda: 1234.5) as recorder:
        clock.ns += 7
        recorder.event("step", step=1, loss=2.5, data=3)
        recorder.event("exit", at=clock.ns + 100, rank=0, code=-9)
        with recorder.span("checkpoint"):
            clock.ns += 10
    assert path.name == "0001-rank-0.jsonl"
    header, *events = lines(path)
    boot = Path("/proc/sys/kernel/random/boot_id")
    assert header == {
        "kind": "open",
        "format": FORMAT,
        "attempt": 1,
        "process": "rank-0",
        "wall": 1234.5,
        "mono": 5_000_000_000,
        "boot": boot.read_text().strip() if boot.exists() else "",
        "host": os.uname().nodename,
        "pid": os.getpid(),
    }
    assert events == [
        {"kind": "step", "t": 7, "step": 1, "loss": 2.5, "data": 3},
        {"kind": "exit", "t": 107, "rank": 0, "code": -9},
        {"kind": "begin", "t": 7, "name": "checkpoint"},
        {"kind": "end-span", "t": 17, "name": "checkpoint"},
    ]
    record = read_record(path)
    assert record.events == events
    assert record.header == Header(1, "rank-0", 1234.5, 5_000_000_000, header["boot"], header["host"], header["pid"])


def test_span_ends_when_its_body_raises(tmp_path):
    path = tmp_path / "0001-rank-0.jsonl"
    recorder = Recorder(path, attempt=1, process="rank-0")
    with pytest.raises(KeyError), recorder.span("evaluation"):
        raise KeyError("x")
    recorder.close()
    assert [event["kind"] for event in read_record(path).events] == ["begin", "end-span"]


def test_events_of_every_thread_are_complete_and_in_order(tmp_path):
    path = tmp_path / "0001-rank-0.jsonl"
    with Recorder(path, attempt=1, process="rank-0") as recorder:

        def work(name: int) -> None:
            for number in range(500):
                recorder.event("log", who=name, number=number, text="é\n" * 20)

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = lines(path)[1:]
    assert len(events) == 2000
    for name in range(4):
        assert [event["number"] for event in events if event["who"] == name] == list(range(500))


def test_non_json_numbers_and_foreign_types_do_not_stop_recording(tmp_path):
    path = tmp_path / "0001-rank-0.jsonl"
    circular: list[object] = []
    circular.append(circular)
    with Recorder(path, attempt=1, process="rank-0") as recorder:
        recorder.event("step", step=np.int64(3), loss=math.nan, grad_norm=math.inf, lr=np.float32(0.5))
        recorder.event("log", message=np.zeros(3))
        recorder.event("log", message=circular)
        recorder.event("log", message="\ud800")
        recorder.event("log", message=b"\xff")
        recorder.event("log", message="last")
    assert recorder.trouble is None
    events = read_record(path).events
    assert {k: events[0][k] for k in ("step", "loss", "grad_norm", "lr")} == {
        "step": 3,
        "loss": None,
        "grad_norm": None,
        "lr": 0.5,
    }
    assert [event["kind"] for event in events] == ["step"] + ["log"] * 5
    assert events[-1]["message"] == "last"


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=examples(20), deadline=None)
def test_loss_round_trips_bit_for_bit(tmp_path_factory, loss):
    path = tmp_path_factory.mktemp("bits") / "0001-rank-0.jsonl"
    with Recorder(path, attempt=1, process="rank-0") as recorder:
        recorder.event("step", loss=loss)
    assert np.float64(read_record(path).events[0]["loss"]).tobytes() == np.float64(loss).tobytes()


def test_killed_process_loses_almost_no_events(tmp_path):
    path = tmp_path / "0001-rank-0.jsonl"
    code = f"""
import signal
from pathlib import Path
from headway.track.events import Recorder
recorder = Recorder(Path({str(path)!r}), attempt=1, process="rank-0")
for step in range(1, 101):
    recorder.event("step", step=step)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code], env=os.environ) as process:
        eventually(lambda: path.exists() and len(read_record(path).events) >= 95)  # nothing closes the record
        process.kill()
    assert process.returncode == -signal.SIGKILL
    steps = [event["step"] for event in read_record(path).events]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 95


class FullDisk:
    """Stands in for os.write: lets `room` bytes through, then fails until `room` grows."""

    def __init__(self, room: int, code: int = errno.ENOSPC) -> None:
        self.room, self.code = room, code
        self.write = os.write

    def __call__(self, file: int, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(self.code, os.strerror(self.code))
        sent = self.write(file, data[: self.room])
        self.room -= sent
        return sent


def steps_of(path: Path) -> list[int]:
    record = read_record(path)
    assert record.skipped == 0
    assert record.header.wall > 0
    return [event["step"] for event in record.events if event["kind"] == "step"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("room", [0, 10, 400, 5000])
def test_events_wait_in_memory_while_they_cannot_be_written(tmp_path, monkeypatch, room, code):
    disk = FullDisk(room, code)
    monkeypatch.setattr("headway.track.events.os.write", disk)
    path = tmp_path / "0001-rank-0.jsonl"
    recorder = Recorder(path, attempt=1, process="rank-0")
    for step in range(1, 201):
        recorder.event("step", step=step)
    assert not recorder.flush(300)
    assert os.strerror(code) in recorder.trouble
    unwritten = recorder.unwritten()
    assert unwritten.offset == path.stat().st_size == room
    assert unwritten.lines.endswith(b'"step":200}\n')
    disk.room = 1 << 20
    for step in range(201, 211):
        recorder.event("step", step=step)
    assert recorder.flush(300)
    assert (recorder.trouble, recorder.unwritten(), recorder.close(), recorder.dropped) == (None, None, None, 0)
    assert steps_of(path) == list(range(1, 211))


def test_events_are_retried_although_no_other_comes(tmp_path, monkeypatch):
    disk = FullDisk(300)
    monkeypatch.setattr("headway.track.events.os.write", disk)
    monkeypatch.setattr("headway.track.events._RETRY_S", 0.01)
    path = tmp_path / "0001-rank-0.jsonl"
    with Recorder(path, attempt=1, process="rank-0") as recorder:
        for step in range(1, 21):
            recorder.event("step", step=step)
        assert not recorder.flush(300)
        disk.room = 1 << 20
        eventually(lambda: recorder.trouble is None)
        assert steps_of(path) == list(range(1, 21))


def test_no_event_is_lost_wherever_a_full_disk_tears_a_line(tmp_path, monkeypatch):
    for room in range(300, 360):
        disk = FullDisk(room)
        with monkeypatch.context() as patch:
            patch.setattr("headway.track.events.os.write", disk)
            path = tmp_path / str(room) / "0001-rank-0.jsonl"
            recorder = Recorder(path, attempt=1, process="rank-0", clock=lambda: 0)
            for step in range(1, 21):
                recorder.event("step", step=step)
            assert not recorder.flush(300)
            disk.room = 1 << 20
            recorder.event("step", step=21)
            recorder.close()
        assert steps_of(path) == list(range(1, 22))


def test_backlog_is_bounded_and_what_is_beyond_is_counted_and_said(tmp_path, monkeypatch):
    disk, clock = FullDisk(1000), FakeClock()
    monkeypatch.setattr("headway.track.events.os.write", disk)
    path = tmp_path / "0001-rank-0.jsonl"
    recorder = Recorder(path, attempt=1, process="rank-0", clock=clock, backlog_bytes=2000)
    for step in range(1, 201):
        clock.ns += 10
        recorder.event("step", step=step)
        if step == 40:
            assert not recorder.flush(300)  # from here on, as much waits as may
    assert not recorder.flush(300)
    assert 1900 < len(recorder.unwritten().lines) <= 2000
    disk.room, clock.ns = 1 << 20, clock.ns + 5
    assert recorder.flush(300)  # which writes what waited, and what is said about the rest
    recorder.event("step", step=201)
    assert recorder.close() is None
    steps = steps_of(path)
    kept = len(steps) - 1
    assert steps == [*range(1, kept + 1), 201]
    assert recorder.dropped == 200 - kept > 50
    (lost,) = [event for event in read_record(path).events if event["kind"] == "lost"]
    assert (lost["events"], lost["since"], lost["t"]) == (200 - kept, 10 * (kept + 1), 2005)
    assert "events were lost" in lost["text"]


def test_record_continues_in_the_same_file_of_a_file_system_mounted_again(tmp_path, monkeypatch):
    """The open file is stale. One that is opened again counts if it has the same inode, and no other is created."""
    path, write, stale = tmp_path / "0001-rank-0.jsonl", os.write, set()

    def write_unless_stale(file: int, data: bytes) -> int:
        if file in stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return write(file, data)

    monkeypatch.setattr("headway.track.events.os.write", write_unless_stale)
    recorder = Recorder(path, attempt=1, process="rank-0")
    recorder.event("step", step=1)
    assert recorder.flush(300)
    stale.add(recorder._file)
    away = path.rename(tmp_path / "away")
    path.write_text("another file\n")
    recorder.event("step", step=2)
    assert not recorder.flush(300)
    assert path.read_text() == "another file\n"
    path.unlink()
    recorder.event("step", step=3)
    assert not recorder.flush(300)
    assert not path.exists()
    away.rename(path)
    for step in (4, 5):  # the first finds the file, the second is written there
        recorder.event("step", step=step)
        recorder.flush(300)
    assert recorder.close() is None
    assert steps_of(path) == [1, 2, 3, 4, 5]


def test_unwritable_folder_is_reported_immediately(tmp_path):
    (tmp_path / "events").write_text("in the way")
    with pytest.raises(RunError, match="cannot write the run's record"):
        Recorder(tmp_path / "events" / "0001-agent.jsonl", attempt=1, process="agent")


def test_existing_record_continues_on_its_own_clock(tmp_path):
    path = tmp_path / "0001-agent.jsonl"
    clock = FakeClock(1000)
    with Recorder(path, attempt=1, process="agent", clock=clock, wall=lambda: 50.0) as recorder:
        recorder.event("log", message="a")
    with path.open("a") as file:
        file.write('{"kind":"log","t":1,"mess')  # torn by a crash
    clock.ns = 9000
    with Recorder(path, attempt=1, process="agent", clock=clock, wall=lambda: 51.0) as recorder:
        recorder.event("log", message="b")
    record = read_record(path)
    assert path.read_text().count('"open"') == 1
    assert [(event["t"], event["message"]) for event in record.events] == [(0, "a"), (8000, "b")]
    assert record.skipped == 1


def test_record_without_header_gets_one(tmp_path):
    path = tmp_path / "0003-agent.jsonl"
    path.write_text('{"kind":"op')
    with Recorder(path, attempt=3, process="agent", wall=lambda: 7.0) as recorder:
        recorder.event("log", message="b")
    record = read_record(path)
    assert (record.header.wall, record.header.attempt, record.skipped) == (7.0, 3, 1)
    assert [event["message"] for event in record.events] == ["b"]


@given(st.lists(st.integers(0, 10**9), max_size=30), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_truncated_record_yields_its_complete_lines(tmp_path_factory, steps, data):
    folder = tmp_path_factory.mktemp("cut")
    path = folder / "0002-rank-1.jsonl"
    header = {"kind": "open", "format": 1, "attempt": 2, "process": "rank-1", "wall": 1.0, "mono": 5}
    rows = [header, *({"kind": "step", "t": i, "step": step} for i, step in enumerate(steps))]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    cut = data.draw(st.integers(0, len(text)))
    path.write_bytes(text[:cut])
    record = read_record(path)
    assert record.events == rows[1 : max(text[:cut].count(b"\n"), 1)]
    assert record.skipped == 0
    assert (record.header.attempt, record.header.process) == (2, "rank-1")


@given(st.lists(st.one_of(st.binary(max_size=40), st.just(b'{"kind":"log","t":1}')), max_size=20))
@settings(max_examples=examples(100), deadline=None)
def test_invalid_lines_are_skipped_and_counted(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("garbage") / "0001-agent.jsonl"
    rows = [row.replace(b"\n", b" ") for row in rows]
    path.write_bytes(b"".join(row + b"\n" for row in rows))
    record = read_record(path)
    good = sum(row == b'{"kind":"log","t":1}' for row in rows)
    assert len(record.events) == good
    assert record.skipped == sum(row != b"" for row in rows) - good


@pytest.mark.parametrize(
    "header",
    [
        {"wall": "soon", "mono": 1.5, "attempt": None, "process": 3},
        {"wall": 1e300, "mono": 10**40},
        {"wall": float("nan")},
        {"wall": True, "boot": None, "pid": "x"},
        {"wall": 10**400},
    ],
)
def test_damaged_header_does_not_stop_reading(tmp_path, header):
    path = tmp_path / "0007-rank-2.jsonl"
    path.write_text(json.dumps({"kind": "open", "format": 1} | header) + '\n{"kind":"log","t":1}\n')
    record = read_record(path)
    assert record.header.attempt == 7
    assert len(record.events) == 1
    assert abs(clock_offset(record.header, Header(7, "agent", 1e9))) < 1e22


def test_newer_format_is_refused_with_a_hint(tmp_path):
    path = tmp_path / "events" / "0001-agent.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"kind": "open", "format": FORMAT + 1}) + "\n")
    with pytest.raises(RunError, match=f"format {FORMAT + 1}") as caught:
        read_run(tmp_path)
    assert caught.value.hint


def test_run_records_are_ordered_by_attempt(tmp_path):
    for attempt in (10000, 2, 1):
        for process in ("rank-0", "agent", "rank-11"):
            Recorder(record_path(tmp_path / "events", attempt, process), attempt=attempt, process=process).close()
    records = [(record.header.attempt, record.header.process) for record in read_run(tmp_path)]
    assert [attempt for attempt, _ in records] == [1] * 3 + [2] * 3 + [10000] * 3
    assert {process for _, process in records} == {"rank-0", "agent", "rank-11"}
    assert [r.header.process for r in read_run(tmp_path, process="rank-0")] == ["rank-0"] * 3
    assert read_run(tmp_path / "nothing") == []


@pytest.mark.parametrize("count", [0, 3, 50, 400])
def test_record_ends_agree_with_full_record(tmp_path, count):
    path = tmp_path / "0001-rank-0.jsonl"
    with Recorder(path, attempt=1, process="rank-0") as recorder:
        for step in range(count):
            recorder.event("step", step=step)
    whole, ends = read_record(path), read_ends(path, size=1000)
    assert ends.header == whole.header
    assert ends.skipped == 0
    assert ends.events[:5] == whole.events[:5]
    assert ends.events[-5:] == whole.events[-5:]
    assert all(event in whole.events for event in ends.events)


def test_tail_returns_each_complete_event_once(tmp_path):
    path = tmp_path / "0001-rank-0.jsonl"
    tail = Tail(path)
    assert tail.poll() == []
    rows = ['{"kind":"open"}\n', '{"kind":"log","text":"é"}\n', "garbage\n", '{"kind":"log","t":2}\n']
    seen = []
    with path.open("ab") as file:
        for byte in "".join(rows).encode():
            file.write(bytes([byte]))
            file.flush()
            seen += tail.poll()
    assert seen == [{"kind": "open"}, {"kind": "log", "text": "é"}, {"kind": "log", "t": 2}]
    assert tail.poll() == []


def test_clock_offset_uses_monotonic_clock_within_a_boot_else_wall_time():
    agent = Header(1, "agent", wall=100.0, mono=1_000, boot="a")
    near = Header(1, "rank-0", wall=90.0, mono=4_000, boot="a")  # the wall clock was set back in between
    far = Header(1, "rank-1", wall=102.5, mono=7, boot="b")
    unknown = Header(1, "rank-2", wall=101.0, mono=9, boot="")
    assert clock_offset(near, agent) == 3_000
    assert clock_offset(far, agent) == 2_500_000_000
    assert clock_offset(unknown, Header(1, "agent", wall=100.0, mono=1_000)) == 1_000_000_000


def test_kept_until_follows_rollbacks_of_later_attempts():
    def rank0(attempt: int, resumed: int | None) -> Record:
        events = [] if resumed is None else [{"kind": "resumed", "t": 0, "step": resumed}]
        return Record(Header(attempt, "rank-0"), events)

    records = [rank0(1, 0), rank0(2, 10), rank0(3, None), rank0(4, 7)]
    records.append(Record(Header(2, "rank-1"), [{"kind": "resumed", "t": 0, "step": 1}]))
    assert kept_until(records) == {1: 7, 2: 7, 3: 7}
    assert kept_until(records[:2]) == {1: 10}
    assert kept_until([]) == {}


@pytest.mark.parametrize(
    ("process", "rank"), [("rank-0", 0), ("rank-12", 12), ("agent", None), ("rank-x", None), ("rank-", None)]
)
def test_rank_comes_from_process_name(process, rank):
    assert Header(1, process).rank == rank


def test_flush_waits_for_pending_events(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "0001-rank-0.jsonl", attempt=1, process="rank-0")
    for step in range(2000):
        recorder.event("step", step=step)
    assert recorder.flush(10.0)
    lines = (tmp_path / "0001-rank-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[1:]] == list(range(2000))
    recorder.close()
