"""Sends a run to one tracker: reads a batch, sends it, writes down how far it is, and tries again after an error.

What a server does not take stays in the event files; the place reached is in `trackers/<name>.json`, from which a
restarted process, or a later attempt, continues.
"""

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headway.track.files import write_json
from headway.track.run_folder import RunFolder
from headway.track.trackers.base import RunFacts, Sent, Tracker, Unsendable
from headway.track.trackers.feed import EventFeed

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class Sender:
    """One tracker of a run, and how far it is."""

    def __init__(
        self,
        run: RunFolder,
        facts: RunFacts,
        tracker: Tracker,
        every_steps: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._facts, self._tracker, self._clock = run, facts, tracker, clock
        self._file = run.trackers / f"{tracker.name}.json"
        self._saved = self._load()
        self._sent = dict[str, int](self._saved.get("offsets", {}))
        self._feed = EventFeed(run, every_steps, self._sent)
        self._feed.outcome = self._saved.get("outcome")
        self._open = False
        self._pending: list[Sent] | None = None
        self._pause_s, self._not_before = FIRST_PAUSE_S, -float("inf")
        self.trouble: str | None = self._saved.get("trouble")
        """Why the last batch was not sent."""

    def advance(self, ended: bool = False) -> bool:
        """Send what is new, unless an error was just now; return whether everything has been sent."""
        if self._clock() < self._not_before:
            return False
        try:
            if not self._open:
                self._saved["known"] = self._tracker.open(self._facts, self._saved.get("known") or {})
                self._open = True
                self._save()
            if self._pending is not None:
                self._send(self._pending)
            for batch in self._feed.batches():
                self._send(batch)
            if ended and (last := self._feed.last()):
                self._send(last)
        except Exception as error:  # a tracker may raise anything, and the next try may work
            self._failed(error)
            return False
        self._pause_s = FIRST_PAUSE_S
        return True

    def close(self) -> None:
        """Close the run with its tracker."""
        if self._open:
            with suppress(Exception):
                self._tracker.close(self._feed.outcome)

    def _send(self, batch: list[Sent]) -> None:
        self._pending = batch
        if batch:
            try:
                self._tracker.send(batch)
            except Unsendable as error:
                self._pending, self._sent = None, dict(self._feed.offsets)
                self._say(f"{self._tracker.name} refused a part of the record, which is left out: {error}")
                return
        self._pending, self._sent = None, dict(self._feed.offsets)
        self.trouble = None
        self._save()

    def _failed(self, error: Exception) -> None:
        self._open = False  # a connection may be what is broken
        self._not_before = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._say(f"{self._tracker.name} receives nothing: {describe(error)}; training is not affected")

    def _say(self, text: str) -> None:
        self.trouble = text
        with suppress(OSError):
            self._save()

    def _save(self) -> None:
        self._run.trackers.mkdir(exist_ok=True)
        self._saved |= {"offsets": self._sent, "trouble": self.trouble, "outcome": self._feed.outcome}
        write_json(self._file, self._saved)

    def _load(self) -> dict[str, Any]:
        try:
            saved = json.loads(self._file.read_bytes())
        except (OSError, ValueError):
            return {}
        offsets = saved.get("offsets") if isinstance(saved, dict) else None
        if not isinstance(offsets, dict) or not all(type(offset) is int and offset >= 0 for offset in offsets.values()):
            return {}
        return dict(saved)


def describe(error: BaseException) -> str:
    """Return an error in one line of at most 200 characters, without what may be a secret in an address."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    text = re.sub(r"://[^/\s@]*@", "://", text)
    return text if len(text) <= 200 else f"{text[:197]}..."
