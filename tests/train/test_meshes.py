"""Whole runs on meshes: the same losses as one worker, and states that any mesh takes over from any other."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conftest import Lived
from headway.models import empty_decoder
from headway.parallel import make_mesh, parallelize_model
from headway.recipe import Recipe, with_settings
from headway.state import (
    CheckpointFacts,
    begin_checkpoint,
    collect_shard_entries,
    commit,
    find_checkpoint,
    leave_shard_entry,
    open_checkpoint,
    partial_folder,
    shard_name,
    write_shard,
)
from headway.state.tensors import ModelShare, load_state, named_state, pieces
from headway.track import read_recipe
from headway.train.build import build_optimizer
from processes import run_ranks

MODEL = {"model.heads": 4, "model.kv_heads": 2, "train.batch": 8, "train.steps": 3, "eval.every_steps": 2}
MESHES: dict[str, dict[str, Any]] = {
    "shard 2": {"shard": 2},
    "replicate 2": {"replicate": 2, "shard": 1},
    "tensor 2": {"tensor": 2, "shard": 1},
    "pipeline 2": {"pipeline": 2, "shard": 1},
    "replicate 2 shard 2": {"replicate": 2, "shard": 2},
    "shard 2 tensor 2": {"shard": 2, "tensor": 2},
    "tensor 2 pipeline 2": {"tensor": 2, "pipeline": 2, "shard": 1},
    "pipeline 2 interleaved": {"pipeline": 2, "shard": 1, "schedule": "interleaved"},
}
SLOW = pytest.mark.slow


def on(mesh: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return MODEL | settings | {f"parallel.{key}": value for key, value in mesh.items()}


def losses(result) -> list[float]:
    return [event["loss"] for event in result.events("step")]


@pytest.fixture(scope="module")
def run_once(tmp_path_factory, make_lab, recipe) -> Callable[..., Lived]:
    """Runs a mesh for three steps, with an evaluation after the second and the last; or what it did, the next time."""

    @cache
    def run(name: str | None, layers: int = 2) -> Lived:
        settings = on(MESHES[name] if name else {}, **{"model.layers": layers})
        result = make_lab(tmp_path_factory.mktemp("once")).train(recipe(settings), workers=None if name else 1)
        assert result.outcome.state == "finished", result.outcome
        return result

    return run


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) if " 2 " in name else name for name in MESHES])
def test_run_on_a_mesh_has_the_losses_of_one_worker(run_once, name: str) -> None:
    layers = 4 if "interleaved" in name else 2
    result, alone = run_once(name, layers), run_once(None, layers)
    assert losses(result) == pytest.approx(losses(alone), rel=1e-4)
    norms = [[event["grad_norm"] for event in run.events("step")] for run in (result, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    evaluations = [[event["loss"] for event in run.events("eval")] for run in (result, alone)]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-4)
    assert len(evaluations[0]) == 2


@pytest.mark.parametrize(
    ("path", "layers"),
    [
        (("shard 2", "pipeline 2", "tensor 2"), 2),
        pytest.param(("shard 2 tensor 2", "pipeline 2 interleaved", "tensor 2"), 4, marks=SLOW),
    ],
    ids=["two workers", "four workers"],
)
def test_state_moves_between_meshes_and_loss_continues(lab, recipe, path: tuple[str, ...], layers: int) -> None:
    """Each takes over the state of the one before; the first begins, the others do one and two steps more."""
    settings = {"train.schedule": "constant", "eval.every_steps": 0, "model.layers": layers}
    first = on(MESHES[path[0]], **settings, **{"train.steps": 2})
    result = lab.train(recipe(first), workers=None)
    for steps, name in ((3, path[1]), (5, path[2])):
        assert result.outcome.state == "finished", result.outcome
        before = open_checkpoint(find_checkpoint(result.run.checkpoints)).manifest
        plain = {"replicate": 1, "shard": 1, "tensor": 1, "pipeline": 1, "schedule": "1f1b", "chunks": "", "stages": ""}
        changes = [f"parallel.{key}={value}" for key, value in (plain | MESHES[name]).items()]
        result = lab.resume(result.run, f"train.steps={steps}", *changes)
        taken = result.events("resumed")[-1]
        assert taken["step"] == before.step
    assert result.outcome.state == "finished", result.outcome
    alone = lab.train(recipe(MODEL | settings | {"train.steps": 5}))
    assert losses(result) == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize(
    "names",
    [("shard 2 tensor 2", "replicate 2 shard 2"), pytest.param(("tensor 2 pipeline 2",), marks=SLOW)],
    ids=" and ".join,
)
def test_mesh_writes_exactly_the_state_it_read(run_once, names: tuple[str, ...], offload: bool, tmp_path) -> None:
    """One worker's last state, weights and moments, loaded by a mesh and written again: the digests are the same."""
    alone = run_once(None)
    recipes = {}
    for name in names:
        settings = {"train.offload_optimizer": offload, **{f"parallel.{key}": v for key, v in MESHES[name].items()}}
        changes = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        recipes[name] = with_settings(read_recipe(alone.run), changes)
    source = find_checkpoint(alone.run.checkpoints)
    run_ranks(tmp_path, 4, load_and_save, recipes, source, tmp_path)
    for name in names:
        written = open_checkpoint(find_checkpoint(tmp_path / name)).manifest
        assert written.digest == open_checkpoint(source).manifest.digest
        assert any(tensor.startswith("optimizer/") for tensor in written.tensors)
        assert len(written.files) == 4 or name == "replicate 2 shard 2"


def load_and_save(rank: int, workers: int, recipes: dict[str, Recipe], source: Path, folder: Path) -> None:
    for name, recipe in recipes.items():
        load_and_save_by(rank, workers, recipe, source, folder / name)


def load_and_save_by(rank: int, workers: int, recipe: Recipe, source: Path, folder: Path) -> None:
    world = make_mesh(rank, workers, torch.device("cpu"), recipe.parallel.sizes(workers))
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, world)
    held = ModelShare(world.rank, world.stage, spread.borrowed, spread.names)
    optimizer = build_optimizer(spread.model, recipe.train)
    load_state(source, spread.model, optimizer, held)
    save = begin_checkpoint(folder, 1) if rank == 0 else None
    dist.barrier()
    partial = partial_folder(folder, 1)
    mine = pieces(named_state(spread.model, optimizer, held), held)
    leave_shard_entry(partial, write_shard(partial, shard_name(rank), mine))
    dist.barrier()
    if save is not None:
        commit(
            save,
            CheckpointFacts(cursor=0, chain="", data_version="v"),
            collect_shard_entries(partial, workers),
            workers=workers,
        )
    dist.barrier()


@pytest.mark.slow
def test_offloaded_moments_are_bitwise_equal(lab, recipe, run_once) -> None:
    kept = run_once("shard 2")
    offloaded = lab.train(recipe(on(MESHES["shard 2"], **{"train.offload_optimizer": True})), workers=None)
    assert offloaded.outcome.state == "finished", offloaded.outcome
    assert (offloaded.chain, offloaded.digest) == (kept.chain, kept.digest)
