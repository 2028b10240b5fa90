"""Progress of a build of a dataset: bars on a terminal, a line every few seconds elsewhere; on standard error."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headway.cli.data_view import source_size
from headway.cli.progress import terminal_bars
from headway.cli.text import plural
from headway.data import BuildProgress

_STAGES = {
    "tokenizer": "training the tokenizer",
    "encode": "encoding",
    "decode": "decoding",
    "write": "writing",
    "probe": "reading headers",
}


@contextmanager
def build_progress() -> Iterator[Callable[[BuildProgress], None]]:
    """Yield what draws a bar on a terminal, else prints a line every few seconds; on stderr."""
    if not sys.stderr.isatty():
        yield _plain_progress()
        return
    with terminal_bars("{task.description:22}", "Bar", "Download", "TimeRemaining") as bars:
        tasks: dict[str, Any] = {}

        def draw(now: BuildProgress) -> None:
            if now.stage not in tasks:
                tasks[now.stage] = bars.add_task(_STAGES[now.stage], total=now.total_bytes)
            bars.update(tasks[now.stage], completed=now.done_bytes)

        yield draw


def _plain_progress(every_s: float = 5.0) -> Callable[[BuildProgress], None]:
    """Return what prints a line every few seconds, and none twice."""
    printed: dict[str, tuple[float, str]] = {}

    def show(now: BuildProgress) -> None:
        share = now.done_bytes / max(now.total_bytes, 1)
        total = plural(now.total_bytes, "file") if now.stage == "probe" else source_size(now.total_bytes)
        line = f"{_STAGES[now.stage]}: {share:.0%} of {total}"
        at_s, last = printed.get(now.stage, (float("-inf"), ""))
        if line != last and time.monotonic() - at_s >= every_s:
            printed[now.stage] = time.monotonic(), line
            print(line, file=sys.stderr)

    return show
