"""Experts and their balance against plain formulas: one token after the other, and autograd of the written-out loss."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from headway.kernels.dispatch import KernelChoice
from headway.models.experts import (
    BiasBalance,
    Experts,
    LoadBalanceLoss,
    MoeFeedForward,
    set_loss_scale,
    softmax_top_k,
    top_k_softmax,
    uneven,
    update_balance,
)
from headway.models.layers import Linear
from thinned import examples

# A CPU without bfloat16 instructions says so, once, and computes all the same.
no_bfloat16_cpu = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def filled(module: nn.Module, seed: int = 0, std: float = 0.3) -> nn.Module:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, std, generator=draw)
    return module


def mixture(experts: int = 5, seen: int = 2, dim: int = 8, hidden: int = 16, balance: float = 0.0) -> MoeFeedForward:
    router = Linear(dim, experts, bias=False)
    layer = MoeFeedForward(router, partial(softmax_top_k, count=seen), Experts(experts, dim, hidden), balance)
    filled(layer)
    return layer


def stream(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one_by_one(experts: Experts, x_TD: Tensor, weights_TX: Tensor, chosen_TX: Tensor) -> Tensor:
    """What experts do, a token and an expert at a time."""

    def bias(name: str, e: int) -> Tensor | float:
        biases = getattr(experts, f"{name}_bias")
        return 0.0 if biases is None else biases[e]

    rows = []
    for x_D, weights, chosen in zip(x_TD, weights_TX, chosen_TX.tolist(), strict=True):
        total = torch.zeros_like(x_D)
        for weight, e in zip(weights, chosen, strict=True):
            gate = experts.gate[e] @ x_D + bias("gate", e)
            up = experts.up[e] @ x_D + bias("up", e)
            total = total + weight * (experts.down[e] @ (gate * torch.sigmoid(gate) * up) + bias("down", e))
        rows.append(total)
    return torch.stack(rows)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


# -- routers


def test_routers_by_hand() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 3.5]]).log()  # probabilities 0, 2/3, 1/3
    logits[1] = torch.tensor([0.5, 0.2, 0.3]).log()
    weights, chosen = softmax_top_k(logits, 2)
    assert chosen.tolist() == [[1, 2], [0, 2]]
    torch.testing.assert_close(weights, torch.tensor([[2 / 3, 1 / 3], [0.625, 0.375]]))
    plain, _ = softmax_top_k(logits[1:], 2, renormalize=False)
    torch.testing.assert_close(plain, torch.tensor([[0.5, 0.3]]))
    later, same = top_k_softmax(logits, 2)
    assert torch.equal(same, chosen)
    torch.testing.assert_close(later, weights)


# -- experts


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(1, 13), st.integers(1, 6), st.data(), st.booleans(), st.integers(0, 2**32))
def test_no_token_is_dropped(tokens: int, count: int, data: st.DataObject, bias: bool, seed: int) -> None:
    """Whoever is chosen, also where many experts have nobody: values and gradients are those of one token at a time."""
    seen = data.draw(st.integers(1, count))
    experts = Experts(count, dim=4, hidden=6, bias=bias).double()
    filled(experts, seed)
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(count, generator=draw)[:seen] for _ in range(tokens)])
    chosen[: tokens // 2] = chosen[0].clone()
    inputs = [torch.randn(tokens, n, generator=draw, dtype=torch.float64) for n in (4, seen)]
    slope = torch.randn(tokens, 4, generator=draw, dtype=torch.float64)
    results = []
    for way in (experts, partial(one_by_one, experts)):
        x, weights = (t.clone().requires_grad_() for t in inputs)
        out = way(x, weights, chosen)
        experts.zero_grad()
        (out * slope).sum().backward()
        results.append([out.detach(), x.grad, weights.grad, *gradients(experts).values()])
    assert len(results[0]) >= 6
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    experts = Experts(3, dim=4, hidden=4)
    filled(experts)
    experts(stream(2, 4), torch.ones(2, 1), torch.tensor([[0], [2]])).sum().backward()
    assert [bool(experts.gate.grad[e].any()) for e in range(3)] == [True, False, True]


@no_bfloat16_cpu
@pytest.mark.parametrize("bias", [False, True])
def test_grouped_products_equal_the_loop_s(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grouped product's own code on the CPU, with an expert that has no token."""
    experts = Experts(4, dim=16, hidden=24, bias=bias)
    filled(experts)
    experts.bfloat16()
    weights, chosen = softmax_top_k(stream(37, 4), 2)
    chosen[chosen == 3] = 1
    results = []
    for kernel in ("loop", "grouped"):
        monkeypatch.setattr("headway.kernels.dispatch.experts", lambda *_, kernel=kernel: KernelChoice(kernel, ""))
        x = stream(37, 16).bfloat16().requires_grad_()
        experts.zero_grad()
        out = experts(x, weights, chosen)
        (out.float() * stream(37, 16, seed=3)).sum().backward()
        results.append([out.detach(), x.grad, *gradients(experts).values()])
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_a_gpu_s_grouped_products_are_right_and_repeat_themselves(bias: bool) -> None:
    experts = Experts(8, dim=64, hidden=96, bias=bias)
    filled(experts, std=0.1)
    weights, chosen = softmax_top_k(stream(300, 8), 2)
    chosen[chosen == 7] = 0  # an expert that has no token
    slope = stream(300, 64, seed=3)
    x = stream(300, 64).requires_grad_()
    out = experts(x, weights, chosen)
    (out * slope).sum().backward()
    wanted = [out.detach(), x.grad, *gradients(experts).values()]
    there = experts.cuda()
    runs = []
    for _ in range(2):
        there.zero_grad()
        x = stream(300, 64).cuda().requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = there(x, weights.cuda(), chosen.cuda())
        assert out.dtype == torch.bfloat16
        (out.float() * slope.cuda()).sum().backward()
        runs.append([out.detach(), x.grad, *gradients(there).values()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    for got, want in zip(runs[0], wanted, strict=True):
        assert (got.float().cpu() - want).norm() <= 0.02 * want.norm()


@no_bfloat16_cpu
def test_autocast_keeps_gradients_in_float32() -> None:
    exact, cast = mixture(), mixture()
    x = stream(2, 9, 8)
    exact(x).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = cast(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    for name, want in gradients(exact).items():
        got = gradients(cast)[name]
        assert got.dtype == torch.float32
        # Where two experts are nearly as likely, bfloat16 may send a token to the other one.
        assert (got - want).norm() <= 0.2 * want.norm(), name


def test_only_shapes_on_the_meta_device() -> None:
    layer = mixture().to("meta")
    assert layer(torch.empty(2, 3, 8, device="meta")).shape == (2, 3, 8)


# -- an even load


def test_the_auxiliary_loss_is_transformers_s_of_one_layer() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = stream(23, 6) * 2
    _, chosen = softmax_top_k(logits, 2)
    torch.testing.assert_close(uneven(logits, chosen), load_balancing_loss_func((logits,), 6, 2))


def test_an_even_load_is_the_number_of_experts_seen() -> None:
    chosen = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3]])
    assert uneven(torch.zeros(4, 4), chosen).item() == pytest.approx(2)
    assert uneven(torch.tensor([[9.0, 9.0, -9.0, -9.0]] * 4), torch.tensor([[0, 1]] * 4)).item() == pytest.approx(4)


