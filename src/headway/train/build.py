"""Builds the parts of a training run, complete before the loop starts."""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn

from headway.data.corpus import Corpus, open_corpus
from headway.data.loader import RowReader
from headway.data.media.corpus import MediaCorpus, open_media_corpus
from headway.errors import ModelError
from headway.kernels.dispatch import make_plain
from headway.models.custom import empty_model
from headway.models.diffusion.text_encoders import TextEncoder, open_text_encoder
from headway.models.exact import make_exact
from headway.models.lora import add_adapters, base_names
from headway.parallel import ParallelModel, World, parallelize_model
from headway.parallel.layout import blocks_of, layout_of
from headway.parallel.objective import Objective
from headway.recipe import Assignment, Model, ModelLayout, Recipe
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.fp8 import Fp8, fp8_layers
from headway.recipe.objective import Distill
from headway.recipe.policy import PolicyGradient
from headway.state import OpenCheckpoint
from headway.state.tensors import ModelShare
from headway.track import Recorder, RunFolder, chain
from headway.track.heartbeat import HeartbeatWriter
from headway.train.callbacks import Callbacks
from headway.train.custom_init import load_buffers
from headway.train.diffusion_feed import DiffusionFeed
from headway.train.draw_weights import draw_weights
from headway.train.fail_together import fail_together
from headway.train.fault_injector import WorkerFaultInjector
from headway.train.feed import DeviceFeed, Feed
from headway.train.heartbeat_hooks import add_heartbeat_hooks
from headway.train.meter import Meter, make_meter
from headway.train.objectives import CountedObjective, NextToken, make_objective
from headway.train.objectives.diffusion import DenoisingLoss
from headway.train.objectives.preference import REFERENCE
from headway.train.objectives.reference import ScoringProgress, WithReference, reference_column
from headway.train.objectives.teacher import (
    WithTeacher,
    frozen_model,
    load_teacher,
    recipe_of_reference,
    stored_targets,
)
from headway.train.optim import WeightEma, build_optimizer, freeze, lower, widen_gradients
from headway.train.restore import restore
from headway.train.rollouts import RolloutFeed
from headway.train.stop import StopRequest


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

    # data and objective
    corpus = open_corpus(recipe) if recipe.data.media is None else open_media_corpus(recipe)
    reader = corpus.reader() if recipe.rl is None and isinstance(corpus, Corpus) else None
    objective = make_objective(recipe.objective, corpus.weighted, recipe.rl)
    with fail_together(world, "build the callbacks"):
        callbacks = Callbacks.of(recipe.callbacks if world.first else ())

    # this worker's part of the model
    model, base = plain_model(recipe, world)
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
    marks = partial(scoring_marks, world, recorder, beat, stop)
    if isinstance(recipe.objective, Distill):
        spread, reader = with_teacher(recipe, recipe.objective, world, run, spread, corpus, reader, marks)
    if REFERENCE in objective.columns:
        reader = with_reference(recipe, world, spread, corpus, reader, marks, None if drawn else draw)

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
    feed: Feed
    if isinstance(corpus, MediaCorpus):
        encode = None if encoder is None else encoder.encode
        denoising = cast(DenoisingLoss, objective)
        feed = DiffusionFeed(recipe, corpus, world, denoising, encode, partial(record_replaced, recorder))
    elif reader is not None:
        loader = corpus.loader(reader, world.data.rank, world.data.size)
        feed = DeviceFeed(loader, world.device, objective)
    else:
        feed = rollout_feed(recipe, run, world, spread, corpus, objective, recorder, beat, faults)
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


def set_up_torch(recipe: Recipe, data_rank: int) -> None:
    """Seed all generators, and choose kernels as the recipe says."""
    seed_everything(recipe.seed, data_rank)
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a pass over every output that a kernel then writes
    make_plain(recipe.train.plain)


def plain_model(recipe: Recipe, world: World) -> tuple[nn.Module, frozenset[str]]:
    """Return the model on the meta device, with adapters if the recipe has any, and the names of their base."""
    model, base = empty_model(recipe.model), frozenset[str]()
    lower(model, recipe.train)
    if recipe.lora is not None:
        add_adapters(model, recipe.lora)
        base = base_names(model)
    freeze(model, recipe.train)
    if recipe.inference.exact:
        check_exact(recipe, world)
        make_exact(model, world.device, getattr(torch, recipe.train.dtype))
    if world.size > 1:
        check_ties(model, recipe.model.layout)
    return model, base


def record_fp8_layers(model: Model, section: Fp8, recorder: Recorder) -> None:
    """Record which layers multiply in float8; warn of those that cannot."""
    layers = fp8_layers(model, section)
    recorder.event("log", message=layers.describe())
    if layers.skipped:
        logging.getLogger(__name__).warning(layers.describe())


def set_buffers(model: nn.Module, recipe: Recipe, run: RunFolder) -> None:
    """Fill buffers, which were uninitialized memory: those of a class of the user's own are beside the run."""
    if recipe.model.class_ is not None:
        load_buffers(run, model)
        return
    for buffer in model.buffers():
        buffer.zero_()


