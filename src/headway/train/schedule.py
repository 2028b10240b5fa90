"""The learning rate of a step: a pure function of the recipe."""

import math

from headway.recipe import Train

__all__ = ["learning_rate"]


def learning_rate(train: Train, step: int) -> float:
    """The rate of update number `step`, from 1: the schedule's, times the cuts that have come by then."""
    return _scheduled(train, step) * math.prod(factor for first, factor in train.rate_cuts if step >= first)


def _scheduled(train: Train, step: int) -> float:
    """A linear rise, then a cosine to lr * min_lr_ratio or no change."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    floor = train.lr * train.min_lr_ratio
    return floor + (train.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
