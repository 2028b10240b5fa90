"""Limits how many tasks of an array run at a time on a Ray cluster."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headway.cluster.engines.ray.job import RayJob


class ArrayThrottle:
    """Queues the tasks of each array. Used from the controller's event loop only."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, list[RayJob]] = {}
        """Tasks that wait for a slot, by array, first come first served."""

    @asynccontextmanager
    async def slot(self, job: RayJob) -> AsyncIterator[None]:
        """Hold a slot of the job's array, once one is free or the job is cancelled."""
        array, limit = job.id.partition("_")[0], job.request.at_once
        if limit is None:
            yield
            return
        waiting = self._waiting.setdefault(array, [])
        waiting.append(job)
        while not job.cancelled and (self._running[array] >= limit or self._first(waiting) is not job):
            await job.changed.wait()
        waiting.remove(job)
        self._running[array] += 1
        self._wake(waiting)
        try:
            yield
        finally:
            self._running[array] -= 1
            self._wake(waiting)

    def _first(self, waiting: list[RayJob]) -> RayJob | None:
        return next((job for job in waiting if not job.cancelled), None)

    def _wake(self, waiting: list[RayJob]) -> None:
        first = self._first(waiting)
        if first is not None:
            first.notify()
