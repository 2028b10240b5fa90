"""Read the samples of a run with decoder processes, ahead of the steps that need them.

The samples of a window of steps are decoded together, those of one segment by one request, so that a group of pictures
that several of them lie in is decoded once. At most `ahead` windows are decoded beyond the current one: decoders wait
for the steps, and what is in memory is bounded. The samples are those of `MediaReader`, to the bit.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from headway.data.media.dataset import MediaDataset
from headway.data.media.decode import Pixels
from headway.data.media.order import MediaOrder
from headway.data.media.processes import DecoderLimits, DecoderProcesses, RequestFailed
from headway.data.media.reader import MediaBatch, make_batch
from headway.data.media.specs import SampleSpec
from headway.errors import DataError

Pending = dict[int, tuple["Future[Any]", int]]
"""Of each sample number: the request that it is part of, and its place there."""


class PooledReader:
    """The samples of a run by steps; close it, or use it as a context."""

    def __init__(
        self,
        dataset: MediaDataset,
        order: MediaOrder,
        *,
        rows: tuple[int, int] | None = None,
        processes: int = 2,
        ahead: int = 2,
        limits: DecoderLimits | None = None,
        on_replaced: Callable[[str], None] | None = None,
    ) -> None:
        self.dataset, self.order = dataset, order
        self.rows = rows or (0, order.batch)
        """This rank's rows of each step."""
        self._ahead = ahead
        self._decoders = DecoderProcesses(processes, limits, on_replaced)
        self._windows: dict[int, Pending] = {}

    @property
    def decoders(self) -> DecoderProcesses:
        """The processes."""
        return self._decoders

    def __enter__(self) -> "PooledReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        self._decoders.close()

    def read(self, cursor: int) -> MediaBatch:
        """Read this rank's samples of the step that begins at row `cursor`; reading on from there is prefetched."""
        window = cursor // self._window_rows
        for later in range(window, window + self._ahead + 1):
            if later not in self._windows:
                self._windows[later] = self._request(self._window_specs(later, cursor))
        for passed in [number for number in self._windows if not window <= number <= window + self._ahead]:
            for request, _ in self._windows.pop(passed).values():
                request.cancel()
        pending = self._windows[window]
        numbers = self.order.numbers(cursor, self.rows)
        if any(number not in pending for number in numbers):  # a step that was read before
            pending |= self._request(self.order.specs([number for number in numbers if number not in pending]))
        specs = self.order.specs(numbers)
        pixels = [self._result(spec, *pending.pop(spec.number)) for spec in specs]
        return make_batch(self.dataset, specs, pixels)

    def read_specs(self, specs: Sequence[SampleSpec]) -> MediaBatch:
        """Read samples of one bucket, held-out ones for example."""
        pending = self._request(specs)
        return make_batch(self.dataset, specs, [self._result(spec, *pending[spec.number]) for spec in specs])

    @property
    def _window_rows(self) -> int:
        return self.order.batch * self.order.media.steps_per_window

    def _window_specs(self, window: int, cursor: int) -> list[SampleSpec]:
        """Return this rank's samples of a window, from a step on."""
        first = window * self._window_rows
        if not self.order.aligned:  # steps may begin anywhere: count from this one
            first += cursor % self.order.batch
        steps = range(first, first + self._window_rows, self.order.batch)
        return self.order.specs([n for step in steps if step >= cursor for n in self.order.numbers(step, self.rows)])

    def _request(self, specs: Sequence[SampleSpec]) -> Pending:
        """Have samples decoded, those of one segment together, in the order in which steps need them."""
        groups: dict[tuple[int, int], list[SampleSpec]] = {}
        for spec in specs:
            groups.setdefault((spec.clip, spec.segment), []).append(spec)
        pending: Pending = {}
        for group in groups.values():
            request = self._decoders.submit({"dataset": str(self.dataset.path), "specs": group})
            pending |= {spec.number: (request, place) for place, spec in enumerate(group)}
        return pending

    def _result(self, spec: SampleSpec, request: "Future[Any]", place: int) -> Pixels:
        try:
            pixels: Pixels = request.result()[place]
        except RequestFailed as error:
            clip = self.dataset.clip(spec.clip)
            raise DataError(
                f"sample {spec.number:,}, clip {clip.number:,} ({clip.name}): {error.message}",
                hint="raise the decoders' limits, or build the dataset again without this file",
            ) from None
        return pixels
