"""A run killed anywhere and resumed ends with the bits of one that was left alone."""

import random

import pytest

from headway.recipe import FaultPlan
from headway.state import verify
from headway.track import compare

STEPS = 12
SETTINGS = {"train.steps": STEPS, "checkpoint.every_steps": 4, "eval.every_steps": 6, "eval.windows": 4}
CHANCE = random.Random(7)
KILLS = [
    (step, CHANCE.choice([0, 1, None]), CHANCE.choice(["start", "data", "compute"]))
    for step in CHANCE.sample(range(1, STEPS + 1), 10)
]


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_lab, recipe):
    """The run that nothing happened to."""
    lived = make_lab(tmp_path_factory.mktemp("unharmed")).train(recipe(SETTINGS), workers=2)
    assert lived.outcome.state == "finished", lived.outcome
    return lived


@pytest.mark.parametrize(
    ("step", "rank", "point"), [*KILLS[:6], *(pytest.param(*kill, marks=pytest.mark.slow) for kill in KILLS[6:])]
)
def test_killed_at_a_random_step_and_resumed(lab, recipe, unharmed, step: int, rank: int | None, point: str) -> None:
    killed = lab.train(recipe(SETTINGS), workers=2, faults=FaultPlan().kill(step, rank, point))
    assert killed.outcome.state == "failed"
    assert "SIGKILL" in killed.outcome.reason
    resumed = lab.resume(killed.run)
    assert resumed.outcome.state == "finished", resumed.outcome
    assert resumed.chain == unharmed.chain
    assert resumed.digest == unharmed.digest
    comparison = compare(resumed.run, unharmed.run)
    assert comparison.equal, comparison.sentence


@pytest.mark.parametrize("point", ["save", "saved"])
def test_killed_while_saving_leaves_the_older_checkpoint(lab, recipe, unharmed, point: str) -> None:
    killed = lab.train(recipe(SETTINGS), workers=2, faults=FaultPlan().kill(8, 0, point))
    assert killed.outcome.state == "failed"
    steps = sorted(path.name for path in killed.run.checkpoints.glob("step-*"))
    assert steps == ["step-00000004"]
    verify(killed.run.checkpoints / steps[0])
    resumed = lab.resume(killed.run)
    assert resumed.digest == unharmed.digest


def test_the_same_recipe_twice_is_equal_and_another_seed_is_not(lab, recipe, unharmed) -> None:
    again = lab.train(recipe(SETTINGS), workers=2)
    assert compare(again.run, unharmed.run).equal
    other = lab.train(recipe(SETTINGS | {"seed": 5}), workers=2)
    comparison = compare(other.run, unharmed.run)
    assert not comparison.equal
    assert comparison.step == 1


def test_when_it_is_saved_changes_nothing(lab, recipe, unharmed) -> None:
    lived = lab.train(recipe(SETTINGS | {"checkpoint.every_steps": 5, "eval.every_steps": 0}), workers=2)
    assert lived.chain == unharmed.chain
    assert lived.digest == unharmed.digest


def test_other_workers_take_over_a_state_exactly_and_then_go_on_closely(lab, recipe, unharmed) -> None:
    first = lab.train(recipe(SETTINGS | {"train.steps": 4, "train.schedule": "constant"}), workers=2)
    resumed = lab.resume(first.run, "train.steps=8", workers=4)
    straight = lab.train(recipe(SETTINGS | {"train.steps": 8, "train.schedule": "constant"}), workers=2)
    assert resumed.outcome.state == "finished", resumed.outcome
    ours = [event["loss"] for event in resumed.events("step")]
    assert ours == pytest.approx([event["loss"] for event in straight.events("step")], rel=1e-4)


def test_a_branch_from_a_step_repeats_the_run_it_left(lab, recipe, unharmed) -> None:
    run = lab.train(recipe(SETTINGS), workers=2).run
    branch = lab.train(recipe(SETTINGS), workers=2, origin=f"{run.name}@8")
    assert branch.outcome.state == "finished", branch.outcome
    assert branch.events("resumed")[0]["step"] == 8
    assert branch.digest == unharmed.digest
