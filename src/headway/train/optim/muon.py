"""Muon: the momentum of a matrix, orthogonalized, is its update (Jordan et al. 2024).

Five steps of Newton and Schulz with quintic coefficients bring all singular values near one: in bfloat16 on GPUs, as
its authors do, and in float32 on CPUs, which gain nothing from less. The update is scaled by 0.2 sqrt(max(rows,
columns)), so that its root mean square is about that of AdamW's and both live with one learning rate (Liu et al. 2025,
Muon is Scalable for LLM Training).

A matrix that several workers share is brought to one of them, whole; each gets its share of the matrices, by their
cost, and sends everyone's part of the result back: two exchanges for a round of matrices. What it computes there is
what one worker alone would. Of a stack of matrices, one for each expert, those that lie whole on a worker stay there.
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

__all__ = ["muon", "muon_states", "orthogonalized"]

QUINTIC = (3.4445, -4.7750, 2.0315)
STEPS = 5
LEAST_NORM = 1e-7
MATCHES_ADAMW = 0.2
ROUND_ELEMENTS = 1 << 26
"""Of this worker's parts of the matrices that are under way at once."""


def muon_states(one: ParameterState, dtype: torch.dtype) -> State:
    """The momentum, there from the start."""
    return {"momentum": zeros_like(one.parameter, dtype)}


def orthogonalized(matrices: Tensor) -> Tensor:
    """Matrices [..., M, N] with the same singular vectors and singular values near one."""
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
    made: Tensor = (x if wide else x.mT).float()
    return made


def muon(
    items: Sequence[ParameterState], group: Mapping[str, Any], dice: RoundingBits, both: dist.ProcessGroup | None
) -> None:
    """One update of each; `both` are the workers of a matrix that two axes cut."""
    teams = dict[dist.ProcessGroup | None, list[ParameterState]]()
    for one in items:
        teams.setdefault(None if _whole(one) else shard_group(one.parameter, both), []).append(one)
    for team, shared in teams.items():
        for turn in _rounds(shared, 1 if team is None else team.size()):
            updates = [_directed(one, group["momentum"], dice) for one in turn]
            if team is None:
                updates = [orthogonalized(update) if update.numel() else update for update in updates]
            else:
                updates = _together(turn, updates, team)
            for one, update in zip(turn, updates, strict=True):
                _apply(one, update, group, dice)


def _whole(one: ParameterState) -> bool:
    """Whether all workers have whole matrices of it, if they have any."""
    return all(box.shape[-2:] == one.shape[-2:] or not box.volume for box in one.boxes.values())


def _rounds(items: Sequence[ParameterState], size: int) -> Iterator[list[ParameterState]]:
    """Matrices that are under way together: at least one for each worker of a team."""
    turn, held = list[ParameterState](), 0
    for one in items:
        each = math.prod(one.shape) // size
        if len(turn) >= size and held + each > ROUND_ELEMENTS:
            yield turn
            turn, held = [], 0
        turn.append(one)
        held += each
    if turn:
        yield turn


def _directed(one: ParameterState, decay: float, dice: RoundingBits) -> Tensor:
    """The momentum with this step's gradient, and Nesterov's look ahead."""
    gradient, kept = opened(one.gradient), one.moment("momentum")
    momentum = opened(kept)
    share = gradient * (1 - decay)  # in steps that round once each, as the average of weights is
    momentum.mul_(decay).add_(share)
    one.put("momentum", kept, momentum, dice)
    return share.add_(momentum * decay)


def _apply(one: ParameterState, update: Tensor, group: Mapping[str, Any], dice: RoundingBits) -> None:
    weight = opened(one.weight)
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.add_(update, alpha=-group["lr"] * MATCHES_ADAMW * math.sqrt(max(one.shape[-2:])))
    one.put("weight", one.weight, weight, dice)


# -- matrices that a team shares


def _together(items: Sequence[ParameterState], updates: Sequence[Tensor], team: dist.ProcessGroup) -> list[Tensor]:
    """Orthogonalize matrices whose parts lie on a team's workers; each gets its part back."""
    ranks = dist.get_process_group_ranks(team)
    me = ranks.index(dist.get_rank())
    boxes = [[one.boxes[rank] for rank in ranks] for one in items]
    owners = _owners([one.shape for one in items], len(ranks))
    mine = [i for i, owner in enumerate(owners) if owner == me]
    sent = [[updates[i] for i, owner in enumerate(owners) if owner == rank] for rank in range(len(ranks))]
    volumes = [[boxes[i][rank].volume for i in mine] for rank in range(len(ranks))]

    arrived = _exchange(sent, volumes, team, updates[0].device)
    made = [
        orthogonalized(_assembled([arrived[rank][j] for rank in range(len(ranks))], boxes[i], items[i].shape))
        for j, i in enumerate(mine)
    ]
    back = [
        [whole[boxes[i][rank].slices((0,) * whole.ndim)] for i, whole in zip(mine, made, strict=True)]
        for rank in range(len(ranks))
    ]
    own = [[update.numel() for update in to_one] for to_one in sent]
    returned = _exchange(back, own, team, updates[0].device)
    parts = [iter(from_one) for from_one in returned]
    return [next(parts[owner]).view_as(update) for owner, update in zip(owners, updates, strict=True)]


def _owners(shapes: Sequence[tuple[int, ...]], size: int) -> list[int]:
    """Who takes which matrix: the dearest first, each to whoever has least to do."""
    loads, owners = [0] * size, [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: -_cost(shapes[i])):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += _cost(shapes[i])
    return owners


def _cost(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * min(shape[-2:])


def _exchange(
    sent: Sequence[Sequence[Tensor]], volumes: Sequence[Sequence[int]], team: dist.ProcessGroup, device: torch.device
) -> list[list[Tensor]]:
    """Send a list of tensors to each; what each has sent here, flat, of these volumes."""
    nothing = torch.empty(0, device=device)
    out = torch.cat([nothing, *(tensor.reshape(-1) for tensors in sent for tensor in tensors)])
    into = out.new_empty(sum(map(sum, volumes)))
    dist.all_to_all_single(
        into,
        out,
        [sum(from_one) for from_one in volumes],
        [sum(tensor.numel() for tensor in tensors) for tensors in sent],
        group=team,
    )
    arrived = iter(torch.split(into, [volume for from_one in volumes for volume in from_one]))
    return [[next(arrived) for _ in from_one] for from_one in volumes]


def _assembled(parts: Sequence[Tensor], boxes: Sequence[Box], shape: tuple[int, ...]) -> Tensor:
    """The whole tensor that parts are boxes of."""
    whole = parts[0].new_empty(shape)
    for part, box in zip(parts, boxes, strict=True):
        whole[box.slices((0,) * len(shape))] = part.view(box.shape)
    return whole
