"""Keeps the process alive that sends a run to other trackers, and says in the record when a tracker gets nothing."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from headway.recipe.track import Track
from headway.track import Recorder, RunFolder

CHECK_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 120.0


class TrackerProcess:
    """The process of `headway.track.trackers`; nothing here waits for it, and no error of it reaches the run."""

    def __init__(self, run: RunFolder, settings: Track | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._names = [] if settings is None else settings.names()
        self._process: subprocess.Popen[bytes] | None = None
        self._pause_s, self._next = FIRST_PAUSE_S, clock()
        self._reported = dict[str, str | None]()

    def tick(self, recorder: Recorder) -> None:
        """Start the process if it is not there, and record a tracker's trouble once."""
        if not self._names or self._clock() < self._next:
            return
        self._next = self._clock() + CHECK_S
        if self._process is not None and self._process.poll() is not None:
            self._close_pipe(self._process)
            self._process = None
            self._next = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        elif self._process is None:
            with suppress(OSError):
                self._process = self._start()
        for name in self._names:
            trouble = self._trouble(name)
            if trouble and self._reported.get(name) is None:
                recorder.event("tracker", name=name, text=trouble)
            elif self._reported.get(name) is not None and trouble is None:
                recorder.event("tracker", name=name, text=f"{name} receives the run's metrics again")
            self._reported[name] = trouble

    @property
    def pid(self) -> int | None:
        """The process, if it runs."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Tell the process that the run has ended; it sends what is left by itself, in the background."""
        if self._process is not None:
            self._close_pipe(self._process)
            self._process.returncode = 0  # whoever reaps it: no warning when it is collected

    @staticmethod
    def _close_pipe(process: "subprocess.Popen[bytes]") -> None:
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()

    def _start(self) -> subprocess.Popen[bytes]:
        path = self._run.logs / "trackers.log"
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "headway.track.trackers", str(self._run.path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )

    def _trouble(self, name: str) -> str | None:
        try:
            trouble = json.loads((self._run.trackers / f"{name}.json").read_bytes())["trouble"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return trouble if isinstance(trouble, str) else None
