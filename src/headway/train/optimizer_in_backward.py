"""Updates inside the backward pass: a block's parameters as soon as all of their gradients are there.

So only one block's gradients are in memory at once, and those of what lies outside of blocks. It is of one worker, in
one pass a step, and without clipping: the norm of all gradients is known only when the first updates are long made. It
is recorded all the same.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from headway.parallel import ParallelModel, World, total_norm
from headway.recipe import Recipe

__all__ = ["OptimizerInBackward", "early_updates"]


def early_updates(
    spread: ParallelModel, optimizer: torch.optim.Optimizer, recipe: Recipe, world: World
) -> "OptimizerInBackward | None":
    """What makes them, where a recipe asks for it."""
    if not recipe.train.update_in_backward:
        return None
    assert world.size == 1, "refused before"
    assert not spread.accumulates, "refused before"
    return OptimizerInBackward([block for stage in spread.stages for block in stage.blocks], optimizer, world)


class OptimizerInBackward:
    """Updates blocks while a backward pass goes on; the rest is left to whoever asked for the pass."""

    def __init__(self, blocks: Sequence[nn.Module], optimizer: torch.optim.Optimizer, world: World) -> None:
        self._optimizer, self._world = optimizer, world
        self._squares: list[Tensor] = []
        for block in blocks:
            mine = {name: one for name, one in block.named_parameters() if one.requires_grad}
            waiting = set(mine)
            for name, parameter in mine.items():
                parameter.register_post_accumulate_grad_hook(partial(self._come, name, mine, waiting))

    def _come(self, name: str, mine: dict[str, nn.Parameter], waiting: set[str], _: Tensor) -> None:
        waiting.discard(name)
        if waiting:
            return
        waiting.update(mine)
        self._squares.append(total_norm(mine, self._world).float().square())
        # of the gradients there are, all are this block's: those before are gone; what is outside has to wait
        outside = self._put_aside(mine)
        self._optimizer.step()
        for parameter in mine.values():
            parameter.grad = None
        for parameter, gradient in outside:
            parameter.grad = gradient

    def _put_aside(self, mine: dict[str, nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
        """Gradients of what is not in the block."""
        kept = {id(parameter) for parameter in mine.values()}
        found = list[tuple[nn.Parameter, Tensor]]()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in kept:
                    found.append((parameter, parameter.grad))
                    parameter.grad = None
        return found

    def norm(self, parameters: dict[str, nn.Parameter]) -> Tensor:
        """Of all gradients of the pass that is over, those that are gone with it included."""
        squares, self._squares = self._squares, []
        rest = {name: one for name, one in parameters.items() if one.grad is not None}
        if rest:
            squares.append(total_norm(rest, self._world).float().square())
        return torch.stack(squares).sum().sqrt()
