"""Diffusion transformers on meshes compute what one process computes: every gradient of plain PyTorch."""

from functools import cache
from typing import Any

import pytest
import torch
from test_compositions import RATE, STEPS, Named, of, workers_of
from torch import Tensor
from torch.distributed.tensor import DTensor

from headway.errors import ModelError
from headway.models import initial_weight
from headway.models.custom import empty_model
from headway.models.diffusion import Conditioning, TextStates, empty_transformer
from headway.parallel import finish_gradients, make_mesh, parallelize_model, total_norm
from headway.parallel.layout import check_layout
from headway.parallel.local_part import to_local
from headway.parallel.objective import LABEL, TEXT, TEXT_MASK, TIME
from headway.recipe import Data, Parallel, Recipe, Train
from headway.recipe.families import class_of
from headway.state.tensors import fill
from processes import run_ranks

ROWS, TOKENS, WIDTH = 4, 6, 12
SMALL = {"layers": 2, "dim": 48, "heads": 4, "in_channels": 2}
DIT = SMALL | {"family": "dit", "num_classes": 5, "learned_variance": True}
TEXT_DIT = SMALL | {"family": "dit", "conditioning": "text", "text_dim": WIDTH, "text_tokens": TOKENS}
WAN = SMALL | {"family": "wan", "text_dim": WIDTH, "text_tokens": TOKENS, "time_features": 16}
MESHES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: mesh, model, train
    "dit, shard 2, recomputed": ({"shard": 2}, DIT, {"recompute": "full"}),
    "wan, shard 2": ({"shard": 2}, WAN, {}),
    "text dit, tensor 2": ({"tensor": 2, "shard": 1}, TEXT_DIT, {}),
    "wan, tensor 2, recomputed": ({"tensor": 2, "shard": 1}, WAN, {"recompute": "full"}),
    "wan, replicate 2": ({"replicate": 2, "shard": 1}, WAN, {"recompute": "selective"}),
}
MORE = {
    "dit, replicate 2": ({"replicate": 2, "shard": 1}, DIT, {}),
    "dit, tensor 4": ({"tensor": 4, "shard": 1}, DIT, {}),
    "wan, tensor 4": ({"tensor": 4, "shard": 1}, WAN, {}),
    "wan, shard 2 tensor 2": ({"shard": 2, "tensor": 2}, WAN, {"recompute": "selective"}),
    "text dit, replicate 2 tensor 2": ({"replicate": 2, "tensor": 2, "shard": 1}, TEXT_DIT, {"recompute": "full"}),
    "dit, replicate 2 shard 2": ({"replicate": 2, "shard": 2}, DIT, {}),
}


def make_recipe(mesh: dict[str, Any], model: dict[str, Any], train: dict[str, Any]) -> Recipe:
    # without the checks between sections, which ask for a dataset
    return Recipe.model_construct(
        model=class_of(model)(**model),
        data=Data(path="nowhere", seq=16),
        train=Train(batch=ROWS, **train),
        parallel=Parallel(**mesh),
        rl=None,
        lora=None,
    )


def start(recipe: Recipe, name: str, shape: tuple[int, ...]) -> Tensor:
    """A first value of every parameter that is nowhere zero, unlike in runs, where adaLN-zero hides most gradients."""
    weight = initial_weight(recipe.model, name, shape, 0)
    noise = torch.empty(shape).normal_(
        0, 0.05, generator=torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    )
    return weight + noise


def batch(recipe: Recipe) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    frames = 1 if recipe.model.family == "dit" else 3
    shape = (ROWS, recipe.model.in_channels, frames, 4, 8)
    x, target = (torch.randn(shape, generator=generator) for _ in range(2))
    columns = {TIME: torch.rand(ROWS, generator=generator)}
    if recipe.model.conditioning == "class":
        return x, target, columns | {LABEL: torch.tensor([0, 3, 5, 1])}
    states = torch.randn((ROWS, TOKENS, WIDTH), generator=generator)
    mask = torch.arange(TOKENS) < torch.tensor([[TOKENS], [2], [1], [4]])
    return x, target, columns | {TEXT: states, TEXT_MASK: mask}


