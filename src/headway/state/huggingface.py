"""Hugging Face folders under the decoder's own names: weights found, checked and written a few megabytes at a time.

A Weight is a tensor that is not in memory: its dtype, its shape, and a way to get its bytes block by block. What a
folder holds and what a checkpoint holds are both such Weights, so whatever their size, a block is all that is ever
in memory. Nothing in a folder is executed: of its files only JSON and safetensors are opened.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import ModelError, StateError
from headway.recipe import Model
from headway.recipe.huggingface import config_from_model
from headway.recipe.model import HfTensor
from headway.state import hf_packing as packing
from headway.state.bands import band_bytes, read_bands
from headway.state.hf_sidecars import apply_sidecars
from headway.state.manifest import CHUNK_BYTES
from headway.state.read_checkpoint import OpenCheckpoint, read_box
from headway.state.safetensors_file import DTYPES, SafetensorsLayout, bits_dtype, plan_file, read_header
from headway.track import make_durable

__all__ = [
    "BLOCK_BYTES",
    "LazyWeight",
    "Progress",
    "TokenizerFile",
    "check_weights",
    "current_name",
    "from_hf",
    "saved_weights",
    "stored_weights",
    "to_hf",
    "weight_files",
    "write_folder",
]

Shapes = Mapping[str, tuple[int, ...]]
Progress = Callable[[int, int], None]
"""Told how many bytes are done, and of how many."""

BLOCK_BYTES = 8 * CHUNK_BYTES
"""What is in memory of a weight at a time; whole chunks, so that checksums can be taken of it."""
SHARD_BYTES = 5 * 2**30
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class LazyWeight:
    """A tensor by its dtype and shape, and a way to its bytes; a block is valid until the next one is asked for."""

    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[memoryview]]
    slice_at: Callable[[int], Iterable[memoryview]] | None = None
    """A shorter way to one slice of its first dim than past all before it."""

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json, and which of its tokens ends a document, if one does."""

    path: Path
    end_id: int | None = None
    end_token: str | None = None


def current_name(name: str, model: Model) -> str | None:
    """What a tensor of theirs is called today; None for one that says nothing, since it follows from others."""
    for pattern, now in model.OLD_NAMES.items():
        name = re.sub(pattern, now, name)
    tied = model.tie_embeddings and name == model.OUTSIDE["head.weight"]
    return None if tied or model.follows(name) else name


def stored_weights(folder: Path, model: Model) -> dict[str, LazyWeight]:
    """The weights of a Hugging Face folder by our names, checked against the shapes that a model has."""
    found: dict[str, LazyWeight] = {}
    for file in weight_files(folder):
        for stored, place in _image(file).spans.items():
            name = current_name(stored, model)
            if name is None:
                continue
            if name in found:
                raise ModelError(f"{folder} has {name} in two of its files", hint="remove the file that is left over")
            blocks = partial(_read_file, file, place.begin, place.end)
            found[name] = LazyWeight(place.dtype, place.shape, blocks)
    return from_hf(found, model, str(folder))


def from_hf(found: Mapping[str, LazyWeight], model: Model, where: str) -> dict[str, LazyWeight]:
    """A folder's weights by our names: as they are, or rearranged when they are read."""
    shapes = model.tensors() | model.buffers()
    forms = list(model.hf_tensors())
    check_weights(
        {name: weight.shape for name, weight in found.items()},
        {form.name: packing.packed_shape(form, shapes) for form in forms},
        where,
    )
    pieces: dict[str, list[tuple[HfTensor, int]]] = {}
    for form in forms:
        for i, name in enumerate(form.headway_names):
            pieces.setdefault(name, []).append((form, i))
    return {name: _unpacked(shapes[name], pieces[name], found) for name in shapes}


def _unpacked(
    shape: tuple[int, ...], pieces: list[tuple[HfTensor, int]], found: Mapping[str, LazyWeight]
) -> LazyWeight:
    """One of our tensors, made of those of theirs that have a part of it."""
    sources = [found[form.name] for form, _ in pieces]
    if pieces[0][0].form == "same":
        return sources[0]
    if pieces[0][0].form == "expert":
        parts = [source for _, source in sorted(zip((form.index for form, _ in pieces), sources, strict=True))]
        return LazyWeight(sources[0].dtype, shape, partial(_one_after_the_other, parts))
    (form, which), source = pieces[0], sources[0]
    return LazyWeight(source.dtype, shape, partial(_rearranged, form, which, source))


