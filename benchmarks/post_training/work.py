"""What is trained, the same for all ways, and how the sides may do it."""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

RECIPES = Path(__file__).parents[2] / "recipes"
PAD, END = 0, 1
TINY_MODEL = {
    "family": "llama", "vocab_size": 512, "layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "hidden": 128,
    "tie_embeddings": True,
}  # fmt: skip
WARM = 4
"""Steps before those that are timed."""


@dataclass(frozen=True)
class Work:
    """What is trained, the same for all ways."""

    recipe: str
    """A file of recipes/ with the shape of the model."""
    kind: str
    """Objective."""
    rows: int
    """Rows of a step."""
    steps: int
    """Timed ones."""
    seq: int = 4096
    lora: bool = False
    answer: tuple[int, int] = (300, 2000)
    """Tokens: median, most."""
    prompt: tuple[int, int] = (150, 1800)


WORKS = {
    "sft": Work("llama3.2-1b.toml", "sft", rows=8, steps=16),
    "lora": Work("llama3-8b.toml", "sft", rows=4, steps=12, lora=True),
    "dpo": Work("llama3.2-1b.toml", "dpo", rows=8, steps=16, answer=(200, 600), prompt=(150, 400)),
}


class Way(NamedTuple):
    """How one side does it."""

    side: str
    name: str
    attention: str = "sdpa"
    recompute: bool = False
    defaults: bool = False
    microbatch: int | None = None
    """Rows of a forward pass; None for a step's. In `dpo` of TRL, half as many pairs as those rows have."""
    liger: bool = True
    """Whether to use Liger's layers, if they are installed."""


class StepSize(NamedTuple):
    """What a step trains on."""

    tokens: float
    pairs: float


class Conversation(NamedTuple):
    """Token ids; of a pair, the second answer is the rejected one."""

    prompt: np.ndarray
    answers: tuple[np.ndarray, ...]


def ways_of(part: str, tiny: bool) -> list[Way]:
    """In the order in which they run."""
    if tiny:
        return [Way("headway", "headway"), Way("trl", "trl sdpa")]
    if part == "sft":
        return [
            Way("headway", "headway"),
            Way("trl", "trl flex", "flex_attention"),
            Way("trl", "trl sdpa", microbatch=1),
            Way("trl", "trl defaults", recompute=True, defaults=True),
        ]
    if part == "lora":
        return [
            Way(side, f"{side}{f' {attention[:4]}' if side == 'trl' else ''}{', recomputing' if again else ''}",
                attention, again, microbatch=1)
            for again in (False, True)
            for side, attention in (("headway", "sdpa"), ("trl", "flex_attention"), ("trl", "sdpa"))
        ]  # fmt: skip
    return [
        Way("headway", "headway"),
        Way("trl", "trl sdpa"),
        Way("trl", "trl flex", "flex_attention"),
        Way("trl", "trl defaults", recompute=True, defaults=True),
    ]


def work_of(part: str, options: argparse.Namespace) -> Work:
    """The work of a part; with `tiny`, all its rows are one step."""
    work = WORKS[part]
    if options.rehearse:
        return dataclasses.replace(work, steps=4, seq=256, answer=(20, 60), prompt=(15, 50))
    if options.tiny:
        return dataclasses.replace(work, rows=0, steps=4, seq=256, answer=(20, 60), prompt=(15, 50))
    return work


def model_of(part: str, tiny: bool) -> Any:
    """The recipe's model section."""
    from headway.recipe import Model

    if tiny:
        return Model(**{key: value for key, value in TINY_MODEL.items() if key != "family"})
    values = tomllib.loads((RECIPES / WORKS[part].recipe).read_text())["model"]
    return parsed({"model": values, "data": {"path": "none"}}).model


def parsed(values: dict[str, Any], settings: Sequence[str] = ()) -> Any:
    """A recipe."""
    from headway.recipe.load import parse_recipe, with_settings

    return with_settings(parse_recipe(values, {}, "benchmark"), settings)


def conversations(work: Work, vocabulary: int) -> list[Conversation]:
    """More than all steps need, the same on both sides; answers end with a token of their own."""
    rng = np.random.default_rng(7)
    wanted = (work.rows * (WARM + work.steps + 1) or 8) * work.seq
    drawn, tokens = list[Conversation](), 0
    answers = 2 if work.kind == "dpo" else 1

    def text(median: int, most: int, end: bool) -> np.ndarray:
        length = int(np.clip(rng.lognormal(math.log(median), 0.8), 8, most))
        ids = rng.integers(2, vocabulary, length, dtype=np.int64)
        ids[-1] = END if end else ids[-1]
        return ids

    while tokens < wanted:
        drawn.append(Conversation(text(*work.prompt, False), tuple(text(*work.answer, True) for _ in range(answers))))
        tokens += sum(len(drawn[-1].prompt) + len(answer) for answer in drawn[-1].answers)
    return drawn


def write_weights(part: str, folder: Path) -> None:
    """A folder with a tiny model, and one with adapters whose product is not zero."""
    from headway.models import empty_decoder, init_weights, write_folder
    from headway.recipe import Lora
    from headway.recipe.lora import adapted_layers, adapter_tensors
    from headway.state.peft import Adapter, LayerAdapter, write_adapter

    model = model_of(part, tiny=True)
    if not (folder / "model").exists():
        decoder = empty_decoder(model)
        init_weights(decoder, 5)
        write_folder(folder / "model", model, decoder.state_dict())
    if WORKS[part].lora:
        rng, lora = np.random.default_rng(3), Lora(rank=16)
        shapes = adapter_tensors(model, lora)
        layers = {
            layer: LayerAdapter(
                *(rng.normal(0, 0.05, shapes[f"{layer}.{key}"]).astype(np.float32) for key in ("lora_a", "lora_b")),
                lora.scale,
            )
            for layer in adapted_layers(model)
        }
        write_adapter(folder / "adapter", model, Adapter("benchmark", layers))


def rate(work: Work, options: argparse.Namespace) -> float:
    """Learning rate: such that a tiny model's losses move."""
    return 2e-3 if options.tiny else (1e-6 if work.kind == "dpo" else 2e-5)


@torch.no_grad()
def draw(model: torch.nn.Module) -> None:
    """Weights as a fresh model has them, on the device; an adapter's product is zero."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            parameter.zero_()
        elif parameter.ndim > 1:
            parameter.normal_(std=0.02)
        else:
            parameter.fill_(1.0)


def uses_liger(way: Way, options: argparse.Namespace) -> bool:
    """Whether a way would use Liger's layers."""
    installed = importlib.util.find_spec("liger_kernel") is not None
    return way.side == "trl" and not way.defaults and installed and options.device == "cuda"
