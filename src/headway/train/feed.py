"""Batches as tensors on the device, through a ring of reused buffers.

Creating two tensors from a new array costs half as much as copying the rows (15 us of 40 for a batch of 8 x 2048), and
pinning new memory for a GPU far more. A buffer is reused after `TURNS` steps, which is more than a device can lag (see
`DeviceMeter.LAG`).
"""

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headway.data import Loader
from headway.data.loader import MASKED, Batch, RowReader
from headway.data.order import Ids
from headway.errors import DataError
from headway.parallel import ParallelModel, World
from headway.parallel.objective import DeviceBatch
from headway.train.meter import DeviceMeter
from headway.train.objectives import CountedObjective, NextToken

TURNS = DeviceMeter.LAG + 2


class CountedBatch(NamedTuple):
    """This worker's rows of one step, and the objective's counts of them."""

    batch: DeviceBatch
    trained: int
    """Number of labels that are not masked."""
    counts: tuple[float, ...]


class FedStep(NamedTuple):
    """What a step of the loop is fed with."""

    rows: DeviceBatch
    """This worker's rows."""
    trained: int
    """Number of this worker's labels that are not masked."""
    counts: tuple[float, ...]
    """The objective's counts of this worker's rows."""
    cursor: int
    """Where the data of the next step begins."""
    tokens: int
    """Tokens of the step, over all workers."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """What else is known of the step's data, by name."""


