"""The optimizer of a run: AdamW as torch has it, or an update made of several rules; on GPUs, always the latter."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.kernels.adamw import AdamwTable
from headway.kernels.clip import clip_factor
from headway.kernels.dispatch import fused
from headway.parallel.local_part import to_local
from headway.parallel.world import World
from headway.recipe import ModelLayout, Train
from headway.state.tensors import ModelShare
from headway.train.offload import OffloadedAdamW
from headway.train.optim.adafactor import adafactor, adafactor_states
from headway.train.optim.adamw import adamw, adamw_states, eightbit_states, fused_adamw
from headway.train.optim.groups import groups_of
from headway.train.optim.muon import muon, muon_states
from headway.train.optim.parameter_state import ParameterState, State, trained, zeros_like
from headway.train.optim.rounding import RoundingBits

__all__ = ["RuleOptimizer", "build_optimizer", "clip"]


FUSED = ("adamw", "adamw-8bit")
"""Rules that one pass over all tensors follows."""


def build_optimizer(
    model: nn.Module,
    train: Train,
    seed: int = 0,
    world: World | None = None,
    held: ModelShare | None = None,
    layout: ModelLayout | None = None,
) -> torch.optim.Optimizer:
    """What updates this worker's part of a model, whose weights are there. All workers of a world call it."""
    groups = groups_of(model, train, held or ModelShare(), layout)
    plain = (train.optimizer, train.weights, train.moments) == ("adamw", "float32", "float32")
    if plain and train.offload_optimizer:
        groups = [{key: value for key, value in group.items() if key not in ("names", "rule")} for group in groups]
        return OffloadedAdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps)
    both = _both(world) if train.optimizer == "muon" and world is not None else None
    return RuleOptimizer(groups, train, seed, both)


def clip(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], norm: Tensor, most: float) -> None:
    """Have the next update see gradients of a norm of at most so much: scaled on their way into it, or here."""
    if isinstance(optimizer, RuleOptimizer) and optimizer.scales:
        optimizer.factor = clip_factor(norm, most)
        return
    # On local shards: for a list of DTensors, torch derives their sharding first, which takes 0.17 s.
    with torch.no_grad():
        gradients = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, clip_factor(norm, most).to(gradients[0].device))


class RuleOptimizer(torch.optim.Optimizer):
    """Each group of parameters by its own rule; nothing is read back from the device."""

    factor: Tensor | None = None
    """What gradients are multiplied by on their way into the next update."""

    def __init__(
        self, groups: list[dict[str, Any]], train: Train, seed: int, both: dist.ProcessGroup | None = None
    ) -> None:
        """`both` are the workers of a matrix that two axes cut, which Muon brings together."""
        options = {"lr": train.lr, "betas": (train.beta1, train.beta2), "eps": train.eps, "momentum": train.momentum}
        super().__init__(groups, options)
        self._seed, self._both = seed, both
        self._items = list[list[ParameterState]]()
        for group in self.param_groups:
            named = zip(group["names"], group["params"], strict=True)
            self._items.append([self._started(trained(name, p), group["rule"], train) for name, p in named])
        self._fuses = _fuses(self.param_groups)
        self._tables = dict[tuple[int, str], AdamwTable | None]()
        """Of a group's parameters that are updated together, by the first of them."""
        self.scales = self._fuses and all(group["rule"] in FUSED for group in self.param_groups)
        """Whether all rules take a factor on the way."""

    def _started(self, one: ParameterState, rule: str, train: Train) -> ParameterState:
        """With its states, which are the optimizer's own too, as a save looks for them there."""
        one.state.update(_states(one, rule, train))
        if train.master:
            one.state["master"] = zeros_like(one.parameter, torch.float32).copy_(one.parameter.detach())
        self.state[one.parameter] = one.state
        return one

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None, "the loss is made before"
        for number, group in enumerate(self.param_groups):
            items = [one for one in self._items[number] if one.parameter.grad is not None]
            if not items:
                continue
            here = [one for one in items if one.elements]
            dice = RoundingBits(self._seed, group["number"])
            match group["rule"]:
                case "muon":
                    muon(items, group, dice, self._both)
                case "adafactor":
                    adafactor(items, group, dice)
                case _ if self._fuses:
                    which = (number, items[0].name)
                    self._tables[which] = fused_adamw(here, group, dice, self.factor, self._tables.get(which))
                    continue  # with its masters shown
                case _:
                    adamw(here, group, dice)
            for one in items:
                one.show_master()
        self.factor = None


def _fuses(groups: Iterable[dict[str, Any]]) -> bool:
    """Whether Triton's kernels make AdamW's updates of these parameters."""
    like = next(parameter for group in groups for parameter in group["params"])
    return fused("adamw", like.device.type, like.dtype).kernel == "triton"


def _states(one: ParameterState, rule: str, train: Train) -> State:
    match rule:
        case "muon":
            return muon_states(one, getattr(torch, train.moments))
        case "adafactor":
            return adafactor_states(one)
        case "adamw-8bit":
            return eightbit_states(one)
        case _:
            return adamw_states(one, getattr(torch, train.moments))


def _both(world: World) -> dist.ProcessGroup | None:
    """Those who differ in their places on the shard and the tensor axis only."""
    if world.mesh is None or world.axis("shard").size == 1 or world.axis("tensor").size == 1:
        return None
    return world.mesh["shard", "tensor"]._flatten("shard and tensor").get_group()
