"""A worker starts from the meta device: its memory never holds more of the model than its own part and one tensor."""

from pathlib import Path

import pytest
import torch

from headway.models import empty_decoder
from headway.parallel import apply, make_mesh
from headway.plan.architecture import architecture_of
from headway.plan.flops import parameters
from headway.recipe import Recipe
from headway.recipe.load import parse_recipe
from headway.state.tensors import Held
from headway.track import RunFolder
from headway.train.build import draw_weights
from processes import run_ranks

MODEL = {"layers": 12, "dim": 512, "heads": 8, "hidden": 2048, "vocab_size": 512, "tie_embeddings": False}
MB = 1e6


def make_recipe(mesh: dict[str, int]) -> Recipe:
    values = {"model": MODEL, "data": {"path": "nowhere", "seq": 16}, "train": {"batch": 8}, "parallel": mesh}
    return parse_recipe(values, {}, "test")


def high_water() -> float:
    """The most memory this process has held since the mark was last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024.0


def story(rank: int, workers: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    world = make_mesh(rank, workers, torch.device("cpu"), recipe.parallel.sizes(workers))
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water()
    spread = apply(empty_decoder(recipe.model, "meta"), recipe, world)
    held = Held(world.rank, world.stage, spread.borrowed, spread.names)
    draw_weights(spread.model, recipe, held, RunFolder(Path("nowhere")))
    return {"grown": torch.tensor(high_water() - before)}


@pytest.mark.parametrize(
    "mesh", [{"shard": 4}, {"shard": 2, "tensor": 2}, {"pipeline": 4, "shard": 1}, {"shard": 2, "pipeline": 2}], ids=str
)
def test_no_worker_ever_allocates_the_whole_model(mesh: dict[str, int], tmp_path) -> None:
    recipe = make_recipe(mesh)
    whole = 4 * parameters(architecture_of(recipe.model))
    assert whole > 200 * MB, "the model must outweigh what else a process allocates"
    largest = 4 * 512 * 2048
    for rank, found in enumerate(run_ranks(tmp_path, 4, story, recipe)):
        grown = float(found["grown"])
        # its own quarter (a pipeline's ends have a table more), one tensor on its way, and the libraries' own needs
        assert grown < 0.3 * whole + 2 * largest + 30 * MB, f"worker {rank}: {grown / MB:.0f} MB of {whole / MB:.0f}"
