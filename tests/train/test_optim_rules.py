"""Each rule against an independent one: torch's, transformers', or its paper's formula in float64."""

import math

import numpy as np
import pytest
import torch
from small_net import Net, gradients
from torch import nn

from headway.models import empty_decoder
from headway.recipe import Model, Train
from headway.recipe.train import ParameterGroup
from headway.train.optim import build_optimizer, set_step
from headway.train.optim.muon import orthogonalized

STEPS = 10
RATE = 0.02


def run(net: nn.Module, train: Train, steps: int, seed: int = 0) -> torch.optim.Optimizer:
    optimizer = build_optimizer(net, train, seed)
    for step in range(1, steps + 1):
        for name, gradient in gradients(net, step).items():
            parameter = net.get_parameter(name)
            parameter.grad = gradient.to(parameter.dtype)
        set_step(optimizer.param_groups, step, RATE)
        optimizer.step()
    return optimizer


def adamw64(net: nn.Module, train: Train, steps: int, names: set[str] | None = None) -> dict[str, torch.Tensor]:
    """Loshchilov and Hutter's algorithm 2, in float64."""
    weights = {}
    for name, p in net.named_parameters():
        decay = train.weight_decay if p.ndim >= 2 and not name.endswith("bias") else 0.0
        w, m, v = p.detach().double(), torch.zeros(p.shape).double(), torch.zeros(p.shape).double()
        for step in range(1, steps + 1):
            g = gradients(net, step)[name].double()
            m, v = train.beta1 * m + (1 - train.beta1) * g, train.beta2 * v + (1 - train.beta2) * g * g
            mean, square = m / (1 - train.beta1**step), v / (1 - train.beta2**step)
            w = w - RATE * decay * w - RATE * mean / (square.sqrt() + train.eps)
        weights[name] = w
    return {name: w for name, w in weights.items() if names is None or name in names}


