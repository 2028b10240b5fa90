"""Evaluation: the loss on held-out windows, per dataset and overall."""

from typing import Any

import torch
from torch import Tensor

from headway.data.order import Ids
from headway.train.build import Parts
from headway.train.sample_grids import grid_is_due, write_grid


def evaluate(parts: Parts, step: int) -> None:
    """Record what the run is worth on held-out data: its loss, or the rewards of answers to held-out prompts."""
    with parts.recorder.span("evaluation"):
        parts.faults.reach("evaluation", step)
        rewards = parts.feed.held_out_rewards(parts.held_out, step)
    if rewards is None:
        if parts.held_out.size:
            evaluate_loss(parts, step)
        evaluate_samples(parts, step)
    elif parts.world.first:
        parts.recorder.event("eval", step=step, **rewards)
        parts.callbacks.evaluated(step, rewards)


def evaluate_samples(parts: Parts, step: int) -> None:
    """Write the sample grid of a diffusion run, if one is due; of its EMA, if it has one."""
    if not grid_is_due(parts.recipe, step):
        return
    if parts.average is None:
        write_grid(parts, step)
        return
    with parts.average.standing_in():
        write_grid(parts, step)


def evaluate_loss(parts: Parts, step: int) -> None:
    """Record the mean loss per token over the held-out windows, each evaluated by one data rank.

    For a mixture, also record each dataset's mean and its epochs; with an EMA, also its mean; an objective of several
    sums has its other values recorded by name.
    """
    world, spread, corpus, names = parts.world, parts.spread, parts.corpus, parts.objective.names
    more = dict[str, Any]()
    with parts.recorder.span("evaluation"), torch.no_grad():
        spread.model.eval()
        totals = _totals(parts)
        mean = held_out_loss(parts, totals.sum(dim=0))
        if parts.average is not None:
            with parts.average.standing_in():
                more["loss_ema"] = held_out_loss(parts, _totals(parts).sum(dim=0))
        spread.model.train()
    if world.first:
        if len(corpus.names) > 1:
            epochs = corpus.epochs(corpus.cursor_before(step + 1))
            by_name = zip(corpus.names, totals, strict=True)
            more["losses"] = {name: held_out_loss(parts, sums) for name, sums in by_name if sums[1].any()}
            more["epochs"] = dict(zip(corpus.names, epochs, strict=True))
        if len(names) > 1:
            sums, counts = totals.sum(dim=0)
            more |= {name: float(sums[i] / counts[i]) for i, name in enumerate(names) if counts[i] and name != "loss"}
        parts.recorder.event("eval", step=step, loss=mean, **more)
        numbers = {name: value for name, value in more.items() if isinstance(value, float)}
        parts.callbacks.evaluated(step, {"loss": mean} | numbers)


def _totals(parts: Parts) -> Tensor:
    """Return the sums and counts [2, K] of each dataset's held-out windows, over all workers."""
    world = parts.world
    totals = torch.stack([_sums(parts, ids) for ids in parts.corpus.by_dataset(parts.held_out)])
    parts.spread.rest()
    totals[:, 0] *= world.axis("tensor").rank == 0
    totals[:, 1] *= world.speaks
    return world.sum(totals)


def _sums(parts: Parts, ids: Ids) -> Tensor:
    """Return the sums and counts of this worker's share of these windows."""
    totals = torch.zeros(2, len(parts.objective.names), dtype=torch.float64, device=parts.world.device)
    for counts, batch in parts.feed.held_out_rows(parts.spread, parts.world, ids):
        totals[0] += parts.spread.evaluate(batch).double()
        parts.beat.mark()
        totals[1] += torch.tensor(counts, dtype=torch.float64, device=totals.device)
    return totals


def held_out_loss(parts: Parts, totals: Tensor) -> float:
    """Return the loss of sums and counts [2, K]: the sum of its terms' means."""
    sums, counts = totals[:, : parts.objective.terms]
    return float((sums / counts.where(counts > 0, 1.0)).sum())
