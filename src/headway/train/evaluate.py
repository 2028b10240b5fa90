"""The loss on held-out windows."""

import numpy as np
import torch

from headway.train.build import Parts

__all__ = ["evaluate"]

MASKED = -100


def evaluate(parts: Parts, step: int) -> float:
    """Mean loss a token over the held-out windows, each seen by one data rank; recorded by the first.

    Sharded models gather weights together, so every worker makes as many forward passes as any other: one that has
    run out of windows repeats the first with all labels masked.
    """
    recipe, world, spread, data = parts.recipe, parts.world, parts.spread, parts.world.data
    ids = parts.held_out[: recipe.eval.windows]
    rows = spread.evaluation_rows(len(ids))
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    with parts.recorder.span("evaluation"), torch.no_grad():
        parts.faults.reach("evaluation", step)
        spread.model.eval()
        for low in range(0, len(ids), rows * data.size):
            mine = ids[low + rows * data.rank : low + rows * (data.rank + 1)]
            batch = parts.reader.read(np.concatenate([mine, ids[:1].repeat(rows - len(mine))]))
            labels = batch.labels.copy()
            labels[len(mine) :] = MASKED
            inputs = torch.from_numpy(batch.inputs).to(world.device)
            loss = spread.evaluate(inputs, torch.from_numpy(labels).to(world.device))
            parts.beat.mark()
            totals += torch.stack([loss.double(), torch.tensor((labels != MASKED).sum(), device=world.device)])
        spread.rest()
        totals[0] *= world.axis("tensor").rank == 0
        totals[1] *= world.speaks
        world.sum(totals)
        spread.model.train()
        mean = float(totals[0] / totals[1].clamp(min=1))
    if world.first:
        parts.recorder.event("eval", step=step, loss=mean)
    return mean
