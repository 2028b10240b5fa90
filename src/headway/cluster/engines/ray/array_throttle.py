"""Copies of an array on a Ray cluster take turns, where no more than so many may run at a time."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headway.cluster.engines.ray.job import RayJob

__all__ = ["ArrayThrottle"]


class ArrayThrottle:
    """Whose turn it is. All of it happens on the owner's event loop."""

    def __init__(self) -> None:
        self._out: Counter[str] = Counter()
        self._held: dict[str, list[RayJob]] = {}
        """Copies that wait for their turn, by array, the first first."""

    @asynccontextmanager
    async def of(self, job: RayJob) -> AsyncIterator[None]:
        """A start of a job, once there is room in its array, or nobody wants it any more."""
        array, most = job.id.partition("_")[0], job.request.at_once
        if most is None:
            yield
            return
        held = self._held.setdefault(array, [])
        held.append(job)
        while not job.cancelled and (self._out[array] >= most or self._first(held) is not job):
            await job.news.wait()
        held.remove(job)
        self._out[array] += 1
        self._wake(held)
        try:
            yield
        finally:
            self._out[array] -= 1
            self._wake(held)

    def _first(self, held: list[RayJob]) -> RayJob | None:
        return next((job for job in held if not job.cancelled), None)

    def _wake(self, held: list[RayJob]) -> None:
        first = self._first(held)
        if first is not None:
            first.tell()
