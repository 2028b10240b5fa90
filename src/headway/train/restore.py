"""Bringing a worker to where a run stands: from a checkpoint, or from what the agent has kept in memory."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from headway.parallel import World
from headway.recipe import Assignment
from headway.state import MemoryCheckpoint, OpenCheckpoint, map_files, open_checkpoint
from headway.state.address import open_address
from headway.state.peer_read import PeerCheckpoint, PeerFile, PeerReader
from headway.state.tensors import ModelShare, load_state
from headway.train.optim import WeightEma
from headway.train.rng import restore_rng

__all__ = ["open_state", "restore"]

WHERE = "the disk of the machine that leads"


def open_state(assignment: Assignment, descriptors: Sequence[int], told: Mapping[str, Any]) -> OpenCheckpoint | None:
    """The state that a worker goes on from; None starts at step 0. What the agent has kept came with the assignment,
    and where to find what other nodes have."""
    if assignment.from_memory:
        elsewhere = {file.name: file for file in (PeerFile(*one) for one in told.get("far", ()))}
        far = PeerReader(told["key"]) if elsewhere else None
        if far is not None and told.get("disk"):
            ((manifest, size),) = zip(descriptors, (size for _, _, size in told["files"]), strict=True)
            content = os.pread(manifest, size, 0)
            return open_checkpoint(PeerCheckpoint(WHERE, content, tuple(elsewhere.values()), far))
        return open_checkpoint(MemoryCheckpoint(map_files(descriptors, told.get("files", ())), elsewhere, far))
    return None if assignment.checkpoint is None else open_address(assignment.checkpoint)


def restore(
    state: OpenCheckpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    held: ModelShare,
    world: World,
    average: WeightEma | None = None,
) -> tuple[int, int, str]:
    """Bring model, optimizer, average and random state to a saved state; returns its step, cursor and chain."""
    load_state(state, model, optimizer, held, None if average is None else average.tensors)
    manifest = state.manifest
    restore_rng(world, manifest.rng, manifest.workers)
    return manifest.step, manifest.cursor, manifest.chain
