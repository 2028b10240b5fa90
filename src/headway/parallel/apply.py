"""Parallelizes a plain model from the outside, in one visible order.

    fp8        linear layers, as the recipe says                    models/fp8.py, fp8_gather.py
    split      this worker's stages of the model                    pipeline.py
    split      each matrix over the tensor axis                     tensor.py, vocab_parallel.py
    share      experts over their axis                              expert.py
    split      sequences over the context axis                      context.py
    recompute  activations of blocks                                recompute.py
    compile    each block
    shard      parameters over the data axes                        shard.py

A compiled block contains its recomputation, and gathers of weights stay outside both. All of this happens on the meta
device: memory is allocated last, for this worker's part alone. Parameter names stay those of the plain model.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.errors import ModelError
from headway.models import Decoder
from headway.models.diffusion import Conditioning, DiffusionTransformer, TextStates
from headway.models.experts import set_loss_scale
from headway.models.fp8 import Float8Model, make_fp8
from headway.parallel.collectives import whole
from headway.parallel.context import SequenceParts, split_sequences
from headway.parallel.documents import keeps_apart, make_places
from headway.parallel.expert import share_experts
from headway.parallel.fp8_gather import Float8Gather
from headway.parallel.gradients import Missing
from headway.parallel.layout import (
    TensorCuts,
    blocks_of,
    check_pipeline,
    cuts_of,
    explain_shapes,
    layout_of,
    named,
    stages_of,
)
from headway.parallel.objective import (
    IMAGE,
    LABEL,
    TEACHER_IDS,
    TEXT,
    TEXT_MASK,
    TIME,
    DeviceBatch,
    DistillationObjective,
    MeasureHead,
    Objective,
    PolicyObjective,
    SumScale,
    TeacherTargets,
    loss_of,
)
from headway.parallel.pipeline import LocalStage, PipelineRunner, StageSplit, has_ties, split, tie_group
from headway.parallel.recompute import recompute
from headway.parallel.shard import forget_copies, hold_gradients, release_weights, shard
from headway.parallel.tensor import SEQUENCE, cut_tensors
from headway.parallel.vocab_parallel import (
    LogitOptions,
    cross_entropy_of_logits,
    logprobs_of_logits,
    shared_logprobs,
    shared_logprobs_among,
    shared_logprobs_and_entropy,
    shared_loss,
    shared_top_k,
)
from headway.parallel.world import Axis, World
from headway.recipe import ModelLayout, Parallel, Recipe


@dataclass(frozen=True)
class ParallelModel:
    """One worker's part of a model."""

    model: nn.Module
    """This worker's modules, by the names of the plain model."""
    stages: tuple[LocalStage, ...]
    schedule: PipelineRunner | None
    """The pipeline schedule, if any."""
    missing: Missing
    """Gradient reductions left after backward passes."""
    borrowed: Mapping[str, str]
    """Parameters that another stage owns: local name to owner's name."""
    names: frozenset[str]
    """Names of all tensors of the plain model."""
    rows: int
    """Rows per step of this worker."""
    microbatch: int
    """Rows per forward pass."""
    accumulates: bool
    """Whether a step accumulates gradients over several passes."""
    pipeline: int
    """Workers that layers are split over."""
    copies: bool
    """Whether the data axes only replicate, without sharding."""
    reduce_each: bool = False
    """Whether shards reduce gradients in every microbatch."""
    documents: bool = True
    """Whether attention is restricted to documents."""
    parts: SequenceParts | None = None
    """Which parts of its sequences this worker takes; None for all."""
    one_shape: bool = False
    """Whether a step whose number of rows varies is padded to whole microbatches: a GPU's kernels are compiled for one
    shape, and for every other one anew."""
    forgets: bool = False
    """Deliberate bug: gradients are not reduced over replicas."""
    head: MeasureHead | None = None
    """The objective; None for the plain summed loss."""
    teach: Callable[[DeviceBatch], DeviceBatch] | None = None
    """Adds a teacher's columns to rows, if it runs beside the model."""
    float8: Float8Model | None = None
    """Its float8 products, if the recipe has any."""
    gathered: Float8Gather | None = None
    """Its weights that are gathered in float8, if any."""
    ragged: bool = False
    """Whether documents without a window are kept apart by cuDNN, where the host knows how many there are."""

    def passes(self, batch: DeviceBatch, scale: SumScale) -> Tensor:
        """Run forward and backward over all rows, by microbatches; gradients are reduced in the last one, or in each.

        Return the objective's scaled sums, or this worker's part of them: a scalar for the plain summed loss.
        """
        set_loss_scale(self.model, scale.tokens)
        if self.ragged:
            make_places(self.model, batch.document_counts, self.microbatch)
        self.refresh()
        if self.schedule is not None:
            return self.schedule.step(self._taken(batch), scale)
        total, rows = torch.zeros(self._shape, device=batch.inputs.device), len(batch.inputs)
        for low in range(0, rows, self.microbatch):
            high = min(low + self.microbatch, rows)
            hold_gradients(self.model, last=high == rows, copies=self.copies, reduce_each=self.reduce_each)
            if self.forgets:
                forget_copies(self.model)
            values = scale.of(self._sums(batch.rows(low, high)))
            loss_of(values, self.terms).backward()
            total += values.detach()
        return total

    def evaluate(self, batch: DeviceBatch) -> Tensor:
        """Return the objective's sums, or this worker's part of them: a scalar for the plain summed loss."""
        if self.ragged:
            rows = self.microbatch if self.schedule is not None else len(batch.inputs)
            make_places(self.model, batch.document_counts, rows)
        self.refresh()
        return self.schedule.evaluate(self._taken(batch)) if self.schedule is not None else self._sums(batch)

    def refresh(self) -> None:
        """Cast weights to float8, where the recipe says so: once for all microbatches."""
        if self.float8 is not None:
            self.float8.refresh()
        if self.gathered is not None:
            self.gathered.refresh()

    def document_logprobs(self, batch: DeviceBatch) -> Tensor | None:
        """Return the log-probabilities of the documents of all rows, [rows, documents]; None before the last stage."""
        assert self.head is not None, "only an objective of log-probabilities has them"
        with self.head.collecting(by_document=True) as collected:
            self.evaluate(batch)
        return torch.cat(collected) if collected else None

    @torch.no_grad()
    def token_logprobs(self, batch: DeviceBatch) -> Tensor | None:
        """Return the log-probabilities of the labels of any number of rows, [rows, seq], in the passes of a step; None
        before the last stage."""
        assert self.head is not None, "only an objective of log-probabilities has them"
        rows = len(batch.inputs) if self.schedule is not None else self.microbatch
        trains = self.model.training
        self.model.eval()  # adapters drop nothing of what is only scored
        with self.head.collecting(by_document=False) as collected:
            for low in range(0, len(batch.inputs), rows):
                self.evaluate(batch.rows(low, min(low + rows, len(batch.inputs))))
        self.rest()
        self.model.train(trains)
        return torch.cat(collected) if collected else None

    def _sums(self, batch: DeviceBatch) -> Tensor:
        batch = self._taken(batch)
        sums: Tensor = self.model(batch.inputs, batch.labels, **_named(batch.documents), **batch.columns)
        return sums

    def _taken(self, batch: DeviceBatch) -> DeviceBatch:
        """Return what of a batch the model and the objective take."""
        batch = batch if self.teach is None else self.teach(batch)
        if self.parts is not None:  # documents stay whole: keys are those of all parts
            # labels, too, where an objective measures whole sequences
            labels = self.parts.take(batch.labels) if self.head is None else batch.labels
            batch = replace(batch, inputs=self.parts.take(batch.inputs), labels=labels)
        return replace(
            batch,
            documents=batch.documents if self.documents or self.head is not None else None,
            columns=batch.columns if self.head is not None else {},
        )

    @property
    def terms(self) -> int:
        """How many of the sums make up the loss."""
        return 1 if self.head is None else self.head.objective.terms

    @property
    def _shape(self) -> tuple[int, ...]:
        return () if self.head is None else (len(self.head.objective.names),)

    def evaluation_rows(self, most: int) -> int:
        """Return the rows to evaluate at once, of at most `most`: a pipeline always takes a step's."""
        return self.rows if self.schedule is not None else min(self.microbatch, most)

    @property
    def rows_multiple(self) -> int:
        """What the rows of a step's passes, whose number may vary, are a multiple of."""
        if self.schedule is None:
            return self.microbatch if self.one_shape else 1
        return self.microbatch * self.pipeline

    def rest(self) -> None:
        """Free weights gathered for a forward pass without a backward pass."""
        for stage in self.stages:
            release_weights(stage.module)


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
    copies = world.axis("shard").size == 1
    missing: Missing = ()

    ragged = keeps_apart(model, recipe, world.device, microbatch)

    # products in float8
    holds = world.data.size == 1 and tensor.size == 1
    if train.fp8 is not None:
        make_fp8(model, recipe.model, train.fp8, world.device, holds=holds)

    # this worker's stages
    stages, stream, tied = _stages(model, layout, recipe, world, microbatch, cuts)
    missing += tied

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
        for stage in stages.stages:
            assert isinstance(stage.module, Decoder)
            split_sequences(stage.module, context, parallel.context_attention or "all-gather", first=stage.first)

    for stage in stages.stages:
        _set_forward(stage, recipe, world, cuts, vocabulary, head, parts)

    # activations, then kernels
    recompute([block for stage in stages.stages for block in stage.blocks], train.recompute, train.recompute_blocks)
    if recipe.compiles(world.device.type):
        _compile_blocks(stages)

    # parameters, over the data axes
    if world.fsdp_size > 1:
        keep = bool(parallel.keep_weights) or pipeline.size > 1 or copies
        for stage in stages.stages:
            shard(stage.module, stage.blocks, world, train.dtype, keep)

    if "no-gradient-reduction" in mutations:
        missing = ()

    # memory, last
    for stage in stages.stages:
        _allocate(stage.module, world.device)
    float8 = gathered = None
    if train.fp8 is not None:
        float8 = Float8Model(stages.model, world.device, holds=holds)
        if train.fp8.gather and train.fp8.scaling == "tensorwise" and not copies:
            gathered = Float8Gather(stages.model, float8, world.axis("shard"))
    schedule = None
    if pipeline.size > 1:
        wrong = "pipeline-loss-scale" in mutations
        schedule = PipelineRunner(stages, world, parallel, stream, _stream_dtype(recipe, world), head, divides=wrong)
    return ParallelModel(
        model=stages.model,
        stages=stages.stages,
        schedule=schedule,
        missing=missing,
        borrowed={**(stages.borrowed or {}), **_others_buffers(stages.model, layout, pipeline)},
        names=names,
        rows=rows,
        microbatch=microbatch,
        pipeline=pipeline.size,
        accumulates=schedule is not None or recipe.rl is not None or microbatch * world.data.size < max(train.batches),
        copies=copies,
        reduce_each=bool(parallel.reduce_each),
        documents=_takes_documents(model),
        parts=parts,
        one_shape=world.device.type == "cuda",
        forgets="no-gradient-reduction" in mutations,
        head=head,
        float8=float8,
        gathered=gathered,
        ragged=ragged,
    )


