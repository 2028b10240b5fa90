"""The learning rate with cuts."""

import pytest

from headway.recipe import Train
from headway.train.schedule import learning_rate


def test_a_cut_multiplies_the_rate_from_its_step_on() -> None:
    plain = Train(steps=10, lr=1e-2, warmup_steps=4, schedule="cosine")
    cut = Train(steps=10, lr=1e-2, warmup_steps=4, schedule="cosine", rate_cuts=((3, 0.5), (8, 0.1)))
    ratios = [learning_rate(cut, step) / learning_rate(plain, step) for step in range(1, 11)]
    assert ratios == pytest.approx([1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.05, 0.05, 0.05], rel=1e-12)


def test_two_cuts_at_one_step_both_count() -> None:
    train = Train(steps=10, lr=1.0, warmup_steps=0, schedule="constant", rate_cuts=((5, 0.5), (5, 0.5)))
    assert [learning_rate(train, step) for step in (4, 5, 6)] == [1.0, 0.25, 0.25]
