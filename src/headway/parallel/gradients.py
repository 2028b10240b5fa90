"""Gradients after a step's passes: the remaining reductions, and the global norm."""

from collections.abc import Collection, Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from headway.kernels.clip import gradient_norm, table_of
from headway.kernels.dispatch import uses_triton
from headway.parallel.local_part import to_local
from headway.parallel.world import World

Missing = tuple[tuple[frozenset[str], dist.ProcessGroup], ...]
"""Parameters with partial gradients, and the groups to reduce them over."""


def finish_gradients(parameters: Mapping[str, nn.Parameter], missing: Missing) -> None:
    """Reduce partial gradients, with one collective per group."""
    for names, group in missing:
        gradients = [p.grad for name, p in parameters.items() if name in names and p.grad is not None]
        parts = [to_local(gradient) for gradient in gradients]
        if parts:
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(flat, group=group)
            for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(total.view_as(part))


def total_norm(parameters: Mapping[str, nn.Parameter], world: World, borrowed: Collection[str] = ()) -> Tensor:
    """Return the global gradient norm as a plain scalar; replicated gradients count once."""
    by_copies = dict[int, list[Tensor]]()
    for name, parameter in parameters.items():
        if parameter.grad is not None and name not in borrowed:
            by_copies.setdefault(_copies(parameter.grad), []).append(to_local(parameter.grad))
    norms = {copies: _norm(parts) for copies, parts in by_copies.items()}
    if world.size == 1:
        return norms[1]
    squares = torch.zeros((), device=world.device)
    for copies, norm in norms.items():
        squares += norm.float().square() / copies
    return world.sum(squares).sqrt()


def _norm(parts: list[Tensor]) -> Tensor:
    if parts and uses_triton("norm", parts[0]):
        return gradient_norm(table_of([part for part in parts if part.numel()]))
    return torch.nn.utils.get_total_norm(parts)


def _copies(gradient: Tensor) -> int:
    """Return how many workers hold the same elements."""
    if not isinstance(gradient, DTensor):
        return 1
    axes = enumerate(gradient.placements)
    return prod(gradient.device_mesh.size(axis) for axis, placement in axes if isinstance(placement, Replicate))
