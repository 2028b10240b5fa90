"""Making the state durable: all workers write their shards, the first commits them as one checkpoint.

Each stage ends by agreeing whether it went well everywhere, so that a full disk under one worker stops all of them
with its sentence and leaves the older checkpoints as they were.
"""

import time

import torch

from headway.errors import HeadwayError
from headway.state import Facts, abandon, begin, commit, open_checkpoint, partial_folder, write_shard
from headway.state.tensors import named_state, pieces
from headway.train.build import Parts, Progress
from headway.train.rng import rng_state, rng_text
from headway.train.together import together

__all__ = ["save"]


def save(parts: Parts, progress: Progress) -> None:
    """Write one checkpoint, together with the other workers."""
    world, folder = parts.world, parts.run.checkpoints
    started = time.monotonic()
    with parts.recorder.span("checkpoint"):
        mine = pieces(named_state(parts.spread.model, parts.optimizer, parts.held), parts.held)
        rng = world.gather(rng_state(world))
        with together(world, "prepare a checkpoint"):
            if world.first:
                begin(folder, progress.step, needs_bytes=world.size * sum(piece.data.nbytes for piece in mine))
        try:
            with together(world, "write its part of a checkpoint"):
                parts.faults.reach("save", progress.step)
                write_shard(partial_folder(folder, progress.step), world.rank, mine)
            with together(world, "commit a checkpoint"):
                parts.faults.reach("commit", progress.step)
                if world.first:
                    _commit(parts, progress, rng, started)
        except HeadwayError:
            if world.first:
                abandon(partial_folder(folder, progress.step))
            raise


def _commit(parts: Parts, progress: Progress, rng: list[torch.Tensor], started: float) -> None:
    keep = parts.recipe.checkpoint
    path = commit(
        parts.run.checkpoints,
        progress.step,
        Facts(cursor=progress.cursor, chain=progress.chain, data_version=parts.data_version, rng=rng_text(rng)),
        workers=parts.world.size,
        keep_last=keep.keep_last,
        keep_every_steps=keep.keep_every_steps,
    )
    manifest = open_checkpoint(path).manifest
    parts.recorder.event(
        "checkpoint",
        step=progress.step,
        digest=manifest.digest,
        bytes=manifest.bytes,
        seconds=time.monotonic() - started,
    )