@pytest.mark.parametrize("kind", ["plain", "recomputed"])
def test_its_gradient_is_that_of_the_written_out_loss(kind: str) -> None:
    """With microbatches of unequal size, the recorded loss untouched; also where blocks are computed again."""
    coefficient, parts = 0.7, [stream(2, 9, 8), stream(1, 9, 8, seed=5)]
    tokens = 27
    truth, layer = mixture(), mixture(balance=coefficient)

    want = torch.zeros(())
    for x in parts:
        logits = truth.router(x.flatten(0, 1))
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(2).indices
        share = torch.stack([(chosen == e).sum() / len(logits) for e in range(5)])
        auxiliary = 5 * (share * probabilities.mean(0)).sum()
        want = want + truth(x).square().sum() / tokens + coefficient * len(logits) / tokens * auxiliary
    want.backward()

    set_loss_scale(layer, 1 / tokens)
    for x in parts:
        out = checkpoint(layer, x, use_reentrant=False) if kind == "recomputed" else layer(x)
        assert torch.equal(out, truth(x))
        (out.square().sum() / tokens).backward()

    plain = mixture()
    sum(plain(x).square().sum() / tokens for x in parts).backward()
    for name, grad in gradients(truth).items():
        torch.testing.assert_close(gradients(layer)[name], grad, msg=name)
    assert not torch.allclose(plain.router.weight.grad, truth.router.weight.grad, rtol=0.05), "else it would say little"


def test_without_a_scale_there_is_no_auxiliary_loss() -> None:
    balanced, plain = mixture(balance=0.7), mixture()
    for each in (balanced, plain):
        each(stream(2, 9, 8)).sum().backward()
    assert all(torch.equal(grad, gradients(plain)[name]) for name, grad in gradients(balanced).items())


def test_a_router_learns_to_share_out() -> None:
    """Nothing but the auxiliary loss: a router that sends all tokens to two experts comes to use all."""
    router = Linear(8, 6, bias=False)
    filled(router)
    with torch.no_grad():
        router.weight[:2] += 0.5
    x = stream(256, 8).abs()
    balance = LoadBalanceLoss(1.0)
    set_loss_scale(balance, 1 / 256)
    loads = []
    for _ in range(150):
        logits = router(x)
        _, chosen = softmax_top_k(logits, 2)
        loads.append(torch.bincount(chosen.flatten(), minlength=6))
        router.zero_grad()
        (balance(logits, logits, chosen) * 0).sum().backward()
        with torch.no_grad():
            router.weight -= 0.5 * router.weight.grad
    assert loads[0].min() == 0
    assert loads[-1].min() >= 256 * 2 / 6 / 3