def check_sequences(model: nn.Module, size: int) -> None:
    """Raise ModelError for what cannot be split over the context axis."""
    if not isinstance(model, Decoder):
        raise ModelError(
            f"parallel.context is {size}, but {type(model).__name__} is none of Headway's decoders, whose attention "
            f"can be split",
            hint="--set parallel.context=1",
        )


def _takes_documents(model: nn.Module) -> bool:
    """Whether a model supports document masking: Headway's, and classes whose forward takes `documents`."""
    return isinstance(model, Decoder) or "documents" in inspect.signature(type(model).forward).parameters


def _named(documents: Tensor | None) -> dict[str, Tensor]:
    return {} if documents is None else {"documents": documents}


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


def _compile_blocks(stages: StageSplit) -> None:
    for stage in stages.stages:
        for block in stage.blocks:
            block.forward = torch.compile(block.forward)


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


def _stream_dtype(recipe: Recipe, world: World) -> torch.dtype:
    """Return the dtype of the stream between stages: FSDP has that of products, autocast float32."""
    return torch.bfloat16 if recipe.train.dtype == "bfloat16" and world.fsdp_size > 1 else torch.float32


def _set_forward(
    stage: LocalStage,
    recipe: Recipe,
    world: World,
    cuts: TensorCuts | None,
    vocabulary: int | None,
    head: MeasureHead | None,
    parts: SequenceParts | None,
) -> None:
    """Run a stage in the recipe's precision; it returns the summed loss, the objective's sums, or the stream."""
    model, tensor = stage.module, world.axis("tensor")
    documents = _takes_documents(model)
    if isinstance(model, Decoder):
        forward = model.forward if stage.last else model.hidden
        if stage.last and head is not None:
            group = tensor.group if cuts is not None and cuts.by_sequence else None
            forward = partial(_measured, head, _scores_of(model, head.objective, group), documents, parts)
        model.loss.z_loss = recipe.train.z_loss
        if cuts is not None:
            shape = LogitOptions(model.loss.softcap, recipe.train.z_loss)
            model.loss.forward = partial(shared_loss, tensor, cuts.by_sequence, shape)
            model.loss.logprobs = partial(  # type: ignore[method-assign]
                shared_logprobs, tensor, cuts.by_sequence, model.loss.softcap
            )
            model.loss.logprobs_and_entropy = partial(  # type: ignore[method-assign]
                shared_logprobs_and_entropy, tensor, cuts.by_sequence, model.loss.softcap
            )
            model.loss.logprobs_among = partial(  # type: ignore[method-assign]
                shared_logprobs_among, tensor, cuts.by_sequence, model.loss.softcap
            )
            model.loss.top_k = partial(  # type: ignore[method-assign]
                shared_top_k, tensor, cuts.by_sequence, model.loss.softcap
            )
            if not stage.first:
                model.context = WholeSequence(model.context, tensor.size)
    elif isinstance(model, DiffusionTransformer):
        forward = partial(_denoised, head, model.forward)
    else:
        forward = partial(_of_tokens, model.forward)
        if stage.last and head is None:
            forward = partial(_loss_of_logits, model.forward, tensor, vocabulary, recipe.train.z_loss)
        elif stage.last and head is not None:
            scores = partial(_logprobs_of_model, model.forward, tensor, vocabulary)
            forward = partial(_measured, head, scores, documents, None)
        if cuts is not None:
            forward = partial(_explained, forward, model, cuts)
    # FSDP gathers in the right precision; without data axes, autocast converts higher-precision weights here.
    casts = recipe.train.dtype == "bfloat16" and recipe.train.weights == "float32" and world.fsdp_size == 1
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
    **columns: Tensor,
) -> Tensor:
    with context():
        out: Tensor = plain(x, labels, documents, **columns) if last else plain(x, documents).to(dtype)
    return out


