"""Live updates: what has changed, as server-sent events. Reads only what files say of themselves.

A page hears that a run has changed, and asks for what it shows. Looking for changes is paced by what it costs.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from threading import Event as StopEvent
from typing import Any

from pydantic_core import to_json

from headway.dashboard.cached import SHARE, signature_of
from headway.dashboard.recorded import RecordedRuns
from headway.errors import HeadwayError

POLL_S = 1.0
KEEPALIVE_S = 15.0


async def changes(recorded: RecordedRuns, name: str | None, stopping: StopEvent) -> AsyncIterator[str]:
    """Yield a message when a run has changed (all runs, without a name), until the server stops."""
    known = await asyncio.to_thread(look, recorded, name)
    yield message("hello", {})
    quiet_since = time.monotonic()
    while not stopping.is_set():
        began = time.monotonic()
        now = await asyncio.to_thread(look, recorded, name)
        cost = time.monotonic() - began
        if now != known:
            changed = sorted(key for key in now.keys() | known.keys() if now.get(key) != known.get(key))
            known, quiet_since = now, time.monotonic()
            yield message("changed", {"runs": changed})
        elif time.monotonic() - quiet_since > KEEPALIVE_S:
            quiet_since = time.monotonic()
            yield ": still here\n\n"
        await pause(max(POLL_S, cost / SHARE), stopping.is_set)


def look(recorded: RecordedRuns, name: str | None) -> dict[str, Any]:
    """Return what changes when a run does, by its name; a run that is gone has none."""
    if name is None:
        return {key: signature_of(run) for run, key in recorded.folders()}
    try:
        return {name: signature_of(recorded.find(name))}
    except HeadwayError:
        return {}


def message(kind: str, data: Any) -> str:
    """Return a server-sent event."""
    return f"event: {kind}\ndata: {to_json(data).decode()}\n\n"


async def pause(seconds: float, stopped: Callable[[], bool]) -> None:
    """Wait, but no longer than until the server stops."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not stopped():
        await asyncio.sleep(min(left, 0.25))
