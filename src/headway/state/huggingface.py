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
from headway.state.bands import band_bytes, read_bands
from headway.state.manifest import CHUNK_BYTES
from headway.state.restore import Checkpoint
from headway.state.safetensors_file import DTYPES, Image, plan_image, read_image
from headway.track import make_durable

__all__ = [
    "BLOCK_BYTES",
    "Progress",
    "TokenizerFile",
    "Weight",
    "check_weights",
    "saved_weights",
    "stored_weights",
    "theirs",
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

# Ours on the left, theirs on the right; those of a block stand behind `layers.<i>.` and `model.layers.<i>.`.
OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
# Old folders carry the rotary frequencies, which follow from rope_theta.
DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Weight:
    """A tensor by its dtype and shape, and a way to its bytes; a block is valid until the next one is asked for."""

    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[memoryview]]

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


def theirs(name: str) -> str:
    """The Hugging Face name of one of our parameters."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, layer, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    return f"model.layers.{layer}.{BLOCK[module]}.{kind}"


def passed_over(name: str, tied: bool) -> bool:
    """Whether a tensor of theirs says nothing: it follows from others."""
    return DERIVED.fullmatch(name) is not None or (tied and name == OUTSIDE["head.weight"])


def stored_weights(folder: Path, shapes: Shapes, *, tied: bool) -> dict[str, Weight]:
    """The weights of a Hugging Face folder by our names, checked against the shapes that a model has."""
    ours = {theirs(name): name for name in shapes}
    found: dict[str, Weight] = {}
    for file in weight_files(folder):
        for name, place in _image(file).places.items():
            if passed_over(name, tied):
                continue
            if ours.get(name, name) in found:
                raise ModelError(f"{folder} has {name} in two of its files", hint="remove the file that is left over")
            blocks = partial(_read_file, file, place.begin, place.end)
            found[ours.get(name, name)] = Weight(place.dtype, place.shape, blocks)
    check_weights({name: weight.shape for name, weight in found.items()}, shapes, str(folder))
    return found


def saved_weights(checkpoint: Checkpoint, shapes: Shapes, prefix: str = "model/") -> dict[str, Weight]:
    """The weights of a checkpoint, whatever pieces it has them in, checked against the shapes that a model has."""
    found = {
        name.removeprefix(prefix): Weight(entry.dtype, entry.shape, partial(_read_checkpoint, checkpoint, name))
        for name, entry in checkpoint.manifest.tensors.items()
        if name.startswith(prefix)
    }
    check_weights({name: weight.shape for name, weight in found.items()}, shapes, checkpoint.place)
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
    weights: Mapping[str, Weight],
    *,
    tokenizer: TokenizerFile | None = None,
    seq: int = 2048,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write a folder that `transformers` opens: config.json, safetensors, and a copy of a tokenizer.json.

    It appears whole or not at all. `weights` are by our names, `seq` is the length the model was trained at.
    """
    config = config_from_model(model, seq)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} is there already", hint="name a new folder, or remove that one")
    beside = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    try:
        beside.mkdir(parents=True)
        _write_weights(beside, {theirs(name): weight for name, weight in weights.items()}, shard_bytes, progress)
        if tokenizer is not None:
            _write_tokenizer(beside, tokenizer, seq)
            config["eos_token_id"] = tokenizer.end_id
        dtype = weights["norm.weight"].dtype
        _write_json(beside / "config.json", config | {"dtype": dtype, "torch_dtype": dtype})
        make_durable(beside)
        beside.rename(folder)
        make_durable(folder.parent)
    except OSError as error:
        raise ModelError(f"{folder} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_weights(folder: Path, weights: Mapping[str, Weight], shard_bytes: int, progress: Progress | None) -> None:
    """One file, or several of at most `shard_bytes` (or one tensor) each with an index."""
    shards: list[dict[str, Weight]] = [{}]
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


def _write_file(path: Path, weights: Mapping[str, Weight]) -> Iterator[int]:
    """Write one file and make it durable, saying how many bytes each block had."""
    image = plan_image((name, weight.dtype, weight.shape) for name, weight in weights.items())
    with path.open("xb") as file:
        file.write(_told_format(image))
        for name in image.places:
            for block in weights[name].blocks():
                file.write(block)
                yield len(block)
        file.flush()
        os.fsync(file.fileno())


def _told_format(image: Image) -> bytes:
    """The file's header with the note that older versions of `transformers` insist on."""
    entries = json.loads(image.header[8:])
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


def _image(file: Path) -> Image:
    if not file.exists():
        raise ModelError(f"{file} is missing, though the folder's index names it")
    try:
        return read_image(file)
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


def _read_checkpoint(checkpoint: Checkpoint, name: str) -> Iterator[memoryview]:
    """A tensor of a checkpoint, some rows at a time, checked."""
    for bits in read_bands(checkpoint, name, band_bytes(checkpoint)):
        yield bits.view(np.uint8).data


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _write_json(path: Path, value: Any) -> None:
    with path.open("x") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