def assert_near(net: nn.Module, truth: dict[str, torch.Tensor], tolerance: float = 2e-6) -> None:
    for name, wanted in truth.items():
        torch.testing.assert_close(
            net.get_parameter(name).double(), wanted, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("steps", [1, STEPS])
def test_adamw_is_the_papers(steps: int) -> None:
    net, train = Net(), Train(lr=RATE)
    truth = adamw64(net, train, steps)
    run(net, train, steps)
    assert_near(net, truth)


def test_adamw_is_torchs_to_the_bit_where_tensors_fill_registers() -> None:
    net, other = Net(), Net()
    run(net, Train(lr=RATE), STEPS)
    decayed = [p for name, p in other.named_parameters() if p.ndim >= 2 and not name.endswith("bias")]
    rest = [p for name, p in other.named_parameters() if p.ndim < 2 or name.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    torch_adamw = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(1, STEPS + 1):
        for name, p in other.named_parameters():
            p.grad = gradients(other, step)[name]
        torch_adamw.step()
    filled = [name for name, p in other.named_parameters() if p.numel() % 16 == 0]
    assert len(filled) > 5
    for name in filled:
        assert torch.equal(net.get_parameter(name), other.get_parameter(name)), name


MATRICES = {f"blocks.{i}.{kind}" for i in range(2) for kind in ("wide", "tall", "experts")}


def newton_schulz64(matrix: np.ndarray) -> np.ndarray:
    """By singular values: each goes through the quintic five times, and singular vectors stay."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.sqrt((values**2).sum())
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (16, 16), (1, 7), (4, 6, 9), (2, 9, 1)])
def test_orthogonalized_matrices_have_the_quintics_singular_values(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    truth = np.stack([newton_schulz64(matrix) for matrix in matrices.double().reshape(-1, *shape[-2:]).numpy()])
    torch.testing.assert_close(
        orthogonalized(matrices).double(), torch.from_numpy(truth).view(shape), rtol=0, atol=2e-5
    )
    assert torch.equal(orthogonalized(torch.zeros(3, 4)), torch.zeros(3, 4))


@pytest.mark.parametrize("steps", [1, STEPS])
def test_muon_is_the_papers_for_matrices_in_blocks_and_adamw_for_the_rest(steps: int) -> None:
    net, train = Net(), Train(lr=RATE, optimizer="muon")
    truth = adamw64(net, train, steps)
    for name in MATRICES:
        w = net.get_parameter(name).detach().double().numpy()
        momentum = np.zeros_like(w)
        for step in range(1, steps + 1):
            g = gradients(net, step)[name].double().numpy()
            momentum = 0.95 * momentum + 0.05 * g
            ahead = 0.05 * g + 0.95 * momentum
            matrices = ahead.reshape(-1, *ahead.shape[-2:])
            update = np.stack([newton_schulz64(matrix) for matrix in matrices]).reshape(ahead.shape)
            w = w * (1 - RATE * train.weight_decay) - RATE * 0.2 * math.sqrt(max(w.shape[-2:])) * update
        truth[name] = torch.from_numpy(w)
    optimizer = run(net, train, steps)
    assert_near(net, truth, 3e-5)
    kept = {name for group in optimizer.param_groups if group["rule"] == "muon" for name in group["names"]}
    assert kept == MATRICES
    by_muon = net.get_parameter("blocks.0.wide")
    assert set(optimizer.state[by_muon]) == {"momentum"}


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # Muon multiplies bfloat16, not fast on every CPU
def test_muon_is_close_to_torchs_own_which_works_in_bfloat16() -> None:
    net, other = Net(), Net()
    run(net, Train(lr=RATE, optimizer="muon", momentum=0.9), STEPS)
    named = {name: p for name, p in other.named_parameters() if name in MATRICES and p.ndim == 2}
    torch_muon = torch.optim.Muon(
        named.values(), lr=RATE, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    start = {name: p.detach().clone() for name, p in named.items()}
    for step in range(1, STEPS + 1):
        for name, p in named.items():
            p.grad = gradients(other, step)[name]
        torch_muon.step()
    for name, p in named.items():
        moved = (p - start[name]).norm()
        assert (net.get_parameter(name) - p).norm() < 0.02 * moved, name


@pytest.mark.parametrize("steps", [1, STEPS])
def test_adafactor_is_transformers_in_float64(steps: int) -> None:
    from transformers.optimization import Adafactor  # importing it takes seconds: only where it is needed

    net, other = Net(), Net().double()
    run(net, Train(lr=RATE, optimizer="adafactor"), steps)
    matrices = [p for name, p in other.named_parameters() if p.ndim >= 2 and not name.endswith("bias")]
    rest = [p for name, p in other.named_parameters() if p.ndim < 2 or name.endswith("bias")]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    hf_adafactor = Adafactor(groups, lr=RATE, scale_parameter=False, relative_step=False)
    for step in range(1, steps + 1):
        for name, gradient in gradients(other, step).items():
            other.get_parameter(name).grad = gradient.double()
        hf_adafactor.step()
    assert_near(net, dict(other.named_parameters()), 5e-6)


def test_eight_bits_follow_adamw_in_float64() -> None:
    """Off by what eight bits lose, which is small beside the way that weights went; small tensors lose nothing."""
    net, train = Net(), Train(lr=RATE, optimizer="adamw-8bit")
    start = {name: p.detach().clone().double() for name, p in net.named_parameters()}
    truth = adamw64(net, train, STEPS)
    optimizer = run(net, train, STEPS)
    coarse = {name for group in optimizer.param_groups if group["rule"] == "adamw-8bit" for name in group["names"]}
    assert coarse == {f"blocks.{i}.{kind}" for i in range(2) for kind in ("wide", "tall")}
    assert_near(net, {name: wanted for name, wanted in truth.items() if name not in coarse})
    for name in coarse:
        off = (net.get_parameter(name).double() - truth[name]).norm() / (truth[name] - start[name]).norm()
        assert 0 < off < 0.05, (name, off)


def test_groups_have_rates_and_decays_of_their_own() -> None:
    net, plain = Net(), Net()
    groups = [
        {"match": ["blocks.0.norm", "head"], "rate": 0.5},
        {"match": ["blocks.**", "embed.*"], "weight_decay": 0.3, "rate": 2.0},
    ]
    run(net, Train(lr=RATE, groups=groups), 1)
    for name, p in plain.named_parameters():
        rate, decay = 0.5 * RATE, 0.1 if p.ndim >= 2 else 0.0
        if name not in ("blocks.0.norm", "head"):
            rate, decay = 2.0 * RATE, 0.3
        g = gradients(plain, 1)[name].double()
        wanted = p.double() * (1 - rate * decay) - rate * g / (g.abs() + 1e-8)
        torch.testing.assert_close(net.get_parameter(name).double(), wanted, rtol=1e-6, atol=1e-6)


def test_rates_follow_the_width_by_mup() -> None:
    """A group's own factor comes on top."""
    model = Model(vocab_size=64, layers=1, dim=64, heads=4, tie_embeddings=False, mup_base=16)
    decoder = empty_decoder(model)
    train = Train(lr=0.5, groups=(ParameterGroup(match=("layers.*.mlp.**",), rate=3.0),))
    optimizer = build_optimizer(decoder, train)
    set_step(optimizer.param_groups, 1, 0.5)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    by_name = {name: rates[id(p)] for name, p in decoder.named_parameters()}
    assert by_name["embed.weight"] == by_name["norm.weight"] == by_name["layers.0.mlp_norm.weight"] == 0.5
    assert by_name["layers.0.attention.q.weight"] == by_name["head.weight"] == 0.125
    assert by_name["layers.0.mlp.up.weight"] == 0.375


def test_routers_are_no_matrices_of_muon() -> None:
    model = Model(family="mixtral", vocab_size=64, layers=1, dim=32, heads=4, experts=4, top_k=2)
    decoder = empty_decoder(model)
    optimizer = build_optimizer(decoder, Train(optimizer="muon"))
    rules = {name: group["rule"] for group in optimizer.param_groups for name in group["names"]}
    assert rules["layers.0.mlp.router.weight"] == rules["embed.weight"] == "adamw"
    assert rules["layers.0.mlp.experts.up"] == rules["layers.0.attention.q.weight"] == "muon"
