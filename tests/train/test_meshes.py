"""Whole runs on meshes: the same losses as one worker, and states that any mesh takes over from any other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headway.models import empty_decoder
from headway.parallel import apply, make_mesh
from headway.recipe import Recipe, with_settings
from headway.state import (
    Facts,
    begin,
    collect,
    commit,
    find_checkpoint,
    leave,
    open_checkpoint,
    partial_folder,
    shard_name,
    write_shard,
)
from headway.state.tensors import Held, load_state, named_state, pieces
from headway.track import read_recipe
from headway.train.build import build_optimizer
from processes import run_ranks

MODEL = {"model.layers": 4, "model.heads": 4, "model.kv_heads": 2, "train.batch": 8, "eval.every_steps": 3}
MESHES: dict[str, dict[str, Any]] = {
    "shard 2": {"shard": 2},
    "replicate 2": {"replicate": 2, "shard": 1},
    "tensor 2": {"tensor": 2, "shard": 1},
    "pipeline 2 interleaved": {"pipeline": 2, "shard": 1, "schedule": "interleaved"},
    "shard 2 tensor 2": {"shard": 2, "tensor": 2},
    "tensor 2 pipeline 2": {"tensor": 2, "pipeline": 2, "shard": 1},
}


def on(mesh: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return MODEL | settings | {f"parallel.{key}": value for key, value in mesh.items()}


def losses(lived) -> list[float]:
    return [event["loss"] for event in lived.events("step")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, make_lab, recipe):
    """Six steps of one worker, with an evaluation after the third and the last."""
    lived = make_lab(tmp_path_factory.mktemp("alone")).train(recipe(MODEL | {"train.steps": 6}))
    assert lived.outcome.state == "finished", lived.outcome
    return lived


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "2 pipeline" in name else name for name in MESHES]
)
def test_a_run_on_a_mesh_has_the_losses_of_one_worker(lab, recipe, alone, name: str) -> None:
    lived = lab.train(recipe(on(MESHES[name], **{"train.steps": 6})), workers=None)
    assert lived.outcome.state == "finished", lived.outcome
    assert losses(lived) == pytest.approx(losses(alone), rel=1e-4)
    norms = [[event["grad_norm"] for event in run.events("step")] for run in (lived, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    evaluations = [[event["loss"] for event in run.events("eval")] for run in (lived, alone)]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-4)
    assert len(evaluations[0]) == 2


def test_a_state_goes_from_mesh_to_mesh_and_the_loss_goes_on(lab, recipe, alone) -> None:
    """Two steps on each of three meshes, then one worker: each takes the state over bit for bit, as digests say."""
    path = [MESHES["shard 2 tensor 2"], MESHES["pipeline 2 interleaved"], {"tensor": 2, "shard": 1}]
    lived = lab.train(recipe(on(path[0], **{"train.steps": 2, "train.schedule": "constant"})), workers=None)
    for steps, mesh in ((4, path[1]), (6, path[2])):
        assert lived.outcome.state == "finished", lived.outcome
        before = open_checkpoint(find_checkpoint(lived.run.checkpoints)).manifest
        plain = {"replicate": 1, "shard": 1, "tensor": 1, "pipeline": 1, "schedule": "1f1b", "chunks": "", "stages": ""}
        settings = [f"parallel.{key}={value}" for key, value in (plain | mesh).items()]
        lived = lab.resume(lived.run, f"train.steps={steps}", "checkpoint.every_steps=1", *settings)
        taken = lived.events("resumed")[-1]
        assert taken["step"] == before.step
    assert lived.outcome.state == "finished", lived.outcome
    assert losses(lived) == pytest.approx(constant(lab, recipe), rel=1e-4)


def constant(lab, recipe) -> list[float]:
    return losses(lab.train(recipe(MODEL | {"train.steps": 6, "train.schedule": "constant"})))


@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["shard 2 tensor 2", "tensor 2 pipeline 2", "replicate 2"])
def test_a_mesh_writes_the_very_state_it_read(alone, name: str, offload: bool, tmp_path) -> None:
    """One worker's last state, weights and moments, loaded by a mesh and written again: the digests are the same."""
    settings = {"train.offload_optimizer": offload} | {f"parallel.{key}": value for key, value in MESHES[name].items()}
    recipe = with_settings(read_recipe(alone.run), [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    source = find_checkpoint(alone.run.checkpoints)
    workers = 2 if name == "replicate 2" else 4
    run_ranks(tmp_path, workers, load_and_save, recipe, source, tmp_path / "written")
    written = open_checkpoint(find_checkpoint(tmp_path / "written")).manifest
    assert written.digest == open_checkpoint(source).manifest.digest
    assert any(name.startswith("optimizer/") for name in written.tensors)


def load_and_save(rank: int, workers: int, recipe: Recipe, source: Path, folder: Path) -> None:
    world = make_mesh(rank, workers, torch.device("cpu"), recipe.parallel.sizes(workers))
    spread = apply(empty_decoder(recipe.model, "meta"), recipe, world)
    held = Held(world.rank, world.stage, spread.borrowed, spread.names)
    optimizer = build_optimizer(spread.model, recipe.train)
    load_state(source, spread.model, optimizer, held)
    save = begin(folder, 1) if rank == 0 else None
    dist.barrier()
    partial = partial_folder(folder, 1)
    mine = pieces(named_state(spread.model, optimizer, held), held)
    leave(partial, write_shard(partial, shard_name(rank), mine))
    dist.barrier()
    if save is not None:
        commit(save, Facts(cursor=0, chain="", data_version="v"), collect(partial, workers), workers=workers)
    dist.barrier()


def test_moments_in_the_hosts_memory_give_the_same_bits(lab, recipe) -> None:
    kept, offloaded = (
        lab.train(recipe(MODEL | {"train.steps": 4, "train.offload_optimizer": offload}), workers=2)
        for offload in (False, True)
    )
    assert offloaded.outcome.state == "finished", offloaded.outcome
    assert (offloaded.chain, offloaded.digest) == (kept.chain, kept.digest)
