"""Sharded tensors, saved and loaded by real process groups."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from headway.errors import StateError
from headway.state import Facts, begin, commit, open_checkpoint, partial_folder, verify, write_shard
from headway.state.tensors import Held, load_state, named_state, pieces, read_tensors
from processes import run_ranks

FACTS = Facts(cursor=0, chain="", data_version="v")


@pytest.fixture
def ranks(tmp_path):
    """Run one of the stories below in so many processes that form a group."""
    return partial(run_ranks, tmp_path)


class Net(nn.Module):
    """Sizes that do not divide: 5 rows over 3 ranks, 1 row over all, a scalar-like gain."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in {"five": (5, 4), "one": (1, 3), "two": (2,), "eight": (8, 2, 3)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.register_buffer("count", torch.tensor(seed))

    def forward(self, x):
        rows = (self.five.sum() + self.one.square().sum()) * self.two.prod()
        return x * rows + (self.eight**2).mean()


def build(world, seed):
    model = Net(seed)
    if world:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def train(model, optimizer, steps):
    for step in range(steps):
        model(torch.tensor(1.0 + step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def save_together(rank, world, folder, state):
    if rank == 0:
        begin(folder, 1)
    if world > 1:
        dist.barrier()
    write_shard(partial_folder(folder, 1), rank, pieces(state, Held(owner=rank == 0)))
    if world > 1:
        dist.barrier()
    if rank == 0:
        commit(folder, 1, FACTS, workers=world)
    if world > 1:
        dist.barrier()


def story_train_and_save(rank, world, folder):
    model, optimizer = build(world, seed=3)
    train(model, optimizer, 2)
    save_together(rank, world, folder, named_state(model, optimizer))
    again, optimizer = build(world, seed=9)
    opened = open_checkpoint(folder / "step-00000001")
    load_state(opened, again, optimizer)
    foreign = {name for file, name in opened._checked if file != f"rank-{rank:05d}.safetensors"}
    assert all(name == "model/count" or name.endswith("/step") for name in foreign), foreign


def story_load_and_save(rank, world, source, folder):
    model, optimizer = build(world, seed=9)
    load_state(source / "step-00000001", model, optimizer)
    save_together(rank, world, folder, named_state(model, optimizer))
    train(model, optimizer, 1)  # what was made for the optimizer must serve it


def manifest(folder):
    return open_checkpoint(folder / "step-00000001").manifest


def tensors(folder):
    return read_tensors(folder / "step-00000001", prefix="")


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8)), name


def test_resharding_is_exact_and_digests_agree(ranks, tmp_path):
    """Two ranks, then one, then three, then no group at all."""
    names = {world: tmp_path / f"by-{world}" for world in (2, 1, 3)}
    ranks(2, story_train_and_save, names[2])
    first = tensors(names[2])
    assert any(name.endswith("five/exp_avg") for name in first)
    ranks(1, story_load_and_save, names[2], names[1])
    ranks(3, story_load_and_save, names[1], names[3])
    for world, folder in names.items():
        verify(folder / "step-00000001")
        assert manifest(folder).workers == world == len(manifest(folder).files)
        assert manifest(folder).digest == manifest(names[2]).digest
        assert_same(tensors(folder), first)
    rows = [piece.shape[0] for piece in manifest(names[3]).tensors["model/five"].pieces]
    assert rows == [2, 2, 1]
    assert len(manifest(names[3]).tensors["model/two"].pieces) == 2  # the third rank holds nothing of it

    plain, optimizer = build(0, seed=1)  # and without any process group
    load_state(names[3] / "step-00000001", plain, optimizer)
    assert_same(named_state(plain, optimizer), first)
    save_together(0, 1, tmp_path / "plain", named_state(plain, optimizer))
    assert manifest(tmp_path / "plain").digest == manifest(names[2]).digest


def story_layouts(rank, world, folder):
    """Layouts beyond FSDP's: other dimensions, nested shards, replicas, rows fewer than ranks; and one refused."""
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    line = init_device_mesh("cpu", (world,))
    whole = {name: torch.from_numpy(array) for name, array in layouts_truth().items()}
    state = {
        "dim1": distribute_tensor(whole["dim1"], line, [Shard(1)]),
        "nested": distribute_tensor(whole["nested"], grid, [Shard(0), Shard(0)]),
        "corners": distribute_tensor(whole["corners"], grid, [Shard(0), Shard(1)]),
        "hybrid": distribute_tensor(whole["hybrid"], grid, [Replicate(), Shard(0)]),
        "copies": distribute_tensor(whole["copies"], grid, [Replicate(), Replicate()]),
        "few": distribute_tensor(whole["few"], line, [Shard(0)]),
        "none": distribute_tensor(whole["none"], line, [Shard(0)]),
    }
    save_together(rank, world, folder, state)
    holder = nn.Module()
    for name, tensor in state.items():
        holder.register_buffer(name, torch.zeros_like(tensor))
    save_together(rank, world, folder / "named", {f"model/{name}": tensor for name, tensor in state.items()})
    load_state(folder / "named" / "step-00000001", holder)
    for name, tensor in state.items():
        assert torch.equal(getattr(holder, name).to_local(), tensor.to_local()), name
    with pytest.raises(StateError, match="tensor sum lies on its mesh as"):
        pieces({"sum": DTensor.from_local(torch.ones(2), line, [Partial()])}, Held(owner=rank == 0))


def layouts_truth():
    rng = np.random.default_rng(0)
    shapes = {
        "dim1": (3, 7),
        "nested": (11, 2),
        "corners": (5, 5, 2),
        "hybrid": (3, 2),
        "copies": (4,),
        "few": (1, 5),
        "none": (0, 3),
    }
    return {name: rng.random(shape, np.float32) for name, shape in shapes.items()}


def test_other_layouts_are_saved_whole(ranks, tmp_path):
    ranks(4, story_layouts, tmp_path / "c")
    verify(tmp_path / "c" / "step-00000001")
    found = tensors(tmp_path / "c")
    for name, array in layouts_truth().items():
        assert np.array_equal(found[name].numpy(), array), name
    assert len(manifest(tmp_path / "c").tensors["corners"].pieces) == 4
    assert len(manifest(tmp_path / "c").tensors["hybrid"].pieces) == 2
    assert len(manifest(tmp_path / "c").tensors["copies"].pieces) == 1
