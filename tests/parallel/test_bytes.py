"""The bytes that a step's collectives really move are those that the plan counts."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from headway.models import empty_decoder
from headway.parallel import finish_gradients, make_mesh, parallelize_model
from headway.parallel.objective import DeviceBatch, SumScale
from headway.parallel.world import EXPERT_SHARD
from headway.plan.settings import Mesh, Settings
from headway.plan.traffic import traffic
from headway.plan.trainer import headway_software
from headway.recipe import Recipe
from headway.recipe.load import parse_recipe
from processes import run_ranks

SEQ, BATCH = 32, 4
MODEL = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "hidden": 128, "vocab_size": 256}
OPERATIONS = {
    "all_gather": (0,), "allgather": (0,), "reduce_scatter": (1,), "allreduce": (0,), "send": (0,), "alltoall": (0, 1),
}  # fmt: skip
"""Which arguments of an operation are the whole tensor; of several, what arrives and leaves, the mean counts."""
MOE = {"family": "mixtral", "experts": 4, "top_k": 2, "balance": 0.0}
DEEPSEEK = {
    "family": "deepseek_v3", "kv_heads": 4, "experts": 6, "top_k": 2, "groups": 3, "top_groups": 2, "first_dense": 1,
    "q_rank": 16, "kv_rank": 16, "rope_dim": 4, "head_dim": 12, "value_dim": 8, "layers": 4,
}  # fmt: skip

WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "shard 2": {"parallel": {"shard": 2}},
    "shard 2, weights kept": {"parallel": {"shard": 2, "keep_weights": True}},
    "replicate 2 shard 2": {"parallel": {"replicate": 2, "shard": 2}},
    "replicate 2 shard 2, reduced each": {"parallel": {"replicate": 2, "shard": 2, "reduce_each": True}},
    "tensor 2": {"parallel": {"tensor": 2, "shard": 1}},
    "tensor 4, 2 key heads": {"parallel": {"tensor": 4, "shard": 1}},
    "tensor 2, recomputed": {"parallel": {"tensor": 2, "shard": 1}, "train": {"recompute": "full"}},
    "pipeline 2": {"parallel": {"pipeline": 2, "shard": 1}},
    "pipeline 2, untied": {"parallel": {"pipeline": 2, "shard": 1}, "model": {"tie_embeddings": False}},
    "pipeline 2 interleaved": {
        "parallel": {"pipeline": 2, "shard": 1, "schedule": "interleaved"},
        "model": {"layers": 4},
    },
    "shard 2 tensor 2": {"parallel": {"shard": 2, "tensor": 2}},
    "shard 2 pipeline 2": {"parallel": {"shard": 2, "pipeline": 2}},
    "tensor 2 pipeline 2": {"parallel": {"tensor": 2, "pipeline": 2, "shard": 1}},
    "context 2": {"parallel": {"context": 2, "shard": 1}},
    "context 2, recomputed": {
        "parallel": {"context": 2, "shard": 1, "context_attention": "all-gather"}, "train": {"recompute": "full"},
    },
    "context 2, selective": {"parallel": {"context": 2, "shard": 1}, "train": {"recompute": "selective"}},
    "context 2, all-to-all": {
        "parallel": {"context": 2, "shard": 1, "context_attention": "all-to-all"}, "train": {"recompute": "full"},
    },
    "context 2, ring": {"parallel": {"context": 2, "shard": 1, "context_attention": "ring"}},
    "context 2, latent": {"parallel": {"context": 2, "shard": 1}, "model": DEEPSEEK},
    "context 2 tensor 2": {"parallel": {"context": 2, "tensor": 2, "shard": 1}},
    "context 4, ring": {"parallel": {"context": 4, "shard": 1, "context_attention": "ring"}},
    "shard 2 context 2": {"parallel": {"shard": 2, "context": 2}, "train": {"recompute": "full"}},
    "replicate 2 context 2": {"parallel": {"replicate": 2, "context": 2, "shard": 1}},
    "context 2 pipeline 2": {"parallel": {"context": 2, "pipeline": 2, "shard": 1}},
    "shard 2, experts": {"parallel": {"shard": 2}, "model": MOE},
    "shard 2 expert 2": {"parallel": {"shard": 2, "expert": 2}, "model": MOE},
    "shard 2 expert 2, recomputed": {
        "parallel": {"shard": 2, "expert": 2}, "model": MOE, "train": {"recompute": "full"},
    },
    "shard 4 expert 2": {"parallel": {"shard": 4, "expert": 2}, "model": MOE | {"family": "gpt_oss"}},
    "replicate 2 shard 2 expert 2": {
        "parallel": {"replicate": 2, "shard": 2, "expert": 2, "reduce_each": True}, "model": MOE,
    },
    "shard 2 expert 2 pipeline 2": {"parallel": {"shard": 2, "expert": 2, "pipeline": 2}, "model": DEEPSEEK},
}  # fmt: skip


class Count(TorchDispatchMode):
    """Adds up the bytes of every collective, by what it does and over whom."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = Counter[tuple[str, str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_")
            kind = next((kind for kind in OPERATIONS if name.startswith(kind)), None)
            if kind is not None:
                group = next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.ScriptObject))
                for place in (places := OPERATIONS[kind]):
                    whole = args[place]
                    for tensor in whole if isinstance(whole, list | tuple) else [whole]:
                        name = dist.ProcessGroup.unbox(group).group_name
                        self.bytes[kind, name] += tensor.nbytes / len(places)
        return func(*args, **(kwargs or {}))


