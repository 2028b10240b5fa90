"""Import a Hugging Face folder as a run: its weights become an ordinary checkpoint of step 0.

Such a run can be sampled from, exported, compared and started from (`model.init`); it has no data and no optimizer, so
it cannot be resumed, and its record only states where it came from.
"""

import contextlib
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from headway.errors import RunError
from headway.recipe import Model, Recipe
from headway.state.box import Box
from headway.state.digest import MASK, digest_box
from headway.state.durable import locked_folder, new_file
from headway.state.hf_sidecars import save_sidecars
from headway.state.huggingface import LazyWeight, Progress, TokenizerFile
from headway.state.manifest import CHUNK_BYTES, CheckpointFacts, PieceEntry, TensorEntry, chunk_checksums, file_entry
from headway.state.safetensors_file import SafetensorsLayout, bits_dtype, plan_file
from headway.state.write_checkpoint import ShardEntry, abandon, begin_checkpoint, commit, shard_name
from headway.track import START, Recorder, RunFolder, create_run, free_name, make_durable, record_path, write_json
from headway.track.access import umask_of

NO_DATA = "no-data"
"""Name of the data folder of a run without data."""
IMPORTED = "imported"
"""Key of the manifest's extra facts that states where a checkpoint's weights came from."""


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
    """Create a run from weights under Headway's names; it appears complete or not at all.

    `source` states where they came from, `seq` is the longest sequence that the model is meant for; `sidecars` is the
    folder whose small files are stored too.
    """
    final = RunFolder(root.absolute() / name)
    if final.path.exists():
        raise RunError(
            f"run {name} already exists", hint=f"choose another name, such as --name {free_name(final)}", usage=True
        )
    try:
        with _staging_folder(root) as staging, contextlib.ExitStack() as private:
            run = create_run(staging, name, name)
            private.enter_context(umask_of(run.path))
            # A recipe needs data, and there is none: the path says so to whoever resumes the run.
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
def _staging_folder(root: Path) -> Iterator[Path]:
    """A hidden folder beside the runs; removes what killed imports left behind."""
    root.mkdir(parents=True, exist_ok=True)
    for old in root.glob(".import-*"):
        with contextlib.suppress(OSError), locked_folder(old, wait=False):
            shutil.rmtree(old)
    path = Path(tempfile.mkdtemp(prefix=".import-", dir=root))
    try:
        with locked_folder(path, wait=False):
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _facts(recipe: Recipe, source: str) -> CheckpointFacts:
    fields = recipe.model_dump(mode="json")
    return CheckpointFacts(cursor=0, chain=START, data_version="", recipe=fields, extra={IMPORTED: source})


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
    """Write the checkpoint of step 0: one file with all tensors."""
    tensors = {f"model/{name}": weight for name, weight in weights.items()}
    layout = plan_file((name, weight.dtype, weight.shape) for name, weight in tensors.items())
    save = begin_checkpoint(checkpoints, 0, needs_bytes=layout.bytes)
    try:
        entries = _write(save.partial / shard_name(0), layout, tensors, progress)
    except BaseException:
        abandon(save)
        raise
    commit(save, facts, [ShardEntry(name=shard_name(0), file=file_entry(layout), tensors=entries)], workers=1)


def _write(
    path: Path, layout: SafetensorsLayout, tensors: Mapping[str, LazyWeight], progress: Progress | None
) -> dict[str, TensorEntry]:
    """Write a file durably, block by block; return each tensor's manifest entry."""
    total, done = sum(weight.bytes for weight in tensors.values()), 0
    entries = {}
    with new_file(path) as file:
        file.write(layout.header)
        for name in layout.spans:
            entry = _Entry(tensors[name])
            for block in tensors[name].blocks():
                file.write(block)
                entry.add(block)
                done += len(block)
                if progress is not None:
                    progress(done, total)
            entries[name] = entry.finish(path.name, layout.spans[name].begin)
    return entries


def tensor_digest(weight: LazyWeight) -> int:
    """Return the digest of a tensor, block by block."""
    entry = _Entry(weight)
    for block in weight.blocks():
        entry.add(block)
    return entry.digest


class _Entry:
    """Checksums and digest of a tensor that arrives in blocks; the digest uses flat indices, so any shape will do."""

    def __init__(self, weight: LazyWeight) -> None:
        self._weight = weight
        self._elements = math.prod(weight.shape)
        self._done = self._digest = 0
        self._checksums: list[str] = []

    def add(self, block: memoryview) -> None:
        """Add the next block."""
        bits = np.frombuffer(block, bits_dtype(self._weight.dtype))
        assert self._done * bits.itemsize % CHUNK_BYTES == 0, "a block before the last ends inside a chunk"
        self._checksums += chunk_checksums(block)
        self._digest += digest_box(bits, (self._elements,), Box((self._done,), (bits.size,)))
        self._done += bits.size

    @property
    def digest(self) -> int:
        """The tensor's digest, once all of it was added."""
        assert self._done == self._elements, f"{self._done} of {self._elements} elements were added"
        return self._digest & MASK

    def finish(self, file: str, offset: int) -> TensorEntry:
        """Return the tensor's manifest entry: it is one piece."""
        shape, start = self._weight.shape, (0,) * len(self._weight.shape)
        piece = PieceEntry(file=file, offset=offset, start=start, shape=shape, xxh3=tuple(self._checksums))
        return TensorEntry(dtype=self._weight.dtype, shape=shape, digest=f"{self.digest:016x}", pieces=(piece,))
