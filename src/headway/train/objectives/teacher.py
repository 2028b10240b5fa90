"""The teacher of a distillation: a frozen model on the run's own mesh, in no optimizer and in no checkpoint.

Live, it runs on every microbatch, right before the student. Cached, it runs once over all rows before the first step
and is then gone: its likeliest tokens are kept beside the data, in a folder named by a hash of what they depend on.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from headway.data.corpus import Corpus
from headway.data.loader import MASKED, Batch, Documents, RowReader
from headway.data.order import Ids
from headway.errors import DataError, ModelError
from headway.models import empty_decoder
from headway.models.exact import make_exact
from headway.parallel import ParallelModel, World, parallelize_model
from headway.parallel.objective import TEACHER_IDS, TEACHER_LOGPROBS, DeviceBatch, Objective, TeacherTargets
from headway.recipe import Parallel, Recipe
from headway.recipe.objective import Distill
from headway.state.base_weights import model_at
from headway.state.tensors import ModelShare
from headway.train.feed import local_rows
from headway.train.objectives.reference import FOLDER
from headway.train.optim import lower

_FROZEN: dict[str, Any] = {"recompute": "none", "recompute_blocks": None, "freeze": ()}
"""Settings of train that only gradients need."""
_FORMAT = 1
_OFFSETS = "offsets"
_ROWS_AT_ONCE = 256


class Teacher:
    """A frozen model that gives rows its likeliest tokens."""

    def __init__(self, spread: ParallelModel, targets: TeacherTargets) -> None:
        self.spread, self._targets = spread, targets

    @torch.no_grad()
    def teach(self, batch: DeviceBatch) -> DeviceBatch:
        """Return rows with the teacher's columns; without them before a pipeline's last stage."""
        self.spread.evaluate(replace(batch, columns={}))
        self.spread.rest()
        return replace(batch, columns={**batch.columns, **self._targets.take()})


def load_teacher(
    recipe: Recipe, objective: Distill, world: World, draw: Callable[[nn.Module, Recipe, ModelShare], None]
) -> Teacher:
    """Build the teacher on the run's mesh; `draw` loads this worker's part of its weights."""
    targets = TeacherTargets(objective.top_k, objective.temperature)
    try:
        spread = frozen_model(recipe_of_teacher(recipe, objective), world, draw, targets)
    except ModelError as error:
        raise ModelError(f"the teacher does not fit the run's mesh: {error.message}", hint=error.hint) from None
    return Teacher(spread, targets)


def frozen_model(
    recipe: Recipe,
    world: World,
    draw: Callable[[nn.Module, Recipe, ModelShare], None],
    objective: Objective | TeacherTargets,
) -> ParallelModel:
    """Build a model on a mesh that is never trained; `draw` loads this worker's part of its weights."""
    model = empty_decoder(recipe.model, "meta")
    lower(model, recipe.train)
    model.requires_grad_(False)
    if recipe.inference.exact:
        make_exact(model, world.device, getattr(torch, recipe.train.dtype))
    spread = parallelize_model(model, recipe, world, objective=objective)
    for buffer in spread.model.buffers():
        buffer.zero_()
    draw(spread.model, recipe, ModelShare(world.rank, world.stage, spread.borrowed, spread.names, frozenset()))
    spread.model.eval()
    return spread


def recipe_of_reference(recipe: Recipe) -> Recipe:
    """Return the recipe of a policy's reference: the model as the run begins with it, on its mesh."""
    return recipe.model_copy(update={"lora": None, "train": recipe.train.model_copy(update=_FROZEN)})


def recipe_of_teacher(recipe: Recipe, objective: Distill) -> Recipe:
    """Return the recipe that a teacher is built by: its own model, on the run's mesh, in the precision of products."""
    changes = {"weights": recipe.train.dtype, **_FROZEN}
    parallel = (recipe.parallel or Parallel()).model_copy(update={"stages": None})
    update = {
        "model": model_at(objective.teacher).model_copy(update={"init": objective.teacher}),
        "lora": None,
        "train": recipe.train.model_copy(update=changes),
        "parallel": parallel,
    }
    return recipe.model_copy(update=update)


