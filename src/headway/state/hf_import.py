"""A Hugging Face folder becomes a run of its own: its weights are a checkpoint of step 0 like any other.

Such a run was never trained here. It can be sampled from, exported, compared and started from (`model.init`); it has
no data and no optimizer, so there is nothing to resume, and its record says only where it came from.
"""

import contextlib
import fcntl
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from headway.errors import RunError
from headway.recipe import Model, Recipe
from headway.state.box import Box
from headway.state.digest import MASK, digest_box
from headway.state.hf_sidecars import save_sidecars
from headway.state.huggingface import LazyWeight, Progress, TokenizerFile
from headway.state.manifest import CHUNK_BYTES, CheckpointFacts, FileEntry, PieceEntry, TensorEntry, chunk_checksums
from headway.state.safetensors_file import SafetensorsLayout, bits_dtype, plan_file
from headway.state.write_checkpoint import ShardEntry, abandon, begin_checkpoint, commit, shard_name
from headway.track import START, Recorder, RunFolder, create_run, make_durable, record_path, write_json

__all__ = ["IMPORTED", "NO_DATA", "import_run"]

NO_DATA = "no-data"
"""What the data of a run is called that has none."""
IMPORTED = "imported"
"""Key of the manifest's extra facts that says where a checkpoint's weights came from."""


def import_run(
    root: Path,
    name: str,
    model: Model,
    weights: Mapping[str, LazyWeight],
    *,
    source: str,
    seq: int,
    tokenizer: TokenizerFile | None = None,
    sidecars: Path | None = None,
    progress: Progress | None = None,
) -> RunFolder:
    """Make a run of weights by our names; it appears whole or not at all.

    `source` says where they came from, `seq` is the longest sequence that the model is meant for;
    `companions` is the folder whose small files are kept.
    """
    final = RunFolder(root.absolute() / name)
    if final.path.exists():
        raise RunError(f"there is a run {name} already", hint="choose another name with --name")
    try:
        with _workshop(root) as workshop:
            run = create_run(workshop, name, name)
            # A recipe must name data, and there is none: the path says so to whoever resumes the run.
            data = {"path": str(final.path / NO_DATA), "seq": seq}
            recipe = Recipe.model_validate({"name": name, "model": model, "data": data})
            _write_small_files(run, recipe, tokenizer, source)
            if sidecars is not None:
                save_sidecars(sidecars, run.companions, None if tokenizer is None else tokenizer.path)
            _save(run.checkpoints, weights, _facts(recipe, source), progress)
            run.path.rename(final.path)
            make_durable(root)
    except OSError as error:
        hint = "free some space, or name another folder with --runs"
        raise RunError(f"{name} cannot be imported into {root}: {error.strerror or error}", hint=hint) from None
    return final


@contextlib.contextmanager
def _workshop(root: Path) -> Iterator[Path]:
    """A folder beside the runs that is none of them; what killed imports left behind is cleared."""
    root.mkdir(parents=True, exist_ok=True)
    for old in root.glob(".import-*"):
        with contextlib.suppress(OSError), _locked(old):
            shutil.rmtree(old)
    path = Path(tempfile.mkdtemp(prefix=".import-", dir=root))
    try:
        with _locked(path):
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder, or raise BlockingIOError when another process does; the kernel lets go of a dead one's."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _facts(recipe: Recipe, source: str) -> CheckpointFacts:
    said = recipe.model_dump(mode="json")
    return CheckpointFacts(cursor=0, chain=START, data_version="", recipe=said, extra={IMPORTED: source})


def _write_small_files(run: RunFolder, recipe: Recipe, tokenizer: TokenizerFile | None, source: str) -> None:
    write_json(run.recipe_file, recipe.model_dump())
    recorder = Recorder(record_path(run.events, 1, "agent"), attempt=1, process="agent")
    recorder.event("end", outcome="finished", reason=f"imported from {source}")
    if failed := recorder.close():
        raise OSError(failed)
    if tokenizer is not None:
        shutil.copyfile(tokenizer.path, run.tokenizer_file)
        if tokenizer.end_id is not None:
            write_json(run.data_file, {"end_of_text": tokenizer.end_id})
    for path in run.path.iterdir():
        make_durable(path)


def _save(
    checkpoints: Path, weights: Mapping[str, LazyWeight], facts: CheckpointFacts, progress: Progress | None
) -> None:
    """Write the checkpoint of step 0, one file of all tensors."""
    tensors = {f"model/{name}": weight for name, weight in weights.items()}
    layout = plan_file((name, weight.dtype, weight.shape) for name, weight in tensors.items())
    save = begin_checkpoint(checkpoints, 0, needs_bytes=layout.bytes)
    try:
        described = _write(save.partial / shard_name(0), layout, tensors, progress)
    except BaseException:
        abandon(save)
        raise
    file = FileEntry(bytes=layout.bytes, header_bytes=len(layout.header), header_xxh3=layout.header_xxh3)
    commit(save, facts, [ShardEntry(name=shard_name(0), file=file, tensors=described)], workers=1)


def _write(
    path: Path, layout: SafetensorsLayout, tensors: Mapping[str, LazyWeight], progress: Progress | None
) -> dict[str, TensorEntry]:
    """Write a file block by block and make it durable; what the manifest says of each tensor is taken on the way."""
    total, done = sum(weight.bytes for weight in tensors.values()), 0
    described = {}
    with path.open("xb") as file:
        file.write(layout.header)
        for name in layout.spans:
            entry = _Entry(tensors[name])
            for block in tensors[name].blocks():
                file.write(block)
                entry.add(block)
                done += len(block)
                if progress is not None:
                    progress(done, total)
            described[name] = entry.finish(path.name, layout.spans[name].begin)
        file.flush()
        os.fsync(file.fileno())
    return described


class _Entry:
    """Checksums and digest of a tensor that comes in blocks; the digest goes by flat index, so any shape will do."""

    def __init__(self, weight: LazyWeight) -> None:
        self._weight = weight
        self._elements = math.prod(weight.shape)
        self._seen = self._digest = 0
        self._checksums: list[str] = []

    def add(self, block: memoryview) -> None:
        """Take in the next block."""
        bits = np.frombuffer(block, bits_dtype(self._weight.dtype))
        assert self._seen * bits.itemsize % CHUNK_BYTES == 0, "a block before the last has a part of a chunk"
        self._checksums += chunk_checksums(block)
        self._digest += digest_box(bits, (self._elements,), Box((self._seen,), (bits.size,)))
        self._seen += bits.size

    def finish(self, file: str, offset: int) -> TensorEntry:
        """What the manifest says of the tensor, all of which is one piece."""
        shape, start = self._weight.shape, (0,) * len(self._weight.shape)
        assert self._seen == self._elements, f"{self._seen} of {self._elements} elements came"
        piece = PieceEntry(file=file, offset=offset, start=start, shape=shape, xxh3=tuple(self._checksums))
        digest = f"{self._digest & MASK:016x}"
        return TensorEntry(dtype=self._weight.dtype, shape=shape, digest=digest, pieces=(piece,))
