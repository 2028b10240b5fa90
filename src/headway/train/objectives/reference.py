"""The reference model's log-probabilities of all samples: computed once, before the first step, and kept as a column.

The reference is the model as a run begins with it. So no second model is in memory: the run's own is scored with its
initial weights, on its own mesh. The column is stored beside the data, named by a hash of everything that it depends
on, and is used by every run with the same hash.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from headway.data.corpus import Corpus
from headway.data.loader import Batch, Documents, RowReader
from headway.data.order import Ids
from headway.parallel import ParallelModel, World
from headway.parallel.objective import DeviceBatch
from headway.recipe import Recipe
from headway.track import Recorder
from headway.track.heartbeat import HeartbeatWriter
from headway.train.feed import local_rows
from headway.train.objectives.preference import REFERENCE
from headway.train.stop import StoppedEarly, StopRequest

FOLDER = ".columns"
"""Folder inside a dataset with columns that were computed."""
_FORMAT = 1


class WithReference(RowReader):
    """A reader of samples whose rows also have the reference's log-probabilities."""

    def __init__(self, reader: RowReader, values_S: np.ndarray) -> None:
        self._reader, self._values_S = reader, values_S
        self.seq, self.windows = reader.seq, reader.windows
        self.masks, self.documents = reader.masks, reader.documents

    def locate(self, ids: Ids) -> list[tuple[int, int]]:
        """See RowReader."""
        return self._reader.locate(ids)

    def read_at(
        self, locations: Sequence[tuple[int, int]], out: Ids | None = None, documents: Documents | None = None
    ) -> Batch:
        """See RowReader."""
        batch = self._reader.read_at(locations, out, documents)
        present = batch.columns["weight"] > 0
        values = np.where(present, self._values_S[batch.columns["sample"]], 0).astype(np.float32)
        return batch._replace(columns={**batch.columns, REFERENCE: values})


def reference_column(
    recipe: Recipe,
    corpus: Corpus,
    spread: ParallelModel,
    world: World,
    mark: Callable[[int, int, int], None],
    draw: Callable[[], None] | None,
) -> np.ndarray:
    """Return the reference's log-probability of each sample, stored beside the data or computed from the initial
    weights; `draw` sets those, None if the model has them."""
    samples = sum(dataset.manifest.documents for dataset in corpus.datasets)
    file = column_file(recipe, corpus)
    stored = stored_reference(file, samples)
    if not world.any(stored is None):
        assert stored is not None
        return stored
    if draw is not None:
        draw()
    reader = corpus.reader()
    rows = local_rows(reader, spread, world, np.arange(reader.windows), ("weight",))
    values_S = score_samples(spread, world, rows, reader.windows, samples, mark)
    if world.first:
        store_reference(file, values_S)
    return values_S


def column_file(recipe: Recipe, corpus: Corpus) -> Path:
    """Return where the column of a recipe is: in the first dataset, by a hash of what it depends on."""
    data = recipe.data
    init = recipe.model.init
    content = {
        "format": _FORMAT,
        "versions": [dataset.version for dataset in corpus.datasets],
        "data": [data.seq, data.loss_on, data.over_length],
        "model": recipe.model.model_dump(mode="json", exclude={"init"}),
        "weights": recipe.seed if init is None else _identity(init),
        "lora": None if recipe.lora is None or recipe.lora.init is None else _identity(recipe.lora.init),
        "quantize": None if recipe.lora is None else recipe.lora.quantize,
        "dtype": [recipe.train.dtype, recipe.train.weights],
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    return corpus.datasets[0].path / FOLDER / f"reference-{key}.safetensors"


def _identity(address: str) -> list[Any]:
    """Return the files of weights by name, size and hash; of a store, its address."""
    folder = Path(address)
    files = sorted(folder.rglob("*.safetensors"))
    if not files:
        return [address]
    return [[str(file.relative_to(folder)), file.stat().st_size, _hash(file)] for file in files]


def _hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def stored_reference(file: Path, samples: int) -> np.ndarray | None:
    """Return the column from a file; None if there is none, or it is damaged."""
    try:
        values: np.ndarray = load_file(file)[REFERENCE]
    except (OSError, SafetensorError, KeyError):
        return None
    return values if values.shape == (samples,) else None


def store_reference(file: Path, values_S: np.ndarray) -> None:
    """Write the column; a folder that cannot be written has it computed again in the next attempt."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    with suppress(OSError):
        try:
            file.parent.mkdir(exist_ok=True)
            save_file({REFERENCE: values_S}, temporary)
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)


def score_samples(
    spread: ParallelModel,
    world: World,
    rows: Iterator[tuple[Batch, DeviceBatch]],
    total: int,
    samples: int,
    mark: Callable[[int, int, int], None],
) -> np.ndarray:
    """Return the log-probabilities of all samples, float32, from this worker's share of the rows; the same on all.

    `mark` is called with the number of rows done before a pass, after it, and in all.
    """
    done = 0
    values_S = torch.zeros(samples, dtype=torch.float64)
    spread.model.eval()
    with torch.no_grad():
        for read, batch in rows:
            scores_BD = spread.document_logprobs(batch)
            before, done = done, min(done + len(batch.inputs) * world.data.size, total)
            mark(before, done, total)
            if scores_BD is None or not world.reports:
                continue
            present = torch.from_numpy(read.columns["weight"] > 0)
            chosen = torch.from_numpy(read.columns["sample"])[present]
            values_S.index_add_(0, chosen, scores_BD.cpu().double()[present])
    spread.rest()
    spread.model.train()
    return world.sum(values_S).float().numpy()


@dataclass(frozen=True)
class ScoringProgress:
    """Shows how far a reference's or teacher's scores are, and stops computing them on request."""

    world: World
    recorder: Recorder
    beat: HeartbeatWriter
    stop: StopRequest
    of: str
    """What is computed: reference or teacher."""

    def mark(self, before: int, done: int, total: int) -> None:
        """Take the rows done before a pass of all workers, after it, and in all; raise StoppedEarly on request."""
        self.beat.mark()
        if before * 100 // total == done * 100 // total:  # the same rows, and so the same answer, on all workers
            return
        if self.world.first:
            self.recorder.event("reference", of=self.of, done=done, total=total)
        if self.world.any(self.stop.asked):
            raise StoppedEarly
