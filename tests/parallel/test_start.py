"""A worker starts from the meta device: its memory never holds more of the model than its own part and one tensor."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.models import empty_decoder
from headway.parallel import make_mesh, parallelize_model
from headway.plan.flops import parameters
from headway.recipe import Recipe
from headway.recipe.load import parse_recipe
from headway.state.tensors import ModelShare
from headway.track import RunFolder
from headway.train.draw_weights import draw_weights
from processes import run_ranks

MODEL = {"layers": 4, "dim": 512, "heads": 8, "hidden": 2048, "vocab_size": 512, "tie_embeddings": False}
SMALL = MODEL | {"layers": 1, "dim": 64, "hidden": 64}
MB = 1e6


def make_recipe(mesh: dict[str, int], model: dict[str, Any] = MODEL) -> Recipe:
    values = {"model": model, "data": {"path": "nowhere", "seq": 16}, "train": {"batch": 8}, "parallel": mesh}
    return parse_recipe(values, {}, "test")


def high_water() -> float:
    """The most memory this process has held since the mark was last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024.0


def story(rank: int, workers: int, recipes: list[Recipe]) -> dict[str, torch.Tensor]:
    """How much memory each mesh takes at its most, one after the other in the same processes."""
    grown = []
    # A small model first: what libraries load and reserve once (50 MB with MKL) is none of the model's memory.
    for recipe in [make_recipe(recipes[0].parallel.model_dump(), SMALL), *recipes]:
        world = make_mesh(rank, workers, torch.device("cpu"), recipe.parallel.sizes(workers))
        Path("/proc/self/clear_refs").write_text("5")
        before = high_water()
        spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, world)
        held = ModelShare(world.rank, world.stage, spread.borrowed, spread.names)
        draw_weights(spread.model, recipe, held, RunFolder(Path("nowhere")))
        grown.append(high_water() - before)
        del spread, held
        gc.collect()
    return {"grown": torch.tensor(grown[1:])}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize(
    "meshes",
    [
        [{"shard": 2, "tensor": 2}],
        pytest.param([{"shard": 4}, {"pipeline": 4, "shard": 1}, {"shard": 2, "pipeline": 2}], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_worker_allocates_the_whole_model(meshes: list[dict[str, int]], tmp_path) -> None:
    recipes = [make_recipe(mesh) for mesh in meshes]
    whole = 4 * parameters(recipes[0].model.architecture())
    assert whole > 65 * MB, "the model must outweigh what else a process allocates"
    largest = 4 * MODEL["dim"] * MODEL["hidden"]
    for rank, result in enumerate(run_ranks(tmp_path, 4, story, recipes)):
        for mesh, grown in zip(meshes, result["grown"].tolist(), strict=True):
            # its own quarter (a pipeline's ends have a table more), one tensor on its way, and what else it takes
            message = f"worker {rank} of {mesh}: {grown / MB:.0f} MB of {whole / MB:.0f}"
            assert grown < 0.3 * whole + 2 * largest + 25 * MB, message
