"""Notices when a run's folder vanishes, says so, and lets nothing be created in its place until it is back.

A thread looks at the folder again and again, so that a file system that hangs blocks only that thread. Meanwhile
training continues: open files stay open in a renamed folder, and states stay in memory (agent/saving/coordinator.py).
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from headway.errors import FolderGone
from headway.track import Recorder, RunFolder
from headway.track.folder_identity import FolderIdentity, FolderState, compare_folders, identify

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
    """Tells people about the folder's trouble: the live view over the launcher's channel, and the run's record."""

    def __init__(
        self,
        trouble: Callable[[], str | None],
        tell: Callable[[str | None, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell` gets what is wrong, or None, and the step that the workers have reached."""
        self._trouble, self._tell, self._clock = trouble, tell, clock
        self._since: float | None = None
        self._told_at = 0.0

    def attend(self, recorder: Recorder, step: int) -> None:
        """Report what has changed since the last call, and the step while there is trouble."""
        trouble, now = self._trouble(), self._clock()
        if trouble is None:
            if self._since is not None:
                text = f"the run's folder is back after {now - self._since:.0f} s; the newest state is written there"
                recorder.event("storage", text=text)
                self._tell(None, step)
            self._since = None
            return
        if self._since is None:
            self._since = now
            trouble += "; training continues, its newest state stays in memory"
            recorder.event("storage", text=trouble)
        elif now - self._told_at < REPORT_EVERY_S:
            return
        self._told_at = now
        self._tell(trouble, step)
