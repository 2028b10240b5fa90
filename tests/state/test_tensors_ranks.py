"""Sharded tensors, saved and loaded by real process groups."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from counting import Counting
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from headway.errors import StateError
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
    verify_checkpoint,
    write_shard,
)
from headway.state.tensors import ModelShare, load_state, named_state, owned_pieces, pieces, read_tensors
from processes import run_ranks

FACTS = CheckpointFacts(cursor=0, chain="", data_version="v")


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
    from headway.train.build import build_optimizer  # it takes a while, and most ranks here do without

    return model, build_optimizer(model, Train(lr=0.01))


def train(model, optimizer, steps):
    for step in range(steps):
        model(torch.tensor(1.0 + step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def save_together(rank, world, folder, state):
    begun = begin_checkpoint(folder, 1) if rank == 0 else None
    if world > 1:
        dist.barrier()
    partial, share = partial_folder(folder, 1), ModelShare(rank, tuple(range(world)))
    leave_shard_entry(partial, write_shard(partial, shard_name(rank), pieces(state, share)))
    if world > 1:
        dist.barrier()
    if begun is not None:
        commit(begun, FACTS, collect_shard_entries(partial, world), workers=world)
    if world > 1:
        dist.barrier()


def story_train_and_save(rank, world, folder):
    model, optimizer = build(world, seed=3)
    train(model, optimizer, 2)
    save_together(rank, world, folder, named_state(model, optimizer))
    again, optimizer = build(world, seed=9)
    source = Counting(folder / "step-00000001")
    opened = open_checkpoint(source)
    load_state(opened, again, optimizer)
    at = {
        (piece.file, piece.offset): name for name, tensor in opened.manifest.tensors.items() for piece in tensor.pieces
    }
    read = [(file, at[file, begin]) for file, begin, _ in source.reads if begin > 0]
    assert len(read) == len(set(read))
    foreign = {name for file, name in read if file != shard_name(rank)}
    assert all(name == "model/count" or name.endswith("/step") for name in foreign), foreign
    own = sum(t.to_local().nbytes for t in named_state(again, optimizer).values() if isinstance(t, DTensor))
    small = sum(t.nbytes for t in named_state(again, optimizer).values() if not isinstance(t, DTensor))
    assert sum(end - begin for _, begin, end in source.reads if begin > 0) == own + small


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
        verify_checkpoint(folder / "step-00000001")
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
    with pytest.raises(StateError, match="tensor sum is placed as"):
        pieces({"sum": DTensor.from_local(torch.ones(2), line, [Partial()])}, ModelShare(rank, tuple(range(world))))


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


def test_other_layouts_are_saved_completely(ranks, tmp_path):
    ranks(4, story_layouts, tmp_path / "c")
    verify_checkpoint(tmp_path / "c" / "step-00000001")
    saved = tensors(tmp_path / "c")
    for name, array in layouts_truth().items():
        assert np.array_equal(saved[name].numpy(), array), name
    assert len(manifest(tmp_path / "c").tensors["corners"].pieces) == 4
    assert len(manifest(tmp_path / "c").tensors["hybrid"].pieces) == 2
    assert len(manifest(tmp_path / "c").tensors["copies"].pieces) == 1


def story_copies(rank, world, folder):
    """Copies of everything on two ranks each: whole DTensors, sharded ones, plain tensors."""
    line = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2))
    state = dict[str, torch.Tensor]()
    for i, array in enumerate(copies_truth()):
        whole = torch.from_numpy(array)
        state[f"model/{i}.copied"] = distribute_tensor(whole, line, [Replicate()])
        state[f"model/{i}.sharded"] = distribute_tensor(whole, grid, [Replicate(), Shard(0)])
        state[f"model/{i}.plain"] = whole
    save_together(rank, world, folder, state)
    return {
        "owned": torch.tensor(
            sum(own.tensor.nbytes for own in owned_pieces(state, ModelShare(rank, tuple(range(world)))))
        )
    }


def copies_truth():
    """Like the layers of a model: many alike, and small ones between."""
    rng = np.random.default_rng(1)
    return [rng.random((rows, 8), np.float32) for _ in range(6) for rows in (16, 64, 4)]


@pytest.mark.parametrize("world", [2, 4])
def test_copies_share_the_writing(ranks, tmp_path, world):
    shares = [int(result["owned"]) for result in ranks(world, story_copies, tmp_path / "c")]
    saved = tensors(tmp_path / "c")
    for i, array in enumerate(copies_truth()):
        for kind in ("copied", "sharded", "plain"):
            assert np.array_equal(saved[f"model/{i}.{kind}"].numpy(), array)
    verify_checkpoint(tmp_path / "c" / "step-00000001")
    whole = 3 * sum(array.nbytes for array in copies_truth())
    assert sum(shares) == whole  # all of it once
    largest = max(array.nbytes for array in copies_truth())
    assert all(abs(share - whole / world) <= largest for share in shares), shares
    for kind in ("copied", "sharded", "plain"):
        files = manifest(tmp_path / "c").tensors
        writers = {piece.file for name, tensor in files.items() if name.endswith(kind) for piece in tensor.pieces}
        assert len(writers) == world, kind
