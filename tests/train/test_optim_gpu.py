"""On a GPU: the bits of a CPU where they are promised, about its updates elsewhere, and a host that never waits."""

from typing import Any

import pytest
import torch
from small_net import Net, gradients

from headway.recipe import Train
from headway.state.box import Box
from headway.train.optim import build_optimizer, set_step
from headway.train.optim.eightbit import encode
from headway.train.optim.rounding import RoundingBits, to_bfloat16

pytestmark = pytest.mark.gpu
HALF = {"dtype": "bfloat16", "weights": "bfloat16"}
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "adamw": ({}, 1e-5),
    "adamw in bfloat16": (HALF | {"moments": "bfloat16"}, 0.02),
    "adamw with masters": (HALF | {"master": True}, 0.01),
    "adamw-8bit": ({"optimizer": "adamw-8bit"}, 0.02),
    "muon": ({"optimizer": "muon"}, 0.05),
    "adafactor": ({"optimizer": "adafactor"}, 1e-4),
}
"""With how far apart CPU and GPU may be, as a share of the way that weights go."""


def test_random_bits_rounding_and_codes_are_those_of_a_cpu() -> None:
    shape, box = (300, 5, 70), Box((17, 1, 3), (200, 3, 60))
    here, there = (RoundingBits(1, 2).bits("w", box, shape, torch.device(kind)) for kind in ("cpu", "cuda"))
    assert torch.equal(here, there.cpu())
    value = torch.randn(box.shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(to_bfloat16(value, here), to_bfloat16(value.cuda(), there).cpu())
    for a, b in zip(encode(value, True), encode(value.cuda(), True), strict=True):
        assert torch.equal(a, b.cpu())


def run(device: str, settings: dict[str, Any]) -> Net:
    train = Train(lr=0.02, **settings)
    net = Net().to(device, getattr(torch, train.weights))
    optimizer = build_optimizer(net, train, seed=3)
    per_step = [{name: g.to(device) for name, g in gradients(Net(), step).items()} for step in (1, 2, 3)]
    for step, drawn in enumerate(per_step, 1):
        for name, p in net.named_parameters():
            p.grad = drawn[name].to(p.dtype)
        set_step(optimizer.param_groups, step, 0.02)
        # the first step may make tables and handles; from then on the host must not wait
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return net


@pytest.mark.parametrize("way", WAYS)
def test_updates_are_about_those_of_a_cpu_and_the_host_never_waits(way: str) -> None:
    settings, tolerance = WAYS[way]
    cpu, gpu, first = run("cpu", settings), run("cuda", settings), Net()
    for name, p in cpu.named_parameters():
        moved = (p.float() - first.get_parameter(name)).norm()
        apart = (gpu.get_parameter(name).float().cpu() - p.float()).norm()
        assert apart <= tolerance * moved, (name, float(apart / moved))


def test_gradients_of_bfloat16_weights_add_up_in_float32() -> None:
    from headway.train.optim import widen_gradients

    linear = torch.nn.Linear(8, 8, device="cuda", dtype=torch.bfloat16)
    widen_gradients(linear)
    for _ in range(3):
        linear(torch.randn(4, 8, device="cuda", dtype=torch.bfloat16)).float().square().sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32
