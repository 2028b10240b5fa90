"""Whole runs whose sequences are split over workers: one worker's losses, also held out; states that other meshes take
over; and the bits of an uninterrupted run after a kill."""

from typing import Any

import pytest

from headway.errors import RecipeError
from headway.recipe import FaultPlan

SLOW = pytest.mark.slow
MODEL = {"model.kv_heads": 2, "train.batch": 8, "train.steps": 3, "eval.every_steps": 3}
MESHES: dict[str, dict[str, Any]] = {
    "all-gather": {"context": 2, "shard": 1},
    "all-to-all": {"context": 2, "shard": 1, "context_attention": "all-to-all"},
    "ring": {"context": 2, "shard": 1, "context_attention": "ring"},
    "shard 2": {"context": 2, "shard": 2},
    "replicate 2": {"context": 2, "shard": 1, "replicate": 2},
    "pipeline 2": {"context": 2, "shard": 1, "pipeline": 2},
    "tensor 2": {"context": 2, "shard": 1, "tensor": 2},
}


def on(mesh: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return MODEL | settings | {f"parallel.{key}": value for key, value in mesh.items()}


def losses(result, kind: str = "step") -> list[float]:
    assert result.outcome.state == "finished", result.outcome
    return [event["loss"] for event in result.events(kind)]


@pytest.mark.parametrize("name", MESHES)
@SLOW
def test_run_has_the_losses_of_one_worker(lab, recipe, name: str) -> None:
    optimizer = {"train.optimizer": "muon" if name == "shard 2" else "adamw"}
    alone = lab.train(recipe(MODEL | optimizer), workers=1)
    split = lab.train(recipe(on(MESHES[name], **optimizer)), workers=None)
    assert losses(split) == pytest.approx(losses(alone), rel=1e-4)
    assert losses(split, "eval") == pytest.approx(losses(alone, "eval"), rel=1e-4)
    tokens = [[event["tokens"] for event in result.events("step")] for result in (alone, split)]
    assert tokens[0] == tokens[1]


@SLOW
def test_state_moves_between_meshes(lab, recipe) -> None:
    settings = {"train.schedule": "constant"}
    result = lab.train(recipe(on(MESHES["shard 2"], **settings, **{"train.steps": 2})), workers=None)
    plain = {"replicate": 1, "shard": 1, "pipeline": 1, "tensor": 1, "context": 1}
    path = ({"tensor": 2}, {"context": 2}, {}, {"context": 2, "replicate": 2})
    for steps, mesh in enumerate(path, 3):
        changes = [f"parallel.{key}={value}" for key, value in (plain | mesh).items()]
        result = lab.resume(result.run, f"train.steps={steps}", *changes)
        assert result.outcome.state == "finished", result.outcome
        assert result.events("resumed")[-1]["step"] == steps - 1
    alone = lab.train(recipe(MODEL | settings | {"train.steps": 6}), workers=1)
    assert losses(result) == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.parametrize(("name", "stage"), [("all-gather", "compute"), ("ring", "optimizer")])
@SLOW
def test_killed_run_ends_with_the_same_bits(lab, recipe, name: str, stage: str) -> None:
    settings = on(MESHES[name], **{"train.steps": 6, "checkpoint.every_steps": 2})
    unharmed = lab.train(recipe(settings), workers=None)
    killed = lab.train(recipe(settings), workers=None, faults=FaultPlan().kill(5, 1, stage))
    resumed = killed if killed.outcome.state == "finished" else lab.resume(killed.run)
    assert resumed.outcome.state == "finished", resumed.outcome
    assert (resumed.chain, resumed.digest) == (unharmed.chain, unharmed.digest)


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"parallel.context": 3}, "context 3 does not divide sequences of 32 tokens into 6 chunks", "30 and 36"),
        ({"parallel.context": 4, "parallel.context_attention": "all-to-all"},
         "all-to-all over context 4 does not divide 2 heads and 2 key-value heads", "may be 1, 2; or use all-gather"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused(lab, recipe, settings, message: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        lab.train(recipe(MODEL | {"parallel.shard": 1} | settings), workers=None)
    assert hint in (caught.value.hint or "")
