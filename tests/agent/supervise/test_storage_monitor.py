"""A run's folder that vanishes: noticed, told once, and nothing created in its place. Clocks are stepped by hand."""

import threading

import pytest

from headway.agent.supervise.storage_monitor import SILENT_S, FolderLook, FolderMonitor, StorageReporter, folder_trouble
from headway.errors import FolderGone
from headway.track import create_run
from headway.track.folder_identity import FolderIdentity, open_identity


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Events:
    """Stands for the agent's recorder."""

    def __init__(self):
        self.texts, self.trouble = [], None

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
    clock, events, told, trouble = Clock(), Events(), [], [None]
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


def test_run_stops_only_when_records_cannot_be_written_for_too_long():
    """A folder that is gone does not end it while open files take its records."""
    clock, events, trouble = Clock(), Events(), ["the folder is gone"]
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
