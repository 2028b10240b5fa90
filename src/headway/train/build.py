"""Builds the parts of a training run, complete before the loop starts."""

import logging
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from headway.data.corpus import Corpus, open_corpus
from headway.data.loader import RowReader
from headway.data.media.corpus import MediaCorpus, open_media_corpus
from headway.errors import ModelError
from headway.kernels.dispatch import make_plain
from headway.models import initial_weight, stored_weights
from headway.models.custom import empty_model
from headway.models.diffusion.text_encoders import TextEncoder, open_text_encoder
from headway.models.exact import make_exact
from headway.models.huggingface import read_weight
from headway.models.lora import (
    CODES,
    add_adapters,
    base_names,
    fill_quantized,
    initial_adapter,
    is_adapter,
    read_adapters,
)
from headway.parallel import ParallelModel, World, parallelize_model
from headway.parallel.layout import blocks_of, layout_of
from headway.parallel.objective import Objective
from headway.recipe import Assignment, Lora, Model, ModelLayout, Recipe
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.fp8 import fp8_layers
from headway.recipe.model import SCORE
from headway.recipe.objective import Distill
from headway.recipe.policy import PolicyGradient
from headway.state import OpenCheckpoint
from headway.state.address import open_address
from headway.state.base_weights import base_weights, model_at
from headway.state.tensors import ModelShare, fill, load_base, load_weights
from headway.track import Recorder, RunFolder, chain
from headway.track.heartbeat import HeartbeatWriter
from headway.train.callbacks import Callbacks
from headway.train.custom_init import initial_weights, load_buffers
from headway.train.diffusion_feed import DiffusionFeed
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
    data = world.data
    seed_everything(recipe.seed, data.rank)
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a pass over every output that a kernel then writes
    make_plain(recipe.train.plain)

    corpus = open_corpus(recipe) if recipe.data.media is None else open_media_corpus(recipe)
    reader = corpus.reader() if recipe.rl is None and isinstance(corpus, Corpus) else None
    objective = make_objective(recipe.objective, corpus.weighted, recipe.rl)

    with fail_together(world, "build the callbacks"):
        callbacks = Callbacks.of(recipe.callbacks if world.first else ())
    run = RunFolder(Path(assignment.run))
    model = empty_model(recipe.model)
    lower(model, recipe.train)
    base = frozenset[str]()
    if recipe.lora is not None:
        add_adapters(model, recipe.lora)
        base = base_names(model)
    freeze(model, recipe.train)
    if recipe.inference.exact:
        check_exact(recipe, world)
        make_exact(model, world.device, getattr(torch, recipe.train.dtype))
    if world.size > 1:
        check_ties(model, recipe.model.layout)
    if recipe.train.fp8 is not None and world.first:
        layers = fp8_layers(recipe.model, recipe.train.fp8)
        recorder.event("log", message=layers.describe())
        if layers.skipped:
            logging.getLogger(__name__).warning(layers.describe())
    measures = None if isinstance(objective, NextToken) else cast(Objective, objective)
    spread = parallelize_model(model, recipe, world, assignment.faults.mutations, measures)
    if world.fsdp_size == 1 and spread.accumulates:
        widen_gradients(spread.model)
    if not recipe.compiles(world.device.type):
        add_heartbeat_hooks(spread, beat)
    held = ModelShare(world.rank, world.stage, spread.borrowed, spread.names, base)
    if recipe.model.class_ is not None:
        load_buffers(run, spread.model)
    else:
        for buffer in spread.model.buffers():
            buffer.zero_()  # it was uninitialized memory
    if state is None or base:  # the state of a run with adapters has only those
        draw_weights(spread.model, recipe, held, run)
    if isinstance(recipe.objective, Distill):
        load = partial(load_teacher, recipe, recipe.objective, world, partial(draw_weights, run=run))
        if recipe.objective.mode == "live":
            spread = replace(spread, teach=load().teach)
        else:
            beat.enter("evaluate")
            with recorder.span("evaluation"):
                mark = ScoringProgress(world, recorder, beat, stop, "teacher").mark
                assert isinstance(corpus, Corpus), "a teacher has tokens"
                stored = stored_targets(recipe, recipe.objective, corpus, world, mark, load, run.name)
                assert reader is not None
                reader = WithTeacher(reader, stored)
    if REFERENCE in objective.columns:
        beat.enter("evaluate")
        with recorder.span("evaluation"):
            drawn = state is None or bool(base)
            first_weights = None if drawn else partial(draw_weights, spread.model, recipe, held, run)
            mark = ScoringProgress(world, recorder, beat, stop, "reference").mark
            assert reader is not None
            assert isinstance(corpus, Corpus)
            reader = WithReference(reader, reference_column(recipe, corpus, spread, world, mark, first_weights))
    optimizer = build_optimizer(spread.model, recipe.train, recipe.seed, world, held, recipe.model.layout)
    average = WeightEma(spread.model, optimizer, recipe.train.ema, held) if recipe.train.ema is not None else None
    start = RunProgress(0, 0, chain.START)
    if state is not None:
        beat.enter("restore")
        with recorder.span("restore"), fail_together(world, "read the checkpoint"):
            start = RunProgress(*restore(state, spread.model, optimizer, held, world, average))
    faults = WorkerFaultInjector(assignment.faults, world.rank, assignment.attempt, spread.model, run.faults)
    encoder = text_encoder(recipe, world.device)
    feed: Feed
    if isinstance(corpus, MediaCorpus):
        encode = None if encoder is None else encoder.encode
        denoising = cast(DenoisingLoss, objective)
        feed = DiffusionFeed(recipe, corpus, world, denoising, encode, partial(record_replaced, recorder))
    elif reader is not None:
        feed = DeviceFeed(corpus.loader(reader, data.rank, data.size), world.device, objective)
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


