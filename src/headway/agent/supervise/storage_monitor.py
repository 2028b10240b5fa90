"""Notices when a run's folder vanishes or takes no records, says so, and decides when that has lasted too long.

A thread looks at the folder again and again, so that a file system that hangs blocks only that thread. Meanwhile
training continues and nothing is created in the folder's place: open files stay open in a renamed folder, records that
cannot be written wait in memory (track/events.py), and so do states (agent/saving/coordinator.py).
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from headway.errors import FolderGone
from headway.track import Recorder, RunFolder
from headway.track.folder_identity import FolderIdentity, FolderState, compare_folders, identify
from headway.track.heartbeat import UnrecordedWorker

LOOK_EVERY_S = 0.5
SILENT_S = 10.0
"""A file system that has not answered for so long counts as gone."""
REPORT_EVERY_S = 1.0


@dataclass(frozen=True)
class FolderLook:
    """What the last look at the folder saw, and when."""

    state: FolderState
    at: float


def folder_trouble(path: str, last: FolderLook, now: float) -> str | None:
    """Say what is wrong with a run's folder; None if nothing is."""
    if last.state == "gone":
        return f"the run's folder {path} is gone: renamed, removed or unmounted"
    if last.state == "replaced":
        return f"another folder is at {path}, in the place of the run's"
    if now - last.at > SILENT_S:
        return f"the file system of {path} has not answered for {SILENT_S:.0f} s"
    return None


class FolderMonitor:
    """Watches one run's folder."""

    def __init__(
        self,
        run: RunFolder,
        opened: FolderIdentity,
        relock: Callable[[], bool],
        *,
        look: Callable[[RunFolder], FolderIdentity | None] = identify,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`relock` takes the run's lock again in a folder that was mounted again, where the old lock is lost."""
        self._run, self._opened, self._relock, self._look, self._clock = run, opened, relock, look, clock
        self._last = FolderLook("here", clock())
        self._closed = threading.Event()
        self.superseded = False
        """Whether another process has the run's lock since the folder was mounted again."""

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self._opened.run

    def start(self) -> None:
        """Look again and again, in the background."""
        threading.Thread(target=self._watch, name="folder", daemon=True).start()

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def look(self) -> FolderState:
        """Look now; this may take as long as the file system takes."""
        now = self._look(self._run)
        state = compare_folders(self._opened, now)
        if state == "remounted" and now is not None and not self.superseded:
            self.superseded = not self._relock()
            self._opened, state = (self._opened, state) if self.superseded else (now, "here")
        self._last = FolderLook(state, self._clock())
        return state

    def trouble(self) -> str | None:
        """What is wrong with the folder, as of the last look; never waits."""
        return folder_trouble(str(self._run.path), self._last, self._clock())

    def check(self) -> None:
        """Look now, and raise FolderGone unless the folder is there."""
        if self.look() != "here":
            raise FolderGone(
                self.trouble() or f"{self._run.path} was mounted again, and another process has its lock",
                hint="bring the folder back: nothing is created in its place, and the last state stays in memory",
            )

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_EVERY_S):
            self.look()


class StorageReporter:
    """Tells people that the folder is gone or records cannot be written, and decides when that has lasted too long.

    The live view is told over the launcher's channel, since it reads the records; they get it as soon as they can be
    written.
    """

    def __init__(
        self,
        folder_trouble: Callable[[], str | None],
        tell: Callable[[str | None, int], None],
        outage_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell` gets what is wrong, or None, and the step that the workers have reached."""
        self._folder_trouble, self._tell, self._outage_s, self._clock = folder_trouble, tell, outage_s, clock
        self._since: float | None = None
        self._unrecorded_since: float | None = None
        self._told_at = 0.0
        self._text, self._text_about = "", ""

    def trouble(self, recorder: Recorder) -> str | None:
        """What is wrong now, if anything is."""
        return self._folder_trouble() or recorder.trouble

    def attend(
        self, recorder: Recorder, step: int, worker: UnrecordedWorker | None = None, stopping: str | None = None
    ) -> None:
        """Report what has changed since the last call, and the step while there is trouble; `stopping` is what the run
        does about it at last.

        Records of a `worker` may fail long before the agent's: a full disk has room left in the last block of a file.
        """
        trouble, now = self.trouble(recorder) or (worker and worker.text), self._clock()
        unrecorded_s = max(recorder.trouble_s(), worker.seconds if worker else 0.0)
        is_unrecorded = recorder.trouble is not None or worker is not None
        self._unrecorded_since = now - unrecorded_s if is_unrecorded else None
        if trouble is None:
            if self._since is not None:
                text = f"the run's folder works again after {now - self._since:.0f} s; nothing waits in memory any more"
                recorder.event("storage", text=text, works=True)
                self._tell(None, step)
            self._since, self._text_about = None, ""
            return
        # Records of one process after another fail on a full disk: that is one trouble, and is told once.
        about = stopping or ("folder" if self._folder_trouble() else "records")
        changed, self._text_about = about != self._text_about, about
        if changed:
            self._text = stopping or f"{trouble}; training continues, and what cannot be written waits in memory"
        if self._since is None:
            self._since = now - unrecorded_s  # as of the first write that failed
        elif not changed and now - self._told_at < REPORT_EVERY_S:
            return
        if changed:
            recorder.event("storage", text=self._text, works=False)
        self._told_at = now
        self._tell(self._text, step)

    def lasted_s(self) -> float:
        """How long there has been trouble, as of now; 0 if there is none."""
        return 0.0 if self._since is None else self._clock() - self._since

    def has_lasted(self) -> bool:
        """Whether records could not be written for so long that the run should save what it can and stop.

        A folder that is gone does not end a run by itself: where open files still take records, nothing is lost.
        """
        return outlasted(self._unrecorded_since, self._clock(), self._outage_s)


def outlasted(since: float | None, now: float, limit_s: float) -> bool:
    """Whether something that began at `since`, if it did, has lasted for longer than `limit_s`."""
    return since is not None and now - since > limit_s
