"""Optimizer steps inside the backward pass: a block is updated as soon as all of its gradients are ready.

Only one block's gradients, and those outside of blocks, are then in memory at once. It needs one worker, one microbatch
per step and no clipping: the gradient norm is known only after the first updates, but is still recorded.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from headway.parallel import ParallelModel, World, total_norm
from headway.recipe import Recipe


def early_updates(
    spread: ParallelModel, optimizer: torch.optim.Optimizer, recipe: Recipe, world: World
) -> "OptimizerInBackward | None":
    """Return the optimizer in backward, if the recipe asks for it."""
    if not recipe.train.update_in_backward:
        return None
    assert world.size == 1, "refused before"
    assert not spread.accumulates, "refused before"
    return OptimizerInBackward([block for stage in spread.stages for block in stage.blocks], optimizer, world)


class OptimizerInBackward:
    """Updates blocks during a backward pass; the caller updates everything else."""

    def __init__(self, blocks: Sequence[nn.Module], optimizer: torch.optim.Optimizer, world: World) -> None:
        self._optimizer, self._world = optimizer, world
        self._squares: list[Tensor] = []
        for block in blocks:
            block_parameters = {
                name: parameter for name, parameter in block.named_parameters() if parameter.requires_grad
            }
            waiting = set(block_parameters)
            for name, parameter in block_parameters.items():
                parameter.register_post_accumulate_grad_hook(
                    partial(self._on_gradient, name, block_parameters, waiting)
                )

    def _on_gradient(self, name: str, block_parameters: dict[str, nn.Parameter], waiting: set[str], _: Tensor) -> None:
        waiting.discard(name)
        if waiting:
            return
        waiting.update(block_parameters)
        self._squares.append(total_norm(block_parameters, self._world).float().square())
        # All present gradients belong to this block: earlier ones are freed, and those outside of blocks set aside.
        outside = self._put_aside(block_parameters)
        self._optimizer.step()
        for parameter in block_parameters.values():
            parameter.grad = None
        for parameter, gradient in outside:
            parameter.grad = gradient

    def _put_aside(self, block_parameters: dict[str, nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
        """Detach the gradients of parameters outside the block, and return them."""
        block_ids = {id(parameter) for parameter in block_parameters.values()}
        others = list[tuple[nn.Parameter, Tensor]]()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in block_ids:
                    others.append((parameter, parameter.grad))
                    parameter.grad = None
        return others

    def norm(self, parameters: dict[str, nn.Parameter]) -> Tensor:
        """Return the norm of all gradients of the last pass, including freed ones."""
        squares, self._squares = self._squares, []
        rest = {name: parameter for name, parameter in parameters.items() if parameter.grad is not None}
        if rest:
            squares.append(total_norm(rest, self._world).float().square())
        return torch.stack(squares).sum().sqrt()
