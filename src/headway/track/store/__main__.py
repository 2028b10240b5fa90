"""Compacts metrics: `python -m headway.track.store RUN_FOLDER` those of a run that ended, at the lowest priority.

Without a folder, those of the runs whose folders come on standard input; see `compaction_pool.py`.
"""

import os
import select
import sys
from pathlib import Path

from pydantic_core import from_json

from headway.errors import HeadwayError
from headway.track.run_folder import RunFolder
from headway.track.store.compact import MetricStore
from headway.track.store.compaction_pool import IDLE_S


def main(arguments: list[str]) -> int:
    """Compact; readers do it when this cannot."""
    if arguments:
        os.nice(19)
        return 0 if _compact(MetricStore(), Path(arguments[0])) else 1
    store = MetricStore()
    while select.select([sys.stdin.buffer], [], [], IDLE_S)[0] and (line := sys.stdin.buffer.readline()):
        _compact(store, Path(from_json(line)))
        os.write(1, b"\n")
    return 0


def _compact(store: MetricStore, folder: Path) -> bool:
    try:
        store.compact(RunFolder(folder))
    except (HeadwayError, OSError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
