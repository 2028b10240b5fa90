"""Which nodes should hear from the service: a version per node, and waiting without asking again and again."""

import asyncio
import threading
from collections.abc import Iterable

LOOK_S = 1.0
"""How long a wait may overlook that the service is to end."""


class NodeChanges:
    """Versions of what is wanted of nodes. Changed by any thread, awaited in event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all = 0
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

    async def wait(self, node: str, version: int, wait_s: float, stopping: threading.Event) -> None:
        """Return once a node has another version, the time is over, or the service is to end."""
        pair = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            self._waiting.setdefault(node, set()).add(pair)
        try:
            left = wait_s
            while self.version(node) == version and left > 0 and not stopping.is_set():
                try:
                    await asyncio.wait_for(pair[1].wait(), min(left, LOOK_S))
                except TimeoutError:
                    left -= LOOK_S
        finally:
            with self._lock:
                self._waiting[node].discard(pair)
                if not self._waiting[node]:
                    del self._waiting[node]
