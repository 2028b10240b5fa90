"""Parallelizes a plain model from the outside, in one visible order.

    fp8        linear layers, as the recipe says                    models/fp8.py, fp8_gather.py
    split      this worker's stages of the model                    pipeline.py
    split      each matrix over the tensor axis                     tensor.py, vocab_parallel.py
    share      experts over their axis                              expert.py
    split      sequences over the context axis                      context.py
    loss       precision, and what the last stage computes          stage_forward.py
    recompute  activations of blocks                                recompute.py
    compile    each block
    shard      parameters over the data axes                        shard.py

A compiled block contains its recomputation, and gathers of weights stay outside both. All of this happens on the meta
device: memory is allocated last, for this worker's part alone. Parameter names stay those of the plain model. What runs
the passes of a step is the result: parallel_model.py.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import ModelError
from headway.models import Decoder
from headway.models.fp8 import Float8Model, make_fp8
from headway.parallel.context import SequenceParts, split_sequences
from headway.parallel.documents import exact_context, keeps_apart, takes_documents
from headway.parallel.expert import share_experts
from headway.parallel.fp8_gather import Float8Gather
from headway.parallel.gradients import Missing
from headway.parallel.layout import TensorCuts, blocks_of, check_pipeline, cuts_of, layout_of, named, stages_of
from headway.parallel.objective import MeasureHead, Objective, TeacherTargets
from headway.parallel.parallel_model import ParallelModel
from headway.parallel.pipeline import LocalStage, PipelineRunner, StageSplit, has_ties, split, tie_group
from headway.parallel.recompute import recompute
from headway.parallel.shard import shard
from headway.parallel.stage_forward import ForwardSplit, set_forward, stream_dtype
from headway.parallel.tensor import SEQUENCE, cut_tensors
from headway.parallel.world import Axis, World
from headway.recipe import ModelLayout, Parallel, Recipe


def parallelize_model(
    model: nn.Module,
    recipe: Recipe,
    world: World,
    mutations: Collection[str] = (),
    objective: Objective | TeacherTargets | None = None,
) -> ParallelModel:
    """Parallelize a model on the meta device as the recipe says; memory is allocated for this worker's part alone.

    Without an objective, its loss is the plain sum over labels. `mutations` are deliberate bugs that test `headway
    check`.
    """
    head = None if objective is None else MeasureHead(objective)
    train, parallel = recipe.train, recipe.parallel or Parallel()
    layout = layout_of(model, recipe.model.layout)
    tensor, pipeline, context = world.axis("tensor"), world.axis("pipeline"), world.axis("context")
    if context.size > 1:
        check_sequences(model, context.size)
    names = frozenset(name for name, _ in (*model.named_parameters(), *model.named_buffers()))
    rows = train.batch // world.data.size
    microbatch = min(train.microbatch or rows, rows)
    cuts = cuts_of(model, layout, tensor.size) if tensor.size > 1 else None
    ragged, exact = keeps_apart(model, recipe, world.device, microbatch), exact_context(model)

    # products in float8
    if train.fp8 is not None:
        make_fp8(model, recipe.model, train.fp8, world.device, holds=_has_whole_weights(world))

    # this worker's stages
    stages, stream, missing = _stages(model, layout, recipe, world, microbatch, cuts)

    # each matrix, over the tensor axis
    vocabulary = None
    if cuts is not None:
        missing += _cut_matrices(stages.model, cuts, world, mutations)
        vocabulary = _shared_vocabulary(stages.model, cuts)

    # experts, over their axis
    if world.expert_mesh is not None:
        share_experts(stages.model, world.expert_mesh["expert"], world.axis("expert"))

    # sequences, over the context axis
    parts = SequenceParts(context) if context.size > 1 else None
    if parts is not None:
        _split_sequences(stages, context, parallel)

    forward_split = ForwardSplit(head, cuts, vocabulary, parts)
    for stage in stages.stages:
        set_forward(stage, recipe, world, forward_split)

    # activations, then kernels
    recompute([block for stage in stages.stages for block in stage.blocks], train.recompute, train.recompute_blocks)
    if recipe.compiles(world.device.type):
        _compile_blocks(stages)

    # parameters, over the data axes
    if world.fsdp_size > 1:
        _shard_parameters(stages, recipe, world)

    # memory, last
    for stage in stages.stages:
        _allocate(stage.module, world.device)
    float8, gathered = _float8_weights(stages.model, recipe, world)
    schedule = None
    if pipeline.size > 1:
        wrong = "pipeline-loss-scale" in mutations
        schedule = PipelineRunner(stages, world, parallel, stream, stream_dtype(recipe, world), head, divides=wrong)
    forgets = "no-gradient-reduction" in mutations
    return ParallelModel(
        model=stages.model,
        stages=stages.stages,
        schedule=schedule,
        missing=() if forgets else missing,
        borrowed={**(stages.borrowed or {}), **_others_buffers(stages.model, layout, pipeline)},
        names=names,
        rows=rows,
        microbatch=microbatch,
        pipeline=pipeline.size,
        accumulates=schedule is not None or recipe.rl is not None or microbatch * world.data.size < max(train.batches),
        copies=_only_copies(world),
        reduce_each=bool(parallel.reduce_each),
        documents=takes_documents(model),
        parts=parts,
        one_shape=world.device.type == "cuda",
        forgets=forgets,
        head=head,
        float8=float8,
        gathered=gathered,
        ragged=ragged,
        exact=exact,
    )


def check_sequences(model: nn.Module, size: int) -> None:
    """Raise ModelError for what cannot be split over the context axis."""
    if not isinstance(model, Decoder):
        raise ModelError(
            f"parallel.context is {size}, but {type(model).__name__} is none of Headway's decoders, whose attention "
            f"can be split",
            hint="--set parallel.context=1",
        )


def _stages(
    model: nn.Module, layout: ModelLayout, recipe: Recipe, world: World, microbatch: int, cuts: TensorCuts | None
) -> tuple[StageSplit, torch.Size, Missing]:
    """Split the model into this worker's stages; return them, the shape of the stream between them, and what gradients
    of tied parameters are still to be reduced over."""
    pipeline, context = world.axis("pipeline"), world.axis("context")
    _, blocks = blocks_of(model, layout)
    if pipeline.size == 1:
        return StageSplit(model, (LocalStage(0, model, tuple(blocks)),)), torch.Size(()), ()
    counts = stages_of(model, layout, recipe.parallel or Parallel(), pipeline.size)
    check_pipeline(model, layout, counts)
    stream = stream_shape(model, blocks[-1], microbatch, recipe.data.seq // context.size, cuts, world.axis("tensor"))
    stages = split(model, layout, counts, pipeline)
    tied = tie_group(world) if has_ties(model, layout) else None
    shared = frozenset({*stages.lent, *(stages.borrowed or {})})
    return stages, stream, ((shared, tied),) if tied is not None and shared else ()


def _cut_matrices(model: nn.Module, cuts: TensorCuts, world: World, mutations: Collection[str]) -> Missing:
    """Split matrices over the tensor axis; return the parameters whose gradients are partial sums there."""
    tensor = world.axis("tensor")
    assert world.mesh is not None
    assert tensor.group is not None
    partial_sums = cut_tensors(model, cuts, world.mesh["tensor"], tensor)
    if "whole-norm" in mutations:
        partial_sums = frozenset(name for name in partial_sums if "norm" not in name)
    return ((partial_sums, tensor.group),)


def _split_sequences(stages: StageSplit, context: Axis, parallel: Parallel) -> None:
    for stage in stages.stages:
        assert isinstance(stage.module, Decoder)
        split_sequences(stage.module, context, parallel.context_attention or "all-gather", first=stage.first)


def _compile_blocks(stages: StageSplit) -> None:
    for stage in stages.stages:
        for block in stage.blocks:
            block.forward = torch.compile(block.forward)


def _only_copies(world: World) -> bool:
    """Whether the data axes only replicate, without sharding."""
    return world.axis("shard").size == 1


def _shard_parameters(stages: StageSplit, recipe: Recipe, world: World) -> None:
    parallel = recipe.parallel or Parallel()
    keep_weights = bool(parallel.keep_weights) or world.axis("pipeline").size > 1 or _only_copies(world)
    for stage in stages.stages:
        shard(stage.module, stage.blocks, world, recipe.train.dtype, keep_weights)


def _has_whole_weights(world: World) -> bool:
    """Whether this worker has all of each weight."""
    return world.data.size == 1 and world.axis("tensor").size == 1


def _float8_weights(model: nn.Module, recipe: Recipe, world: World) -> tuple[Float8Model | None, Float8Gather | None]:
    """Return a model's products in float8, and its weights that are gathered in float8, if the recipe has any."""
    fp8 = recipe.train.fp8
    if fp8 is None:
        return None, None
    float8 = Float8Model(model, world.device, holds=_has_whole_weights(world))
    if not fp8.gather or fp8.scaling != "tensorwise" or _only_copies(world):
        return float8, None
    return float8, Float8Gather(model, float8, world.axis("shard"))


