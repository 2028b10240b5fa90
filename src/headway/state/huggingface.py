"""Read and write Hugging Face folders under Headway's tensor names, a few megabytes at a time.

A LazyWeight is a tensor that is not in memory: its dtype, its shape, and a function that yields its bytes block by
block. Folders and checkpoints both become LazyWeights, so that only one block is in memory, whatever the size. Nothing
in a folder is executed: only its JSON and safetensors files are opened.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import ModelError, StateError
from headway.recipe import Model
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.huggingface import reward_config
from headway.recipe.model import HfTensor
from headway.state import hf_packing as packing
from headway.state.durable import new_file
from headway.state.hf_sidecars import apply_sidecars
from headway.state.manifest import CHUNK_BYTES
from headway.state.read_checkpoint import OpenCheckpoint, band_bytes, read_bands, read_box
from headway.state.safetensors_file import DTYPES, SafetensorsLayout, bits_dtype, plan_file, read_header
from headway.track import make_durable

Shapes = Mapping[str, tuple[int, ...]]
Progress = Callable[[int, int], None]
"""Called with the bytes done and the total."""

BLOCK_BYTES = 8 * CHUNK_BYTES
"""How much of a weight is in memory at a time: whole chunks, so that their checksums can be computed."""
SHARD_BYTES = 5 * 2**30
WEIGHTS = "model"
DIFFUSION_WEIGHTS = "diffusion_pytorch_model"
"""Stems of file names, in folders of `transformers` and of `diffusers`."""


@dataclass(frozen=True)
class LazyWeight:
    """A tensor that is not in memory; each of its blocks is valid until the next one is read."""

    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[memoryview]]
    slice_at: Callable[[int], Iterable[memoryview]] | None = None
    """Reads one slice of the first dim without reading those before it."""

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json and its end-of-document token, if any."""

    path: Path
    end_id: int | None = None
    end_token: str | None = None


def current_name(name: str, model: Model) -> str | None:
    """Return the current name of a Hugging Face tensor; None for a redundant one, which follows from others."""
    for pattern, replacement in model.OLD_NAMES.items():
        name = re.sub(pattern, replacement, name)
    tied = model.tie_embeddings and name == model.OUTSIDE["head.weight"]
    return None if tied or model.follows(name) else name


def stored_weights(folder: Path, model: Model) -> dict[str, LazyWeight]:
    """Open the weights of a Hugging Face folder under Headway's names, checked against the model's shapes."""
    weights: dict[str, LazyWeight] = {}
    for file in weight_files(folder):
        for stored_name, span in _header(file).spans.items():
            name = current_name(stored_name, model)
            if name is None:
                continue
            if name in weights:
                raise ModelError(f"{folder} has {name} in two files", hint="remove the stale file")
            blocks = partial(_read_file, file, span.begin, span.end)
            weights[name] = LazyWeight(span.dtype, span.shape, blocks)
    return from_hf(weights, model, str(folder))


def from_hf(hf_weights: Mapping[str, LazyWeight], model: Model, location: str) -> dict[str, LazyWeight]:
    """Rename a folder's weights to Headway's names; those in another form are rearranged when they are read."""
    shapes = model.tensors() | model.buffers()
    forms = list(model.hf_tensors())
    check_weights(
        {name: weight.shape for name, weight in hf_weights.items()},
        {form.name: packing.packed_shape(form, shapes) for form in forms},
        location,
    )
    pieces: dict[str, list[tuple[HfTensor, int]]] = {}
    for form in forms:
        for i, name in enumerate(form.headway_names):
            pieces.setdefault(name, []).append((form, i))
    return {name: _unpacked(shapes[name], pieces[name], hf_weights) for name in shapes}


def _unpacked(
    shape: tuple[int, ...], pieces: list[tuple[HfTensor, int]], hf_weights: Mapping[str, LazyWeight]
) -> LazyWeight:
    """Build a Headway tensor from the Hugging Face tensors that hold parts of it."""
    sources = [hf_weights[form.name] for form, _ in pieces]
    if pieces[0][0].form == "same":
        return sources[0]
    if pieces[0][0].form == "copy":
        names = [form.name for form, _ in pieces]
        return LazyWeight(sources[0].dtype, shape, partial(_copies, dict(zip(names, sources, strict=True))))
    if pieces[0][0].form == "expert":
        parts = [source for _, source in sorted(zip((form.index for form, _ in pieces), sources, strict=True))]
        return LazyWeight(sources[0].dtype, shape, partial(_concatenate, parts))
    (form, which), source = pieces[0], sources[0]
    return LazyWeight(source.dtype, shape, partial(_unpack, form, which, source))


