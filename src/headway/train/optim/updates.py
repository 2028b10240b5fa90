"""The optimizer of a run: AdamW as torch has it, or an update made of several rules."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headway.parallel.world import World
from headway.recipe import Layout, Train
from headway.state.tensors import Held
from headway.train.offload import OffloadedAdamW
from headway.train.optim.adafactor import adafactor, adafactor_states
from headway.train.optim.adamw import adamw, adamw_states, eightbit_states
from headway.train.optim.groups import groups_of
from headway.train.optim.kept import State, Trained, trained, zeros_like
from headway.train.optim.muon import muon, muon_states
from headway.train.optim.rounding import Dice

__all__ = ["Updates", "build_optimizer"]


def build_optimizer(
    model: nn.Module,
    train: Train,
    seed: int = 0,
    world: World | None = None,
    held: Held | None = None,
    layout: Layout | None = None,
) -> torch.optim.Optimizer:
    """What updates this worker's part of a model, whose weights are there. All workers of a world call it."""
    groups = groups_of(model, train, held or Held(), layout)
    betas = (train.beta1, train.beta2)
    if (train.optimizer, train.weights, train.moments) != ("adamw", "float32", "float32"):
        both = _both(world) if train.optimizer == "muon" and world is not None else None
        return Updates(groups, train, seed, both)
    groups = [{key: value for key, value in group.items() if key not in ("names", "rule")} for group in groups]
    if train.offload_optimizer:
        return OffloadedAdamW(groups, lr=train.lr, betas=betas, eps=train.eps)
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=betas, eps=train.eps, fused=True)
    # There from the start, as its first step would make it: what a save copies never changes its shape.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    return optimizer


class Updates(torch.optim.Optimizer):
    """Each group of parameters by its own rule; nothing is read back from the device."""

    def __init__(
        self, groups: list[dict[str, Any]], train: Train, seed: int, both: dist.ProcessGroup | None = None
    ) -> None:
        """`both` are the workers of a matrix that two axes cut, which Muon brings together."""
        options = {"lr": train.lr, "betas": (train.beta1, train.beta2), "eps": train.eps, "momentum": train.momentum}
        super().__init__(groups, options)
        self._seed, self._both = seed, both
        self._items = list[list[Trained]]()
        for group in self.param_groups:
            named = zip(group["names"], group["params"], strict=True)
            self._items.append([self._started(trained(name, p), group["rule"], train) for name, p in named])

    def _started(self, one: Trained, rule: str, train: Train) -> Trained:
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
        for group, all_of_it in zip(self.param_groups, self._items, strict=True):
            items = [one for one in all_of_it if one.parameter.grad is not None]
            dice = Dice(self._seed, group["number"])
            match group["rule"]:
                case "muon":
                    muon(items, group, dice, self._both)
                case "adafactor":
                    adafactor(items, group, dice)
                case _:
                    adamw([one for one in items if one.elements], group, dice)
            for one in items:
                one.show_master()


def _states(one: Trained, rule: str, train: Train) -> State:
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
