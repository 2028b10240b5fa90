"""An average of the weights over the steps, in float32, which forgets exponentially."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from headway.parallel.local_part import to_local
from headway.state.tensors import ModelShare, named_parameters
from headway.train.optim.parameter_state import opened, zeros_like

__all__ = ["WeightEma"]


class WeightEma:
    """Of each parameter that is trained: begins as the weights are, and follows them after each step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, decay: float, held: ModelShare) -> None:
        self._decay = decay
        named = [(name, p) for name, p in named_parameters(model, held) if p.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        # A weight that is kept in less than float32 may have a better copy with its optimizer.
        self._followed = [optimizer.state[p].get("master", p).detach() for p in self._parameters]
        self.tensors = {name: zeros_like(p, torch.float32) for name, p in named}
        """By the parameters' names, each laid out as its parameter is."""
        self._averages = [to_local(tensor) for tensor in self.tensors.values()]
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin with the weights as they are."""
        for average, weight in zip(self._averages, self._followed, strict=True):
            average.copy_(to_local(weight))

    @torch.no_grad()
    def follow(self) -> None:
        """Take in the weights of one more step."""
        for average, weight in zip(self._averages, self._followed, strict=True):
            # by steps that round once each: PyTorch's own rounds the last few elements of a tensor in another way
            average.mul_(self._decay).add_(opened(to_local(weight)) * (1 - self._decay))

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Have the model be its average for a while."""
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