def _measured(
    head: MeasureHead,
    scores_of: Callable[[DeviceBatch, Tensor | None], Any],
    takes_documents: bool,
    parts: SequenceParts | None,
    x: Tensor,
    labels: Tensor,
    documents: Tensor | None = None,
    **columns: Tensor,
) -> Tensor:
    """An objective of log-probabilities; `x` may be the stream.

    Workers with `parts` of sequences all measure whole ones, and the first of them reports the sums.
    """
    batch = DeviceBatch(x, labels, documents, columns)
    seen = documents if takes_documents else None
    if parts is None:
        return head(scores_of(batch, seen), batch)
    of_tokens = {TEACHER_IDS: parts.take(columns[TEACHER_IDS])} if TEACHER_IDS in columns else {}
    scores = scores_of(replace(batch, labels=parts.take(labels), columns=of_tokens), seen)
    whole_scores = parts.whole(scores) if isinstance(scores, Tensor) else tuple(map(parts.whole, scores))
    sums = head(whole_scores, batch)
    return sums if parts.axis.rank == 0 else sums - sums.detach()


def _denoised(
    head: MeasureHead | None,
    plain: Any,
    x: Tensor,
    targets: Tensor | None,
    _: None = None,
    **columns: Tensor,
) -> Tensor:
    """A diffusion model on noised samples; without targets, what it predicts."""
    text = TextStates(columns[TEXT], columns[TEXT_MASK]) if TEXT in columns else None
    conditioning = Conditioning(labels_B=columns.get(LABEL), text=text, latents_BCTYX=columns.get(IMAGE))
    predicted: Tensor = plain(x, columns[TIME], conditioning)
    if targets is None:
        return predicted
    assert head is not None, "diffusion has an objective"
    return head(predicted, DeviceBatch(x, targets, None, columns))