def to_hf(weights: Mapping[str, LazyWeight], model: Model) -> dict[str, LazyWeight]:
    """Convert weights under Headway's names to the tensors of a Hugging Face folder."""
    hf_weights = dict[str, LazyWeight]()
    shapes = {name: weight.shape for name, weight in weights.items()}
    for form in model.hf_tensors():
        first = weights[form.headway_names[0]]
        shape = packing.packed_shape(form, shapes)
        if form.form in ("same", "copy"):
            hf_weights[form.name] = first
        elif form.form == "expert":
            hf_weights[form.name] = LazyWeight(first.dtype, shape, partial(_slice, first, form.index))
        else:
            parts = [weights[name] for name in form.headway_names]
            hf_weights[form.name] = LazyWeight(first.dtype, shape, partial(_pack, form, parts))
    return hf_weights


def _concatenate(parts: Iterable[LazyWeight]) -> Iterator[memoryview]:
    """All bytes of some weights; every block but the last is full, as the checksums of chunks need."""
    buffer, filled = memoryview(bytearray(BLOCK_BYTES)), 0
    for block in (block for part in parts for block in part.blocks()):
        while block:
            count = min(len(block), BLOCK_BYTES - filled)
            buffer[filled : filled + count] = block[:count]
            filled, block = filled + count, block[count:]
            if filled == BLOCK_BYTES:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def _copies(copies: Mapping[str, LazyWeight]) -> Iterator[memoryview]:
    """The bytes of the first copy, compared with those of the others."""
    (first, source), *others = copies.items()
    for name, other in others:
        if any(a != b for a, b in zip(source.blocks(), other.blocks(), strict=True)):
            raise ModelError(
                f"{first} and {name} differ; this family has one of them for all blocks",
                hint="the published models have equal ones: this folder was trained further, apart",
            )
    yield from source.blocks()


def _slice(weight: LazyWeight, index: int) -> Iterator[memoryview]:
    """The bytes of one slice of a weight's first dim."""
    if weight.slice_at is not None:
        yield from weight.slice_at(index)
        return
    size = weight.bytes // weight.shape[0]
    begin, position = index * size, 0
    for block in weight.blocks():
        low, high = max(begin - position, 0), min(begin + size - position, len(block))
        if low < high:
            yield block[low:high]
        position += len(block)
        if position >= begin + size:
            return


def _unpack(form: HfTensor, which: int, source: LazyWeight) -> Iterator[memoryview]:
    yield np.ascontiguousarray(packing.unpack(form, _array(source), which)).view(np.uint8).reshape(-1).data


def _pack(form: HfTensor, parts: Iterable[LazyWeight]) -> Iterator[memoryview]:
    yield np.ascontiguousarray(packing.pack(form, [_array(part) for part in parts])).view(np.uint8).reshape(-1).data


def _array(weight: LazyWeight) -> packing.Bits:
    """All of a weight, as unsigned integers of its dtype's size."""
    joined = np.frombuffer(b"".join(bytes(block) for block in weight.blocks()), dtype=np.uint8)
    return joined.view(f"u{DTYPES[weight.dtype][1]}").reshape(weight.shape)


def saved_weights(checkpoint: OpenCheckpoint, shapes: Shapes, prefix: str = "model/") -> dict[str, LazyWeight]:
    """Open the weights of a checkpoint, however they are sharded, checked against the model's shapes."""
    weights = {
        name.removeprefix(prefix): LazyWeight(
            entry.dtype,
            entry.shape,
            partial(_read_checkpoint, checkpoint, name),
            partial(_read_slice, checkpoint, name),
        )
        for name, entry in checkpoint.manifest.tensors.items()
        if name.startswith(prefix)
    }
    check_weights({name: weight.shape for name, weight in weights.items()}, shapes, checkpoint.location)
    return weights


def check_weights(stored: Shapes, shapes: Shapes, location: str) -> None:
    """Raise ModelError naming the tensors that are missing, unexpected, or of another shape than the model's."""
    missing = [name for name in shapes if name not in stored]
    if missing:
        raise ModelError(f"{location} lacks {_abridged(missing)}")
    unexpected = [name for name in stored if name not in shapes]
    if unexpected:
        raise ModelError(f"{location} has {_abridged(unexpected)}, which the model does not have")
    for name, shape in shapes.items():
        if stored[name] != shape:
            raise ModelError(f"{location} has {name} of shape {stored[name]}, the model's is {shape}")


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: one, or those that its index lists."""
    for stem in (WEIGHTS, DIFFUSION_WEIGHTS):
        index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
        if index.exists():
            return _indexed_files(folder, index)
        if single.exists():
            return [single]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ModelError(
            f"{folder} has only pickled weights, which can execute code and are never opened",
            hint="if you trust them, load them with transformers and call save_pretrained",
        )
    raise ModelError(
        f"{folder} has no {WEIGHTS}.safetensors", hint="a Hugging Face folder has config.json and *.safetensors"
    )


def _indexed_files(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index: {error!r}") from None
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise ModelError(f"{index} lists {outside[0]!r}, which is not a file of its folder")
    return [folder / name for name in names]


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

    It appears complete or not at all. `weights` have Headway's names, `seq` is the length the model was trained at;
    `sidecars` holds the files that came with the weights it started from.
    """
    config = reward_config(model.to_config(seq)) if model.reward else model.to_config(seq)
    with new_model_folder(folder) as partial_folder:
        diffusion = isinstance(model, DiffusionModel)
        stem = DIFFUSION_WEIGHTS if diffusion else WEIGHTS
        _write_weights(partial_folder, stem, to_hf(weights, model), shard_bytes, progress)
        if tokenizer is not None:
            _write_tokenizer(partial_folder, tokenizer, seq)
            config["eos_token_id"] = tokenizer.end_id
        if sidecars is not None:
            config = apply_sidecars(sidecars, partial_folder, config)
        if not diffusion:  # diffusers warns of keys that it does not know
            dtype = weights["norm.weight"].dtype
            config |= {"dtype": dtype, "torch_dtype": dtype}
        write_json(partial_folder / "config.json", config)


