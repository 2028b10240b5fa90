"""Heartbeat marks at every block: they show which block a worker hangs in, and which worker is behind."""

from typing import Any

from torch import Tensor, nn

from headway.parallel import ParallelModel
from headway.track.heartbeat import HeartbeatWriter


def add_heartbeat_hooks(spread: ParallelModel, beat: HeartbeatWriter) -> None:
    """Add hooks that mark when a pass enters a block, forward and backward.

    Not for compiled blocks: a hook would be compiled with them, or break their graph.
    """
    blocks = [block for stage in spread.stages for block in stage.blocks] or _parts(spread.model)
    for number, block in enumerate(blocks, start=1):
        _mark(block, number, beat, last=number == len(blocks))


def _parts(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model without known blocks, two levels deep."""
    parts = [(name, part) for name, part in model.named_modules() if name and name.count(".") <= 1]
    return [part for _, part in parts if not isinstance(part, nn.ModuleList | nn.ModuleDict)]


def _mark(block: nn.Module, number: int, beat: HeartbeatWriter, last: bool) -> None:
    def enter(*_: Any) -> None:
        beat.mark(number)

    def leave(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if last:
            beat.forward()
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(enter)

    block.register_forward_pre_hook(enter)
    block.register_forward_hook(leave)
