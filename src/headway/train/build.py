"""Builds the parts of a training run, complete before the loop starts."""

import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch

from headway.data.corpus import Corpus, open_corpus
from headway.data.loader import RowReader
from headway.data.media.corpus import MediaCorpus, open_media_corpus
from headway.kernels.dispatch import make_plain
from headway.models.diffusion.text_encoders import TextEncoder, open_text_encoder
from headway.parallel import ParallelModel, World, parallelize_model
from headway.parallel.objective import Objective
from headway.recipe import Assignment, Recipe
from headway.recipe.families.diffusion import DiffusionModel
from headway.state import OpenCheckpoint
from headway.state.tensors import ModelShare
from headway.track import Recorder, RunFolder, chain
from headway.track.heartbeat import HeartbeatWriter
from headway.train.callbacks import Callbacks
from headway.train.diffusion_feed import DiffusionFeed
from headway.train.draw_weights import draw_weights
from headway.train.fail_together import fail_together
from headway.train.fault_injector import WorkerFaultInjector
from headway.train.feed import DeviceFeed, Feed
from headway.train.frozen_models import WorkerContext, reference_beside, with_frozen_models
from headway.train.heartbeat_hooks import add_heartbeat_hooks
from headway.train.meter import Meter, make_meter
from headway.train.objectives import CountedObjective, NextToken, make_objective
from headway.train.objectives.diffusion import DenoisingLoss
from headway.train.optim import WeightEma, build_optimizer, widen_gradients
from headway.train.restore import restore
from headway.train.rollouts import RolloutFeed
from headway.train.stop import StopRequest
from headway.train.trainable_model import record_fp8_layers, set_buffers, trainable_model


@dataclass(frozen=True)
class RunProgress:
    """A run's progress: steps done, samples consumed, and the chain."""

    step: int
    cursor: int
    chain: str