def _scores_of(
    model: Decoder, objective: Objective | TeacherTargets, group: dist.ProcessGroup | None
) -> Callable[[DeviceBatch, Tensor | None], Tensor | tuple[Tensor, Tensor]]:
    """Return the function of rows whose result an objective measures; attention is restricted to the documents.

    The stream is split by sequence over the workers of `group`, if any.
    """
    if model.score is not None:
        if group is None:
            return lambda batch, documents: model.rewards(batch.inputs, documents)
        return lambda batch, documents: whole(model.rewards(batch.inputs, documents), SEQUENCE, group)
    if isinstance(objective, TeacherTargets):
        count, temperature = objective.count, objective.temperature
        return lambda batch, documents: model.top_k(batch.inputs, count, temperature, documents)
    if isinstance(objective, DistillationObjective):
        warmth = objective.temperature
        return lambda batch, documents: model.logprobs_among(
            batch.inputs, batch.labels, batch.columns[TEACHER_IDS], warmth, documents
        )
    if isinstance(objective, PolicyObjective):
        scores = model.logprobs_and_entropy if objective.wants_entropy else model.logprobs
        at = objective.temperature
        return lambda batch, documents: scores(batch.inputs, batch.labels, documents, at)
    return lambda batch, documents: model.logprobs(batch.inputs, batch.labels, documents)


