"""What optimizers keep is what the plan counts, to the byte."""

from typing import Any

import pytest
import torch
from torch import nn

from headway.hardware import default_cluster, known_chip
from headway.models import empty_decoder
from headway.parallel import make_mesh, parallelize_model
from headway.plan.memory import memory
from headway.plan.optimizer import optimizer_state_bytes
from headway.plan.plan import make_task
from headway.plan.settings import Mesh, Settings
from headway.recipe import Data, Model, Recipe, Train
from headway.recipe.families import FAMILIES
from headway.state.tensors import ModelShare
from headway.train.optim import WeightEma, build_optimizer, freeze, lower
from processes import run_ranks

HALF = {"dtype": "bfloat16", "weights": "bfloat16"}
WAYS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "moments in bfloat16": {"moments": "bfloat16"},
    "all in bfloat16": HALF | {"moments": "bfloat16"},
    "masters": HALF | {"master": True},
    "muon": {"optimizer": "muon"},
    "muon in bfloat16": {"optimizer": "muon", "moments": "bfloat16"},
    "adamw-8bit": {"optimizer": "adamw-8bit"},
    "adafactor": {"optimizer": "adafactor"},
    "an average": {"ema": 0.99},
    "muon with masters and an average": HALF | {"optimizer": "muon", "master": True, "ema": 0.9},
    "frozen blocks": {"freeze": ["layers.0.**", "embed.*"]},
    "frozen blocks, eight bits": {"freeze": ["layers.*.mlp.**"], "optimizer": "adamw-8bit"},
}
MODEL = Model(vocab_size=320, layers=2, dim=64, heads=4, kv_heads=2, hidden=320, tie_embeddings=False)


def recipe_of(way: str) -> Recipe:
    return Recipe(data=Data(path="d", seq=16), model=MODEL, train=Train(batch=4, **WAYS[way]))


def held_bytes(model: nn.Module, recipe: Recipe, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Of weights, and of all that the optimizer and the average keep of them but for counters."""
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    if recipe.train.ema is not None:
        states += WeightEma(model, optimizer, recipe.train.ema, ModelShare()).tensors.values()
    local = [value.to_local() if hasattr(value, "to_local") else value for value in states]
    weights = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return sum(weight.nbytes for weight in weights), sum(tensor.nbytes for tensor in local)


def planned(recipe: Recipe, mesh: Mesh) -> tuple[float, float]:
    cluster = default_cluster(known_chip("cpu"), mesh.devices)
    task = make_task(recipe, cluster)
    settings = Settings(mesh, task.seq, 1, task.batch, zero=3, software=task.software.on_mesh(mesh, passes=task.batch))
    needed = memory(task.architecture, settings, cluster)
    return needed.weights, needed.optimizer


@pytest.mark.parametrize("way", WAYS)
def test_the_plan_counts_what_one_worker_keeps(way: str) -> None:
    recipe = recipe_of(way)
    model = empty_decoder(recipe.model)
    freeze(model, recipe.train)
    lower(model, recipe.train)
    held = held_bytes(model, recipe, build_optimizer(model, recipe.train))
    assert held == pytest.approx(planned(recipe, Mesh()), rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_knows_every_family_s_matrices(family: str) -> None:
    """By their names and shapes alone, of stacked experts too, it finds what optimizers find in modules."""
    settings = Model(family=family, vocab_size=320, layers=2, dim=64, heads=4)
    model = empty_decoder(settings)
    for optimizer in ("muon", "adamw-8bit", "adafactor"):
        recipe = Recipe(data=Data(path="d"), model=settings, train=Train(optimizer=optimizer))
        _, states = held_bytes(model, recipe, build_optimizer(model, recipe.train))
        assert states == sum(
            optimizer_state_bytes(name, shape, recipe.train) for name, shape in settings.tensors().items()
        )


def story(rank: int, workers: int) -> dict[str, torch.Tensor]:
    held = {}
    for way in WAYS:
        recipe = recipe_of(way)
        world = make_mesh(rank, workers, torch.device("cpu"), {"replicate": 1, "shard": 2, "tensor": 1})
        model = empty_decoder(recipe.model, "meta")
        freeze(model, recipe.train)
        lower(model, recipe.train)
        spread = parallelize_model(model, recipe, world)
        optimizer = build_optimizer(spread.model, recipe.train, 0, world)
        held[way] = torch.tensor(held_bytes(spread.model, recipe, optimizer))
    return held


def test_the_plan_counts_what_each_of_two_workers_keeps(tmp_path) -> None:
    for by_way in run_ranks(tmp_path, 2, story):
        for way, held in by_way.items():
            weights, states = planned(recipe_of(way), Mesh(shard=2))
            if way == "adafactor":
                # each has all means of rows and columns, and half of the five norms' squares
                states = 2 * states - 5 * 64 * 4 / 2
            assert held.tolist() == pytest.approx([weights, states], rel=1e-12), way
