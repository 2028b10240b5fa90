"""The loss on held-out windows."""

from collections.abc import Callable

import numpy as np
import torch

from headway.parallel import reshard
from headway.train.build import Parts

__all__ = ["evaluate"]

MASKED = -100


def evaluate(parts: Parts, step: int, forward_context: Callable[[], torch.autocast]) -> float:
    """Mean loss a token over the held-out windows, each seen by one worker; recorded by the first.

    Sharded models gather weights together, so every worker makes as many forward passes as any other: one that has
    run out of windows repeats the first with all labels masked.
    """
    recipe, world = parts.recipe, parts.world
    ids = parts.held_out[: recipe.eval.windows]
    rows = min(recipe.train.microbatch or recipe.train.batch // world.size, len(ids))
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    with parts.recorder.span("evaluation"), torch.no_grad():
        parts.faults.reach("evaluation", step)
        parts.model.eval()
        for low in range(0, len(ids), rows * world.size):
            mine = ids[low + rows * world.rank : low + rows * (world.rank + 1)]
            batch = parts.reader.read(np.concatenate([mine, ids[:1].repeat(rows - len(mine))]))
            labels = batch.labels.copy()
            labels[len(mine) :] = MASKED
            inputs = torch.from_numpy(batch.inputs).to(world.device)
            with forward_context():
                loss = parts.model(inputs, torch.from_numpy(labels).to(world.device))
            totals += torch.stack([loss.double(), torch.tensor((labels != MASKED).sum(), device=world.device)])
        reshard(parts.model)
        world.sum(totals)
        parts.model.train()
        mean = float(totals[0] / totals[1].clamp(min=1))
    if world.first:
        parts.recorder.event("eval", step=step, loss=mean)
    return mean
