"""Weight initialization of custom model classes.

A constructor draws weights from torch's global generator in any order, and fills buffers: that must happen once, in one
process, on the CPU. That process stores them in the run's folder as a checkpoint of step 0, from which each worker
reads its part; no worker ever has the whole model.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headway.data.corpus import open_corpus
from headway.errors import ModelError, StateError
from headway.models.custom import build_own
from headway.parallel.layout import check_layout
from headway.recipe import Recipe
from headway.state import (
    CheckpointFacts,
    begin_checkpoint,
    commit,
    find_checkpoint,
    open_checkpoint,
    shard_name,
    write_shard,
)
from headway.state.tensors import fill, named_state, pieces, read_tensors
from headway.track import RunFolder, chain, write_json

FACTS = "model.json"
BUFFER = "buffer/"
"""Name prefix of non-persistent buffers."""
SHORT = 8
PROBE = 5e10
"""Parameters times tokens that a CPU handles in seconds: up to this the test pass takes a whole sequence."""


def init_custom_model(run: RunFolder, recipe: Recipe, workers: int) -> None:
    """Build the model with the recipe's seed, check that it returns logits, and store its tensors in the run."""
    vocabulary = open_corpus(recipe).vocab_size
    random.seed(recipe.seed)
    np.random.seed(recipe.seed % 2**32)
    torch.manual_seed(recipe.seed)
    model = build_own(recipe.model, "cpu")
    # as all workers will: better one failure than one per worker
    check_layout(build_own(recipe.model, "meta"), recipe, workers)
    tensors = {
        name: tensor.clone() if _is_buffer(model, name) else tensor for name, tensor in named_state(model).items()
    }
    tensors |= {f"{BUFFER}{name}": _real(buffer).clone() for name, buffer in _transient(model)}
    facts = count(model, recipe)
    check_logits(model, recipe, vocabulary, int(facts["parameters"]))

    folder = run.initial
    local_pieces = pieces(tensors)
    save = begin_checkpoint(folder, 0, needs_bytes=sum(piece.data.nbytes for piece in local_pieces))
    shard = write_shard(save.partial, shard_name(0), local_pieces)
    write_json(folder / FACTS, facts)
    commit(
        save, CheckpointFacts(cursor=0, chain=chain.START, data_version=recipe.data.version or ""), [shard], workers=1
    )


def check_logits(model: nn.Module, recipe: Recipe, vocabulary: int, parameters: int) -> None:
    """Check that a pass over a few tokens returns logits [1, L, V] that cover the dataset's vocabulary."""
    length = recipe.data.seq if parameters * recipe.data.seq <= PROBE else min(SHORT, recipe.data.seq)
    name, hint = recipe.model.class_, "forward takes tokens [B, L] and returns logits [B, L, V]"
    tokens = torch.arange(length).remainder(vocabulary).unsqueeze(0)
    training = model.training
    try:
        with torch.no_grad():
            logits = model.eval()(tokens)
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(
            f"{name} fails on {length} tokens of a vocabulary of {vocabulary}: {type(error).__name__}: {line}",
            hint=f"{hint}, for sequences of data.seq tokens and all tokens of the data",
        ) from error
    model.train(training)
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        what = f"a tensor of {logits.dtype}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ModelError(f"{name} returns {what}, not logits", hint=hint)
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        shape = f"a tensor {list(logits.shape)} of tokens {list(tokens.shape)}"
        raise ModelError(f"{name} returns {shape}, not logits", hint=hint)
    if logits.shape[2] < vocabulary:
        raise ModelError(
            f"{name} returns logits for {logits.shape[2]} tokens, but the dataset has a vocabulary of {vocabulary}",
            hint=f"give the model a vocabulary of {vocabulary} or more, or rebuild the dataset with its tokenizer",
        )


def count(model: nn.Module, recipe: Recipe) -> dict[str, Any]:
    """Return a lower bound of a class's cost, from its parameters without embedding lookups."""
    parameters = {id(parameter): parameter.numel() for parameter in model.parameters()}
    tables, others = set[int](), set[int]()
    for module in model.modules():
        (tables if isinstance(module, nn.Embedding) else others).update(map(id, module._parameters.values()))
    multiplied = sum(size for key, size in parameters.items() if key in others or key not in tables)
    return {
        "class": recipe.model.class_,
        "parameters": sum(parameters.values()),
        "flops_per_token": 6 * multiplied,
        "flops_source": "6 per parameter, without embedding lookups and attention scores: a lower bound",
    }


def draw_facts(run: RunFolder) -> dict[str, Any]:
    """Return the facts that the initializing process stored."""
    path = run.initial / FACTS
    try:
        facts: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StateError(f"cannot read {path}: {error}", hint=f"remove {path.parent}: it is recreated") from error
    return facts


def initial_weights(run: RunFolder) -> Path:
    """Return the folder of the checkpoint of step 0."""
    return find_checkpoint(run.initial)


def load_buffers(run: RunFolder, model: nn.Module) -> None:
    """Fill non-persistent buffers, which checkpoints lack."""
    transient = dict(_transient(model))
    if not transient:
        return
    saved = read_tensors(open_checkpoint(initial_weights(run)), BUFFER)
    for name, buffer in transient.items():
        if name not in saved or saved[name].shape != _real(buffer).shape:
            raise StateError(f"{initial_weights(run)} has no matching buffer {name}")
        fill(name, _real(buffer), saved[name])


def _is_buffer(model: nn.Module, name: str) -> bool:
    return name.removeprefix("model/") in dict(model.named_buffers())


def _transient(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        for key in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers[key]
            if buffer is not None:
                yield f"{name}.{key}".lstrip("."), buffer


def _real(tensor: Tensor) -> Tensor:
    """View a complex tensor (often a rotary table) as pairs of real numbers, which a checkpoint can hold."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