Marks = Callable[[str], AbstractContextManager[Callable[[int, int, int], None]]]
"""Opens the account of what a frozen model scores, and yields what marks progress there; by what it is of."""


@contextmanager
def scoring_marks(
    world: World, recorder: Recorder, beat: HeartbeatWriter, stop: StopRequest, of: str
) -> Iterator[Callable[[int, int, int], None]]:
    """See Marks."""
    beat.enter("evaluate")
    with recorder.span("evaluation"):
        yield ScoringProgress(world, recorder, beat, stop, of).mark


def with_teacher(
    recipe: Recipe,
    objective: Distill,
    world: World,
    run: RunFolder,
    spread: ParallelModel,
    corpus: Corpus | MediaCorpus,
    reader: RowReader | None,
    marks: Marks,
) -> tuple[ParallelModel, RowReader | None]:
    """Return the model with its teacher beside it, or the reader of rows with what the teacher stored of them."""
    load = partial(load_teacher, recipe, objective, world, partial(draw_weights, run=run))
    if objective.mode == "live":
        return replace(spread, teach=load().teach), reader
    assert isinstance(corpus, Corpus), "a teacher has tokens"
    assert reader is not None
    with marks("teacher") as mark:
        stored = stored_targets(recipe, objective, corpus, world, mark, load, run.name)
    return spread, WithTeacher(reader, stored)


def with_reference(
    recipe: Recipe,
    world: World,
    spread: ParallelModel,
    corpus: Corpus | MediaCorpus,
    reader: RowReader | None,
    marks: Marks,
    draw: Callable[[], None] | None,
) -> RowReader:
    """Return the reader of rows with the log-probabilities of the initial weights, which `draw` sets."""
    assert isinstance(corpus, Corpus)
    assert reader is not None
    with marks("reference") as mark:
        return WithReference(reader, reference_column(recipe, corpus, spread, world, mark, draw))


def record_replaced(recorder: Recorder, why: str) -> None:
    """Record that a decoder process was replaced, and why."""
    recorder.event("log", message=f"decoder replaced: {why}")


def text_encoder(recipe: Recipe, device: torch.device) -> TextEncoder | None:
    """Open the frozen encoder of captions, if the model is conditioned on texts."""
    model = recipe.model
    if not isinstance(model, DiffusionModel) or model.conditioning != "text":
        return None
    return open_text_encoder(model, device)


def rollout_feed(
    recipe: Recipe,
    run: RunFolder,
    world: World,
    spread: ParallelModel,
    corpus: Corpus,
    objective: CountedObjective,
    recorder: Recorder,
    beat: HeartbeatWriter,
    faults: WorkerFaultInjector,
) -> Feed:
    """Build what samples and scores answers to prompts, with the reference if the recipe has one."""
    assert isinstance(recipe.objective, PolicyGradient)
    reference = None
    if recipe.objective.kl != "none":
        draw = partial(draw_weights, run=run)
        reference = frozen_model(recipe_of_reference(recipe), world, draw, cast(Objective, objective))
    return RolloutFeed(
        recipe, run, world, spread, reference, corpus.prompt_reader(), corpus.prompt_order(), objective,
        recorder, beat, faults,
    )  # fmt: skip


def check_exact(recipe: Recipe, world: World) -> None:
    """Raise ModelError if the plan or the precision excludes exact inference."""
    split = [axis for axis in ("pipeline", "context", "tensor", "expert") if world.axis(axis).size > 1]
    if split:
        raise ModelError(
            f"inference.exact needs a mesh of replicate and shard axes only, and this one has {', '.join(split)}",
            hint=f"--set parallel.{split[0]}=1",
        )
    needed = "bfloat16" if world.device.type == "cuda" else "float32"
    if recipe.train.dtype != needed:
        raise ModelError(
            f"inference.exact on a {'GPU' if world.device.type == 'cuda' else 'CPU'} is for {needed}, "
            f"not {recipe.train.dtype}",
            hint=f"--set train.dtype={needed}",
        )


def check_ties(model: nn.Module, layout: ModelLayout | None) -> None:
    """Raise ModelError if a block shares a parameter with anything outside: workers handle blocks one at a time."""
    blocks_name, blocks = blocks_of(model, layout_of(model, layout))
    prefix = f"{blocks_name}." if blocks_name else ""
    seen = dict[int, tuple[str, str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False) if blocks else ():
        block = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
        other, its_block = seen.setdefault(id(parameter), (name, block))
        if block != its_block:
            raise ModelError(
                f"{other} and {name} are tied across blocks of {blocks_name}, which several workers cannot share",
                hint="use one worker; only tensors outside of blocks, such as head and embedding, may be tied",
            )


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch, differently for workers with different data."""
    number = np.random.SeedSequence([seed, rank]).generate_state(1)[0].item()
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
