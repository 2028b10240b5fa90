"""The worker processes of an attempt: joining, the position on the mesh, and global reductions.

A World is passed as a value; nothing reads ranks from the environment.
"""

import datetime
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headway.recipe import Assignment

EXPERT_SHARD = "expert shard"
"""Workers of the shard axis that have the same experts, which are sharded over them."""


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, as seen from this worker."""

    size: int = 1
    rank: int = 0
    """This worker's index on it."""
    group: dist.ProcessGroup | None = None
    """Process group along this axis; None for an axis of size 1."""


@dataclass(frozen=True)
class World:
    """This worker's global rank."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    """Mesh of the axes larger than 1; None for a single worker."""
    axes: Mapping[str, Axis] = field(default_factory=dict)
    """Axes of at least two workers; `shard` includes the context axis, over which weights are sharded, too."""
    expert_mesh: DeviceMesh | None = None
    """The mesh with its shard axis as two, EXPERT_SHARD and expert; None without an axis of experts."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which records metrics."""
        return self.rank == 0

    def axis(self, name: str) -> Axis:
        """Return an axis by name; one that the mesh lacks has size 1."""
        return self.axes.get(name, Axis())

    @property
    def data(self) -> Axis:
        """The data axes (replicate and shard) as one: workers that see different sequences."""
        copies, shards, parts = self.axis("replicate"), self.axis("shard"), self.axis("context").size
        rank = copies.rank * shards.size + shards.rank
        return Axis(copies.size * shards.size // parts, rank // parts)

    @property
    def fsdp_size(self) -> int:
        """How many workers share each weight and sum its gradient: those with other sequences, or other parts."""
        return self.data.size * self.axis("context").size

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the mesh's axes."""
        sizes = {name: axis.size for name, axis in self.axes.items()}
        return sizes | ({"shard": sizes["shard"] // sizes.get("context", 1)} if "shard" in sizes else {})

    @property
    def stage(self) -> tuple[int, ...]:
        """The workers of the same pipeline stage; all, without a pipeline (the outermost axis)."""
        pipeline = self.axis("pipeline")
        count = self.size // pipeline.size
        return tuple(range(pipeline.rank * count, (pipeline.rank + 1) * count))

    @property
    def reports(self) -> bool:
        """Whether this worker is the first of its stage's with the same rows: they all have the same scores of them."""
        return self.axis("tensor").rank == 0 and self.axis("context").rank == 0

    @property
    def speaks(self) -> bool:
        """Whether this worker is the first of those with the same data."""
        return self.axis("pipeline").rank == 0 and self.reports

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all workers, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_data(self, tensor: Tensor) -> Tensor:
        """Sum over workers with other tokens, in place."""
        for name in ("shard", "replicate"):
            axis = self.axis(name)
            if axis.size > 1:
                dist.all_reduce(tensor, group=axis.group)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether any worker says so. Runs on the CPU, without waiting for the device."""
        return bool(self.sum(torch.tensor([int(flag)])).item())

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather CPU tensors of the same shape from all workers, by rank."""
        if self.size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor)
        return parts

    def gather_text(self, text: str) -> list[str]:
        """Gather a text from all workers, by rank."""
        content = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        sizes = [int(size) for size in self.gather(torch.tensor([len(text.encode())]))]
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: len(content)] = content
        parts = self.gather(padded)
        return [bytes(part[:size].numpy()).decode() for part, size in zip(parts, sizes, strict=True)]


def join(assignment: Assignment, timeout_s: float, sizes: Mapping[str, int]) -> World:
    """Join the other workers of this attempt at its rendezvous; gloo on CPUs, NCCL on GPUs.

    `sizes` are those of the mesh's axes, outermost first; consecutive ranks differ in the last.
    """
    device = torch.device("cpu")
    backend = "gloo"
    if assignment.device == "cuda":
        device = torch.device("cuda", assignment.local_rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    if assignment.workers == 1:
        return World(rank=0, size=1, device=device)
    dist.init_process_group(
        backend,
        store=_store(assignment, timeout_s),
        rank=assignment.rank,
        world_size=assignment.workers,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device if assignment.device == "cuda" else None,
    )
    return make_mesh(assignment.rank, assignment.workers, device, sizes)


def _store(assignment: Assignment, timeout_s: float) -> dist.Store:
    """Return the rendezvous store: a file, or rank 0's port for several nodes."""
    if not assignment.rendezvous.startswith("tcp://"):
        return dist.FileStore(assignment.rendezvous, assignment.workers)
    host, _, port = assignment.rendezvous.removeprefix("tcp://").rpartition(":")
    timeout, listener = datetime.timedelta(seconds=timeout_s), None
    if assignment.rank == 0:  # by itself the store would listen on all addresses of the machine
        listener = socket.create_server((host, int(port)), backlog=max(64, assignment.workers)).detach()
    return dist.TCPStore(host, int(port), assignment.workers, assignment.rank == 0, timeout, master_listen_fd=listener)


def make_mesh(rank: int, workers: int, device: torch.device, sizes: Mapping[str, int]) -> World:
    """Arrange joined workers as a mesh."""
    # Weights are sharded over context, too. FSDP2 needs a shard axis with every replicate axis, even of size 1.
    context = sizes.get("context", 1)
    sizes = {**sizes, "shard": sizes["shard"] * context, "context": 1}
    named = {name: size for name, size in sizes.items() if size > 1 or (name == "shard" and sizes["replicate"] > 1)}
    expert = named.pop("expert", 1)
    mesh = init_device_mesh(device.type, tuple(named.values()), mesh_dim_names=tuple(named))
    axes = {name: Axis(size, mesh.get_local_rank(name), mesh.get_group(name)) for name, size in named.items()}
    within, shard = None, list(named).index("shard") if "shard" in named else 0  # by name it fails in PyTorch 2.11
    if context > 1:
        parts = mesh._unflatten(shard, (named["shard"] // context, context), ("data shard", "context"))
        axes["context"] = Axis(context, parts.get_local_rank("context"), parts.get_group("context"))
    if expert > 1:
        parts = (named["shard"] // expert, expert)
        within = mesh._unflatten(shard, parts, (EXPERT_SHARD, "expert"))
        axes["expert"] = Axis(expert, within.get_local_rank("expert"), within.get_group("expert"))
    return World(rank=rank, size=workers, device=device, mesh=mesh, axes=axes, expert_mesh=within)


def leave(world: World) -> None:
    """Destroy the process group."""
    if world.size > 1:
        dist.destroy_process_group()