# -- a bias


class Biased(nn.Module):
    """As small as a layer of DeepSeek's may be: chosen by logits and bias, weighed by logits alone."""

    def __init__(self, experts: int, rate: float) -> None:
        super().__init__()
        self.router, self.balance = Linear(4, experts, bias=False), BiasBalance(experts, rate)

    def forward(self, x_TD: Tensor) -> Tensor:
        logits = self.router(x_TD)
        chosen = (logits.sigmoid() + self.balance.bias).topk(2).indices
        return self.balance(logits, chosen)


def biased(experts: int = 4, rate: float = 0.25) -> Biased:
    layer = Biased(experts, rate)
    filled(layer)
    return layer


def test_a_bias_moves_towards_an_even_load() -> None:
    model = nn.Sequential(biased())
    (layer,) = model
    x = stream(30, 4)
    counts = torch.bincount(layer.router(x).sigmoid().topk(2).indices.flatten(), minlength=4)
    assert counts.max() > 15 > counts.min()
    layer(x[:10]).sum().backward()
    layer(x[10:]).sum().backward()
    assert torch.equal(layer.balance.counts, counts)
    update_balance(model, lambda t: t)
    assert layer.balance.bias.tolist() == [0.25 * (-1 if n > 15 else 1 if n < 15 else 0) for n in counts.tolist()]
    assert layer.balance.bias.dtype == torch.float32
    assert not layer.balance.counts.any()


def test_counts_of_all_workers_decide() -> None:
    """Here the first expert sees few tokens, elsewhere it sees many."""
    layer = biased()
    layer.balance.counts.copy_(torch.tensor([0, 5, 5, 6]))
    elsewhere = torch.tensor([20, 3, 3, 2])
    update_balance(layer, lambda t: t + elsewhere)  # 20, 8, 8, 8 of a mean of 11
    assert layer.balance.bias.tolist() == [-0.25, 0.25, 0.25, 0.25]


def test_an_expert_with_its_share_is_left_alone() -> None:
    layer = biased(experts=3)
    layer.balance.counts.copy_(torch.tensor([7, 6, 8]))
    update_balance(layer, lambda t: t)
    assert layer.balance.bias.tolist() == [0.0, 0.25, -0.25]


def test_nothing_is_counted_twice_or_in_evaluation() -> None:
    layer = biased()
    x = stream(12, 4).requires_grad_()
    with torch.no_grad():
        layer(x)
    layer(x)  # a pass that nobody comes back from
    assert not layer.balance.counts.any()
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.balance.counts.sum() == 24


def test_the_bias_alone_is_kept() -> None:
    assert set(biased().state_dict()) == {"router.weight", "balance.bias"}
    assert set(mixture(balance=1.0).state_dict()) == set(mixture().state_dict())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns itself, about itself
def test_a_compiler_leaves_balance_alone() -> None:
    """Nothing in a block's output tells of it: who traced it would leave it out."""
    torch._dynamo.reset()
    compiled, plain, counting = mixture(balance=0.7), mixture(balance=0.7), biased()
    for each, forward in ((plain, plain.forward), (compiled, torch.compile(compiled.forward, backend="aot_eager"))):
        set_loss_scale(each, 1 / 18)
        forward(stream(2, 9, 8)).sum().backward()
    assert all(torch.equal(grad, gradients(plain)[name]) for name, grad in gradients(compiled).items())
    torch.compile(counting.forward, backend="aot_eager")(stream(12, 4)).sum().backward()
    assert counting.balance.counts.sum() == 24


# -- shards


@pytest.fixture
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Layer(nn.Module):
    """What is sharded is a block, which adds to its stream."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = mixture(balance=0.5)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return x_BLD + self.mlp(x_BLD)


@pytest.mark.parametrize("reshard", [True, False])
def test_sharded_equals_plain(mesh: object, reshard: bool) -> None:
    plain, sharded = Layer(), Layer()
    fully_shard(sharded, mesh=mesh, reshard_after_forward=reshard)
    x = stream(2, 9, 8)
    for layer in (plain, sharded):
        set_loss_scale(layer, 1 / 18)
        layer(x).square().mean().backward()
    for name, grad in gradients(sharded).items():
        assert torch.equal(grad.full_tensor(), gradients(plain)[name]), name


@no_bfloat16_cpu
def test_shards_in_bfloat16(mesh: object) -> None:
    layer = Layer()
    fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    set_loss_scale(layer, 1 / 18)
    assert layer.mlp.balance.loss_scale.dtype == torch.float32
    out = layer(stream(2, 9, 8))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(grad.dtype == torch.float32 for grad in gradients(layer).values())
