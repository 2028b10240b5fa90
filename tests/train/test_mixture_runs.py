"""Runs of a mixture with an auxiliary loss: exact over a restart, the same on every mesh, and more even for it."""

import pytest

from headway.errors import RecipeError
from headway.recipe import FaultPlan

STEPS = 6
SETTINGS = {
    "model.family": "mixtral", "model.hidden": 32, "model.experts": 5, "model.balance": 0.5,
    "train.steps": STEPS, "checkpoint.every_steps": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_lab, recipe):
    """The run that nothing happened to."""
    result = make_lab(tmp_path_factory.mktemp("unharmed")).train(recipe(SETTINGS))
    assert result.outcome.state == "finished", result.outcome
    return result


def numbers(result, key: str) -> list[float]:
    assert result.outcome.state == "finished", result.outcome
    return [event[key] for event in result.events("step")]


@pytest.mark.slow
def test_killed_run_ends_bitwise_equal(lab, recipe, unharmed) -> None:
    killed = lab.train(recipe(SETTINGS), faults=FaultPlan().kill(5, None, "compute"))
    assert killed.outcome.state == "failed"
    resumed = lab.resume(killed.run)
    assert resumed.outcome.state == "finished", resumed.outcome
    assert (resumed.chain, resumed.digest) == (unharmed.chain, unharmed.digest)


def test_auxiliary_loss_has_an_effect_and_is_not_recorded(lab, recipe, unharmed) -> None:
    without = lab.train(recipe(SETTINGS | {"model.balance": 0.0}))
    assert numbers(without, "loss")[0] == numbers(unharmed, "loss")[0]
    assert numbers(without, "grad_norm")[0] != numbers(unharmed, "grad_norm")[0]


def test_recomputed_blocks_give_the_same_bits(lab, recipe, unharmed) -> None:
    assert lab.train(recipe(SETTINGS | {"train.recompute": "full"})).digest == unharmed.digest


@pytest.mark.parametrize("mesh", [{"shard": 2}, {"pipeline": 2, "schedule": "zero-bubble"}], ids=["shard", "pipeline"])
def test_meshes_give_the_same_numbers(lab, recipe, mesh: dict[str, int | str]) -> None:
    """Against one worker with as many microbatches: each has an auxiliary loss of its own tokens."""
    halves = SETTINGS | {"train.microbatch": 4, "train.steps": 3}
    alone = lab.train(recipe(halves))
    spread = lab.train(recipe(halves | {f"parallel.{key}": value for key, value in mesh.items()}), workers=2)
    for key in ("loss", "grad_norm"):
        assert numbers(spread, key) == pytest.approx(numbers(alone, key), rel=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_tensor_axis_is_refused_for_experts(lab, recipe, family: str) -> None:
    with pytest.raises(RecipeError, match="experts"):
        lab.train(recipe({"model.family": family, "parallel.tensor": 2}), workers=2)
