"""The processes of an attempt: how a worker joins the others, and the few sums they share.

A World is a value passed to whoever needs it; nothing reads ranks from the environment.
"""

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from headway.recipe import Assignment

__all__ = ["World", "join", "leave"]


@dataclass(frozen=True)
class World:
    """This worker's place among all."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this worker speaks for all: records metrics, commits checkpoints."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all workers, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether any worker says so. Goes through the CPU, so it waits for no device."""
        return bool(self.sum(torch.tensor([int(flag)])).item())

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Everyone's CPU tensor of the same shape, by rank."""
        if self.size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor)
        return parts


def join(assignment: Assignment, timeout_s: float) -> World:
    """Meet the other workers of this attempt through its rendezvous file; gloo on CPUs, NCCL on GPUs."""
    device = torch.device("cpu")
    backend = "gloo"
    if assignment.device == "cuda":
        device = torch.device("cuda", assignment.rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    if assignment.workers > 1:
        dist.init_process_group(
            backend,
            store=dist.FileStore(assignment.rendezvous, assignment.workers),
            rank=assignment.rank,
            world_size=assignment.workers,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=device if assignment.device == "cuda" else None,
        )
    return World(rank=assignment.rank, size=assignment.workers, device=device)


def leave(world: World) -> None:
    """Part from the others."""
    if world.size > 1:
        dist.destroy_process_group()
