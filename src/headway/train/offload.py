"""AdamW with moments in host memory (offload), for models whose optimizer state does not fit on the device.

Each step copies the moments of a bucket of parameters to the device, runs the same fused kernel as without offload, and
copies them back: the results are bitwise the same. On a GPU the host memory is page-locked, so that both copies are
asynchronous and run at link speed.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from headway.kernels import adamw as kernels
from headway.kernels.dispatch import uses_triton
from headway.parallel.local_part import to_local
from headway.state.box import Box

BUCKET_BYTES = 256 << 20
"""Moments on the device at once."""


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW with `exp_avg` and `exp_avg_sq` in host memory, in the shape of this worker's part."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "fused": True})
        for group in self.param_groups:
            for parameter in group["params"]:
                local = to_local(parameter)
                pinned = local.device.type == "cuda"
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=local.device),
                    "exp_avg": torch.zeros(local.shape, dtype=local.dtype, pin_memory=pinned),
                    "exp_avg_sq": torch.zeros(local.shape, dtype=local.dtype, pin_memory=pinned),
                }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one update, bucket by bucket."""
        assert closure is None, "the loss is made before"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None and to_local(p).numel() > 0]
            for bucket in _buckets(parameters):
                self._update(bucket, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        device = to_local(parameters[0]).device
        moments = [[state[key].to(device, non_blocking=True) for state in states] for key in ("exp_avg", "exp_avg_sq")]
        weights = [to_local(parameter).detach() for parameter in parameters]
        gradients = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        steps = [state["step"] for state in states]
        rates = {"lr": group["lr"], "weight_decay": group["weight_decay"], "eps": group["eps"]}
        if uses_triton("adamw", weights[0]):
            torch._foreach_add_(steps, 1.0)
            parts = [_part(*tensors) for tensors in zip(weights, gradients, *moments, steps, strict=True)]
            kernels.adamw(parts, betas=group["betas"], **rates)
        else:
            beta1, beta2 = group["betas"]
            adamw(
                weights, gradients, *moments, [], steps, fused=True, amsgrad=False, beta1=beta1, beta2=beta2, **rates,
                maximize=False,
            )  # fmt: skip
        for key, moved in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            for state, moment in zip(states, moved, strict=True):
                state[key].copy_(moment, non_blocking=True)


def _part(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: Tensor) -> kernels.AdamwPart:
    """Everything is float32, so no stochastic rounding is needed."""
    weight, gradient, mean, square = (x.view(1) if x.ndim == 0 else x for x in (weight, gradient, mean, square))
    shape = tuple(weight.shape)
    return kernels.AdamwPart(
        weight, gradient.contiguous(), mean, square, step, "", Box((0,) * len(shape), shape), shape
    )


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group parameters whose moments fit into a bucket; a larger one is alone."""
    bucket, held = list[Tensor](), 0
    for parameter in parameters:
        size = 2 * to_local(parameter).nbytes
        if bucket and held + size > BUCKET_BYTES:
            yield bucket
            bucket, held = [], 0
        bucket.append(parameter)
        held += size
    if bucket:
        yield bucket