def reference(recipe: Recipe) -> Named:
    model = empty_transformer(recipe.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start(recipe, name, tuple(parameter.shape)))
    x, target, columns = batch(recipe)
    text = TextStates(columns[TEXT], columns[TEXT_MASK]) if TEXT in columns else None
    conditioning = Conditioning(labels_B=columns.get(LABEL), text=text)
    results = {}
    for step in range(STEPS):
        predicted = model(x, columns[TIME], conditioning)
        loss = (predicted - target).square().sum() / target.numel()
        loss.backward()
        results[f"{step}/loss"] = loss.detach()
        results[f"{step}/norm"] = (
            torch.stack([p.grad.double().square().sum() for p in model.parameters()]).sum().sqrt().float()
        )
        for name, parameter in model.named_parameters():
            results[f"{step}/{name}"] = parameter.grad.clone()
            parameter.data -= RATE * parameter.grad
            parameter.grad = None
    return results


def story(rank: int, workers: int, recipe: Recipe) -> Named:
    """The same steps on a mesh; what this rank has of every gradient, put together."""
    world = make_mesh(rank, workers, torch.device("cpu"), recipe.parallel.sizes(workers))
    spread = parallelize_model(empty_model(recipe.model), recipe, world)
    for name, parameter in spread.model.named_parameters():
        fill(name, parameter, start(recipe, name, tuple(parameter.shape)))
    x, target, columns = batch(recipe)
    data, each = world.data, ROWS // world.data.size
    mine = slice(each * data.rank, each * (data.rank + 1))
    results = {}
    for step in range(STEPS):
        predicted = spread.model(x[mine], None, None, **{name: column[mine] for name, column in columns.items()})
        loss = (predicted - target[mine]).square().sum() / target.numel()
        loss.backward()
        parameters = dict(spread.model.named_parameters())
        finish_gradients(parameters, spread.missing)
        once = loss.detach() if world.axis("tensor").rank == 0 else torch.zeros(())
        results[f"{step}/loss"] = world.sum(once.clone())
        results[f"{step}/norm"] = total_norm(parameters, world, spread.borrowed)
        for name, parameter in parameters.items():
            gradient = parameter.grad
            results[f"{step}/{name}"] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
            with torch.no_grad():
                to_local(parameter).sub_(to_local(gradient), alpha=RATE)
            parameter.grad = None
    return results


def stories(rank: int, workers: int, recipes: dict[str, Recipe]) -> Named:
    return {
        f"{name}|{key}": value
        for name, recipe in recipes.items()
        for key, value in story(rank, workers, recipe).items()
    }


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory) -> Any:
    @cache
    def run(more: bool, workers: int) -> list[Named]:
        table = MORE if more else MESHES
        recipes = {name: make_recipe(*way) for name, way in table.items() if workers_of(way[0]) == workers}
        return run_ranks(tmp_path_factory.mktemp("ranks"), workers, stories, recipes)

    return run


def assert_equal(ranks: list[Named], truth: Named) -> None:
    """As in test_compositions, but some gradients are zero up to rounding: of a key's bias, which no softmax sees."""
    for results in ranks:
        assert results.keys() == truth.keys()
        for name, value in results.items():
            norm = truth[f"{name[0]}/norm"]
            bound = (
                1e-5 * truth[name] if name.endswith("/loss") else 1e-4 * torch.maximum(truth[name].norm(), norm / 100)
            )
            assert (value - truth[name]).norm() <= bound, f"{name} differs by {(value - truth[name]).norm():.1e}"


@pytest.mark.parametrize("name", [*MESHES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_diffusion_transformer_on_a_mesh_equals_one_process(rank_results, name: str) -> None:
    mesh = (MESHES | MORE)[name]
    ranks = of(name, rank_results(name in MORE, workers_of(mesh[0])))
    assert_equal(ranks, reference(make_recipe(*mesh)))


def test_tensor_axis_that_does_not_divide_the_heads_is_named() -> None:
    recipe = make_recipe({"tensor": 3, "shard": 1}, WAN, {})
    with pytest.raises(ModelError, match="tensor 3 does not divide the 4 heads of WanTransformer"):
        check_layout(empty_model(recipe.model), recipe, 3)


def test_pipeline_of_a_diffusion_transformer_is_refused() -> None:
    recipe = make_recipe({"pipeline": 2, "shard": 1}, WAN, {})
    with pytest.raises(ModelError, match="no pipeline axis"):
        check_layout(empty_model(recipe.model), recipe, 2)
