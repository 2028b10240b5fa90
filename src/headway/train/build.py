"""Makes the parts of a training run: building is not running, and nothing is finished later by a setter."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from headway.data import Loader, WindowReader, check_version, held_out, open_dataset, split_dataset
from headway.models import Decoder, empty_decoder, init_weights, load_into
from headway.parallel import World, apply
from headway.recipe import Assignment, Recipe, Train
from headway.state import open_checkpoint
from headway.state.tensors import load_state, load_weights
from headway.track import Recorder, RunFolder, chain
from headway.train.feed import Feed
from headway.train.inject import Injector
from headway.train.meter import Meter, make_meter
from headway.train.rng import restore_rng
from headway.train.stop import StopRequest
from headway.train.together import together

__all__ = ["Parts", "Progress", "RecordLost", "build"]


class RecordLost(Exception):
    """The run's record can no longer be written; what cannot be accounted for is not trained."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come: steps done, samples consumed, and the chain over both and what came of them."""

    step: int
    cursor: int
    chain: str


@dataclass(frozen=True)
class Parts:
    """Everything the loop uses."""

    recipe: Recipe
    run: RunFolder
    world: World
    model: nn.Module
    optimizer: torch.optim.Optimizer
    feed: Feed
    reader: WindowReader
    held_out: np.ndarray
    data_version: str
    recorder: Recorder
    meter: Meter
    faults: Injector
    stop: StopRequest
    start: Progress


def build(assignment: Assignment, recipe: Recipe, world: World, recorder: Recorder, stop: StopRequest) -> Parts:
    """Model, optimizer and data of one worker, brought to where the run stands."""
    seed_everything(recipe.seed, world.rank)
    torch.use_deterministic_algorithms(recipe.train.deterministic)

    dataset = open_dataset(Path(recipe.data.path))
    check_version(dataset, recipe.data.version)
    reader = WindowReader(dataset, recipe.data.seq, mask_boundaries=recipe.data.mask_boundaries)
    split = split_dataset(dataset, recipe.data.seq, recipe.data.holdout)
    rows = recipe.train.batch // world.size
    loader = Loader(reader, split, recipe.seed, recipe.train.batch, rows=(rows * world.rank, rows * (world.rank + 1)))

    model = build_model(recipe, fresh=assignment.checkpoint is None).to(world.device)
    model = apply(model, model.layers, recipe.train, world)
    optimizer = build_optimizer(model, recipe.train)
    start = Progress(0, 0, chain.START)
    if assignment.checkpoint is not None:
        with recorder.span("restore"), together(world, "read the checkpoint"):
            start = restore(Path(assignment.checkpoint), model, optimizer, world)
    return Parts(
        recipe=recipe,
        run=RunFolder(Path(assignment.run)),
        world=world,
        model=model,
        optimizer=optimizer,
        feed=Feed(loader, world.device),
        reader=reader,
        held_out=held_out(split),
        data_version=dataset.version,
        recorder=recorder,
        meter=make_meter(world.device),
        faults=Injector(assignment.faults, world.rank, assignment.attempt),
        stop=stop,
        start=start,
    )


def build_model(recipe: Recipe, fresh: bool) -> Decoder:
    """The plain model on the CPU: drawn from the seed, or read from `model.init`; empty if a checkpoint follows."""
    model = empty_decoder(recipe.model)
    if not fresh:
        return model
    if recipe.model.init is None:
        init_weights(model, recipe.seed)
    elif (Path(recipe.model.init) / "config.json").exists():
        load_into(model, Path(recipe.model.init))
    else:
        load_weights(Path(recipe.model.init), model)
    return model


def build_optimizer(model: nn.Module, train: Train) -> torch.optim.AdamW:
    """AdamW, decaying matrices but not norms and biases."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        fused=True,
    )


def restore(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Progress:
    """Bring model, optimizer and random state to a checkpoint; returns how far it had come."""
    opened = open_checkpoint(checkpoint)
    load_state(opened, model, optimizer)
    manifest = opened.manifest
    restore_rng(world, manifest.rng, manifest.workers)
    return Progress(manifest.step, manifest.cursor, manifest.chain)


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch, each worker differently."""
    number = np.random.SeedSequence([seed, rank]).generate_state(1)[0].item()
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