def to_hf(weights: Mapping[str, LazyWeight], model: Model) -> dict[str, LazyWeight]:
    """The tensors of a Hugging Face folder, of weights by our names."""
    made = dict[str, LazyWeight]()
    shapes = {name: weight.shape for name, weight in weights.items()}
    for form in model.hf_tensors():
        first = weights[form.headway_names[0]]
        shape = packing.packed_shape(form, shapes)
        if form.form == "same":
            made[form.name] = first
        elif form.form == "expert":
            made[form.name] = LazyWeight(first.dtype, shape, partial(_slice, first, form.index))
        else:
            parts = [weights[name] for name in form.headway_names]
            made[form.name] = LazyWeight(first.dtype, shape, partial(_packed, form, parts))
    return made


def _one_after_the_other(parts: Iterable[LazyWeight]) -> Iterator[memoryview]:
    """All bytes of some weights; every block but the last is a full one, as checksums of chunks ask for."""
    buffer, held = memoryview(bytearray(BLOCK_BYTES)), 0
    for block in (block for part in parts for block in part.blocks()):
        while block:
            taken = min(len(block), BLOCK_BYTES - held)
            buffer[held : held + taken] = block[:taken]
            held, block = held + taken, block[taken:]
            if held == BLOCK_BYTES:
                yield buffer
                held = 0
    if held:
        yield buffer[:held]


def _slice(weight: LazyWeight, index: int) -> Iterator[memoryview]:
    """The bytes of one slice of a weight's first dim."""
    if weight.slice_at is not None:
        yield from weight.slice_at(index)
        return
    size = weight.bytes // weight.shape[0]
    begin, place = index * size, 0
    for block in weight.blocks():
        low, high = max(begin - place, 0), min(begin + size - place, len(block))
        if low < high:
            yield block[low:high]
        place += len(block)
        if place >= begin + size:
            return


def _rearranged(form: HfTensor, which: int, source: LazyWeight) -> Iterator[memoryview]:
    yield np.ascontiguousarray(packing.unpack(form, _array(source), which)).view(np.uint8).reshape(-1).data


def _packed(form: HfTensor, parts: Iterable[LazyWeight]) -> Iterator[memoryview]:
    yield np.ascontiguousarray(packing.pack(form, [_array(part) for part in parts])).view(np.uint8).reshape(-1).data


def _array(weight: LazyWeight) -> packing.Bits:
    """All of a weight, as numbers of its size: its bits are moved and never computed with."""
    joined = np.frombuffer(b"".join(bytes(block) for block in weight.blocks()), dtype=np.uint8)
    return joined.view(f"u{DTYPES[weight.dtype][1]}").reshape(weight.shape)


def saved_weights(checkpoint: OpenCheckpoint, shapes: Shapes, prefix: str = "model/") -> dict[str, LazyWeight]:
    """The weights of a checkpoint, whatever pieces it has them in, checked against the shapes that a model has."""
    found = {
        name.removeprefix(prefix): LazyWeight(
            entry.dtype,
            entry.shape,
            partial(_read_checkpoint, checkpoint, name),
            partial(_read_slice, checkpoint, name),
        )
        for name, entry in checkpoint.manifest.tensors.items()
        if name.startswith(prefix)
    }
    check_weights({name: weight.shape for name, weight in found.items()}, shapes, checkpoint.location)
    return found


def check_weights(found: Shapes, shapes: Shapes, where: str) -> None:
    """Raise ModelError naming the tensors that are missing, not known, or of another shape."""
    missing = [name for name in shapes if name not in found]
    if missing:
        raise ModelError(f"{where} lacks {_some(missing)}")
    extra = [name for name in found if name not in shapes]
    if extra:
        raise ModelError(f"{where} has {_some(extra)}, which the model has no place for")
    for name, shape in shapes.items():
        if found[name] != shape:
            raise ModelError(f"{where} has {name} of shape {found[name]}, the model's is {shape}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: one, or those its index names."""
    if (folder / INDEX).exists():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder / INDEX} is not an index of safetensors: {error!r}") from None
        outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
        if outside:
            raise ModelError(f"{folder / INDEX} names {outside[0]!r}, which is not a file of its folder")
        return [folder / name for name in names]
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ModelError(
            f"{folder} holds pickled weights only, which can execute code and are never opened",
            hint="where you trust them, load them with transformers and call save_pretrained",
        )
    raise ModelError(f"{folder} holds no {WEIGHTS}", hint="a Hugging Face folder holds config.json and *.safetensors")


