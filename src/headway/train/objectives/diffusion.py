"""Diffusion: the squared error of what a model predicts on noised samples, as a whole and by range of time.

The path from data to noise (`models/noising.py`) is all that flow matching and DDPM differ in: it decides what a sample
becomes and what the model learns to predict, both of which the feed computes.
"""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headway.data.loader import Batch
from headway.models.noising import Floats
from headway.parallel.objective import TIME, DeviceBatch, Objective
from headway.recipe.diffusion import DiffusionObjective
from headway.train.objectives.base import Counts

WEIGHT, BIN = "weight", "bin"
"""Columns: the weight of each sample's loss, 0 for padding; and its range of time, one past the last for padding."""


class DenoisingLoss(Objective):
    """Mean squared error per element, weighted by sample; and its plain mean in each range of time."""

    terms = 1
    columns = frozenset({TIME, WEIGHT, BIN})

    def __init__(self, recipe: DiffusionObjective) -> None:
        self.recipe = recipe
        self.bins = recipe.bins if recipe.bins > 1 else 0
        edges = np.linspace(0, 1, self.bins + 1)
        ranges = (f"loss/{low:.2f}-{high:.2f}" for low, high in pairwise(edges))
        self.names: tuple[str, ...] = ("loss", *ranges) if self.bins else ("loss",)

    def sample_columns(self, times_N: Floats, weights_N: Floats) -> dict[str, npt.NDArray[np.generic]]:
        """Return the columns of samples at some times."""
        return {
            TIME: times_N.astype(np.float32),
            WEIGHT: weights_N.astype(np.float32),
            BIN: np.minimum((times_N * max(self.bins, 1)).astype(np.int64), max(self.bins, 1) - 1),
        }

    def padded(self, columns: Mapping[str, npt.NDArray[np.generic]], rows: int) -> dict[str, npt.NDArray[np.generic]]:
        """Return columns of which only the first rows count."""
        columns = {name: column.copy() for name, column in columns.items()}
        columns[WEIGHT][rows:], columns[BIN][rows:] = 0, max(self.bins, 1)
        return columns

    def counts(self, batch: Batch) -> Counts:
        """Return the number of samples, and that of each range of time."""
        bins = batch.columns[BIN]
        by_bin = np.bincount(bins, minlength=max(self.bins, 1) + 1)[: max(self.bins, 1)]
        return (float(by_bin.sum()), *(by_bin.astype(float).tolist() if self.bins else ()))

    def measure(self, predicted: Tensor, batch: DeviceBatch) -> Tensor:
        """Return the sums over samples, from predictions of the labels' shape."""
        errors_N = (predicted.float() - batch.labels).square().flatten(1).mean(dim=1)
        loss = (errors_N * batch.columns[WEIGHT]).sum().reshape(1)
        if not self.bins:
            return loss
        by_bin = errors_N.detach().new_zeros(self.bins + 1)
        by_bin = by_bin.index_add(0, batch.columns[BIN], errors_N.detach())
        return torch.cat([loss, by_bin[: self.bins]])
