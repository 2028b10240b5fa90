"""The learning rate by hand: schedules, cuts, and batches that grow."""

from itertools import pairwise

import pytest

from headway.recipe import Data, Recipe, Train, check_resumable, with_settings
from headway.train.schedule import learning_rate


def test_rate_cut_applies_from_its_step_on() -> None:
    plain = Train(steps=10, lr=1e-2, warmup_steps=4, schedule="cosine")
    cut = Train(steps=10, lr=1e-2, warmup_steps=4, schedule="cosine", rate_cuts=((3, 0.5), (8, 0.1)))
    ratios = [learning_rate(cut, step) / learning_rate(plain, step) for step in range(1, 11)]
    assert ratios == pytest.approx([1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.05, 0.05, 0.05], rel=1e-12)


def test_two_rate_cuts_at_one_step_both_apply() -> None:
    train = Train(steps=10, lr=1.0, warmup_steps=0, schedule="constant", rate_cuts=((5, 0.5), (5, 0.5)))
    assert [learning_rate(train, step) for step in (4, 5, 6)] == [1.0, 0.25, 0.25]


def rates(**settings: object) -> list[float]:
    train = Train(steps=10, lr=1.0, **settings)
    return [learning_rate(train, step) for step in range(1, 11)]


def test_linear_falls_by_equal_steps_to_its_share() -> None:
    actual = rates(schedule="linear", warmup_steps=2, min_lr_ratio=0.2)
    assert actual == pytest.approx([0.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])


def test_inverse_root_falls_with_the_root_of_the_steps() -> None:
    actual = rates(schedule="inverse-root", warmup_steps=4)
    assert actual == pytest.approx([0.25, 0.5, 0.75, 1.0, *(2 / step**0.5 for step in range(5, 11))])
    assert rates(schedule="inverse-root", warmup_steps=0)[3] == pytest.approx(0.5)


WSD = {
    "linear": [0.75, 0.5, 0.25, 0.0],
    "sqrt": [0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0.0],
    "cosine": [(2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4, 0.0],
}


@pytest.mark.parametrize("decay", WSD)
def test_wsd_rises_stays_and_falls_in_its_last_steps(decay: str) -> None:
    actual = rates(schedule="wsd", warmup_steps=2, decay_steps=4, decay=decay, min_lr_ratio=0.0)
    assert actual == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, *WSD[decay]], abs=1e-12)
    above = rates(schedule="wsd", warmup_steps=2, decay_steps=4, decay=decay, min_lr_ratio=0.3)
    assert above[6:] == pytest.approx([0.3 + 0.7 * left for left in WSD[decay]])


def test_constant_schedule_may_decay_from_any_step() -> None:
    """Resumed with other steps and a decay, it has the rates it had up to there, and falls in the steps that follow."""
    steady = Recipe(data=Data(path="d"), train=Train(steps=1000, warmup_steps=5, schedule="wsd", decay_steps=1))
    resumed = with_settings(steady, ["train.steps=60", "train.decay_steps=20", "train.decay=linear"])
    assert {*check_resumable(steady, resumed)} == {"train.steps", "train.decay_steps", "train.decay"}
    before, after = ([learning_rate(r.train, step) for step in range(1, 61)] for r in (steady, resumed))
    assert before[:40] == after[:40]
    assert all(later < earlier for earlier, later in pairwise(after[39:]))
    constant = Recipe(data=Data(path="d"), train=Train(steps=1000, warmup_steps=5, schedule="constant"))
    decaying = with_settings(constant, ["train.schedule=wsd", "train.steps=60", "train.decay_steps=20"])
    assert "train.schedule" in check_resumable(constant, decaying)
    assert decaying.train.decay == "sqrt"


def test_batch_ramp_is_a_function_of_the_step() -> None:
    train = Train(steps=9, batch=4, batch_ramp=[[3, 8], [6, 16], [12, 99]])
    by_hand = [4, 4, 8, 8, 8, 16, 16, 16, 16]
    assert [train.batch_at(step) for step in range(1, 10)] == by_hand
    assert [train.sequences(step) for step in range(10)] == [sum(by_hand[:step]) for step in range(10)]
    assert train.batches == (4, 8, 16)
    with pytest.raises(ValueError, match="step 3 is not after step 3"):
        Train(batch_ramp=[[3, 8], [3, 9]])
    with pytest.raises(ValueError, match="start at step 2 or later"):
        Train(batch_ramp=[[1, 8]])