# -- stored beside the data


class StoredTargets(NamedTuple):
    """The likeliest tokens of all labels, in the order of rows; in files that are mapped."""

    offsets: np.ndarray
    """[rows + 1]: the first label of each row."""
    ids: np.ndarray
    """[labels, K], int32."""
    logprobs: np.ndarray
    """[labels, K + 1], float32."""


class WithTeacher(RowReader):
    """A reader whose rows also have the teacher's columns; a location is (row, 0)."""

    def __init__(self, reader: RowReader, stored: StoredTargets) -> None:
        self._reader, self._stored = reader, stored
        self.seq, self.windows = reader.seq, reader.windows
        self.masks, self.documents = reader.masks, reader.documents

    def locate(self, ids: Ids) -> list[tuple[int, int]]:
        """See RowReader."""
        return [(row, 0) for row in ids.tolist()]

    def read_at(
        self, locations: Sequence[tuple[int, int]], out: Ids | None = None, documents: Documents | None = None
    ) -> Batch:
        """See RowReader."""
        rows = [row for row, _ in locations]
        batch = self._reader.read_at(self._reader.locate(np.array(rows, dtype=np.int64)), out, documents)
        stored, count = self._stored, self._stored.ids.shape[1]
        ids = np.zeros((*batch.labels.shape, count), dtype=np.int64)
        logprobs = np.zeros((*batch.labels.shape, count + 1), dtype=np.float32)
        for index, row in enumerate(rows):
            of_row = slice(stored.offsets[row], stored.offsets[row + 1])
            unmasked = batch.labels[index] != MASKED
            ids[index, unmasked], logprobs[index, unmasked] = stored.ids[of_row], stored.logprobs[of_row]
        return batch._replace(columns={**batch.columns, TEACHER_IDS: ids, TEACHER_LOGPROBS: logprobs})


def stored_targets(
    recipe: Recipe,
    objective: Distill,
    corpus: Corpus,
    world: World,
    mark: Callable[[int, int, int], None],
    load: Callable[[], Teacher],
    run: str,
) -> StoredTargets:
    """Return the teacher's likeliest tokens of all rows, stored beside the data; if they are not, `load` is called,
    and the files of an unfinished pass are named after the run."""
    folder = targets_folder(recipe, objective, corpus)
    reader = corpus.reader()
    if world.any(_open(folder, reader.windows, objective.top_k) is None):
        _compute(folder, reader, objective, load(), world, mark, run)
    opened = _open(folder, reader.windows, objective.top_k)
    if world.any(opened is None):
        raise DataError(
            f"{folder} is not the same folder for all workers, so the teacher's tokens cannot be stored in it",
            hint="--set objective.mode=live, or data on a file system that all nodes share",
        )
    assert opened is not None
    return opened


def targets_folder(recipe: Recipe, objective: Distill, corpus: Corpus) -> Path:
    """Return where the targets of a recipe are: in the first dataset, by a hash of what they depend on."""
    data = recipe.data
    content: dict[str, Any] = {
        "format": _FORMAT,
        "versions": [dataset.version for dataset in corpus.datasets],
        "data": [data.seq, data.loss_on, data.over_length, data.mask_boundaries, data.within_documents],
        "teacher": objective.digest or objective.teacher,
        "top_k": objective.top_k,
        "temperature": objective.temperature,
        "dtype": recipe.train.dtype,
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    return corpus.datasets[0].path / FOLDER / f"teacher-{key}"


def _open(folder: Path, rows: int, count: int) -> StoredTargets | None:
    """Return stored targets; None if there are none, or they are damaged."""
    try:
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in StoredTargets._fields]
    except (OSError, ValueError):
        return None
    stored = StoredTargets(*arrays)
    labels = int(stored.offsets[-1]) if stored.offsets.shape == (rows + 1,) else -1
    shapes = stored.ids.shape, stored.logprobs.shape
    return stored if shapes == ((labels, count), (labels, count + 1)) else None


