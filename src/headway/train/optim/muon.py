"""Muon: the update of a matrix is its orthogonalized momentum (Jordan et al. 2024).

Five quintic Newton-Schulz iterations bring all singular values near one: in bfloat16 on GPUs, as its authors do, and in
float32 on CPUs, which gain nothing from less. The update is scaled by 0.2 sqrt(max(rows, columns)), so that its root
mean square is about that of AdamW's and both share a learning rate (Liu et al. 2025, Muon is Scalable for LLM
Training).

A sharded matrix is gathered on one worker; matrices are distributed by cost, and the parts of the results sent back:
two all-to-alls per round of matrices. The result is what one worker alone would compute. Of a stack of experts'
matrices, those that are whole on a worker stay there.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.kernels import newton_schulz
from headway.kernels.dispatch import uses_triton
from headway.state.box import Box
from headway.train.optim.parameter_state import ParameterState, State, opened, shard_group, zeros_like
from headway.train.optim.rounding import RoundingBits

QUINTIC = (3.4445, -4.7750, 2.0315)
STEPS = 5
LEAST_NORM = 1e-7
MATCHES_ADAMW = 0.2
ROUND_ELEMENTS = 1 << 26
"""Bytes of this worker's parts of the matrices in one round."""


def muon_states(item: ParameterState, dtype: torch.dtype) -> State:
    """Return the momentum, allocated at the start."""
    return {"momentum": zeros_like(item.parameter, dtype)}


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return matrices [..., M, N] with the same singular vectors, and singular values near one."""
    norm = torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=LEAST_NORM)
    x = (matrices / norm).to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    a, b, c = QUINTIC
    fused = uses_triton("newton_schulz", x)
    for _ in range(STEPS):
        if fused:
            x = newton_schulz.step(x, a, b, c)
        else:
            square = x @ x.mT
            x = a * x + (b * square + c * (square @ square)) @ x
    result: Tensor = (x if wide else x.mT).float()
    return result


def muon(
    items: Sequence[ParameterState], group: Mapping[str, Any], dice: RoundingBits, both: dist.ProcessGroup | None
) -> None:
    """Update each matrix; `both` is the process group of matrices sharded over two axes."""
    process_groups = dict[dist.ProcessGroup | None, list[ParameterState]]()
    for item in items:
        process_groups.setdefault(None if _is_unsharded(item) else shard_group(item.parameter, both), []).append(item)
    for process_group, shared in process_groups.items():
        for turn in _rounds(shared, 1 if process_group is None else process_group.size()):
            updates = [_directed(item, group["momentum"], dice) for item in turn]
            if process_group is None:
                updates = [orthogonalized(update) if update.numel() else update for update in updates]
            else:
                updates = _orthogonalize_shared(turn, updates, process_group)
            for item, update in zip(turn, updates, strict=True):
                _apply(item, update, group, dice)


def _is_unsharded(item: ParameterState) -> bool:
    """Whether every worker with a part of it has whole matrices."""
    return all(box.shape[-2:] == item.shape[-2:] or not box.volume for box in item.boxes.values())


def _rounds(items: Sequence[ParameterState], size: int) -> Iterator[list[ParameterState]]:
    """Yield rounds of matrices: at least one per worker of the process group."""
    turn, held = list[ParameterState](), 0
    for item in items:
        each = math.prod(item.shape) // size
        if len(turn) >= size and held + each > ROUND_ELEMENTS:
            yield turn
            turn, held = [], 0
        turn.append(item)
        held += each
    if turn:
        yield turn


def _directed(item: ParameterState, decay: float, dice: RoundingBits) -> Tensor:
    """Update the momentum, and return the Nesterov direction."""
    gradient, stored = opened(item.gradient), item.moment("momentum")
    momentum = opened(stored)
    share = gradient * (1 - decay)  # in operations that round once each, as in the EMA
    momentum.mul_(decay).add_(share)
    item.put("momentum", stored, momentum, dice)
    return share.add_(momentum * decay)


def _apply(item: ParameterState, update: Tensor, group: Mapping[str, Any], dice: RoundingBits) -> None:
    weight = opened(item.weight)
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.add_(update, alpha=-group["lr"] * MATCHES_ADAMW * math.sqrt(max(item.shape[-2:])))
    item.put("weight", item.weight, weight, dice)


# -- sharded matrices


def _orthogonalize_shared(
    items: Sequence[ParameterState], updates: Sequence[Tensor], group: dist.ProcessGroup
) -> list[Tensor]:
    """Orthogonalize matrices sharded over a process group; each worker gets its part back."""
    ranks = dist.get_process_group_ranks(group)
    me = ranks.index(dist.get_rank())
    boxes = [[item.boxes[rank] for rank in ranks] for item in items]
    owners = _owners([item.shape for item in items], len(ranks))
    own_items = [i for i, owner in enumerate(owners) if owner == me]
    sent = [[updates[i] for i, owner in enumerate(owners) if owner == rank] for rank in range(len(ranks))]
    volumes = [[boxes[i][rank].volume for i in own_items] for rank in range(len(ranks))]

    arrived = _exchange(sent, volumes, group, updates[0].device)
    orthogonal = [
        orthogonalized(_assembled([arrived[rank][j] for rank in range(len(ranks))], boxes[i], items[i].shape))
        for j, i in enumerate(own_items)
    ]
    back = [
        [matrix[boxes[i][rank].slices((0,) * matrix.ndim)] for i, matrix in zip(own_items, orthogonal, strict=True)]
        for rank in range(len(ranks))
    ]
    own_volumes = [[update.numel() for update in to_one] for to_one in sent]
    returned = _exchange(back, own_volumes, group, updates[0].device)
    parts = [iter(from_one) for from_one in returned]
    return [next(parts[owner]).view_as(update) for owner, update in zip(owners, updates, strict=True)]


def _owners(shapes: Sequence[tuple[int, ...]], size: int) -> list[int]:
    """Assign matrices to workers: the most expensive first, each to the least loaded worker."""
    loads, owners = [0] * size, [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: -_cost(shapes[i])):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += _cost(shapes[i])
    return owners


def _cost(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * min(shape[-2:])


def _exchange(
    sent: Sequence[Sequence[Tensor]], volumes: Sequence[Sequence[int]], group: dist.ProcessGroup, device: torch.device
) -> list[list[Tensor]]:
    """Send a list of tensors to each worker; return what each has sent, flat, of these volumes."""
    nothing = torch.empty(0, device=device)
    out = torch.cat([nothing, *(tensor.reshape(-1) for tensors in sent for tensor in tensors)])
    into = out.new_empty(sum(map(sum, volumes)))
    dist.all_to_all_single(
        into,
        out,
        [sum(from_one) for from_one in volumes],
        [sum(tensor.numel() for tensor in tensors) for tensors in sent],
        group=group,
    )
    arrived = iter(torch.split(into, [volume for from_one in volumes for volume in from_one]))
    return [[next(arrived) for _ in from_one] for from_one in volumes]


def _assembled(parts: Sequence[Tensor], boxes: Sequence[Box], shape: tuple[int, ...]) -> Tensor:
    """Return the whole tensor, from its boxes."""
    tensor = parts[0].new_empty(shape)
    for part, box in zip(parts, boxes, strict=True):
        tensor[box.slices((0,) * len(shape))] = part.view(box.shape)
    return tensor
