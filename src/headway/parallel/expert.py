"""The expert axis: each worker has some of a layer's experts, and tokens travel to them, from outside the model.

The axis lies within the shard axis: its workers have different tokens. Each sends its rows to the workers that have
their experts, and gets the results back; no row is dropped. Numbers of rows are only known once tokens are routed, so
the host waits for them, once per layer and pass. The router and both ways of balancing see a worker's own tokens, as
without the axis.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from headway.models.experts import Experts, gather_rows
from headway.parallel.collectives import exchanged
from headway.parallel.local_part import Forward, local_values, on_local, placed
from headway.parallel.world import Axis


def experts_of(module: nn.Module) -> list[Experts]:
    """Return the stacks of experts in a module."""
    return [part for part in module.modules() if isinstance(part, Experts)]


def share_experts(model: nn.Module, mesh: DeviceMesh, axis: Axis) -> None:
    """Give each worker of an axis its share of every layer's experts."""
    for experts in experts_of(model):
        for name, parameter in list(experts._parameters.items()):
            if parameter is not None:
                experts._parameters[name] = placed(parameter, Shard(0), mesh, axis)
        experts.is_shared = True
        compute = partial(on_local, experts, experts.compute, local_values)
        experts.compute = partial(_elsewhere, compute, len(experts.gate), axis)  # type: ignore[method-assign]


@torch.compiler.disable  # shapes depend on the routing
def _elsewhere(compute: Forward, count: int, axis: Axis, rows_ND: Tensor, expert_N: Tensor) -> Tensor:
    """Apply to each row its expert, of `count`, on the worker that has it; rows are sorted by expert.

    R workers    E their experts each    M rows that arrive here
    """
    assert axis.group is not None, "an axis of one worker shares nothing"
    sent_RE = torch.bincount(expert_N, minlength=count).view(axis.size, -1)
    arrive_RE = torch.empty_like(sent_RE)
    dist.all_to_all_single(arrive_RE, sent_RE, group=axis.group)
    sent, arriving = torch.stack((sent_RE.sum(dim=1), arrive_RE.sum(dim=1))).tolist()
    rows_MD = exchanged(rows_ND, sent, arriving, axis.group)

    # they are sorted by expert per sender
    numbers_E = torch.arange(sent_RE.shape[1], device=rows_ND.device)
    expert_M = numbers_E.repeat(axis.size).repeat_interleave(arrive_RE.flatten(), output_size=len(rows_MD))
    expert_M, order_M = expert_M.sort(stable=True)
    back_M = order_M.argsort()
    made_MD = compute(gather_rows(rows_MD, order_M, back_M), expert_M)
    return exchanged(gather_rows(made_MD, back_M, order_M), arriving, sent, axis.group)