def stream_shape(
    model: nn.Module, block: nn.Module, rows: int, seq: int, cuts: TensorCuts | None, tensor: Axis
) -> torch.Size:
    """Return the shape of a microbatch's residual stream, from a pass of the plain model on the meta device."""
    seen = list[torch.Size]()

    def see(_: nn.Module, __: Any, out: Any) -> None:
        if not isinstance(out, Tensor):
            raise ModelError(
                f"a block returns a {type(out).__name__}; a pipeline needs a single tensor",
                hint="blocks must take the residual stream first and return only it",
            )
        seen.append(out.shape)

    hook = block.register_forward_hook(see)
    with torch.no_grad():
        model(torch.empty((rows, seq), dtype=torch.int64, device="meta"))
    hook.remove()
    shape = list(seen[0])
    if cuts is not None and cuts.by_sequence:
        shape[SEQUENCE] //= tensor.size
    return torch.Size(shape)


def _shared_vocabulary(model: nn.Module, cuts: TensorCuts) -> int | None:
    """Return the vocabulary size of the whole head, where a module has a share of it."""
    modules = dict(model.named_modules())
    heads = [modules[name] for name, cut in cuts.cuts.items() if cut == "vocabulary" and name in modules]
    sizes = [head.weight.shape[0] for head in heads if isinstance(head, nn.Linear)]
    return sizes[0] if sizes else None


def _others_buffers(model: nn.Module, layout: ModelLayout, pipeline: Axis) -> dict[str, str]:
    """Return buffers outside of pipeline stages: every stage has them, and the first saves them."""
    if pipeline.rank == 0:
        return {}
    cut = (*named(model, (*layout.first, *layout.last)), blocks_of(model, layout)[0])
    return {name: name for name, _ in model.named_buffers() if not name.startswith(tuple(f"{part}." for part in cut))}


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate a model's memory; tied parameters stay tied."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
