"""A run's folder that vanishes: noticed, told once, and nothing created in its place. Clocks are stepped by hand."""

import errno
import os
import threading

import pytest

from headway.agent.supervise.storage_monitor import SILENT_S, FolderLook, FolderMonitor, StorageReporter, folder_trouble
from headway.errors import FolderGone
from headway.track import Recorder, create_run
from headway.track.folder_identity import FolderIdentity, open_identity
from headway.track.heartbeat import HeartbeatPages, HeartbeatWriter, UnrecordedWorker


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Events:
    """Stands for the agent's recorder."""

    def __init__(self, clock):
        self.texts, self._clock, self._since, self.trouble = [], clock, 0.0, None

    @property
    def trouble(self):
        return self._trouble

    @trouble.setter
    def trouble(self, text):
        self._trouble, self._since = text, self._clock()

    def trouble_s(self):
        return 0.0 if self._trouble is None else self._clock() - self._since

    def event(self, kind, *, text, works):
        assert kind == "storage"
        self.texts.append((text, works))


@pytest.mark.parametrize(
    ("state", "age_s", "words"),
    [
        ("here", 0, None),
        ("here", SILENT_S, None),
        ("here", SILENT_S + 1, "has not answered"),
        ("gone", 0, "is gone"),
        ("replaced", 0, "another folder is at"),
    ],
)
def test_trouble_is_said_in_one_sentence(state, age_s, words):
    text = folder_trouble("/runs/a", FolderLook(state, 100.0), 100.0 + age_s)
    assert text is None if words is None else words in text
    assert text is None or "agent" not in text


def test_monitor_refuses_until_the_folder_is_back(tmp_path):
    run = create_run(tmp_path, "r", "r")
    monitor = FolderMonitor(run, open_identity(run), lambda: True)
    monitor.check()
    away = run.path.rename(tmp_path / "away")
    with pytest.raises(FolderGone, match="is gone"):
        monitor.check()
    run.path.mkdir()
    with pytest.raises(FolderGone, match="another folder is at"):
        monitor.check()
    assert list(run.path.iterdir()) == []
    run.path.rmdir()
    away.rename(run.path)
    monitor.check()
    assert monitor.trouble() is None


def test_remounted_folder_is_used_only_with_its_lock(tmp_path):
    run, opened = create_run(tmp_path, "r", "r"), FolderIdentity(1, 7, "id")
    remounted = FolderIdentity(2, 7, "id")
    for renewed in (True, False):
        monitor = FolderMonitor(run, opened, lambda renewed=renewed: renewed, look=lambda _run: remounted)
        assert monitor.look() == ("here" if renewed else "remounted")
        assert monitor.superseded is not renewed
        if renewed:
            monitor.check()
        else:
            with pytest.raises(FolderGone, match="another process has its lock"):
                monitor.check()


def test_file_system_that_hangs_blocks_nothing_but_the_look(tmp_path):
    run, clock, hung, release = create_run(tmp_path, "r", "r"), Clock(), threading.Event(), threading.Event()
    opened = open_identity(run)

    def look(_run):
        hung.set()
        release.wait()
        return opened

    monitor = FolderMonitor(run, opened, lambda: True, look=look, clock=clock)
    monitor.start()
    assert hung.wait(300)
    assert monitor.trouble() is None
    clock.now += SILENT_S + 1
    assert "has not answered" in monitor.trouble()
    monitor.close()
    release.set()


def test_trouble_is_recorded_once_and_the_step_told_until_it_ends():
    clock, told, trouble = Clock(), [], [None]
    events = Events(clock)
    reporter = StorageReporter(lambda: trouble[0], lambda text, step: told.append((text, step)), 600.0, clock)
    reporter.attend(events, 1)
    assert (events.texts, told) == ([], [])
    trouble[0] = "the folder is gone"
    for step in range(2, 6):
        reporter.attend(events, step)
        clock.now += 0.6
    assert len(events.texts) == 1
    assert "the folder is gone; training continues" in events.texts[0][0]
    assert [step for _, step in told] == [2, 4]
    trouble[0] = None
    for step in (6, 7):
        reporter.attend(events, step)
    assert told[-1] == (None, 6)
    assert len(events.texts) == 2
    assert "works again after 2 s" in events.texts[1][0]
    assert [works for _, works in events.texts] == [False, True]


