"""What a pass needs of an objective, and the rows of a batch that it runs over.

An objective turns the log-probabilities of labels into named sums. Each sum has a count, which depends on the batch
alone and is known before the forward pass: a step's value is the sum over the global batch divided by the count over
the global batch. So no split into microbatches or workers changes it. The first `terms` of them add up to the loss.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headway.models.transfer import on_device


@dataclass(frozen=True)
class DeviceBatch:
    """This worker's rows of one step, or some of them."""

    inputs: Tensor
    """[rows, seq]; of diffusion, noised samples [rows, channels, frames, height, width]."""
    labels: Tensor
    """[rows, seq]; IGNORED where nothing is predicted. Of diffusion, what is to be predicted, shaped as the inputs."""
    documents: Tensor | None = None
    """[rows, seq], int32: the document of each input within its row; None if attention does not use it."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[rows, ...]: what else an objective needs, by name, such as values of each document of a row."""
    host_documents: np.ndarray | None = None
    """`documents` on the host, which need not wait for the device then."""

    def rows(self, low: int, high: int) -> "DeviceBatch":
        """Return some of the rows."""
        documents = None if self.documents is None else self.documents[low:high]
        columns = {name: column[low:high] for name, column in self.columns.items()}
        numbers = None if self.host_documents is None else self.host_documents[low:high]
        return DeviceBatch(self.inputs[low:high], self.labels[low:high], documents, columns, numbers)


def count_documents(documents: np.ndarray | None) -> np.ndarray | None:
    """Return how many documents each row has."""
    return None if documents is None else (documents[:, 1:] != documents[:, :-1]).sum(axis=1) + 1


class Objective(Protocol):
    """Per-token log-probabilities, or a diffusion model's predictions, to named sums."""

    names: tuple[str, ...]
    """Of the sums, those that make up the loss first."""
    terms: int
    """How many of them make up the loss."""

    def measure(self, logprobs_BL: Tensor, batch: DeviceBatch) -> Tensor:
        """Return the sums [K] over these rows, differentiable; log-probabilities are 0 where labels are IGNORED."""
        ...


class DistillationObjective(Objective):
    """One that also compares with a teacher's likeliest tokens, which are the column TEACHER_IDS [rows, seq, K].

    `measure` gets log-probabilities [B, L, K + 2]: of the label, of those tokens at `temperature`, and of all others.
    """

    temperature: float


class PolicyObjective(Objective):
    """One whose log-probabilities are at the temperature that answers were sampled at.

    If it wants the entropy of the distribution, too, `measure` gets both [B, L, 2].
    """

    temperature: float
    wants_entropy: bool


TIME, LABEL, TEXT, TEXT_MASK, IMAGE = "time", "label", "text", "text_mask", "image"
"""Columns of noised samples: when on the path from data (0) to noise (1) they are [rows], their class [rows], the
states of their caption [rows, tokens, width] with a mask of those that are not padding, and the frame that they begin
with [rows, channels, frames, height, width]."""
TEACHER_IDS, TEACHER_LOGPROBS = "teacher_ids", "teacher_logprobs"
"""Columns of a teacher: its likeliest tokens [rows, seq, K], and log-probabilities, the last of all other tokens."""


class TeacherTargets:
    """Stands in for a teacher's objective: keeps the likeliest tokens of all rows that pass."""

    names: tuple[str, ...] = ("targets",)
    terms = 1

    def __init__(self, count: int, temperature: float) -> None:
        self.count, self.temperature = count, temperature
        self._collected = list[tuple[Tensor, Tensor]]()

    def measure(self, likeliest: tuple[Tensor, Tensor], _: DeviceBatch) -> Tensor:
        """Keep the tokens and log-probabilities of some rows."""
        self._collected.append(likeliest)
        return likeliest[1].new_zeros(1)

    def take(self) -> dict[str, Tensor]:
        """Return the columns of all rows since the last call; none before a pipeline's last stage."""
        collected, self._collected = self._collected, []
        if not collected:
            return {}
        ids, logprobs = (torch.cat(parts) for parts in zip(*collected, strict=True))
        return {TEACHER_IDS: ids, TEACHER_LOGPROBS: logprobs}


class SumScale(NamedTuple):
    """Factors of a step's sums: one over their counts in the global batch."""

    sums: tuple[float, ...]
    tokens: float
    """One over the number of labels, for the losses of routers."""

    @classmethod
    def per_label(cls, count: int) -> "SumScale":
        """That of the plain summed loss over so many labels."""
        return cls((1 / max(1, count),), 1 / max(1, count))

    def of(self, sums: Tensor) -> Tensor:
        """Return sums times their factors: a scalar for the plain summed loss."""
        if sums.dim() == 0:
            return sums * self.sums[0]
        factors = torch.tensor(self.sums, dtype=sums.dtype)
        return sums * on_device(factors, sums.device)


def loss_of(values: Tensor, terms: int) -> Tensor:
    """Return the loss of scaled sums."""
    return values if values.dim() == 0 else values[:terms].sum()


def by_document(values_BL: Tensor, documents_BL: Tensor, width: int) -> Tensor:
    """Return sums over the documents of each row, [B, width]; documents from `width` on (padding) are left out."""
    sums = values_BL.new_zeros(len(values_BL), width + 1)
    return sums.scatter_add(1, documents_BL.long().clamp(max=width), values_BL)[:, :width]


class MeasureHead:
    """Applies an objective after a model's last stage; or, while it collects, keeps log-probabilities of all rows."""

    def __init__(self, objective: Objective | TeacherTargets) -> None:
        self.objective = objective
        self._collected: list[Tensor] | None = None
        self._by_document = False

    def __call__(self, logprobs_BL: Any, batch: DeviceBatch) -> Tensor:
        """Return the sums of some rows."""
        if self._collected is None:
            return self.objective.measure(logprobs_BL, batch)
        kept = logprobs_BL.detach()
        if isinstance(self.objective, PolicyObjective) and self.objective.wants_entropy:
            kept = kept[..., 0]
        if self._by_document:
            assert batch.documents is not None, "only rows of documents are scored by document"
            kept = by_document(kept, batch.documents, batch.columns["weight"].shape[1])
        self._collected.append(kept)
        return logprobs_BL.new_zeros(len(self.objective.names))

    @contextmanager
    def collecting(self, *, by_document: bool) -> Iterator[list[Tensor]]:
        """Meanwhile, append the log-probabilities of all rows that pass, without measuring them: [rows, seq], or their
        sums by document [rows, documents]."""
        self._collected, self._by_document = [], by_document
        try:
            yield self._collected
        finally:
            self._collected = None