def make_recipe(way: dict[str, dict[str, Any]]) -> Recipe:
    values = {
        "model": MODEL | way.get("model", {}),
        "data": {"path": "nowhere", "seq": SEQ},
        "train": {"batch": BATCH, "microbatch": 1} | way.get("train", {}),
        "parallel": way["parallel"],
    }
    return parse_recipe(values, {}, "test")


def story(rank: int, workers: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    world = make_mesh(rank, workers, torch.device("cpu"), recipe.parallel.sizes(workers))
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, world)
    for parameter in spread.model.parameters():
        torch.nn.init.zeros_(parameter)
    rows = torch.zeros((BATCH // world.data.size, SEQ), dtype=torch.int64)
    if world.axis("pipeline").size > 1:  # whose first step also introduces its stages to each other
        spread.passes(DeviceBatch(rows, rows), SumScale.per_label(1))
    with Count() as count:
        spread.passes(DeviceBatch(rows, rows), SumScale.per_label(1))
        finish_gradients(dict(spread.model.named_parameters()), spread.missing)
    names = {axis.group.group_name: name for name, axis in [*world.axes.items()][::-1] if axis.group is not None}
    if world.expert_mesh is not None:
        names |= {world.expert_mesh.get_group(EXPERT_SHARD).group_name: EXPERT_SHARD}
    names |= {group.group_name: "pipeline" for _, group in spread.missing if group.group_name not in names}
    kinds = {"allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all"}
    moved = Counter[str]()
    for (kind, group), size in count.bytes.items():
        axis = "expert" if kind == "alltoall" and "expert" in world.axes else names[group]
        moved[f"{kinds.get(kind, kind)} {axis}"] += size
    return {name: torch.tensor(float(size)) for name, size in moved.items()}


def planned(recipe: Recipe, workers: int) -> Settings:
    parallel, train = recipe.parallel, recipe.train
    sizes = parallel.sizes(workers)
    return Settings(
        mesh=Mesh(**sizes),
        seq=SEQ,
        batch=BATCH,
        microbatch=train.microbatch,
        zero=3 if sizes["shard"] * sizes["context"] > 1 else 0,
        recompute=train.recompute or "none",
        schedule=parallel.schedule,
        chunks=parallel.chunks,
        keeps_weights=bool(parallel.keep_weights),
        reduces_each=bool(parallel.reduce_each),
        context_attention=parallel.context_attention or "all-gather",
        precision="float32",
        software=headway_software(compiled=False, autocasts=False, older=True),
    )


def stories(rank: int, workers: int, recipes: dict[str, Recipe]) -> dict[str, torch.Tensor]:
    """All ways of as many workers, one after the other in the same processes."""
    return {
        f"{name}|{key}": value
        for name, recipe in recipes.items()
        for key, value in story(rank, workers, recipe).items()
    }


def workers_of(recipe: Recipe) -> int:
    sizes = recipe.parallel.sizes(1)
    return prod(sizes.values()) // sizes["expert"]


@pytest.fixture(scope="module")
def moved_by_ranks(tmp_path_factory) -> Callable[[int], list[dict[str, torch.Tensor]]]:
    """What the ranks of all ways of a size moved."""
    recipes = {name: make_recipe(way) for name, way in WAYS.items()}

    @cache
    def run(workers: int) -> list[dict[str, torch.Tensor]]:
        mine = {name: recipe for name, recipe in recipes.items() if workers_of(recipe) == workers}
        return run_ranks(tmp_path_factory.mktemp("ranks"), workers, stories, mine)

    return run


def together(sizes: dict[str, float]) -> dict[str, float]:
    """Bytes of the context axis added to those of the shard axis."""
    sums = dict[str, float]()
    for key, size in sizes.items():
        key = key.replace(" context", " shard")
        sums[key] = sums.get(key, 0.0) + size
    return sums


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if workers_of(make_recipe(way)) > 2 else name
        for name, way in WAYS.items()
    ],
)
def test_collectives_move_what_the_plan_counts(name: str, moved_by_ranks) -> None:
    recipe = make_recipe(WAYS[name])
    workers = workers_of(recipe)
    settings, each = planned(recipe, workers), workers // recipe.parallel.pipeline
    ranks = moved_by_ranks(workers)
    exchanges = [moved.pop(f"{name}|all_to_all expert", None) for moved in ranks]
    for rank, moved in enumerate(ranks):
        counted = traffic(recipe.model.architecture(), settings, rank // each)
        truth = {f"{operation} {axis}": size for (operation, axis), size in counted.items()}
        exchanged = truth.pop("all_to_all expert", 0.0)
        measured = {key.partition("|")[2]: float(size) for key, size in moved.items() if key.startswith(f"{name}|")}
        if settings.mesh.shard == 1:  # weights and sequences have the same workers, and mostly one group
            truth, measured = (together(sizes) for sizes in (truth, measured))
        assert measured == pytest.approx(truth, rel=0.02)
        stage = [float(size) for size in exchanges[rank // each * each :][:each] if size is not None]
        assert sum(stage) / each == pytest.approx(exchanged, rel=0.02)  # together: the router's choice is not even
