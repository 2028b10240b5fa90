"""The whole model on every worker, gathered from a mesh: what inference in the middle of training runs."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headway.parallel.parallel_model import ParallelModel
from headway.parallel.world import World


@torch.no_grad()
def fill_whole(plain: nn.Module, spread: ParallelModel, world: World, dtype: torch.dtype) -> None:
    """Give a plain model on the meta device the weights of a parallel one, all workers together.

    What this worker holds whole and in that precision is shared with it, not copied; the rest is gathered from shards,
    a tensor axis and other stages, one tensor at a time.
    """
    spread.rest()
    wanted = dict((*plain.named_parameters(), *plain.named_buffers()))
    own = dict((*spread.model.named_parameters(), *spread.model.named_buffers()))
    mine = {name: tensor for name, tensor in own.items() if name in wanted and name not in spread.borrowed}
    stages = _owners(sorted(wanted), mine, world)
    gathered = dict[int, Tensor]()
    for name, like in sorted(wanted.items()):
        whole = _from_stage(stages[name], mine.get(name), like, world)
        gathered[id(like)] = whole.to(dtype) if isinstance(like, nn.Parameter) else whole
    replace_tensors(plain, gathered)


@torch.no_grad()
def refresh_whole(plain: nn.Module, spread: ParallelModel, world: World) -> bool:
    """Copy the weights of now into a model that `fill_whole` filled, all workers together; return whether any were.

    Tensors that are shared with the parallel model already have them.
    """
    spread.rest()
    wanted = dict((*plain.named_parameters(), *plain.named_buffers()))
    own = dict((*spread.model.named_parameters(), *spread.model.named_buffers()))
    mine = {name: tensor for name, tensor in own.items() if name in wanted and name not in spread.borrowed}
    stages = _owners(sorted(wanted), mine, world)
    targets, sources, copied = list[Tensor](), list[Tensor](), False
    for name, tensor in sorted(wanted.items()):
        held = mine.get(name)
        if world.axis("pipeline").size == 1 and held is not None and not isinstance(held, DTensor):
            if held.data_ptr() != tensor.data_ptr():
                targets.append(tensor)
                sources.append(held)
            continue
        whole = _from_stage(stages[name], held, tensor, world)
        tensor.copy_(whole)
        copied = True
    if targets:
        torch._foreach_copy_(targets, sources)  # one launch rather than one per tensor
    return copied or bool(targets)


def _owners(names: list[str], mine: Mapping[str, Tensor], world: World) -> dict[str, int]:
    """Return the pipeline stage that owns each tensor."""
    pipeline = world.axis("pipeline")
    owners = torch.tensor([pipeline.rank if name in mine else 0 for name in names])
    if pipeline.size > 1:
        dist.all_reduce(owners, group=pipeline.group)
    return dict(zip(names, owners.tolist(), strict=True))


def _from_stage(stage: int, held: Tensor | None, like: Tensor, world: World) -> Tensor:
    """Return a tensor whole; it is gathered inside the stage that owns it, and sent to the others."""
    pipeline = world.axis("pipeline")
    if held is None or stage != pipeline.rank:
        whole = torch.empty(like.shape, dtype=like.dtype, device=world.device)
    else:
        whole = held.full_tensor() if isinstance(held, DTensor) else held.detach()
    if pipeline.size > 1:
        assert pipeline.group is not None
        whole = whole.contiguous()
        dist.broadcast(whole, dist.get_global_rank(pipeline.group, stage), group=pipeline.group)
    return whole


def replace_tensors(plain: nn.Module, tensors: Mapping[int, Tensor]) -> None:
    """Replace a model's tensors, by their identity: tied ones stay tied."""
    replaced = dict[int, Tensor]()
    for module in plain.modules():
        for registry in (module._parameters, module._buffers):
            for key, tensor in registry.items():
                if tensor is None:
                    continue
                value = replaced.get(id(tensor))
                if value is None:
                    value = tensors[id(tensor)]
                    if isinstance(tensor, nn.Parameter):
                        value = nn.Parameter(value, requires_grad=False)
                    replaced[id(tensor)] = value
                registry[key] = value  # type: ignore[assignment]
