"""Processes that compact runs beside the one that reads them: parsing JSON takes a core per process.

Each reads the folders of runs from its standard input, one JSON text per line, and answers with a line when one is
done. It ends when its input does, so with whoever started it, or after it has had nothing to do for a while.
"""

import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import final

from pydantic_core import to_json

MOST = 8
"""Processes that compact at once, this one included."""
IDLE_S = 10.0
"""A process with nothing to do ends after this long."""


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@final
class CompactionPool:
    """Processes of this one that compact runs, one per core besides this one's; started when there is work."""

    def __init__(self, size: int | None = None) -> None:
        self._size = min(cores(), MOST) - 1 if size is None else size
        self._processes: dict[subprocess.Popen[bytes], Path | None] = {}

    @property
    def busy(self) -> set[Path]:
        """Folders of the runs that are being compacted."""
        return {path for path in self._processes.values() if path is not None}

    def assign(self, run: Path) -> bool:
        """Have a process compact a run; return False if all are busy."""
        for process in [process for process, path in self._processes.items() if path is None]:
            if self._send(process, run):
                return True
        return len(self._processes) < self._size and self._send(self._start(), run)

    def finished(self, timeout_s: float = 0.0) -> list[Path]:
        """Return runs that are done since the last call, after waiting for one; a process that died is done, too."""
        busy = {_answers(process): (process, path) for process, path in self._processes.items() if path is not None}
        if not busy:
            return []
        ready, _, _ = select.select(list(busy), [], [], min(max(timeout_s, 0.0), 3600.0))
        for descriptor in ready:
            process, _ = busy[descriptor]
            if os.read(descriptor, 1):
                self._processes[process] = None
            else:
                self._end(process)
        return [busy[descriptor][1] for descriptor in ready]

    def close(self) -> None:
        """End all processes; a run that is being compacted is finished first."""
        for process in list(self._processes):
            self._end(process)

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "headway.track.store"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._processes[process] = None
        return process

    def _send(self, process: "subprocess.Popen[bytes]", run: Path) -> bool:
        assert process.stdin is not None
        try:
            process.stdin.write(to_json(str(run)) + b"\n")
        except OSError:  # it has ended for want of work
            self._end(process)
            return False
        self._processes[process] = run
        return True

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        del self._processes[process]
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):
            process.stdin.close()
        process.wait()
        process.stdout.close()


def _answers(process: "subprocess.Popen[bytes]") -> int:
    assert process.stdout is not None
    return process.stdout.fileno()
