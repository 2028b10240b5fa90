"""Exponential moving average (EMA) of the weights, in float32."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from headway.parallel.local_part import to_local
from headway.state.tensors import ModelShare, named_parameters
from headway.train.optim.parameter_state import opened, zeros_like


class WeightEma:
    """The EMA of each trained parameter: starts as the weights, and is updated after each step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, decay: float, held: ModelShare) -> None:
        self._decay = decay
        named = [(name, p) for name, p in named_parameters(model, held) if p.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        # A weight below float32 may have a master copy in its optimizer.
        self._followed = [optimizer.state[p].get("master", p).detach() for p in self._parameters]
        self.tensors = {name: zeros_like(p, torch.float32) for name, p in named}
        """By parameter name, sharded like the parameter."""
        self._averages = [to_local(tensor) for tensor in self.tensors.values()]
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Start from the current weights."""
        for average, weight in zip(self._averages, self._followed, strict=True):
            average.copy_(to_local(weight))

    @torch.no_grad()
    def follow(self) -> None:
        """Add the weights of one step."""
        for average, weight in zip(self._averages, self._followed, strict=True):
            # in operations that round once each: torch.lerp rounds the last few elements of a tensor differently
            average.mul_(self._decay).add_(opened(to_local(weight)) * (1 - self._decay))

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Temporarily replace the model's weights by the EMA."""
        with torch.no_grad():
            before = [to_local(parameter).clone() for parameter in self._parameters]
            for parameter, average in zip(self._parameters, self._averages, strict=True):
                to_local(parameter).copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, weight in zip(self._parameters, before, strict=True):
                    to_local(parameter).copy_(weight)
