"""Bringing a worker to where a run stands: from a checkpoint, or from what the agent has kept in memory."""

from collections.abc import Sequence

import torch
from torch import nn

from headway.parallel import World
from headway.recipe import Assignment
from headway.state import Checkpoint, InMemory, map_files, open_checkpoint
from headway.state.address import open_address
from headway.state.tensors import Held, load_state
from headway.train.optim import Average
from headway.train.rng import restore_rng

__all__ = ["open_state", "restore"]


def open_state(
    assignment: Assignment, descriptors: Sequence[int], files: Sequence[tuple[str, int, int]]
) -> Checkpoint | None:
    """The state that a worker goes on from; None starts at step 0. What the agent has kept came with the assignment."""
    if assignment.from_memory:
        return open_checkpoint(InMemory(map_files(descriptors, files)))
    return None if assignment.checkpoint is None else open_address(assignment.checkpoint)


def restore(
    state: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    held: Held,
    world: World,
    average: Average | None = None,
) -> tuple[int, int, str]:
    """Bring model, optimizer, average and random state to a saved state; returns its step, cursor and chain."""
    load_state(state, model, optimizer, held, None if average is None else average.tensors)
    manifest = state.manifest
    restore_rng(world, manifest.rng, manifest.workers)
    return manifest.step, manifest.cursor, manifest.chain
