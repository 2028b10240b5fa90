"""Evaluation: the loss on held-out windows, per dataset and overall."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.data.order import Ids
from headway.train.build import Parts

MASKED = -100


def evaluate(parts: Parts, step: int) -> float:
    """Record the mean loss per token over the held-out windows, each evaluated by one data rank.

    For a mixture, also record each dataset's mean and its epochs; with an EMA, also its mean.
    """
    world, spread, corpus = parts.world, parts.spread, parts.corpus
    more = dict[str, Any]()
    with parts.recorder.span("evaluation"), torch.no_grad():
        parts.faults.reach("evaluation", step)
        spread.model.eval()
        totals = _totals(parts)
        mean = _mean(totals.sum(dim=0))
        if parts.average is not None:
            with parts.average.standing_in():
                more["loss_ema"] = _mean(_totals(parts).sum(dim=0))
        spread.model.train()
    if world.first:
        if len(corpus.names) > 1:
            epochs = corpus.epochs(corpus.cursor_before(step + 1))
            more["losses"] = {name: _mean(sums) for name, sums in zip(corpus.names, totals, strict=True) if sums[1] > 0}
            more["epochs"] = dict(zip(corpus.names, epochs, strict=True))
        parts.recorder.event("eval", step=step, loss=mean, **more)
    return mean


def _totals(parts: Parts) -> Tensor:
    """Return the summed loss and number of tokens of each dataset's held-out windows, over all workers."""
    world = parts.world
    totals = torch.stack([_sums(parts, ids) for ids in parts.corpus.by_dataset(parts.held_out)])
    parts.spread.rest()
    totals[:, 0] *= world.axis("tensor").rank == 0
    totals[:, 1] *= world.speaks
    return world.sum(totals)


def _sums(parts: Parts, ids: Ids) -> Tensor:
    """Return the summed loss and number of tokens of this worker's share of these windows.

    Sharded models gather weights collectively, so all workers make equally many forward passes: one without windows
    repeats the first with all labels masked.
    """
    world, spread, data = parts.world, parts.spread, parts.world.data
    rows = spread.evaluation_rows(max(1, len(ids)))
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    for low in range(0, len(ids), rows * data.size):
        local_ids = ids[low + rows * data.rank : low + rows * (data.rank + 1)]
        batch = parts.reader.read(np.concatenate([local_ids, ids[:1].repeat(rows - len(local_ids))]))
        labels = batch.labels.copy()
        labels[len(local_ids) :] = MASKED
        inputs = torch.from_numpy(batch.inputs).to(world.device)
        documents = None if batch.documents is None else torch.from_numpy(batch.documents).to(world.device)
        loss = spread.evaluate(inputs, torch.from_numpy(labels).to(world.device), documents)
        parts.beat.mark()
        totals += torch.stack([loss.double(), torch.tensor((labels != MASKED).sum(), device=world.device)])
    return totals


def _mean(sums: Tensor) -> float:
    return float(sums[0] / sums[1].clamp(min=1))
