"""When a loss counts as diverging: series whose story is known."""

import math
import random

import pytest

from headway.track.divergence import LossMonitor, find_divergence


def series(losses: list[float | None]) -> list[tuple[int, float | None]]:
    return list(enumerate(losses, start=1))


def learning(steps: int, seed: int = 1, noise: float = 0.05, start: float = 10.0, floor: float = 2.0) -> list[float]:
    """A loss that falls as it should, with noise."""
    chance = random.Random(seed)
    return [floor + (start - floor) * math.exp(-step / 100) + chance.gauss(0, noise) for step in range(steps)]


def noisy_batches(steps: int, seed: int) -> list[float]:
    """Losses of single sequences when fine-tuning: mostly low, some several times as high."""
    chance = random.Random(seed)
    return [chance.lognormvariate(0.0, 0.6) for _ in range(steps)]


def with_spikes(losses: list[float], length: int, factor: float, every: int = 60) -> list[float]:
    return [loss * factor if i % every >= every - length else loss for i, loss in enumerate(losses)]


def exploding(steps: int) -> list[float]:
    """7.7, then up to 548 by step 30."""
    return [7.7 if step < 4 else 7.7 * (548 / 7.7) ** ((step - 4) / 25) for step in range(steps)]


@pytest.mark.parametrize(
    "losses",
    [
        learning(1000),
        learning(1000, noise=0.5),
        with_spikes(learning(600), 1, 20.0),
        with_spikes(learning(600), 7, 3.0),
        [random.Random(3).gauss(3.0, 0.7) for _ in range(10)],
        learning(20_000, seed=5, noise=0.7, start=3.0, floor=3.0),  # one sequence a step: as noisy as it gets
        [0.02 + 0.01 * (step % 2) for step in range(200)],  # next to nothing, and twice that
        [0.01] * 100 + [0.2] * 100,
        [10.8, 11.5, 12.0, 11.0, *learning(100)],  # rises for a moment when it begins
        [None] * 40,
        [],
        [*[7.6, 9.0, 11.0, 13.0, 14.0, 12.0, 9.0], *learning(100, start=7.6)],  # warm-up too short, recovers
        [*[7.6, 30.0, 90.0, 60.0, 20.0, 9.0], *learning(100, start=7.6)],
        [0.6 + 0.4 * random.Random(7).random() for _ in range(200)],  # fine-tuning begins low
        noisy_batches(4000, seed=2),
        [0.2, *noisy_batches(400, seed=4)],  # the first batch is an easy one
        [24.0, *learning(200, start=22.0, noise=0.5)],  # large initial weights: far above ln(vocabulary), and falls
    ],
    ids=[
        "falls",
        "falls noisily",
        "short spikes",
        "long spikes",
        "few losses",
        "noise of one sequence a step",
        "next to nothing",
        "small rise",
        "rises when it begins",
        "not finite",
        "none",
        "warm-up spike",
        "high warm-up spike",
        "fine-tuning",
        "fine-tuning on one sequence a step",
        "easy first batch",
        "large initial loss",
    ],
)
def test_ordinary_losses_do_not_diverge(losses: list[float | None]) -> None:
    assert find_divergence(series(losses)) is None


@pytest.mark.parametrize(
    ("losses", "latest"),
    [
        (exploding(30), 30),
        ([7.7, 7.8, 7.7] + [500.0] * 30, 25),  # at once
        ([7.76, 5.1, 84.8, *[340.0] * 14], 17),  # within three steps
        # the demo with a constant learning rate of 9: it explodes within the first steps
        ([7.61, 130.0, 343.0, 250.0, 180.0, 220.0, *[130.0 + 7 * (step % 30) for step in range(40)]], 17),
        ([7.6, 1900.0, 700.0, *[1300.0] * 57], 17),
        ([7.6, 8.5, 9.5, *[12.5] * 40], 24),  # above the first loss, and stays
        ([0.8, 0.9, *[5.0] * 30], 17),  # fine-tuning that forgets at once
        (learning(300) + [9.5] * 40, 320),  # back to where it began
        (learning(300) + [2.5 + 0.1 * step for step in range(60)], 340),  # slowly
        (learning(300) + [9.5, None] * 20, 330),
    ],
    ids=[
        "explodes",
        "at once",
        "within three steps",
        "demo with rate 9",
        "explodes in one step",
        "stays above the first",
        "fine-tuning forgets",
        "back to where it began",
        "slowly",
        "with gaps",
    ],
)
def test_loss_that_rises_and_stays_is_noticed_soon(losses: list[float | None], latest: int) -> None:
    divergence = find_divergence(series(losses))
    assert divergence is not None
    assert divergence.step <= latest
    assert divergence.level > 1.5 * divergence.best
    assert f"up to step {divergence.step}" in divergence.text
    assert "lower train.lr" in divergence.text


def test_divergence_is_said_once() -> None:
    monitor = LossMonitor()
    said = [monitor.add(step, loss) for step, loss in series([7.6, 130.0, *[300.0 + step for step in range(100)]])]
    assert len([divergence for divergence in said if divergence is not None]) == 1


def test_loss_that_comes_down_again_is_forgiven() -> None:
    losses = [*learning(300), *[9.5] * 30, *[2.1] * 30]
    assert find_divergence(series(losses[:330])) is not None
    assert find_divergence(series(losses)) is None
