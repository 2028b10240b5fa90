"""Every composition of axes computes what one process computes: the losses and every gradient of plain PyTorch.

The reference is the plain model in one process, its logits whole, with torch's own cross-entropy and no microbatches.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from headway.agent.launch.trainer_support import outdated_torch
from headway.models import empty_decoder, init_weights, initial_weight
from headway.parallel import finish_gradients, make_mesh, parallelize_model, total_norm
from headway.parallel.local_part import to_local
from headway.parallel.objective import DeviceBatch, SumScale
from headway.recipe import Recipe
from headway.recipe.load import parse_recipe
from headway.state.tensors import fill
from processes import run_ranks

SEQ, VOCABULARY, STEPS, RATE = 16, 99, 2, 0.5
ZERO = 1e-7
DECODER = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "hidden": 64, "vocab_size": VOCABULARY}
MISTRAL = {"family": "mistral", "window": 5}
MIXTRAL = {"family": "mixtral", "experts": 4, "top_k": 2, "balance": 0.0}
QWEN3_MOE = {"family": "qwen3_moe", "experts": 8, "top_k": 3, "balance": 0.0, "dense_layers": (0,)}
GPT_OSS = {"family": "gpt_oss", "experts": 6, "top_k": 2, "balance": 0.0, "window": 5}
DEEPSEEK = {
    "family": "deepseek_v3",
    "kv_heads": 4,
    "experts": 6,
    "top_k": 2,
    "groups": 3,
    "top_groups": 2,
    "first_dense": 1,
    "q_rank": 16,
    "kv_rank": 16,
    "rope_dim": 4,
    "head_dim": 12,
    "value_dim": 8,
}
GEMMA2 = {"family": "gemma2", "window": 5, "head_dim": 8, "attention_cap": 2.0, "logit_cap": 3.0}
GPT2 = {"family": "gpt2", "kv_heads": 4, "positions": SEQ}
YARN = {"rope_scaling": {"kind": "yarn", "factor": 4.0, "original": 4}}
LLAMA3 = {"rope_scaling": {"kind": "llama3", "factor": 4.0, "original": 4, "low": 1.0, "high": 4.0}}
EVERYTHING = {"tie_embeddings": False, "qk_norm": True, "qkv_bias": True, "output_bias": True, "mlp_bias": True}

COMPOSITIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: mesh, model, train
    "shard 2": ({"shard": 2}, {}, {}),
    "shard 2, weights kept": ({"shard": 2, "keep_weights": True}, EVERYTHING, {}),
    "replicate 2": ({"replicate": 2, "shard": 1}, {}, {"microbatch": 2}),
    "tensor 2": ({"tensor": 2, "shard": 1}, EVERYTHING, {}),
    "tensor 2, 1 key head": ({"tensor": 2, "shard": 1}, {"kv_heads": 1}, {}),
    "pipeline 2, 3 layers": ({"pipeline": 2, "shard": 1}, {"layers": 3}, {}),
    "pipeline 2, stages of 2 and 1": ({"pipeline": 2, "shard": 1, "stages": (2, 1)}, EVERYTHING | {"layers": 3}, {}),
    "pipeline 2 interleaved": ({"pipeline": 2, "shard": 1, "schedule": "interleaved"}, {"layers": 4}, {}),
    "shard 2 tensor 2, tied, recomputed": ({"shard": 2, "tensor": 2}, {}, {"recompute": "full"}),
    "shard 2 expert 2": ({"shard": 2, "expert": 2}, MIXTRAL, {}),
    "shard 2 expert 2, recomputed": ({"shard": 2, "expert": 2}, DEEPSEEK, {"recompute": "full"}),
    "context 2, all-gather": ({"context": 2, "shard": 1}, EVERYTHING | YARN, {}),
    "context 2, all-to-all": ({"context": 2, "shard": 1, "context_attention": "all-to-all"}, MISTRAL | LLAMA3, {}),
    "context 2, ring": ({"context": 2, "shard": 1, "context_attention": "ring"}, GPT_OSS, {}),
    "context 2, all-gather, recomputed": ({"context": 2, "shard": 1}, GEMMA2, {"recompute": "full"}),
    "tensor 2 pipeline 2 zero-bubble": ({"tensor": 2, "pipeline": 2, "shard": 1, "schedule": "zero-bubble"}, {}, {}),
}
FOUR = {"layers": 4}
MORE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "replicate 2 shard 2, reduced each": ({"replicate": 2, "shard": 2, "reduce_each": True}, EVERYTHING, {"batch": 8}),
    "replicate 2 tensor 2": ({"replicate": 2, "shard": 1, "tensor": 2}, {}, {}),
    "shard 2 pipeline 2 zero-bubble": ({"shard": 2, "pipeline": 2, "schedule": "zero-bubble"}, EVERYTHING, {}),
    "shard 4, reduced each": ({"shard": 4, "reduce_each": True}, FOUR, {"batch": 8}),
    "tensor 4, 2 key heads": ({"tensor": 4, "shard": 1}, {}, {}),
    "tensor 4, 1 key head": ({"tensor": 4, "shard": 1}, EVERYTHING | {"kv_heads": 1}, {}),
    "pipeline 2": ({"pipeline": 2, "shard": 1}, {}, {}),
    "pipeline 2, stages of 3 and 1": ({"pipeline": 2, "shard": 1, "stages": (3, 1)}, EVERYTHING | FOUR, {}),
    "pipeline 2 zero-bubble": ({"pipeline": 2, "shard": 1, "schedule": "zero-bubble"}, FOUR, {}),
    "pipeline 3, 5 layers": ({"pipeline": 3, "shard": 1}, {"layers": 5}, {}),
    "replicate 2 shard 2": ({"replicate": 2, "shard": 2}, {}, {}),
    "replicate 2 pipeline 2": ({"replicate": 2, "shard": 1, "pipeline": 2}, EVERYTHING | FOUR, {}),
    "shard 2 tensor 2": ({"shard": 2, "tensor": 2}, EVERYTHING, {}),
    "shard 2 pipeline 2": ({"shard": 2, "pipeline": 2}, MISTRAL | FOUR, {}),
    "shard 2 pipeline 2 interleaved": ({"shard": 2, "pipeline": 2, "schedule": "interleaved"}, FOUR, {"batch": 8}),
    "tensor 2 pipeline 2": ({"tensor": 2, "pipeline": 2, "shard": 1}, MISTRAL | FOUR, {"recompute": "selective"}),
    "shard 2 tensor 2 pipeline 2": ({"shard": 2, "tensor": 2, "pipeline": 2}, EVERYTHING | FOUR, {}),
    "replicate 2 tensor 2 pipeline 2": ({"replicate": 2, "shard": 1, "tensor": 2, "pipeline": 2}, FOUR, {}),
    "replicate 2 shard 2 tensor 2": ({"replicate": 2, "shard": 2, "tensor": 2}, {}, {}),
    "replicate 2 shard 2 pipeline 2 interleaved": (
        {"replicate": 2, "shard": 2, "pipeline": 2, "schedule": "interleaved"}, FOUR, {"batch": 8},
    ),
    "shard 2 tensor 2 pipeline 2 zero-bubble": (
        {"shard": 2, "tensor": 2, "pipeline": 2, "schedule": "zero-bubble"}, FOUR, {"recompute": "full"},
    ),
    "shard 2 expert 2, weights kept": ({"shard": 2, "expert": 2, "keep_weights": True}, GPT_OSS, {}),
    "shard 2 expert 2, selective": ({"shard": 2, "expert": 2}, QWEN3_MOE, {"recompute": "selective"}),
    "shard 4 expert 2": ({"shard": 4, "expert": 2}, MIXTRAL, {}),
    "shard 4 expert 4": ({"shard": 4, "expert": 4, "reduce_each": True}, QWEN3_MOE, {"batch": 8}),
    "shard 4 expert 2, by width": ({"shard": 4, "expert": 2}, GPT_OSS, {}),
    "replicate 2 shard 2 expert 2": ({"replicate": 2, "shard": 2, "expert": 2}, QWEN3_MOE, {"batch": 8}),
    "shard 2 expert 2 pipeline 2": ({"shard": 2, "expert": 2, "pipeline": 2}, DEEPSEEK | FOUR, {}),
    "shard 2 expert 2 pipeline 2 interleaved": (
        {"shard": 2, "expert": 2, "pipeline": 2, "schedule": "interleaved"}, QWEN3_MOE | FOUR, {"batch": 8},
    ),
    "context 2, all-gather, positions": ({"context": 2, "shard": 1}, GPT2, {"batch": 8}),
    "context 2, all-gather, sinks": ({"context": 2, "shard": 1}, GPT_OSS, {"recompute": "selective"}),
    "context 2, all-gather, latent": ({"context": 2, "shard": 1}, DEEPSEEK, {}),
    "context 2, all-gather, balanced": ({"context": 2, "shard": 1}, MIXTRAL, {}),
    "context 2, all-to-all, sinks": ({"context": 2, "shard": 1, "context_attention": "all-to-all"}, GPT_OSS, {}),
    "context 2, all-to-all, caps": (
        {"context": 2, "shard": 1, "context_attention": "all-to-all"}, GEMMA2, {"recompute": "full"},
    ),
    "context 2, all-to-all, latent": ({"context": 2, "shard": 1, "context_attention": "all-to-all"}, DEEPSEEK, {}),
    "context 2, ring, window": ({"context": 2, "shard": 1, "context_attention": "ring"}, MISTRAL | YARN, {}),
    "context 2, ring, caps": (
        {"context": 2, "shard": 1, "context_attention": "ring"}, GEMMA2, {"recompute": "full"},
    ),
    "context 2, ring, latent": ({"context": 2, "shard": 1, "context_attention": "ring"}, DEEPSEEK, {}),
    "context 2, all-gather, all but attention": ({"context": 2, "shard": 1}, YARN, {"recompute": "except-attention"}),
    "context 4, all-gather": ({"context": 4, "shard": 1}, MISTRAL, {}),
    "context 4, all-to-all": ({"context": 4, "shard": 1, "context_attention": "all-to-all"}, {"kv_heads": 4}, {}),
    "context 4, ring": ({"context": 4, "shard": 1, "context_attention": "ring"}, GPT_OSS, {}),
    "shard 2 context 2": ({"shard": 2, "context": 2}, EVERYTHING | LLAMA3, {"recompute": "selective"}),
    "shard 2 context 2, all-to-all": (
        {"shard": 2, "context": 2, "context_attention": "all-to-all", "keep_weights": True}, EVERYTHING, {},
    ),
    "shard 2 context 2, ring, reduced each": (
        {"shard": 2, "context": 2, "context_attention": "ring", "reduce_each": True}, {}, {"batch": 8},
    ),
    "replicate 2 context 2": ({"replicate": 2, "context": 2, "shard": 1}, {}, {}),
    "context 2 tensor 2": ({"context": 2, "tensor": 2, "shard": 1}, EVERYTHING | YARN, {}),
    "context 2 tensor 2, ring": ({"context": 2, "tensor": 2, "shard": 1, "context_attention": "ring"}, {}, {}),
    "context 2 pipeline 2": ({"context": 2, "pipeline": 2, "shard": 1}, MISTRAL, {}),
    "context 2 pipeline 2 interleaved, all-to-all": (
        {"context": 2, "pipeline": 2, "shard": 1, "schedule": "interleaved", "context_attention": "all-to-all"},
        FOUR, {},
    ),
    "context 2 pipeline 2, positions": ({"context": 2, "pipeline": 2, "shard": 1}, GPT2, {}),
    "shard 2 expert 2 context 2": ({"shard": 2, "expert": 2, "context": 2}, QWEN3_MOE, {}),
    "context 2 tensor 2 pipeline 2": ({"context": 2, "tensor": 2, "pipeline": 2, "shard": 1}, EVERYTHING, {}),
    "replicate 2 shard 2 context 2": ({"replicate": 2, "shard": 2, "context": 2}, {}, {}),
    "shard 2 context 2, expert 4": ({"shard": 2, "expert": 4, "context": 2}, MIXTRAL, {}),
    "replicate 2 shard 4 expert 2": ({"replicate": 2, "shard": 4, "expert": 2}, MIXTRAL, {"batch": 8}),
}  # fmt: skip

if outdated_torch() is not None:  # agent/prepare.py refuses these there
    COMPOSITIONS = {name: way for name, way in COMPOSITIONS.items() if "zero-bubble" not in name}
    MORE = {name: way for name, way in MORE.items() if "zero-bubble" not in name}


def make_recipe(mesh: dict[str, Any], model: dict[str, Any], train: dict[str, Any]) -> Recipe:
    values = {
        "model": DECODER | model,
        "data": {"path": "nowhere", "seq": SEQ},
        "train": {"batch": 4, "microbatch": 1} | train,
        "parallel": mesh,
    }
    return parse_recipe(values, {}, "test")


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows with masked labels here and there, so that rows count for different numbers of tokens; most are packed of
    several documents."""
    tokens = torch.randint(0, VOCABULARY, (rows, SEQ + 1), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    labels[torch.arange(rows), torch.arange(rows)] = -100
    labels[0, 4:] = -100
    ends = torch.rand((rows, SEQ), generator=torch.Generator().manual_seed(2)) < 0.15
    documents = ends.int().cumsum(dim=1).int()
    documents[3] = 0
    return tokens[:, :-1], labels, documents


def reference(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Plain PyTorch."""
    model = empty_decoder(recipe.model)
    init_weights(model, seed=0)
    inputs, labels, documents = batch(recipe.train.batch)
    results = {}
    for step in range(STEPS):
        logits = model(inputs, documents=documents).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100)
        loss.backward()
        results[f"{step}/loss"] = loss.detach()
        squares = [parameter.grad.double().square().sum() for parameter in model.parameters()]
        results[f"{step}/norm"] = torch.stack(squares).sum().sqrt().float()
        for name, parameter in model.named_parameters():
            results[f"{step}/{name}"] = parameter.grad.clone()
            parameter.data -= RATE * parameter.grad
            parameter.grad = None
    return results | {"evaluation": model(inputs, labels, documents).detach()}


def story(rank: int, workers: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    """The same steps on a mesh; what this rank has of every gradient, put together."""
    world = make_mesh(rank, workers, torch.device("cpu"), recipe.parallel.sizes(workers))
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, world)
    for name, parameter in spread.model.named_parameters():
        fill(name, parameter, initial_weight(recipe.model, name, tuple(parameter.shape), 0))
    for name, buffer in spread.model.named_buffers():
        if ".balance." in name:
            buffer.zero_()
    inputs, labels, documents = batch(recipe.train.batch)
    trained = int((labels != -100).sum())
    data, each = world.data, recipe.train.batch // world.data.size
    mine = slice(each * data.rank, each * (data.rank + 1))
    results = {}
    for step in range(STEPS):
        loss = spread.passes(DeviceBatch(inputs[mine], labels[mine], documents[mine]), SumScale.per_label(trained))
        parameters = dict(spread.model.named_parameters())
        finish_gradients(parameters, spread.missing)
        results[f"{step}/loss"] = total(world, loss)
        results[f"{step}/norm"] = total_norm(parameters, world, spread.borrowed)
        for name, parameter in parameters.items():
            gradient = parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
            results[f"{step}/{name}"] = whole
        with torch.no_grad():
            for parameter in spread.model.parameters():
                assert getattr(parameter.grad, "placements", None) == getattr(parameter, "placements", None)
                to_local(parameter).sub_(to_local(parameter.grad), alpha=RATE)  # on whole ones torch thinks for long
                parameter.grad = None
    with torch.no_grad():
        results["evaluation"] = total(world, spread.evaluate(DeviceBatch(inputs[mine], labels[mine], documents[mine])))
        spread.rest()
    return results


def total(world: Any, loss: torch.Tensor) -> torch.Tensor:
    return world.sum(loss.clone() if world.axis("tensor").rank == 0 else torch.zeros_like(loss))


Named = dict[str, torch.Tensor]


def assert_equal(ranks: list[Named], truth: Named, loss: float, rest: float) -> None:
    seen = set()
    for results in ranks:
        seen |= results.keys()
        for name, value in results.items():
            bound = loss if name.endswith(("/loss", "evaluation")) else rest
            if truth[name].norm() < ZERO:  # such as the gradient of a bias of keys without rotation
                assert value.norm() < ZERO, f"{name} should be 0"
                continue
            difference = (value - truth[name]).norm() / truth[name].norm()
            assert difference < bound, f"{name} differs by {difference:.1e}"
    assert seen == truth.keys()


def workers_of(mesh: dict[str, Any]) -> int:
    sizes = [size for axis, size in mesh.items() if axis in ("replicate", "shard", "context", "tensor", "pipeline")]
    return int(torch.tensor(sizes).prod())


def stories(rank: int, workers: int, recipes: dict[str, Recipe]) -> Named:
    """All compositions of as many workers, one after the other in the same processes."""
    return {
        f"{name}|{key}": value
        for name, recipe in recipes.items()
        for key, value in story(rank, workers, recipe).items()
    }


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory) -> Callable[..., list[Named]]:
    """What the ranks of all compositions of a size found."""

    @cache
    def run(more: bool, workers: int) -> list[Named]:
        table = MORE if more else COMPOSITIONS
        recipes = {name: make_recipe(*way) for name, way in table.items() if workers_of(way[0]) == workers}
        return run_ranks(tmp_path_factory.mktemp("ranks"), workers, stories, recipes)

    return run


def of(name: str, ranks: list[Named]) -> list[Named]:
    mine = f"{name}|"
    return [{key.removeprefix(mine): value for key, value in rank.items() if key.startswith(mine)} for rank in ranks]


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_composition_equals_one_process(name: str, rank_results) -> None:
    ranks = rank_results(more=False, workers=workers_of(COMPOSITIONS[name][0]))
    assert_equal(of(name, ranks), reference(make_recipe(*COMPOSITIONS[name])), loss=1e-5, rest=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_compositions_equal_one_process(name: str, rank_results) -> None:
    ranks = rank_results(more=True, workers=workers_of(MORE[name][0]))
    assert_equal(of(name, ranks), reference(make_recipe(*MORE[name])), loss=1e-5, rest=1e-4)
