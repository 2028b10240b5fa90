"""Runs in exact mode: what a trainer refuses, and that it trains as without."""

from pathlib import Path

import pytest
import torch

from headway.agent import new_run
from headway.errors import ModelError, RecipeError
from headway.models import empty_decoder, init_weights
from headway.models.exact import make_exact
from headway.parallel import World, parallelize_model
from headway.parallel.objective import DeviceBatch, SumScale
from headway.parallel.world import Axis
from headway.recipe.exactness import check_exactness
from headway.recipe.load import parse_recipe
from headway.train.trainable_model import check_exact_mesh

EXACT = {"inference.exact": True}


def test_meshes_that_split_sums_are_refused(recipe) -> None:
    for axis in ("tensor", "pipeline", "context"):
        world = World(0, 2, torch.device("cpu"), axes={axis: Axis(2)})
        with pytest.raises(ModelError, match=f"replicate and shard axes only, and this one has {axis}"):
            check_exact_mesh(world)
        with pytest.raises(RecipeError, match=r"inference\.exact needs a mesh of replicate and shard axes only"):
            recipe(EXACT | {f"parallel.{axis}": 2})
    check_exact_mesh(World(0, 2, torch.device("cpu"), axes={"shard": Axis(2)}))


def test_other_precisions_and_compiled_blocks_are_refused(recipe) -> None:
    half = recipe(EXACT | {"train.dtype": "bfloat16"})
    with pytest.raises(RecipeError, match=r"on a CPU is for float32, not bfloat16"):
        check_exactness(half, "cpu")
    with pytest.raises(RecipeError, match=r"on a GPU is for bfloat16, not float32"):
        check_exactness(recipe(EXACT), "cuda")
    check_exactness(half, "cuda")
    assert recipe({}).compiles("cuda")
    assert not recipe(EXACT).compiles("cuda")
    with pytest.raises(RecipeError, match=r"needs train\.compile = false"):
        recipe(EXACT | {"train.compile": True})


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"train.recompute": "full"}, {"train.recompute": "selective"}], ids=str)
def test_runs_train_as_without_exact_mode(lab, recipe, settings) -> None:
    losses = [
        [event["loss"] for event in lab.train(recipe({"name": name} | more | settings), workers=2).events("step")]
        for name, more in (("plain", {}), ("exact", EXACT))
    ]
    assert len(losses[0]) == 8
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_family_that_is_not_exact_is_refused_before_a_run_folder_is_made(recipe, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="exact mode does not support gemma2 yet"):
        new_run(recipe(EXACT | {"model.family": "gemma2", "model.window": 16}), tmp_path / "runs", workers=1)
    assert not (tmp_path / "runs").exists()


def test_passes_plan_attention_by_the_documents_of_the_host() -> None:
    """Those of the device are another packing here: a pass that planned by them would have another loss."""
    values = {
        "model": {"vocab_size": 40, "layers": 1, "dim": 64, "heads": 1, "kv_heads": 1, "head_dim": 64, "hidden": 32},
        "data": {"path": "none", "seq": 24},
        "train": {"batch": 4, "microbatch": 2},
        "inference": {"exact": True},
    }
    recipe = parse_recipe(values, {}, "test")
    model = empty_decoder(recipe.model)
    make_exact(model, torch.device("cpu"))
    spread = parallelize_model(model, recipe, World(0, 1, torch.device("cpu")))
    init_weights(spread.model, seed=0)
    tokens = torch.randint(0, 40, (4, 25), generator=torch.Generator().manual_seed(0))
    numbers = (torch.arange(24) // 7).int().expand(4, -1).contiguous()

    def loss(documents: torch.Tensor, host: torch.Tensor | None) -> torch.Tensor:
        known = None if host is None else host.numpy()
        batch = DeviceBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), documents, host_documents=known)
        total = spread.passes(batch, SumScale.per_label(96))
        for parameter in spread.model.parameters():
            parameter.grad = None
        return total

    other = torch.zeros_like(numbers)
    assert torch.equal(loss(numbers, numbers), loss(numbers, None))
    assert torch.equal(loss(other, numbers), loss(numbers, None))
    assert not torch.equal(loss(other, None), loss(numbers, None))  # nothing was left behind