def draw_weights(model: nn.Module, recipe: Recipe, held: ModelShare, run: RunFolder) -> None:
    """Initialize this worker's part of the weights, from the seed or from `model.init`, one tensor at a time."""
    init = recipe.model.init
    if recipe.lora is not None:
        draw_adapters(model, recipe, recipe.lora)
    if recipe.lora is not None and recipe.lora.quantize is not None:
        draw_quantized(model, recipe.model)
        return
    if recipe.lora is not None and init is not None and not (Path(init) / "config.json").exists():
        load_base(open_address(init), model, held)
        return
    if recipe.model.reward and init is not None:
        draw_reward_model(model, recipe, init)
        return
    if recipe.model.class_ is not None or (init is not None and not (Path(init) / "config.json").exists()):
        load_weights(open_address(init or str(initial_weights(run))), model, held)
        return
    if init is None:
        draw_all(dict(model.named_parameters()), recipe)
        return
    stored = stored_weights(Path(init), recipe.model)
    for name, parameter in model.named_parameters():
        if name in stored:
            fill(name, parameter, stored[name])
    for name, buffer in model.named_buffers():
        if name in stored:
            buffer.copy_(stored[name])


@torch.no_grad()
def draw_reward_model(model: nn.Module, recipe: Recipe, init: str) -> None:
    """Load this worker's part of a model, one tensor at a time; a head that `init` does not have is initialized."""
    stored = base_weights(init, model_at(init))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in stored:
            fill(name, tensor, read_weight(stored[name]))
        elif name == SCORE:
            fill(name, tensor, initial_weight(recipe.model, name, tuple(tensor.shape), recipe.seed))


@torch.no_grad()
def draw_adapters(model: nn.Module, recipe: Recipe, lora: Lora) -> None:
    """Initialize this worker's part of the adapters, from the seed or from `lora.init`."""
    stored = None if lora.init is None else read_adapters(Path(lora.init), recipe.model)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            drawn = stored[name] if stored else initial_adapter(name, tuple(parameter.shape), recipe.seed)
            fill(name, parameter, drawn)


def draw_quantized(model: nn.Module, description: Model) -> None:
    """Load the base of adapters, one tensor at a time, and quantize the layers that are to be."""
    assert description.init is not None, "adapters have a base"
    stored = base_weights(description.init, description)
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    for name, weight in stored.items():
        layer = name.removesuffix(".weight")
        if name in tensors:
            fill(name, tensors[name], read_weight(weight))
        elif f"{layer}.{CODES}" in tensors:
            fill_quantized(model.get_submodule(layer), read_weight(weight))


def draw_all(parameters: Mapping[str, nn.Parameter], recipe: Recipe) -> None:
    """Initialize this worker's part of every parameter, several at a time, with one thread per tensor.

    A sharded tensor, or one on another device, is first initialized whole: all of those in progress together take no
    more memory than the largest.
    """

    groups, room = list[list[str]](), 0
    for name in sorted(parameters, key=lambda name: (-parameters[name].numel(), name)):
        taken = parameters[name].numel() if _drawn_apart(parameters[name]) else 0
        if not groups or taken > room:
            groups, room = [*groups, []], max(parameter.numel() for parameter in parameters.values())
        groups[-1].append(name)
        room -= taken

    @torch.no_grad()
    def draw(name: str) -> None:
        parameter, shape = parameters[name], tuple(parameters[name].shape)
        if _drawn_apart(parameter):
            fill(name, parameter, initial_weight(recipe.model, name, shape, recipe.seed))
        else:
            initial_weight(recipe.model, name, shape, recipe.seed, into=parameter)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for group in groups:
            list(pool.map(draw, group))


def _drawn_apart(parameter: nn.Parameter) -> bool:
    """Whether it is initialized in a temporary tensor: it is sharded or not on the CPU."""
    return isinstance(parameter, DTensor) or parameter.device.type != "cpu" or parameter.dtype != torch.float32


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch, differently for workers with different data."""
    number = np.random.SeedSequence([seed, rank]).generate_state(1)[0].item()
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
