"""Whole runs whose sequences are split over workers: one worker's losses, also held out; states that other meshes take
over; and the bits of an uninterrupted run after a kill."""

from typing import Any

import pytest
from mesh_runs import check_killed_run, check_moves, losses, on_mesh

from headway.errors import RecipeError

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


@pytest.mark.parametrize("name", MESHES)
@SLOW
def test_run_has_the_losses_of_one_worker(lab, recipe, name: str) -> None:
    optimizer = {"train.optimizer": "muon" if name == "shard 2" else "adamw"}
    alone = lab.train(recipe(MODEL | optimizer), workers=1)
    split = lab.train(recipe(on_mesh(MODEL, MESHES[name], **optimizer)), workers=None)
    assert losses(split) == pytest.approx(losses(alone), rel=1e-4)
    assert losses(split, "eval") == pytest.approx(losses(alone, "eval"), rel=1e-4)
    tokens = [[event["tokens"] for event in result.events("step")] for result in (alone, split)]
    assert tokens[0] == tokens[1]


@SLOW
def test_state_moves_between_meshes(lab, recipe) -> None:
    plain = {"replicate": 1, "shard": 1, "pipeline": 1, "tensor": 1, "context": 1}
    path = ({"tensor": 2}, {"context": 2}, {}, {"context": 2, "replicate": 2})
    check_moves(lab, recipe, MODEL, MESHES["shard 2"], plain, path)


@pytest.mark.parametrize(("name", "stage"), [("all-gather", "compute"), ("ring", "optimizer")])
@SLOW
def test_killed_run_ends_with_the_same_bits(lab, recipe, name: str, stage: str) -> None:
    check_killed_run(lab, recipe, on_mesh(MODEL, MESHES[name]), stage)


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
