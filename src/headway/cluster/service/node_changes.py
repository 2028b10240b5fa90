"""Which nodes should hear from the service: a version per node, and waiting without asking again and again."""

import asyncio
import contextlib
import threading
from collections.abc import Iterable


class NodeChanges:
    """Versions of what is wanted of nodes. Changed by any thread, awaited in event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all, self._closed = 0, False
        self._of_node: dict[str, int] = {}
        self._waiting: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}

    def version(self, node: str) -> int:
        """Return a number that grows with every change for a node."""
        return self._all + self._of_node.get(node, 0)

    def note(self, nodes: Iterable[str] | None = None) -> None:
        """Note a change for some nodes, or for all."""
        with self._lock:
            if nodes is None:
                self._all += 1
                names = list(self._waiting)
            else:
                names = list(nodes)
                for name in names:
                    self._of_node[name] = self._of_node.get(name, 0) + 1
            woken = [pair for name in names for pair in self._waiting.get(name, ())]
        for loop, event in woken:
            loop.call_soon_threadsafe(event.set)

    async def wait(self, node: str, version: int, wait_s: float) -> None:
        """Return once a node has another version, the time is over, or nobody is to wait any more."""
        pair = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            self._waiting.setdefault(node, set()).add(pair)
        try:
            if self.version(node) == version and not self._closed:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await pair[1].wait()
        finally:
            with self._lock:
                self._waiting[node].discard(pair)
                if not self._waiting[node]:
                    del self._waiting[node]

    def close(self) -> None:
        """End all waits, also those to come: the service is to end."""
        self._closed = True
        self.note()
