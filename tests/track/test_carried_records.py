"""Records that travel with a state: against every place at which the writing of a file may have stopped."""

import base64
import errno
import os
import zlib

import pytest

from headway.track import Recorder, create_run, read_record, record_path
from headway.track.carried_records import (
    CarriedRecord,
    carry_record,
    dump_records,
    parse_records,
    restore_records,
)

NAME = "0001-rank-0.jsonl"
WHOLE = b"".join(b'{"kind":"step","t":%d,"step":%d}\n' % (10 * step, step) for step in range(1, 21))


def carried(offset: int, lines: bytes) -> CarriedRecord:
    return CarriedRecord(offset=offset, data=base64.b64encode(zlib.compress(lines)).decode())


@pytest.fixture
def run(tmp_path):
    return create_run(tmp_path, "r", "r")


@pytest.mark.parametrize("offset", [0, 100, 133])
def test_record_is_whole_wherever_its_file_ends(run, offset):
    path, records = run.events / NAME, {NAME: carried(offset, WHOLE[offset:])}
    for written in range(offset, len(WHOLE) + 1, 7):
        path.write_bytes(WHOLE[:written])
        for _ in range(2):
            assert restore_records(run, records) == {}
            assert path.read_bytes() == WHOLE


def test_file_that_goes_on_differently_is_left_as_it_is(run):
    path, other = run.events / NAME, WHOLE[:100] + b'{"kind":"log"}\n'
    path.write_bytes(other)
    assert restore_records(run, {NAME: carried(100, WHOLE[100:])}) == {}
    assert path.read_bytes() == other


def test_file_that_lacks_more_gets_the_lines_that_there_are(run):
    path = run.events / NAME
    path.write_bytes(WHOLE[:40])
    whole_lines = WHOLE.index(b"\n", 100) + 1
    restore_records(run, {NAME: carried(whole_lines, WHOLE[whole_lines:])})
    steps = [event["step"] for event in read_record(path).events]
    assert steps[0] == 1
    assert steps[-1] == 20


def test_what_cannot_be_written_yet_is_returned(run, monkeypatch):
    def full(_file, _data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    records = {NAME: carried(0, WHOLE), "0001-rank-1.jsonl": carried(0, b"")}
    with monkeypatch.context() as patch:
        patch.setattr("headway.track.carried_records.os.write", full)
        remaining = restore_records(run, records)
    assert list(remaining) == [NAME]
    assert restore_records(run, remaining) == {}
    assert (run.events / NAME).read_bytes() == WHOLE


def test_recorder_and_carried_lines_are_the_whole_record(run, monkeypatch):
    write, room = os.write, [500]

    def fill(file, data):
        sent = write(file, data[: room[0]]) if room[0] else 0
        room[0] -= sent
        if not sent:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return sent

    monkeypatch.setattr("headway.track.events.os.write", fill)
    path = record_path(run.events, 1, "rank-0")
    recorder = Recorder(path, attempt=1, process="rank-0")
    assert carry_record(recorder) == {}
    for step in range(1, 41):
        recorder.event("step", step=step)
    assert not recorder.flush(300)
    extra = dump_records("id", carry_record(recorder))
    recorder.close()
    assert parse_records("id", extra) == carry_record(recorder)
    room[0] = 1 << 20
    restore_records(run, parse_records("id", extra))
    record = read_record(path)
    assert ([event["step"] for event in record.events], record.skipped) == (list(range(1, 41)), 0)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"records": 3},
        {"records": {"run": "other", "files": {NAME: carried(0, WHOLE).model_dump()}}},
        {"records": {"run": "id", "files": {"../" + NAME: carried(0, WHOLE).model_dump()}}},
        {"records": {"run": "id", "files": {NAME: {"offset": "x"}}}},
    ],
)
def test_records_of_other_runs_and_damaged_ones_are_not_taken(extra):
    assert parse_records("id", extra) == {}