def test_stop_after_a_full_disk_is_told_at_once_and_other_files_are_not():
    """A full disk fails one file after another, which is one trouble; that the run saves and stops is news."""
    clock, told, trouble = Clock(), [], ["cannot write rank-0.jsonl"]
    events = Events(clock)
    reporter = StorageReporter(lambda: None, lambda text, step: told.append(text), 600.0, clock)
    reporter.trouble = lambda _: trouble[0]
    reporter.attend(events, 1)
    trouble[0] = "cannot write agent.jsonl"
    clock.now += 2
    reporter.attend(events, 2)
    assert len(set(told)) == 1
    clock.now += 0.1
    for _ in range(2):
        reporter.attend(events, 3, stopping="saving where it can, trying for 60 s, and stopping")
    assert told[2:] == ["saving where it can, trying for 60 s, and stopping"]
    assert len(events.texts) == 2


def test_run_stops_only_when_records_cannot_be_written_for_too_long():
    """A folder that is gone does not end it while open files take its records."""
    clock, trouble = Clock(), ["the folder is gone"]
    events = Events(clock)
    reporter = StorageReporter(lambda: trouble[0], lambda _text, _step: None, 600.0, clock)

    def after(seconds):
        clock.now += seconds
        reporter.attend(events, 1)
        return reporter.has_lasted()

    assert not after(0)
    assert not after(1000)
    events.trouble, trouble[0] = "cannot write a: No space left on device", None
    assert not after(0)
    assert not after(599)
    events.trouble = None  # for a moment: it starts anew
    assert not after(0)
    events.trouble = "cannot write a: No space left on device"
    assert not after(0)
    assert not after(600)
    assert after(1)
    assert reporter.lasted_s() == 601


def test_records_of_a_worker_that_fail_first_are_reported_at_once_and_counted_from_then():
    """The agent's own file still has room in its last block."""
    clock, told = Clock(), []
    events = Events(clock)
    reporter = StorageReporter(lambda: None, lambda text, step: told.append((text, step)), 600.0, clock)
    reporter.attend(events, 7, UnrecordedWorker(1, 3.0, errno.ENOSPC))
    assert [step for _, step in told] == [7]
    assert events.texts[0][0].startswith("cannot write the records of worker 1: No space left on device; training")
    clock.now += 54
    events.trouble = "cannot write a: No space left on device"  # the agent's own, much later
    reporter.attend(events, 8, UnrecordedWorker(1, 57.0, errno.ENOSPC))
    clock.now += 6
    events.trouble = None
    reporter.attend(events, 9)
    assert "works again after 63 s" in events.texts[1][0]


def test_worker_without_records_for_too_long_stops_the_run():
    """On a node without the run's folder the agent's own records are written elsewhere."""
    clock = Clock()
    events = Events(clock)
    reporter = StorageReporter(lambda: None, lambda _text, _step: None, 600.0, clock)
    for seconds, lasted in ((1.0, False), (600.0, False), (600.5, True)):
        reporter.attend(events, 1, UnrecordedWorker(0, seconds, errno.EDQUOT))
        assert reporter.has_lasted() is lasted
    reporter.attend(events, 1)
    assert not reporter.has_lasted()


def test_failing_record_of_a_worker_is_seen_in_its_heartbeat(tmp_path, monkeypatch):
    clock, pages, write = Clock(), HeartbeatPages(2), os.write
    is_full = threading.Event()

    def write_unless_full(file, data):
        if is_full.is_set() and data.endswith(b"}\n"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    monkeypatch.setattr(os, "write", write_unless_full)
    beat = HeartbeatWriter(pages.page(1))
    path = tmp_path / "0001-rank-1.jsonl"
    with Recorder(path, attempt=1, process="rank-1", clock=lambda: int(clock() * 1e9)) as recorder:
        recorder.on_trouble = beat.unrecorded
        is_full.set()
        recorder.event("step", step=1)
        assert not recorder.flush(300)
        first = pages.unrecorded([0, 1])
        assert first is not None
        assert (first.rank, first.errno) == (1, errno.ENOSPC)
        assert first.seconds < 1
        clock.now += 20
        assert not recorder.flush(300)
        assert pages.unrecorded([0, 1]) == UnrecordedWorker(1, 20.0, errno.ENOSPC)
        assert recorder.trouble_s() == 20
        assert pages.unrecorded([0]) is None, "a worker that has ended does not count"
        is_full.clear()
        assert recorder.flush(300)
        assert pages.unrecorded([0, 1]) is None
    pages.close()
