"""How a plain model is made to run on several devices: from outside, in one visible order.

    split      this worker's stages of the model                    pipeline.py
    cut        each matrix over the tensor axis                     tensor.py, vocab_parallel.py
    recompute  activations that blocks make again                   recompute.py
    compile    each block
    shard      parameters over the data axes                        shard.py

A compiled block contains its recomputation, and a gather of weights stays outside both. All of it happens on the meta
device: memory comes last, for this worker's part alone. Parameter names stay those of the plain model.
"""

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import ModelError
from headway.models import Decoder
from headway.models.experts import set_loss_scale
from headway.parallel.gradients import Missing
from headway.parallel.layout import TensorCuts, blocks_of, check_pipeline, cuts_of, layout_of, named, stages_of
from headway.parallel.pipeline import LocalStage, PipelineRunner, StageSplit, has_ties, split, tie_group
from headway.parallel.recompute import recompute
from headway.parallel.shard import forget_copies, hold_gradients, release_weights, shard
from headway.parallel.tensor import SEQUENCE, cut_tensors
from headway.parallel.vocab_parallel import LogitOptions, cross_entropy_of_logits, shared_loss
from headway.parallel.world import Axis, World
from headway.recipe import ModelLayout, Parallel, Recipe

__all__ = ["ParallelModel", "parallelize_model"]


@dataclass(frozen=True)
class ParallelModel:
    """A model as one worker holds it."""

    model: nn.Module
    """This worker's part, by the names of the plain model."""
    stages: tuple[LocalStage, ...]
    schedule: PipelineRunner | None
    """The order of a pipeline; None where there is none."""
    missing: Missing
    """Sums of gradients that backward passes leave open."""
    borrowed: Mapping[str, str]
    """Parameters that another stage owns: name here to name there."""
    names: frozenset[str]
    """Of all tensors of the plain model, here or elsewhere."""
    rows: int
    """Of one step here."""
    microbatch: int
    """Rows in one pass."""
    accumulates: bool
    """Whether gradients of several passes add up in a step."""
    copies: bool
    """Whether the data axes hold copies only, and no shards."""
    reduce_each: bool = False
    """Whether shards add gradients up in every microbatch."""
    documents: bool = True
    """Whether the model keeps documents apart."""
    forgets: bool = False
    """A mistake on purpose: gradients are not added up over copies."""

    def passes(self, inputs: Tensor, labels: Tensor, scale: float, documents: Tensor | None = None) -> Tensor:
        """Forward and backward over all rows, a microbatch at a time; gradients travel in the last one, or in each.

        `documents` number the documents that rows are packed of, for models that keep them apart. Returns the summed
        loss times `scale`, or what this worker has of it.
        """
        documents = documents if self.documents else None
        set_loss_scale(self.model, scale)
        if self.schedule is not None:
            return self.schedule.step(inputs, labels, scale, documents)
        total = torch.zeros((), device=inputs.device)
        rows = len(inputs)
        for low in range(0, rows, self.microbatch):
            high = min(low + self.microbatch, rows)
            hold_gradients(self.model, last=high == rows, copies=self.copies, reduce_each=self.reduce_each)
            if self.forgets:
                forget_copies(self.model)
            apart = None if documents is None else documents[low:high]
            loss = self.model(inputs[low:high], labels[low:high], **_named(apart)) * scale
            loss.backward()
            total += loss.detach()
        return total

    def evaluate(self, inputs: Tensor, labels: Tensor, documents: Tensor | None = None) -> Tensor:
        """The summed loss, or what this worker has of it."""
        documents = documents if self.documents else None
        if self.schedule is not None:
            return self.schedule.evaluate(inputs, labels, documents)
        loss: Tensor = self.model(inputs, labels, **_named(documents))
        return loss

    def evaluation_rows(self, most: int) -> int:
        """Rows to evaluate at once, of `most` that there are: a pipeline takes a step's, whatever there is."""
        return self.rows if self.schedule is not None else min(self.microbatch, most)

    def rest(self) -> None:
        """Give back weights that were gathered for a forward pass that no backward pass follows."""
        for stage in self.stages:
            release_weights(stage.module)