@dataclass(frozen=True)
class Parts:
    """Everything the training loop uses."""

    recipe: Recipe
    run: RunFolder
    world: World
    spread: ParallelModel
    """This worker's part of the model."""
    held: ModelShare
    optimizer: torch.optim.Optimizer
    average: WeightEma | None
    """EMA of the weights, if the recipe has one."""
    feed: Feed
    corpus: Corpus | MediaCorpus
    reader: RowReader | None
    """Of rows; None for prompts, images and video."""
    objective: CountedObjective
    held_out: np.ndarray
    """Held-out windows."""
    data_version: str
    recorder: Recorder
    meter: Meter
    faults: WorkerFaultInjector
    beat: HeartbeatWriter
    stop: StopRequest
    start: RunProgress
    callbacks: Callbacks
    """The user's own; none but on worker 0."""
    encoder: TextEncoder | None = None
    """Of captions, for a diffusion model of texts."""

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate with: held-out data, or samples to generate."""
        return self.held_out.size > 0 or self.recipe.eval.samples is not None


def build(
    assignment: Assignment,
    recipe: Recipe,
    world: World,
    recorder: Recorder,
    stop: StopRequest,
    beat: HeartbeatWriter,
    state: OpenCheckpoint | None,
) -> Parts:
    """Build a worker's model, optimizer and data, and restore the run's state."""
    set_up_torch(recipe, world.data.rank)
    run = RunFolder(Path(assignment.run))
    context = WorkerContext(recipe, run, world, recorder, beat, stop)

    # data and objective
    corpus = open_corpus(recipe) if recipe.data.media is None else open_media_corpus(recipe)
    reader = corpus.reader() if recipe.rl is None and isinstance(corpus, Corpus) else None
    objective = make_objective(recipe.objective, corpus.weighted, recipe.rl)
    with fail_together(world, "build the callbacks"):
        callbacks = Callbacks.of(recipe.callbacks if world.first else ())

    # this worker's part of the model
    model, base = trainable_model(recipe, world)
    if recipe.train.fp8 is not None and world.first:
        record_fp8_layers(recipe.model, recipe.train.fp8, recorder)
    measures = None if isinstance(objective, NextToken) else cast(Objective, objective)
    spread = parallelize_model(model, recipe, world, assignment.faults.mutations, measures)
    if world.fsdp_size == 1 and spread.accumulates:
        widen_gradients(spread.model)
    if not recipe.compiles(world.device.type):
        add_heartbeat_hooks(spread, beat)

    # its weights: the state of a run with adapters has only those
    held = ModelShare(world.rank, world.stage, spread.borrowed, spread.names, base)
    set_buffers(spread.model, recipe, run)
    draw = partial(draw_weights, spread.model, recipe, held, run)
    drawn = state is None or bool(base)
    if drawn:
        draw()

    # what frozen models say of the data: computed once, or with each batch
    spread, reader = with_frozen_models(context, objective, spread, corpus, reader, None if drawn else draw)

    # the optimizer, and the state to continue from
    optimizer = build_optimizer(spread.model, recipe.train, recipe.seed, world, held, recipe.model.layout)
    average = WeightEma(spread.model, optimizer, recipe.train.ema, held) if recipe.train.ema is not None else None
    start = RunProgress(0, 0, chain.START)
    if state is not None:
        beat.enter("restore")
        with recorder.span("restore"), fail_together(world, "read the checkpoint"):
            start = RunProgress(*restore(state, spread.model, optimizer, held, world, average))
    faults = WorkerFaultInjector(assignment.faults, world.rank, assignment.attempt, spread.model, run.faults)

    # batches
    encoder = text_encoder(recipe, world.device)
    feed = build_feed(context, objective, spread, corpus, reader, encoder, faults)
    return Parts(
        recipe=recipe,
        run=run,
        world=world,
        spread=spread,
        held=held,
        optimizer=optimizer,
        average=average,
        feed=feed,
        corpus=corpus,
        reader=reader,
        objective=objective,
        held_out=corpus.held_out(recipe.eval.windows),
        data_version=corpus.version,
        recorder=recorder,
        meter=make_meter(world.device),
        faults=faults,
        beat=beat,
        stop=stop,
        start=start,
        callbacks=callbacks,
        encoder=encoder,
    )


def build_feed(
    context: WorkerContext,
    objective: CountedObjective,
    spread: ParallelModel,
    corpus: Corpus | MediaCorpus,
    reader: RowReader | None,
    encoder: TextEncoder | None,
    faults: WorkerFaultInjector,
) -> Feed:
    """Return what feeds the loop: noised samples of media, rows of a corpus, or answers that the model samples."""
    recipe, world, recorder = context.recipe, context.world, context.recorder
    if isinstance(corpus, MediaCorpus):
        encode = None if encoder is None else encoder.encode
        replaced = partial(record_replaced, recorder)
        return DiffusionFeed(recipe, corpus, world, cast(DenoisingLoss, objective), encode, replaced)
    if reader is not None:
        return DeviceFeed(corpus.loader(reader, world.data.rank, world.data.size), world.device, objective)
    reference = reference_beside(context, objective)
    return RolloutFeed(
        recipe, context.run, world, spread, reference, corpus.prompt_reader(), corpus.prompt_order(), objective,
        recorder, context.beat, faults,
    )  # fmt: skip


def record_replaced(recorder: Recorder, why: str) -> None:
    """Record that a decoder process was replaced, and why."""
    recorder.event("log", message=f"decoder replaced: {why}")


def text_encoder(recipe: Recipe, device: torch.device) -> TextEncoder | None:
    """Open the frozen encoder of captions, if the model is conditioned on texts."""
    model = recipe.model
    if not isinstance(model, DiffusionModel) or model.conditioning != "text":
        return None
    return open_text_encoder(model, device)


def set_up_torch(recipe: Recipe, data_rank: int) -> None:
    """Seed all generators, and choose kernels as the recipe says."""
    seed_everything(recipe.seed, data_rank)
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a pass over every output that a kernel then writes
    make_plain(recipe.train.plain)


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch, differently for workers with different data."""
    number = np.random.SeedSequence([seed, rank]).generate_state(1)[0].item()
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
