"""Weights of Hugging Face folders (config.json and safetensors) in and out, under the decoder's own names.

Nothing in a folder is ever executed. Tensors are mapped from the file, so that reading costs memory only for
what is touched.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headway.data.tokenizer import load_tokenizer
from headway.errors import DataError, ModelError
from headway.models.decoder import Decoder
from headway.plan.flops import parameter_shapes
from headway.recipe import Model
from headway.recipe.huggingface import config_from_model, read_model

__all__ = ["load_into", "read_weights", "stored_weights", "write_folder"]

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


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of a Hugging Face folder by our names, as stored, checked against its config.json."""
    return stored_weights(folder, read_model(folder))


def load_into(decoder: Decoder, folder: Path) -> None:
    """Copy a Hugging Face folder's weights into a decoder of the same shape."""
    weights = stored_weights(folder, decoder.model)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(weights[name])


def stored_weights(folder: Path, model: Model) -> dict[str, Tensor]:
    """A Hugging Face folder's weights by our names, as stored, checked against a model's shape."""
    ours = {theirs(name): name for name in parameter_shapes(model)}
    tied_head = {OUTSIDE["head.weight"]} if model.tie_embeddings else set()
    weights: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        for name, tensor in _open(file, skip=tied_head):
            weights[ours.get(name, name)] = tensor
    _check(weights, model, str(folder))
    return weights


def write_folder(
    folder: Path,
    model: Model,
    tensors: Mapping[str, Tensor],
    tokenizer: Path | None = None,
    *,
    seq: int = 2048,
    shard_bytes: int = 5 * 2**30,
) -> None:
    """Write a folder that `transformers` opens: config.json, safetensors, and a copy of a tokenizer.json.

    It appears whole or not at all. `seq` is the length the model was trained at.
    """
    config = config_from_model(model, seq)
    _check(tensors, model, "the model to write")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} is there already", hint="name a new folder, or remove that one")
    partial = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        _write_weights(partial, {theirs(name): tensors[name] for name in parameter_shapes(model)}, shard_bytes)
        if tokenizer is not None:
            config["eos_token_id"] = _write_tokenizer(partial, tokenizer, seq)
        dtype = str(tensors["norm.weight"].dtype).removeprefix("torch.")
        _write_json(partial / "config.json", config | {"dtype": dtype, "torch_dtype": dtype})
        for path in (*partial.iterdir(), partial):
            _sync(path)
        partial.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        raise ModelError(f"{folder} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def theirs(name: str) -> str:
    """The Hugging Face name of one of our parameters."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, layer, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    return f"model.layers.{layer}.{BLOCK[module]}.{kind}"


def _weight_files(folder: Path) -> list[Path]:
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


def _open(file: Path, skip: set[str]) -> Iterable[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                if name not in skip and not DERIVED.fullmatch(name):
                    yield name, opened.get_tensor(name)
    except FileNotFoundError:
        raise ModelError(f"{file} is missing, though the folder's index names it") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None


def _check(tensors: Mapping[str, Tensor], model: Model, where: str) -> None:
    """Raise ModelError naming the tensors that are missing, not known, or of another shape."""
    shapes = parameter_shapes(model)
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise ModelError(f"{where} lacks {_some(missing)}")
    extra = [name for name in tensors if name not in shapes]
    if extra:
        raise ModelError(f"{where} has {_some(extra)}, which the model has no place for")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ModelError(f"{where} has {name} of shape {tuple(tensors[name].shape)}, the model's is {shape}")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _write_weights(folder: Path, tensors: dict[str, Tensor], shard_bytes: int) -> None:
    """One file, or several of at most `shard_bytes` (or one tensor) each with an index."""
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor.detach().cpu().contiguous()
        room -= tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / WEIGHTS, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_tokenizer(folder: Path, tokenizer: Path, seq: int) -> int | None:
    """Copy a tokenizer.json and add what `transformers` would else guess; returns the end of text, if any."""
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": seq}
    try:
        loaded = load_tokenizer(folder)
        end: int | None = loaded.end_of_text
        settings["eos_token"] = loaded.raw.id_to_token(end)
    except DataError:  # one without an end of text still encodes and decodes
        end = None
    _write_json(folder / "tokenizer_config.json", settings)
    return end


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _sync(path: Path) -> None:
    """Make a file or folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
