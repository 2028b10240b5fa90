"""The learning rate schedule: a pure function of the recipe and the step."""

import math

from headway.recipe import Train


def learning_rate(train: Train, step: int) -> float:
    """Return the learning rate of a step, from 1: the schedule's, times the rate cuts so far."""
    return _scheduled(train, step) * math.prod(factor for first, factor in train.rate_cuts if step >= first)


def _scheduled(train: Train, step: int) -> float:
    """Return the scheduled rate: linear warm-up, then the schedule, which decays to lr * min_lr_ratio."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    floor = train.lr * train.min_lr_ratio
    done = min(1.0, (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps))
    match train.schedule:
        case "constant":
            return train.lr
        case "inverse-root":
            return train.lr * math.sqrt(max(1, train.warmup_steps) / step)
        case "wsd":
            assert train.decay_steps is not None, "the recipe fills it in"
            return floor + (train.lr - floor) * _left(
                train.decay or "sqrt", _decayed(train.steps, train.decay_steps, step)
            )
        case _:
            return floor + (train.lr - floor) * _left(train.schedule, done)


def _decayed(steps: int, decay_steps: int, step: int) -> float:
    """Return the progress of the last `decay_steps`, 0 to 1."""
    return min(1.0, max(0, step - (steps - decay_steps)) / decay_steps)


def _left(shape: str, done: float) -> float:
    """Return the remaining share of the decay at a progress."""
    match shape:
        case "linear":
            return 1 - done
        case "sqrt":
            return 1 - math.sqrt(done)
        case _:
            return 0.5 * (1 + math.cos(math.pi * done))