class Feed(Protocol):
    """Gives the loop the data of each step."""

    masks: bool
    """Whether labels can be masked."""

    def samples(self, step: int) -> bool:
        """Whether a step's data is sampled with the weights of now, and identified by the chain before the step."""
        ...

    def take(self, step: int, cursor: int, batch: int, chain_before: str) -> FedStep:
        """Return the data of a step: a batch that begins at sample `cursor`."""
        ...

    def held_out_rows(
        self, spread: ParallelModel, world: World, ids: Ids
    ) -> Iterator[tuple[tuple[float, ...], DeviceBatch]]:
        """Yield this worker's share of held-out samples, for passes without gradients: the objective's counts of them,
        and their rows. All workers get equally many."""
        ...

    def held_out_rewards(self, held_out: Ids, version: int) -> Mapping[str, float] | None:
        """Return what answers to held-out prompts are worth, sampled after the step `version`; None for data that has
        a loss instead."""
        ...

    def settle(self) -> None:
        """Complete what is sampled ahead: a state is about to be saved that cannot sample it again."""
        ...

    def discard(self, version: int) -> None:
        """Forget what was sampled with the weights after the step `version` or later: they may be corrupt."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...


class _Buffer(NamedTuple):
    rows: np.ndarray
    tokens: Tensor
    inputs: Tensor
    labels: Tensor
    documents: Tensor | None
    numbers: np.ndarray | None
    """The documents buffer as an array."""


class DeviceFeed:
    """Reads a step's rows and copies them to the device. A returned batch is valid for `TURNS` steps."""

    def __init__(self, loader: Loader, device: torch.device, objective: CountedObjective | None = None) -> None:
        self._loader, self._device = loader, device
        self._objective = objective or NextToken()
        self.masks = loader.masks
        """Whether labels can be masked."""
        shape = (loader.rows[1] - loader.rows[0], loader.reader.seq + 1)
        self._buffers = [self._buffer(shape) for _ in range(TURNS)]
        self._turn = 0

    def _buffer(self, shape: tuple[int, int]) -> _Buffer:
        pin = self._device.type == "cuda"
        tokens = torch.empty(shape, dtype=torch.int64, pin_memory=pin)
        documents = None
        if self._loader.reader.documents:
            documents = torch.empty((shape[0], shape[1] - 1), dtype=torch.int32, pin_memory=pin)
        numbers = None if documents is None else documents.numpy()
        return _Buffer(tokens.numpy(), tokens, tokens[:, :-1], tokens[:, 1:], documents, numbers)

    def samples(self, step: int) -> bool:
        """See Feed."""
        return False

    def take(self, step: int, cursor: int, batch: int, chain_before: str) -> FedStep:
        """See Feed."""
        return FedStep(*self.read(cursor, batch), cursor + batch, batch * self._loader.reader.seq)

    def held_out_rows(
        self, spread: ParallelModel, world: World, ids: Ids
    ) -> Iterator[tuple[tuple[float, ...], DeviceBatch]]:
        """See Feed."""
        for read, batch in local_rows(self._loader.reader, spread, world, ids, self._objective.columns):
            yield self._objective.counts(read), batch

    def held_out_rewards(self, held_out: Ids, version: int) -> None:
        """See Feed."""

    def settle(self) -> None:
        """See Feed."""

    def discard(self, version: int) -> None:
        """See Feed."""

    def close(self) -> None:
        """See Feed."""

    def read(self, cursor: int, batch: int | None = None) -> CountedBatch:
        """Return the batch that starts at sample `cursor`; `batch` is given if it is smaller than the largest."""
        self._turn = (self._turn + 1) % TURNS
        buffer = self._buffers[self._turn]
        if batch is not None and batch != self._loader.batch:
            buffer = _part(buffer, len(buffer.rows) * batch // self._loader.batch)
        inputs, labels, documents = buffer.inputs, buffer.labels, buffer.documents
        read = self._loader.read(cursor, buffer.rows, buffer.numbers, batch=batch)
        if self._device.type == "cuda":
            tokens = buffer.tokens.to(self._device, non_blocking=True)
            inputs, labels = tokens[:, :-1], tokens[:, 1:]
            documents = None if documents is None else documents.to(self._device, non_blocking=True)
        if self.masks:
            labels = torch.from_numpy(read.labels).to(self._device)
        columns = on_device(read.columns, self._objective.columns, self._device)
        counts = self._objective.counts(read)
        return CountedBatch(DeviceBatch(inputs, labels, documents, columns, buffer.numbers), read.trained, counts)


def local_rows(
    reader: RowReader, spread: ParallelModel, world: World, ids: Ids, columns: Collection[str]
) -> Iterator[tuple[Batch, DeviceBatch]]:
    """Yield this worker's share of some windows, for passes without gradients: on the host and on the device.

    Sharded models gather weights collectively, so all workers make equally many forward passes: one without windows
    repeats the first with all labels masked, and with all columns 0.
    """
    data = world.data
    rows = spread.evaluation_rows(max(1, len(ids)))
    for low in range(0, len(ids), rows * data.size):
        local_ids = ids[low + rows * data.rank : low + rows * (data.rank + 1)]
        read = reader.read(np.concatenate([local_ids, ids[:1].repeat(rows - len(local_ids))]))
        labels = read.labels.copy()
        labels[len(local_ids) :] = MASKED
        own_columns = {name: column.copy() for name, column in read.columns.items()}
        for column in own_columns.values():
            column[len(local_ids) :] = 0
        read = read._replace(labels=labels, columns=own_columns, trained=int((labels != MASKED).sum()))
        inputs, masked = (torch.from_numpy(ids_BL).to(world.device) for ids_BL in (read.inputs, labels))
        documents = None if read.documents is None else torch.from_numpy(read.documents).to(world.device)
        sent = on_device(own_columns, columns, world.device)
        yield read, DeviceBatch(inputs, masked, documents, sent, read.documents)


def on_device(columns: Mapping[str, np.ndarray], names: Collection[str], device: torch.device) -> dict[str, Tensor]:
    """Return some columns on the device; raise DataError for one that the data does not have."""
    missing = sorted(set(names) - columns.keys())
    if missing:
        raise DataError(
            f"the objective needs {missing[0]!r} of each sample, which this data does not have",
            hint="datasets of headway data build --chat have weights; reference values need objective dpo or kto",
        )
    return {name: torch.from_numpy(columns[name]).to(device) for name in sorted(names)}


def _part(buffer: _Buffer, rows: int) -> _Buffer:
    """Return the first rows of a buffer."""
    documents, numbers = buffer.documents, buffer.numbers
    return _Buffer(
        buffer.rows[:rows],
        buffer.tokens[:rows],
        buffer.inputs[:rows],
        buffer.labels[:rows],
        None if documents is None else documents[:rows],
        None if numbers is None else numbers[:rows],
    )
