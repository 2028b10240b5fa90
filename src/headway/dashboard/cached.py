"""What was computed from a run's files, kept until they change."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, final

from headway.track import RunFolder, lock_holder

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

SHARE = 0.05
"""Of one core, that following what changes may take."""

Signature = tuple[Any, ...]
"""Equal as long as nothing was written."""


def signature_of(run: RunFolder) -> Signature:
    """Return what changes when a run records something, starts or ends."""
    return (*files_signature(run.events, "*.jsonl"), _is_locked(run))


def files_signature(folder: Path, pattern: str = "*") -> Signature:
    """Return names, sizes and times of a folder's files; empty if it is gone."""
    entries = []
    for path in folder.glob(pattern):
        try:
            status = path.stat()
        except OSError:
            continue
        entries.append((path.name, status.st_mtime_ns, status.st_size))
    return tuple(sorted(entries))


def urgent_signature(run: RunFolder) -> Signature:
    """Return what changes when a run starts, ends, or its agent records something; not with each step."""
    return (*files_signature(run.events, "*-agent.jsonl"), _is_locked(run))


def _is_locked(run: RunFolder) -> bool:
    try:
        return lock_holder(run) is not None
    except OSError:
        return False


@final
class Cache:
    """The newest values, by key; of threads that want the same one, the first computes it."""

    def __init__(self, most: int = 4096, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._values: OrderedDict[Hashable, tuple[Signature, Any]] = OrderedDict()
        self._locks: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, signature: Signature, compute: Callable[[], T]) -> T:
        """Return the value of a key, computed again if its signature has changed."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            with self._lock:
                entry = self._values.get(key)
                if entry is not None and entry[0] == signature:
                    self._values.move_to_end(key)
                    value: T = entry[1]
                    return value
            value = compute()
            with self._lock:
                self._values[key] = (signature, value)
                self._values.move_to_end(key)
                while len(self._values) > self._most:
                    oldest, _ = self._values.popitem(last=False)
                    self._locks.pop(oldest, None)
            return value

    def get_paced(self, key: Hashable, signature: Signature, urgent: Signature, compute: Callable[[], T]) -> T:
        """Return a value that takes long to compute of much: while it grows, no more often than takes SHARE of a core.

        What `urgent` tells of is never missed.
        """
        with self._lock:
            entry = self._values.get(key)
        if entry is not None:
            known: tuple[T, Signature, float] = entry[1]
            if known[1] == urgent and self._clock() < known[2]:
                return known[0]

        def timed() -> tuple[T, Signature, float]:
            began = self._clock()
            value = compute()
            now = self._clock()
            return value, urgent, now + (now - began) / SHARE

        return self.get(key, signature, timed)[0]

    def get_many(
        self, signatures: Mapping[K, Signature], compute: Callable[[Sequence[K]], Mapping[K, T]]
    ) -> dict[K, T]:
        """Return the values of several keys; those that have changed are computed together."""
        with self._lock:
            known = {
                key: entry[1] for key, now in signatures.items() if (entry := self._values.get(key)) and entry[0] == now
            }
        missing = [key for key in signatures if key not in known]
        fresh = compute(missing) if missing else {}
        for key, value in fresh.items():
            self.get(key, signatures[key], lambda value=value: value)  # type: ignore[misc]
        return {key: fresh[key] if key in fresh else known[key] for key in signatures if key in fresh or key in known}
