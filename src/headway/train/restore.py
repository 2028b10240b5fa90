"""Restores a worker's state, from a checkpoint or from a snapshot in the agent's memory."""

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

LEADER_DISK = "the leader's disk"


def open_state(assignment: Assignment, descriptors: Sequence[int], fields: Mapping[str, Any]) -> OpenCheckpoint | None:
    """Open the state that a worker resumes from; None starts at step 0. A snapshot's descriptors came with the
    assignment, as did the addresses of parts on other nodes."""
    if assignment.from_memory:
        elsewhere = {file.name: file for file in (PeerFile(*entry) for entry in fields.get("far", ()))}
        far = PeerReader(fields["key"]) if elsewhere else None
        if far is not None and fields.get("disk"):
            ((manifest, size),) = zip(descriptors, (size for _, _, size in fields["files"]), strict=True)
            content = os.pread(manifest, size, 0)
            return open_checkpoint(PeerCheckpoint(LEADER_DISK, content, tuple(elsewhere.values()), far))
        return open_checkpoint(MemoryCheckpoint(map_files(descriptors, fields.get("files", ())), elsewhere, far))
    return None if assignment.checkpoint is None else open_address(assignment.checkpoint)


def restore(
    state: OpenCheckpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    held: ModelShare,
    world: World,
    average: WeightEma | None = None,
) -> tuple[int, int, str]:
    """Restore model, optimizer, EMA and random state; return the step, cursor and chain."""
    load_state(state, model, optimizer, held, None if average is None else average.tensors)
    manifest = state.manifest
    restore_rng(world, manifest.rng, manifest.workers)
    return manifest.step, manifest.cursor, manifest.chain