def _logprobs_of_model(
    plain: Any, tensor: Axis, vocabulary: int | None, batch: DeviceBatch, documents: Tensor | None
) -> Tensor:
    """Wraps a custom class, which returns logits."""
    return logprobs_of_logits(_of_tokens(plain, batch.inputs, documents), batch.labels, tensor, vocabulary)


def _explained(plain: Any, model: nn.Module, cuts: TensorCuts, *inputs: Any, **columns: Tensor) -> Tensor:
    """A custom class on a tensor axis: an incomplete layout fails where a split meets what is not."""
    try:
        out: Tensor = plain(*inputs, **columns)
    except RuntimeError as error:
        explained = explain_shapes(model, cuts, error)
        if explained is None:
            raise
        raise explained from error
    return out


def _of_tokens(plain: Any, x: Tensor, documents: Tensor | None = None) -> Tensor:
    """A custom class, which may take documents."""
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
    """Wraps a custom class, which returns logits, with the loss."""
    logits = _of_tokens(plain, x, documents)
    return logits if labels is None else cross_entropy_of_logits(logits, labels, tensor, vocabulary, z_loss)


class WholeSequence(nn.Module):
    """Gives the context builder the full sequence length, where the stream is split by sequence."""

    def __init__(self, context: nn.Module, shares: int) -> None:
        super().__init__()
        self.context, self.shares = context, shares

    def forward(self, like: Tensor, documents: Tensor | None = None, cache: None = None) -> Any:
        """Build the context of all positions."""
        full_sequence = like.new_empty(1).expand(like.shape[0], like.shape[SEQUENCE] * self.shares)
        return self.context(full_sequence, documents, cache)


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
