"""When a loss counts as diverging: series whose story is known."""

import math
import random

import pytest

from headway.track.divergence import find_divergence


def series(losses: list[float | None]) -> list[tuple[int, float | None]]:
    return list(enumerate(losses, start=1))


def learning(steps: int, seed: int = 1, noise: float = 0.05, start: float = 10.0, floor: float = 2.0) -> list[float]:
    """A loss that falls as it should, with noise."""
    chance = random.Random(seed)
    return [floor + (start - floor) * math.exp(-step / 100) + chance.gauss(0, noise) for step in range(steps)]


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
        (learning(300) + [9.5] * 40, 320),  # back to where it began
        (learning(300) + [2.5 + 0.1 * step for step in range(60)], 340),  # slowly
        (learning(300) + [9.5, None] * 20, 330),
    ],
    ids=["explodes", "at once", "within three steps", "back to where it began", "slowly", "with gaps"],
)
def test_loss_that_rises_and_stays_is_noticed_soon(losses: list[float | None], latest: int) -> None:
    divergence = find_divergence(series(losses))
    assert divergence is not None
    assert divergence.step <= latest
    assert divergence.level > 1.5 * divergence.best
    assert "the loss diverges: about " in divergence.text


def test_loss_that_comes_down_again_is_forgiven() -> None:
    losses = [*learning(300), *[9.5] * 30, *[2.1] * 30]
    assert find_divergence(series(losses[:330])) is not None
    assert find_divergence(series(losses)) is None
