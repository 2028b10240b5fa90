"""Whole runs on the axis of experts: one worker's losses, under every optimizer; states that other meshes take over;
and the bits of an uninterrupted run after a kill."""

from typing import Any

import pytest
from mesh_runs import check_killed_run, check_moves, losses, on_mesh

from headway.errors import RecipeError
from headway.state import find_checkpoint, open_checkpoint

SLOW = pytest.mark.slow
MODEL = {
    "model.family": "mixtral", "model.hidden": 32, "model.experts": 4, "model.balance": 0.0,
    "train.batch": 8, "train.steps": 3,
}  # fmt: skip
MESHES: dict[str, dict[str, Any]] = {
    "shard 2 expert 2": {"shard": 2, "expert": 2},
    "shard 4 expert 2": {"shard": 4, "expert": 2},
    "replicate 2 shard 2 expert 2": {"replicate": 2, "shard": 2, "expert": 2},
    "shard 2 expert 2 pipeline 2": {"shard": 2, "expert": 2, "pipeline": 2},
}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("shard 2 expert 2", "adamw"),
        ("shard 4 expert 2", "adamw"),
        ("shard 4 expert 2", "adamw-8bit"),
        ("shard 4 expert 2", "adafactor"),
        ("shard 4 expert 2", "muon"),
        ("shard 2 expert 2 pipeline 2", "muon"),
    ],
)
@SLOW
def test_run_has_the_losses_of_one_worker(lab, recipe, name: str, optimizer: str) -> None:
    settings = {"train.optimizer": optimizer}
    alone = losses(lab.train(recipe(MODEL | settings), workers=1))
    split = losses(lab.train(recipe(on_mesh(MODEL, MESHES[name], **settings)), workers=None))
    assert split == pytest.approx(alone, rel=1e-4)


@SLOW
def test_state_moves_between_meshes(lab, recipe) -> None:
    plain = {"replicate": 1, "shard": 1, "pipeline": 1, "expert": 1}
    path = ({"pipeline": 2}, {"shard": 2, "expert": 2}, {}, {"replicate": 2, "shard": 2, "expert": 2})
    check_moves(lab, recipe, MODEL, MESHES["shard 4 expert 2"], plain, path)


@SLOW
def test_each_worker_stores_its_experts_alone(lab, recipe) -> None:
    result = lab.train(recipe(on_mesh(MODEL, MESHES["shard 4 expert 2"])), workers=None)
    assert result.outcome.state == "finished", result.outcome
    folder = find_checkpoint(result.run.checkpoints)
    sizes = [(folder / name).stat().st_size for name in open_checkpoint(folder).manifest.files]
    assert len(sizes) == 4
    assert max(sizes) < 1.1 * min(sizes)


@pytest.mark.parametrize("stage", ["compute", "optimizer"])
@SLOW
def test_killed_run_ends_with_the_same_bits(lab, recipe, stage: str) -> None:
    check_killed_run(lab, recipe, on_mesh(MODEL, MESHES["shard 2 expert 2"]), stage)


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"parallel.shard": 2, "parallel.expert": 3}, "expert 3 does not divide 4 experts", "expert may be 1, 2"),
        ({"parallel.shard": 2, "parallel.expert": 4}, "expert 4 does not divide shard 2", "1, 2"),
        ({"parallel.shard": 1, "parallel.replicate": 2, "parallel.expert": 2}, "does not divide shard 1", "may be 1"),
        ({"parallel.shard": 8, "parallel.expert": 4, "model.experts": 12, "model.hidden": 33, "model.dim": 36},
         "leaves 3 experts to each 2 workers", "replicate"),
        ({"parallel.shard": 2, "parallel.expert": 2, "parallel.tensor": 2}, "mixtral has no tensor axis", "shard"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused(lab, recipe, settings, message: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        lab.train(recipe(MODEL | settings), workers=None)
    assert hint in (caught.value.hint or "")