@contextmanager
def new_model_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into, which becomes `folder` at the end, durably; after an error, there is none."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} already exists", hint="name a new folder, or remove that one")
    partial_folder = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    try:
        partial_folder.mkdir(parents=True)
        yield partial_folder
        make_durable(partial_folder)
        partial_folder.rename(folder)
        make_durable(folder.parent)
    except OSError as error:
        raise ModelError(f"{folder} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


def _write_weights(
    folder: Path, stem: str, weights: Mapping[str, LazyWeight], shard_bytes: int, progress: Progress | None
) -> None:
    """Write one file, or several of at most `shard_bytes` (or one tensor) each with an index."""
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
        file = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        for count in write_weight_file(folder / file, shard):
            done += count
            if progress is not None:
                progress(done, total)
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        write_json(
            folder / f"{stem}.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )


def write_weight_file(path: Path, weights: Mapping[str, LazyWeight]) -> Iterator[int]:
    """Write one file durably; yields the size of each block."""
    layout = plan_file((name, weight.dtype, weight.shape) for name, weight in weights.items())
    with new_file(path) as file:
        file.write(_header_with_format(layout))
        for name in layout.spans:
            for block in weights[name].blocks():
                file.write(block)
                yield len(block)


def _header_with_format(layout: SafetensorsLayout) -> bytes:
    """The file's header with the format entry that older versions of `transformers` require."""
    entries = json.loads(layout.header[8:])
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tokenizer(folder: Path, tokenizer: TokenizerFile, seq: int) -> None:
    """Copy a tokenizer.json and add the settings that `transformers` would otherwise guess."""
    shutil.copyfile(tokenizer.path, folder / "tokenizer.json")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": seq}
    if tokenizer.end_token is not None:
        settings["eos_token"] = tokenizer.end_token
    make_durable(folder / "tokenizer.json")
    write_json(folder / "tokenizer_config.json", settings)


def _header(file: Path) -> SafetensorsLayout:
    if not file.exists():
        raise ModelError(f"{file} is missing, but the folder's index lists it")
    try:
        return read_header(file)
    except StateError as error:
        raise ModelError(error.message, hint="download or copy the file again") from None


def _read_file(file: Path, begin: int, end: int) -> Iterator[memoryview]:
    """A range of a file, block by block."""
    buffer = memoryview(bytearray(min(BLOCK_BYTES, end - begin)))
    try:
        with file.open("rb") as opened:
            opened.seek(begin)
            for position in range(begin, end, BLOCK_BYTES):
                block = buffer[: min(BLOCK_BYTES, end - position)]
                if opened.readinto(block) != len(block):
                    raise OSError("unexpected end of file")
                yield block
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from None


def _read_checkpoint(checkpoint: OpenCheckpoint, name: str) -> Iterator[memoryview]:
    """A tensor of a checkpoint, verified and band by band."""
    for bits in read_bands(checkpoint, name, band_bytes(checkpoint)):
        yield bits.view(np.uint8).data


def _read_slice(checkpoint: OpenCheckpoint, name: str, index: int) -> Iterator[memoryview]:
    """A slice of a tensor of a checkpoint, verified."""
    entry = checkpoint.manifest.tensors[name]
    bits = np.empty((1, *entry.shape[1:]), bits_dtype(entry.dtype))
    read_box(checkpoint, name, (index, *(0 for _ in entry.shape[1:])), bits.shape, out=bits)
    yield bits.reshape(-1).view(np.uint8).data


def _abridged(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def write_json(path: Path, value: Any) -> None:
    """Write a durable JSON file."""
    with new_file(path) as file:
        file.write(json.dumps(value, indent=2).encode() + b"\n")
