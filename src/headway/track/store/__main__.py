"""Compacts the metrics of one run, `python -m headway.track.store RUN_FOLDER`; started when a run has ended."""

import os
import sys
from pathlib import Path

from headway.errors import HeadwayError
from headway.track.runs import RunFolder
from headway.track.store.compact import MetricStore


def main(folder: str) -> int:
    """Compact at the lowest priority; readers do it when this cannot."""
    os.nice(19)
    try:
        MetricStore().compact(RunFolder(Path(folder)))
    except (HeadwayError, OSError):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
