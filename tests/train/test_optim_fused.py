"""Updates in one launch, in Triton's interpreter: what plain PyTorch makes of them, tensor by tensor."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_net import Net, gradients

from headway.kernels import dispatch as table
from headway.kernels.dispatch import OPERATIONS, make_plain
from headway.parallel.gradients import total_norm
from headway.parallel.world import World
from headway.recipe import Train
from headway.train.optim import RuleOptimizer, build_optimizer, clip, set_step


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has the CPU count as a device of Triton's, which its interpreter makes it."""
    monkeypatch.setattr(table, "devices", ("cuda", "cpu"))
    yield
    make_plain(())


WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "float32": ({}, 1e-5),
    "bfloat16": ({"dtype": "bfloat16", "weights": "bfloat16", "moments": "bfloat16"}, 0.02),
    "masters": ({"dtype": "bfloat16", "weights": "bfloat16", "master": True}, 0.02),
    "8-bit": ({"optimizer": "adamw-8bit"}, 0.02),
}
"""Settings, and how far apart weights may be as a share of the way they went: a number that is off by its last bit may
be rounded the other way."""


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) if way == "bfloat16" else way for way in WAYS]
)
def test_updates_are_what_plain_pytorch_makes_of_them(way: str) -> None:
    """Two steps with gradients clipped to half of their norm, in one launch on their way and tensor by tensor."""
    settings, tolerance = WAYS[way]
    train = Train(lr=0.02, **settings)
    nets = []
    for plain in ((), OPERATIONS):
        make_plain(plain)
        net = small().to(getattr(torch, train.weights))
        optimizer = build_optimizer(net, train, seed=3)
        assert (isinstance(optimizer, RuleOptimizer) and optimizer.scales) == (not plain)
        for step in (1, 2):
            drawn = gradients(small(), step)
            for name, parameter in net.named_parameters():
                parameter.grad = drawn[name].to(parameter.dtype)
            norm = total_norm(dict(net.named_parameters()), World(0, 1, torch.device("cpu")))
            torch.testing.assert_close(norm.float(), _norm(net), rtol=1e-2 if settings else 1e-5, atol=0)
            clip(optimizer, net.parameters(), norm, float(norm) / 2)
            set_step(optimizer.param_groups, step, 0.02)
            optimizer.step()
        nets.append(net)
    first = small()
    for name, parameter in nets[1].named_parameters():
        moved = (parameter.float() - first.get_parameter(name)).norm().item()
        apart = (nets[0].get_parameter(name).float() - parameter.float()).norm().item()
        assert apart <= tolerance * moved, (name, apart / moved)


def small() -> Net:
    """Of one block, without its tall matrix (the head is one too): the interpreter takes its time."""
    net = Net()
    del net.blocks[1:]
    del net.blocks[0].tall
    return net


def _norm(net: torch.nn.Module) -> torch.Tensor:
    squares = sum(p.grad.double().square().sum() for p in net.parameters() if p.grad is not None)
    return torch.as_tensor(squares).sqrt().float()
