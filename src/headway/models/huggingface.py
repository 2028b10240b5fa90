"""Load and save Hugging Face folders (config.json and safetensors) as tensors, by the decoder's names.

Names, files and checks are in `headway.state.huggingface`, which converts between folders and checkpoints without
torch. Here tensors are memory-mapped.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from headway.data.tokenizer import load_tokenizer
from headway.errors import DataError, ModelError
from headway.recipe import Model
from headway.recipe.huggingface import read_model
from headway.state import huggingface as folders
from headway.state.huggingface import LazyWeight, TokenizerFile


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return all weights of a Hugging Face folder by Headway's names, checked against its config.json."""
    return stored_weights(folder, read_model(folder))


def load_into(decoder: nn.Module, folder: Path) -> None:
    """Copy a Hugging Face folder's weights into a decoder or diffusion transformer of the same shape."""
    section = decoder.model
    assert isinstance(section, Model)
    weights = stored_weights(folder, section)
    with torch.no_grad():
        for name, tensor in decoder.state_dict(keep_vars=True).items():
            tensor.copy_(weights[name])


def stored_weights(folder: Path, model: Model) -> dict[str, Tensor]:
    """Return a Hugging Face folder's weights by Headway's names, checked against a model's shapes.

    Tensors with the same form are mapped from the file; others are read and rearranged.
    """
    mapped: dict[str, Tensor] = {}
    for file in folders.weight_files(folder):
        mapped |= dict(_open(file, model))
    same = {form.headway_names[0]: form.name for form in model.hf_tensors() if form.form == "same"}
    stored = folders.stored_weights(folder, model)
    return {name: mapped[same[name]] if name in same else read_weight(weight) for name, weight in stored.items()}


def write_folder(
    folder: Path,
    model: Model,
    tensors: Mapping[str, Tensor],
    tokenizer: Path | None = None,
    *,
    seq: int = 2048,
    shard_bytes: int = folders.SHARD_BYTES,
) -> None:
    """Write a folder that `transformers` opens: config.json, safetensors, and a copy of a tokenizer.json.

    It is created atomically. `seq` is the training length.
    """
    _check(tensors, model, "the model to write")
    weights = {name: _weight(tensors[name]) for name in model.tensors() | model.buffers()}
    copied = None if tokenizer is None else _tokenizer(tokenizer)
    folders.write_folder(folder, model, weights, tokenizer=copied, seq=seq, shard_bytes=shard_bytes)


def _open(file: Path, model: Model) -> Iterable[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for stored in opened.keys():  # noqa: SIM118  (not a dict)
                name = folders.current_name(stored, model)
                if name is not None:
                    yield name, opened.get_tensor(stored)
    except FileNotFoundError:
        raise ModelError(f"{file} is missing, but the folder's index names it") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {file}: {error}") from None


def _check(tensors: Mapping[str, Tensor], model: Model, source: str) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    folders.check_weights(shapes, model.tensors() | model.buffers(), source)


def _weight(tensor: Tensor) -> LazyWeight:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return LazyWeight(dtype, tuple(tensor.shape), partial(_block, tensor))


def read_weight(weight: LazyWeight) -> Tensor:
    """Return a weight as a tensor in memory."""
    joined = bytearray(b"".join(bytes(block) for block in weight.blocks()))
    return torch.frombuffer(joined, dtype=getattr(torch, weight.dtype)).view(weight.shape)


def _block(tensor: Tensor) -> Iterable[memoryview]:
    """Return a tensor's bytes; only the one being written is copied to memory."""
    yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _tokenizer(path: Path) -> TokenizerFile:
    try:
        loaded = load_tokenizer(path)
    except DataError:  # one without an end of text still encodes and decodes
        return TokenizerFile(path)
    return TokenizerFile(path, loaded.end_of_text, loaded.raw.id_to_token(loaded.end_of_text))