def parallelize_model(model: nn.Module, recipe: Recipe, world: World, mutations: Collection[str] = ()) -> ParallelModel:
    """Put a recipe's choices onto a model that lies on the meta device; its memory is this worker's part alone.

    `mutations` are mistakes made on purpose, by which `headway check` is tested.
    """
    train, parallel = recipe.train, recipe.parallel or Parallel()
    layout = layout_of(model, recipe.model.layout)
    tensor, pipeline = world.axis("tensor"), world.axis("pipeline")
    names = frozenset(name for name, _ in (*model.named_parameters(), *model.named_buffers()))
    rows = train.batch // world.data.size
    microbatch = min(train.microbatch or rows, rows)
    cuts = cuts_of(model, layout, tensor.size) if tensor.size > 1 else None
    copies = world.axis("shard").size == 1
    missing: Missing = ()

    # this worker's stages
    _, blocks = blocks_of(model, layout)
    stages = StageSplit(model, (LocalStage(0, model, tuple(blocks)),))
    stream = torch.Size(())
    if pipeline.size > 1:
        counts = stages_of(model, layout, parallel, pipeline.size)
        check_pipeline(model, layout, counts)
        stream = stream_shape(model, blocks[-1], microbatch, recipe.data.seq, cuts, tensor)
        stages = split(model, layout, counts, pipeline)
        tied = tie_group(world) if has_ties(model, layout) else None
        shared = frozenset({*stages.lent, *(stages.borrowed or {})})
        missing += ((shared, tied),) if tied is not None and shared else ()

    # each matrix, over the tensor axis
    vocabulary = None
    if cuts is not None:
        assert world.mesh is not None
        assert tensor.group is not None
        partial_sums = cut_tensors(stages.model, cuts, world.mesh["tensor"], tensor)
        if "whole-norm" in mutations:
            partial_sums = frozenset(name for name in partial_sums if "norm" not in name)
        missing += ((partial_sums, tensor.group),)
        vocabulary = _shared_vocabulary(stages.model, cuts)

    for stage in stages.stages:
        _set_forward(stage, recipe, world, cuts, vocabulary)

    # activations, then kernels
    recompute([block for stage in stages.stages for block in stage.blocks], train.recompute, train.recompute_blocks)
    if recipe.compiles(world.device.type):
        for stage in stages.stages:
            for block in stage.blocks:
                block.forward = torch.compile(block.forward)

    # parameters, over the data axes
    if world.data.size > 1:
        keep = bool(parallel.keep_weights) or pipeline.size > 1 or copies
        for stage in stages.stages:
            shard(stage.module, stage.blocks, world, train.dtype, keep)

    if "no-gradient-reduction" in mutations:
        missing = ()

    # memory, last
    for stage in stages.stages:
        _allocate(stage.module, world.device)
    schedule = None
    if pipeline.size > 1:
        wrong = "pipeline-loss-scale" in mutations
        schedule = PipelineRunner(stages, world, parallel, stream, _stream_dtype(recipe, world), divides=wrong)
    return ParallelModel(
        model=stages.model,
        stages=stages.stages,
        schedule=schedule,
        missing=missing,
        borrowed={**(stages.borrowed or {}), **_others_buffers(stages.model, layout, pipeline)},
        names=names,
        rows=rows,
        microbatch=microbatch,
        accumulates=schedule is not None or microbatch * world.data.size < max(train.batches),
        copies=copies,
        reduce_each=bool(parallel.reduce_each),
        documents=_takes_documents(model),
        forgets="no-gradient-reduction" in mutations,
    )


def _takes_documents(model: nn.Module) -> bool:
    """Whether a model can be told which document a token is of: ours, and classes whose forward takes `documents`."""
    return isinstance(model, Decoder) or "documents" in inspect.signature(type(model).forward).parameters


def _named(documents: Tensor | None) -> dict[str, Tensor]:
    return {} if documents is None else {"documents": documents}


