"""The protocol of objectives on the training side, and the first of them: predicting the next token."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headway.data.loader import MASKED, Batch
from headway.parallel.objective import DeviceBatch, Objective, by_document

Counts = tuple[float, ...]


class CountedObjective(Protocol):
    """What the loop asks of every objective, besides its sums."""

    names: tuple[str, ...]
    """Of its sums; see `parallel.objective.Objective`."""
    terms: int
    columns: frozenset[str]
    """Columns that rows must have."""

    def counts(self, batch: Batch) -> Counts:
        """Return what each sum is divided by, for some rows; it depends on them alone."""
        ...


class NextToken:
    """Cross-entropy of all labels: pre-training, and supervised fine-tuning without weights.

    Its sum has a fused kernel, which needs no log-probabilities per token: a model computes it without `measure`.
    """

    names: tuple[str, ...] = ("loss",)
    terms = 1
    columns = frozenset[str]()

    def counts(self, batch: Batch) -> Counts:
        """Return the number of labels."""
        return (batch.trained,)


class WeightedTokens(Objective):
    """Supervised fine-tuning: cross-entropy of the labels, weighted by document."""

    names: tuple[str, ...] = ("loss",)
    terms = 1
    columns = frozenset({"weight"})

    def counts(self, batch: Batch) -> Counts:
        """Return the weights of all labels."""
        return (float((labels_per_document(batch) * batch.columns["weight"]).sum()),)

    def measure(self, logprobs_BL: Tensor, batch: DeviceBatch) -> Tensor:
        """Return the weighted sum."""
        weight_BD = batch.columns["weight"]
        return -(sums_by_document(logprobs_BL, batch) * weight_BD).sum().reshape(1)


def labels_per_document(batch: Batch) -> np.ndarray:
    """Return the number of labels of each document, [rows, documents], on the host."""
    assert batch.documents is not None, "rows of documents are numbered"
    width = batch.columns["weight"].shape[1]
    rows = np.arange(len(batch.labels))[:, None] * (width + 1)
    bins = (rows + np.minimum(batch.documents, width)).ravel()
    unmasked = (batch.labels != MASKED).ravel()
    counted = np.bincount(bins[unmasked], minlength=len(batch.labels) * (width + 1))
    return counted.reshape(-1, width + 1)[:, :width].astype(np.float64)


def sums_by_document(values_BL: Tensor, batch: DeviceBatch) -> Tensor:
    """Return sums over the documents of each row, [B, documents]."""
    assert batch.documents is not None, "rows of documents are numbered"
    return by_document(values_BL, batch.documents, batch.columns["weight"].shape[1])


def by_token(values_BD: Tensor, batch: DeviceBatch) -> Tensor:
    """Return the value of each token's document [B, L]; 0 for padding."""
    assert batch.documents is not None, "rows of documents are numbered"
    padded = torch.nn.functional.pad(values_BD, (0, 1))
    return padded.gather(1, batch.documents.long().clamp(max=padded.shape[1] - 1))


def lengths_by_document(batch: DeviceBatch) -> Tensor:
    """Return the number of labels of each document, at least 1."""
    return sums_by_document((batch.labels != MASKED).float(), batch).clamp(min=1)