def _compute(
    folder: Path,
    reader: RowReader,
    objective: Distill,
    teacher: Teacher,
    world: World,
    mark: Callable[[int, int, int], None],
    run: str,
) -> None:
    """Run the teacher over all rows; each worker writes its own ones' targets into the files."""
    offsets = label_offsets(reader)
    partial = folder.with_name(f"{folder.name}.partial-{run}")
    _raise_if_any(_begin(partial, offsets, objective.top_k) if world.first else None, partial, world)
    files, error = dict[str, _Rows](), None
    try:
        files = {name: _Rows(partial / f"{name}.npy") for name in ("ids", "logprobs")}
    except OSError as missing:
        error = missing
    _raise_if_any(error, partial, world)
    rows = teacher.spread.evaluation_rows(max(1, reader.windows))
    ids = np.arange(reader.windows)
    for number, (read, batch) in enumerate(local_rows(reader, teacher.spread, world, ids, ())):
        columns = teacher.teach(batch).columns
        first = number * rows * world.data.size
        mark(min(first, reader.windows), min(first + rows * world.data.size, reader.windows), reader.windows)
        own = ids[first + rows * world.data.rank :][:rows]
        if not columns or not world.reports or not len(own):
            continue
        unmasked = read.labels[: len(own)] != MASKED
        begin = int(offsets[own[0]])
        files["ids"].write(begin, columns[TEACHER_IDS][: len(own)].cpu().numpy()[unmasked].astype(np.int32))
        files["logprobs"].write(begin, columns[TEACHER_LOGPROBS][: len(own)].cpu().numpy()[unmasked])
    for file in files.values():
        file.close()
    world.any(False)  # all have written
    if world.first:
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
    world.any(False)  # and all see the folder


def _raise_if_any(error: OSError | None, partial: Path, world: World) -> None:
    """Raise DataError on all workers if one has an error."""
    if world.any(error is not None):
        reason = "another worker failed" if error is None else (error.strerror or str(error))
        raise DataError(
            f"the teacher's tokens cannot be stored in {partial.parent}: {reason}",
            hint="--set objective.mode=live, or data in a folder that all workers can write to",
        )


def _begin(partial: Path, offsets: np.ndarray, count: int) -> OSError | None:
    """Make the files, as long as they will be; return what prevents that."""
    labels = int(offsets[-1])
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        np.save(partial / f"{_OFFSETS}.npy", offsets)
        for name, width, dtype in (("ids", count, np.int32), ("logprobs", count + 1, np.float32)):
            np.lib.format.open_memmap(partial / f"{name}.npy", mode="w+", dtype=dtype, shape=(labels, width))  # type: ignore[no-untyped-call]
    except OSError as error:
        return error
    return None


class _Rows:
    """Rows of an .npy file, written by position: a full disk is an error here, and would be a signal in a mapping."""

    def __init__(self, path: Path) -> None:
        mapped = np.load(path, mmap_mode="r")
        self._begin, self._width = mapped.offset, mapped.itemsize * mapped.shape[1]
        self._file = path.open("r+b")

    def write(self, first: int, rows: np.ndarray) -> None:
        self._file.seek(self._begin + first * self._width)
        self._file.write(np.ascontiguousarray(rows).data)

    def close(self) -> None:
        self._file.close()


def label_offsets(reader: RowReader) -> np.ndarray:
    """Return where the labels of each row begin among those of all rows, [rows + 1]."""
    counts = np.full(reader.windows, reader.seq, dtype=np.int64)
    if reader.masks:
        for low in range(0, reader.windows, _ROWS_AT_ONCE):
            ids = np.arange(low, min(low + _ROWS_AT_ONCE, reader.windows))
            counts[ids] = (reader.read(ids).labels != MASKED).sum(axis=1)
    return np.concatenate([[0], np.cumsum(counts)])