def stream_shape(
    model: nn.Module, block: nn.Module, rows: int, seq: int, cuts: TensorCuts | None, tensor: Axis
) -> torch.Size:
    """The shape of what stages pass on, of one microbatch: seen in a pass of the plain model on the meta device, which
    computes nothing."""
    seen = list[torch.Size]()

    def see(_: nn.Module, __: Any, out: Any) -> None:
        if not isinstance(out, Tensor):
            raise ModelError(
                f"a block returns a {type(out).__name__}, and a pipeline passes one tensor on",
                hint="blocks take the stream first and return it alone",
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


def _stream_dtype(recipe: Recipe, world: World) -> torch.dtype:
    """Of what stages pass on: FSDP keeps the stream in the precision of products, autocast in float32."""
    return torch.bfloat16 if recipe.train.dtype == "bfloat16" and world.data.size > 1 else torch.float32


def _set_forward(
    stage: LocalStage, recipe: Recipe, world: World, cuts: TensorCuts | None, vocabulary: int | None
) -> None:
    """Have a stage make a summed loss of tokens and labels, or pass the stream on, in the recipe's precision."""
    model, tensor = stage.module, world.axis("tensor")
    if isinstance(model, Decoder):
        forward = model.forward if stage.last else model.hidden
        model.loss.z_loss = recipe.train.z_loss
        if cuts is not None:
            shape = LogitOptions(model.loss.softcap, recipe.train.z_loss)
            model.loss.forward = partial(shared_loss, tensor, cuts.by_sequence, shape)
            if not stage.first:
                model.context = WholeSequence(model.context, tensor.size)
    else:
        forward = partial(_of_tokens, model.forward)
        if stage.last:
            forward = partial(_loss_of_logits, model.forward, tensor, vocabulary, recipe.train.z_loss)
    # Shards are gathered in the right precision already; who has no data axis casts here, if weights are kept in more.
    casts = recipe.train.dtype == "bfloat16" and recipe.train.weights == "float32" and world.data.size == 1
    context = partial(torch.autocast, world.device.type, dtype=torch.bfloat16, enabled=casts)
    dtype = _stream_dtype(recipe, world)
    model.forward = partial(_forward, forward, context, stage.last, dtype)


def _forward(
    plain: Any,
    context: Any,
    last: bool,
    dtype: torch.dtype,
    x: Tensor,
    labels: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    with context():
        out: Tensor = plain(x, labels, documents) if last else plain(x, documents).to(dtype)
    return out


def _of_tokens(plain: Any, x: Tensor, documents: Tensor | None = None) -> Tensor:
    """A class of the user's own, which may take documents."""
    out: Tensor = plain(x, **_named(documents))
    return out


def _loss_of_logits(
    plain: Any,
    tensor: Axis,
    vocabulary: int | None,
    z_loss: float,
    x: Tensor,
    labels: Tensor | None,
    documents: Tensor | None = None,
) -> Tensor:
    """What a class of the user's own is taken for: logits, whose loss is made here."""
    logits = _of_tokens(plain, x, documents)
    return logits if labels is None else cross_entropy_of_logits(logits, labels, tensor, vocabulary, z_loss)


class WholeSequence(nn.Module):
    """Tells what makes a batch's context how long sequences are, where the stream it is shown is a share of them."""

    def __init__(self, context: nn.Module, shares: int) -> None:
        super().__init__()
        self.context, self.shares = context, shares

    def forward(self, like: Tensor, documents: Tensor | None = None, first: int = 0) -> Any:
        """That of all positions."""
        whole = like.new_empty(1).expand(like.shape[0], like.shape[SEQUENCE] * self.shares)
        return self.context(whole, documents, first)


def _shared_vocabulary(model: nn.Module, cuts: TensorCuts) -> int | None:
    """Rows of the whole head, where a module that makes logits has a share of them."""
    modules = dict(model.named_modules())
    heads = [modules[name] for name, cut in cuts.cuts.items() if cut == "vocabulary" and name in modules]
    sizes = [head.weight.shape[0] for head in heads if isinstance(head, nn.Linear)]
    return sizes[0] if sizes else None


def _others_buffers(model: nn.Module, layout: ModelLayout, pipeline: Axis) -> dict[str, str]:
    """Buffers outside of what a pipeline cuts: every stage has them, and the first one writes them."""
    if pipeline.rank == 0:
        return {}
    cut = (*named(model, (*layout.first, *layout.last)), blocks_of(model, layout)[0])
    return {name: name for name, _ in model.named_buffers() if not name.startswith(tuple(f"{part}." for part in cut))}


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Give a model memory; tied parameters stay tied."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