def write_folder(
    folder: Path,
    model: Model,
    weights: Mapping[str, LazyWeight],
    *,
    tokenizer: TokenizerFile | None = None,
    sidecars: Path | None = None,
    seq: int = 2048,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write a folder that `transformers` opens: config.json, safetensors, and a copy of a tokenizer.json.

    It appears whole or not at all. `weights` are by our names, `seq` is the length the model was trained at;
    `companions` came with the weights that it began with.
    """
    config = config_from_model(model, seq)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} is there already", hint="name a new folder, or remove that one")
    beside = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    try:
        beside.mkdir(parents=True)
        _write_weights(beside, to_hf(weights, model), shard_bytes, progress)
        if tokenizer is not None:
            _write_tokenizer(beside, tokenizer, seq)
            config["eos_token_id"] = tokenizer.end_id
        if sidecars is not None:
            config = apply_sidecars(sidecars, beside, config)
        dtype = weights["norm.weight"].dtype
        _write_json(beside / "config.json", config | {"dtype": dtype, "torch_dtype": dtype})
        make_durable(beside)
        beside.rename(folder)
        make_durable(folder.parent)
    except OSError as error:
        raise ModelError(f"{folder} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_weights(
    folder: Path, weights: Mapping[str, LazyWeight], shard_bytes: int, progress: Progress | None
) -> None:
    """One file, or several of at most `shard_bytes` (or one tensor) each with an index."""
    shards: list[dict[str, LazyWeight]] = [{}]
    room = shard_bytes
    for name, weight in weights.items():
        if weight.bytes > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = weight
        room -= weight.bytes
    total, done = sum(weight.bytes for weight in weights.values()), 0
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = WEIGHTS if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        for count in _write_file(folder / file, shard):
            done += count
            if progress is not None:
                progress(done, total)
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_file(path: Path, weights: Mapping[str, LazyWeight]) -> Iterator[int]:
    """Write one file and make it durable, saying how many bytes each block had."""
    layout = plan_file((name, weight.dtype, weight.shape) for name, weight in weights.items())
    with path.open("xb") as file:
        file.write(_told_format(layout))
        for name in layout.spans:
            for block in weights[name].blocks():
                file.write(block)
                yield len(block)
        file.flush()
        os.fsync(file.fileno())


def _told_format(layout: SafetensorsLayout) -> bytes:
    """The file's header with the note that older versions of `transformers` insist on."""
    entries = json.loads(layout.header[8:])
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tokenizer(folder: Path, tokenizer: TokenizerFile, seq: int) -> None:
    """Copy a tokenizer.json and add what `transformers` would else guess."""
    shutil.copyfile(tokenizer.path, folder / "tokenizer.json")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": seq}
    if tokenizer.end_token is not None:
        settings["eos_token"] = tokenizer.end_token
    make_durable(folder / "tokenizer.json")
    _write_json(folder / "tokenizer_config.json", settings)


def _image(file: Path) -> SafetensorsLayout:
    if not file.exists():
        raise ModelError(f"{file} is missing, though the folder's index names it")
    try:
        return read_header(file)
    except StateError as error:
        raise ModelError(error.message, hint="download or copy the file again") from None


def _read_file(file: Path, begin: int, end: int) -> Iterator[memoryview]:
    """A stretch of a file, block by block."""
    buffer = memoryview(bytearray(min(BLOCK_BYTES, end - begin)))
    try:
        with file.open("rb", buffering=0) as opened:
            opened.seek(begin)
            for place in range(begin, end, BLOCK_BYTES):
                block = buffer[: min(BLOCK_BYTES, end - place)]
                _fill(opened, block)
                yield block
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from None


def _fill(opened: Any, block: memoryview) -> None:
    while block:
        count = opened.readinto(block)
        if not count:
            raise OSError("it ends too early")
        block = block[count:]


def _read_checkpoint(checkpoint: OpenCheckpoint, name: str) -> Iterator[memoryview]:
    """A tensor of a checkpoint, some rows at a time, checked."""
    for bits in read_bands(checkpoint, name, band_bytes(checkpoint)):
        yield bits.view(np.uint8).data


def _read_slice(checkpoint: OpenCheckpoint, name: str, index: int) -> Iterator[memoryview]:
    """A slice of a tensor of a checkpoint, checked."""
    entry = checkpoint.manifest.tensors[name]
    bits = np.empty((1, *entry.shape[1:]), bits_dtype(entry.dtype))
    read_box(checkpoint, name, (index, *(0 for _ in entry.shape[1:])), bits.shape, out=bits)
    yield bits.reshape(-1).view(np.uint8).data


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _write_json(path: Path, value: Any) -> None:
    with path.open("x") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
