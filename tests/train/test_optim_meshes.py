"""Optimizers on meshes: the update of one worker, and states that any mesh takes over from any other, bit for bit."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_net import Net, gradients
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from headway.errors import ModelError
from headway.parallel import make_mesh
from headway.recipe import Train
from headway.state import (
    CheckpointFacts,
    begin_checkpoint,
    collect_shard_entries,
    commit,
    leave_shard_entry,
    open_checkpoint,
    partial_folder,
    shard_name,
    write_shard,
)
from headway.state.tensors import ModelShare, load_state, named_state, pieces
from headway.train.optim import WeightEma, build_optimizer, set_step
from processes import run_ranks

RATE = 0.02
HALF = {"dtype": "bfloat16", "weights": "bfloat16"}
WAYS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw in bfloat16": HALF | {"moments": "bfloat16"},
    "adamw with masters": HALF | {"master": True},
    "adamw-8bit": {"optimizer": "adamw-8bit"},
    "adamw-8bit in bfloat16": HALF | {"optimizer": "adamw-8bit"},
    "muon": {"optimizer": "muon"},
    "muon in bfloat16": HALF | {"optimizer": "muon", "moments": "bfloat16"},
    "adafactor": {"optimizer": "adafactor"},
}
USUAL = ("adamw", "adamw with masters", "adamw-8bit in bfloat16", "muon in bfloat16", "adafactor")
"""Every rule, and every kind of weights and moments, once; the others are slow."""
PARAMETERS = [way if way in USUAL else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
MESHES = {2: {"replicate": 1, "shard": 2, "tensor": 1}, 4: {"replicate": 1, "shard": 2, "tensor": 2}}
CUTS = {"wide": Shard(1), "tall": Shard(0), "embed.weight": Shard(0), "head": Shard(0)}
"""What a tensor axis does to them; all others are copies there."""


def train_of(way: str) -> Train:
    return Train(lr=RATE, ema=0.9, **WAYS[way])


def laid_out(mesh: Any, train: Train) -> Net:
    """The net, whole for no mesh; otherwise cut over the tensor axis, and then rows over the shard axis."""
    net = Net(columns=1024).to(getattr(torch, train.weights))
    for name, p in [*net.named_parameters()] if mesh is not None else []:
        owner, _, key = name.rpartition(".")
        cut = CUTS.get(key, CUTS.get(name, Replicate()))
        placements = [Shard(0), cut] if mesh.ndim == 2 else [Shard(0)]
        parameter = nn.Parameter(distribute_tensor(p.detach(), mesh, placements))
        net.get_submodule(owner)._parameters[key] = parameter
    return net


def step(net: nn.Module, optimizer: torch.optim.Optimizer, average: WeightEma, number: int) -> None:
    whole = Net(columns=1024)
    for name, gradient in gradients(whole, number).items():
        p = net.get_parameter(name)
        gradient = gradient.to(p.dtype)
        p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if isinstance(p, DTensor) else gradient
    set_step(optimizer.param_groups, number, RATE)
    optimizer.step()
    average.follow()


def parts_of(rank: int, workers: int, train: Train) -> tuple[nn.Module, torch.optim.Optimizer, WeightEma, ModelShare]:
    world = make_mesh(rank, workers, torch.device("cpu"), MESHES[workers]) if workers > 1 else None
    net = laid_out(None if world is None else world.mesh, train)
    held = ModelShare(rank, tuple(range(workers)))
    optimizer = build_optimizer(net, train, seed=5, world=world, held=held)
    return net, optimizer, WeightEma(net, optimizer, 0.9, held), held


def save(rank: int, workers: int, folder: Path, state: dict[str, torch.Tensor], held: ModelShare) -> None:
    begun = begin_checkpoint(folder, 1) if rank == 0 else None
    dist.barrier()
    partial = partial_folder(folder, 1)
    leave_shard_entry(partial, write_shard(partial, shard_name(rank), pieces(state, held)))
    dist.barrier()
    if begun is not None:
        commit(
            begun,
            CheckpointFacts(cursor=0, chain="", data_version="v"),
            collect_shard_entries(partial, workers),
            workers=workers,
        )
    dist.barrier()


def story(rank: int, workers: int, folder: Path, ways: Sequence[str]) -> dict[str, torch.Tensor]:
    """These ways of training: go on from a state of another mesh, or begin; two steps, saved between them."""
    results = {}
    for way in ways:
        train = train_of(way)
        net, optimizer, average, held = parts_of(rank, workers, train)
        source = folder / f"{way}-{workers // 2}" / "step-00000001"
        if workers > 1:
            load_state(source, net, optimizer, held, average.tensors)
        else:
            step(net, optimizer, average, 1)
        save(rank, workers, folder / f"{way}-{workers}", named_state(net, optimizer, held, average.tensors), held)
        step(net, optimizer, average, 2)
        step(net, optimizer, average, 3)
        for name, tensor in named_state(net, optimizer, held, average.tensors).items():
            results[f"{way}/{name}"] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
    return results


Found = dict[int, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool, int], tuple[Path, Found]]:
    """Three steps of one worker; the last two again by two and by four, each of which took the state before it over."""

    @cache
    def run(usual: bool, workers: int) -> tuple[Path, Found]:
        ways = [way for way in WAYS if (way in USUAL) == usual]
        folder, results = run(usual, workers // 2) if workers > 1 else (tmp_path_factory.mktemp("ways"), {})
        return folder, results | {workers: run_ranks(folder, workers, story, folder, ways)[0]}

    return run


WORKERS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("way", PARAMETERS)
@pytest.mark.parametrize("workers", WORKERS)
def test_a_mesh_makes_the_updates_of_one_worker(live, way: str, workers: int) -> None:
    _, results = live(way in USUAL, workers)
    alone = {name: tensor for name, tensor in results[1].items() if name.startswith(f"{way}/")}
    assert any("/ema/" in name for name in alone)
    for name, tensor in alone.items():
        if way == "adafactor":
            torch.testing.assert_close(results[workers][name], tensor, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(results[workers][name], tensor), name


@pytest.mark.parametrize("way", PARAMETERS)
@pytest.mark.parametrize("workers", WORKERS)
def test_states_go_from_mesh_to_mesh_bit_for_bit(live, way: str, workers: int) -> None:
    folder, _ = live(way in USUAL, workers)
    manifests = [open_checkpoint(folder / f"{way}-{number}" / "step-00000001").manifest for number in (1, workers)]
    assert len({manifest.digest for manifest in manifests}) == 1
    assert len(manifests[1].files) == workers


def story_refused(rank: int, workers: int) -> None:
    world = make_mesh(rank, workers, torch.device("cpu"), {"replicate": 1, "shard": 1, "tensor": 2})
    net = Net(columns=768)
    block = net.blocks[0]
    block.wide = nn.Parameter(distribute_tensor(block.wide.detach(), world.mesh, [Shard(1)]))
    with pytest.raises(ModelError, match=r"blocks\.0\.wide is split at column 384, inside a quantization block of 256"):
        build_optimizer(net, Train(optimizer="adamw-8bit"), world=world)


def test_a_mesh_that_cuts_a_block_of_eight_bit_numbers_is_refused(tmp_path) -> None:
    run_ranks(tmp_path, 2, story_refused)
