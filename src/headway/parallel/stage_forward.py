"""What the forward pass of a stage computes: the summed loss, an objective's sums, or the residual stream.

A plain model's `forward` stays as it is; `set_forward` puts what the recipe asks for around it: autocast, the loss of a
head that is split over the tensor axis, or an objective instead of the loss.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.models import Decoder
from headway.models.diffusion import Conditioning, DiffusionTransformer, TextStates
from headway.parallel.collectives import whole
from headway.parallel.context import SequenceParts
from headway.parallel.documents import named_documents, takes_documents
from headway.parallel.layout import TensorCuts, explain_shapes
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
    TeacherTargets,
)
from headway.parallel.pipeline import LocalStage
from headway.parallel.tensor import SEQUENCE
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
from headway.recipe import Recipe


@dataclass(frozen=True)
class ForwardSplit:
    """How the forward passes of a model's stages are split, and what they measure."""

    head: MeasureHead | None = None
    """The objective; None for the plain summed loss."""
    cuts: TensorCuts | None = None
    """How matrices are split over the tensor axis, if they are."""
    vocabulary: int | None = None
    """Tokens of the whole vocabulary, where a worker has a share of the head."""
    parts: SequenceParts | None = None
    """Which parts of its sequences this worker takes; None for all."""


def stream_dtype(recipe: Recipe, world: World) -> torch.dtype:
    """Return the dtype of the stream between stages: FSDP has that of products, autocast float32."""
    return torch.bfloat16 if recipe.train.dtype == "bfloat16" and world.fsdp_size > 1 else torch.float32


def set_forward(stage: LocalStage, recipe: Recipe, world: World, split: ForwardSplit) -> None:
    """Run a stage in the recipe's precision; it returns the summed loss, the objective's sums, or the stream."""
    model, head = stage.module, split.head
    if isinstance(model, Decoder):
        forward = _decoder_forward(model, stage, recipe, world.axis("tensor"), split)
    elif isinstance(model, DiffusionTransformer):
        forward = partial(_denoised, head, model.forward)
    else:
        forward = _custom_forward(model, stage, recipe, world.axis("tensor"), split)
    # FSDP gathers in the right precision; without data axes, autocast converts higher-precision weights here.
    casts = recipe.train.dtype == "bfloat16" and recipe.train.weights == "float32" and world.fsdp_size == 1
    context = partial(torch.autocast, world.device.type, dtype=torch.bfloat16, enabled=casts)
    model.forward = partial(_forward, forward, context, stage.last, stream_dtype(recipe, world))


def _decoder_forward(model: Decoder, stage: LocalStage, recipe: Recipe, tensor: Axis, split: ForwardSplit) -> Any:
    """Return the forward pass of a stage of one of Headway's decoders; its loss is shared over the tensor axis."""
    forward: Any = model.forward if stage.last else model.hidden
    by_sequence = split.cuts is not None and split.cuts.by_sequence
    if stage.last and split.head is not None:
        scores = _scores_of(model, split.head.objective, tensor.group if by_sequence else None)
        forward = partial(_measured, split.head, scores, True, split.parts)
    model.loss.z_loss = recipe.train.z_loss
    if split.cuts is not None:
        _share_loss(model, tensor, by_sequence, recipe.train.z_loss)
        if not stage.first:
            model.context = WholeSequence(model.context, tensor.size)
    return forward


def _share_loss(model: Decoder, tensor: Axis, by_sequence: bool, z_loss: float) -> None:
    """Compute the loss, and all that is like it, with a head that is split over the tensor axis."""
    loss, softcap = model.loss, model.loss.softcap
    loss.forward = partial(  # type: ignore[method-assign]
        shared_loss, tensor, by_sequence, LogitOptions(softcap, z_loss)
    )
    loss.logprobs = partial(shared_logprobs, tensor, by_sequence, softcap)  # type: ignore[method-assign]
    loss.logprobs_and_entropy = partial(  # type: ignore[method-assign]
        shared_logprobs_and_entropy, tensor, by_sequence, softcap
    )
    loss.logprobs_among = partial(shared_logprobs_among, tensor, by_sequence, softcap)  # type: ignore[method-assign]
    loss.top_k = partial(shared_top_k, tensor, by_sequence, softcap)  # type: ignore[method-assign]


def _custom_forward(model: nn.Module, stage: LocalStage, recipe: Recipe, tensor: Axis, split: ForwardSplit) -> Any:
    """Return the forward pass of a stage of a class of the user's own, which returns logits."""
    forward = partial(_of_tokens, model.forward)
    if stage.last and split.head is None:
        forward = partial(_loss_of_logits, model.forward, tensor, split.vocabulary, recipe.train.z_loss)
    elif stage.last and split.head is not None:
        scores = partial(_logprobs_of_model, model.forward, tensor, split.vocabulary)
        forward = partial(_measured, split.head, scores, takes_documents(model), None)
    if split.cuts is not None:
        forward = partial(_explained, forward, model, split.cuts)
    return forward


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
    with_documents: bool,
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
    seen = documents if with_documents else None
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
    out: Tensor = plain(x, **named_documents(documents))
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
