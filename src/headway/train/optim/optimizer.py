"""The optimizer of a run: torch's AdamW, or RuleOptimizer, which applies a rule per group; always that on GPUs."""

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

FUSED = ("adamw", "adamw-8bit")
"""Rules with a fused kernel over all tensors."""


def build_optimizer(
    model: nn.Module,
    train: Train,
    seed: int = 0,
    world: World | None = None,
    held: ModelShare | None = None,
    layout: ModelLayout | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer of this worker's part of a model with initialized weights. All workers must call it."""
    groups = groups_of(model, train, held or ModelShare(), layout)
    plain = (train.optimizer, train.weights, train.moments) == ("adamw", "float32", "float32")
    if plain and train.offload_optimizer:
        groups = [{key: value for key, value in group.items() if key not in ("names", "rule")} for group in groups]
        return OffloadedAdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps)
    both = _both(world) if train.optimizer == "muon" and world is not None else None
    return RuleOptimizer(groups, train, seed, both)


def clip(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], norm: Tensor, most: float) -> None:
    """Clip gradients for the next update: scaled inside the fused kernel, or here."""
    if isinstance(optimizer, RuleOptimizer) and optimizer.scales:
        optimizer.factor = clip_factor(norm, most)
        return
    # On local shards: for a list of DTensors, torch derives their sharding first, which takes 0.17 s.
    with torch.no_grad():
        gradients = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, clip_factor(norm, most).to(gradients[0].device))


class RuleOptimizer(torch.optim.Optimizer):
    """Updates each parameter group by its rule, without reading from the device."""

    factor: Tensor | None = None
    """Factor of gradients in the next update."""

    def __init__(
        self, groups: list[dict[str, Any]], train: Train, seed: int, both: dist.ProcessGroup | None = None
    ) -> None:
        """`both` is the process group of matrices sharded over two axes, for Muon."""
        options = {"lr": train.lr, "betas": (train.beta1, train.beta2), "eps": train.eps, "momentum": train.momentum}
        super().__init__(groups, options)
        self._seed, self._both = seed, both
        self._items = list[list[ParameterState]]()
        for group in self.param_groups:
            named = zip(group["names"], group["params"], strict=True)
            self._items.append([self._started(trained(name, p), group["rule"], train) for name, p in named])
        self._fuses = _fuses(self.param_groups)
        self._tables = dict[tuple[int, str], AdamwTable | None]()
        """Tables of a group's parameters that are updated together, by the first of them."""
        self.scales = self._fuses and all(group["rule"] in FUSED for group in self.param_groups)
        """Whether all rules apply the gradient factor themselves."""

    def _started(self, item: ParameterState, rule: str, train: Train) -> ParameterState:
        """Return a parameter with states, which are also in the optimizer's state for saves."""
        item.state.update(_states(item, rule, train))
        if train.master:
            item.state["master"] = zeros_like(item.parameter, torch.float32).copy_(item.parameter.detach())
        self.state[item.parameter] = item.state
        return item

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "the loss is made before"
        for number, group in enumerate(self.param_groups):
            items = [item for item in self._items[number] if item.parameter.grad is not None]
            if not items:
                continue
            here = [item for item in items if item.elements]
            dice = RoundingBits(self._seed, group["number"])
            if group["rule"] in FUSED and len(here) < len(items):
                # Any worker may save a replicated number, also one that has no element of the parameter.
                torch._foreach_add_([item.state["step"] for item in items if not item.elements], 1.0)
            match group["rule"]:
                case "muon":
                    muon(items, group, dice, self._both)
                case "adafactor":
                    adafactor(items, group, dice)
                case _ if self._fuses:
                    which = (number, items[0].name)
                    self._tables[which] = fused_adamw(here, group, dice, self.factor, self._tables.get(which))
                    continue  # including the copies of its masters
                case _:
                    adamw(here, group, dice)
            for item in items:
                item.show_master()
        self.factor = None


def _fuses(groups: Iterable[dict[str, Any]]) -> bool:
    """Whether these parameters are updated by the Triton kernel of AdamW."""
    like = next(parameter for group in groups for parameter in group["params"])
    return fused("adamw", like.device.type, like.dtype).kernel == "triton"


def _states(item: ParameterState, rule: str, train: Train) -> State:
    match rule:
        case "muon":
            return muon_states(item, getattr(torch, train.moments))
        case "adafactor":
            return adafactor_states(item)
        case "adamw-8bit":
            return eightbit_states(item)
        case _:
            return adamw_states(item, getattr(torch, train.moments))


def _both(world: World) -> dist.ProcessGroup | None:
    """Return the process group over the shard and the tensor axis."""
    if world.mesh is None or world.axis("shard").size == 1 or world.axis("tensor").size == 1:
        return None
    return world.mesh["shard", "tensor"]._flatten("shard and tensor").get_group()
