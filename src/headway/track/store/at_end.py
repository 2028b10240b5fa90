"""Has the metrics of a run that ended compacted, by a process of its own in the background."""

import os
import sys
from contextlib import suppress

from headway.track.run_folder import RunFolder

WORTH_BYTES = 1 << 20
"""Record from which this pays: about 4,000 steps. Readers compact less than that while they read it."""


def compact_in_background(run: RunFolder) -> bool:
    """Start a process that compacts a run's metrics, if they are many; return whether it was started.

    It can neither delay nor fail a run: it has its own session and the lowest priority, and nothing depends on it.
    """
    size = 0
    for path in run.events.glob("*-rank-0.jsonl"):
        with suppress(OSError):
            size += path.stat().st_size
    if size < WORTH_BYTES or not sys.executable:
        return False
    null = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in (0, 1, 2)]
    arguments = [sys.executable, "-m", "headway.track.store", str(run.path)]
    with suppress(OSError):
        os.posix_spawn(sys.executable, arguments, os.environ, file_actions=null, setsid=True)
        return True
    return False
