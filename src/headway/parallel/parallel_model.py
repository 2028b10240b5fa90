"""One worker's part of a model, and its passes: forward and backward by microbatches, evaluation, and scoring."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from headway.models.decoder import ContextBuilder
from headway.models.experts import set_loss_scale
from headway.models.fp8 import Float8Model
from headway.parallel.context import SequenceParts
from headway.parallel.documents import make_places, named_documents, planned_on_host
from headway.parallel.fp8_gather import Float8Gather
from headway.parallel.gradients import Missing
from headway.parallel.objective import DeviceBatch, MeasureHead, SumScale, count_documents, loss_of
from headway.parallel.pipeline import LocalStage, PipelineRunner
from headway.parallel.shard import forget_copies, hold_gradients, release_weights


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
    exact: ContextBuilder | None = None
    """What plans attention by documents, if the model is in exact mode."""

    def passes(self, batch: DeviceBatch, scale: SumScale) -> Tensor:
        """Run forward and backward over all rows, by microbatches; gradients are reduced in the last one, or in each.

        Return the objective's scaled sums, or this worker's part of them: a scalar for the plain summed loss.
        """
        set_loss_scale(self.model, scale.tokens)
        if self.ragged:
            make_places(self.model, count_documents(batch.host_documents), self.microbatch)
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
            make_places(self.model, count_documents(batch.host_documents), rows)
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
        with planned_on_host(self.exact, None if batch.documents is None else batch.host_documents):
            sums: Tensor = self.model(batch.inputs, batch.labels, **named_documents(batch.documents), **batch.columns)
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
