"""What is between experts' grouped GEMMs against loops and float64, in PyTorch and in Triton's interpreter."""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from headway.kernels import dispatch
from headway.kernels.expert_rows import activation, activation_backward, combined, spread

KERNELS = pytest.mark.parametrize("kernel", ["reference", "triton"])
SIZES = pytest.mark.parametrize(("tokens", "experts", "width"), [(1, 1, 5), (4, 3, 33), (2, 2, 2050), (0, 2, 8)])


@pytest.fixture(autouse=True)
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "kernel" in request.fixturenames and request.getfixturevalue("kernel") == "triton":
        monkeypatch.setattr(dispatch, "devices", ("cuda", "cpu"))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def places(tokens: int, experts: int) -> Tensor:
    order = torch.randperm(tokens * experts, generator=torch.Generator().manual_seed(1))
    return order.to(torch.int32).view(tokens, experts)


@KERNELS
@SIZES
def test_rows_lie_where_they_belong(tokens: int, experts: int, width: int, kernel: str) -> None:
    x, back = drawn(tokens, width + 3)[:, 3:], places(tokens, experts)
    rows = spread(x, back)
    assert rows.shape == (tokens * experts, width)
    for token in range(tokens):
        for place in back[token].tolist():
            assert torch.equal(rows[place], x[token])


@KERNELS
@SIZES
@pytest.mark.parametrize("twice", [False, True])
def test_each_token_gets_the_sum_of_its_rows(
    tokens: int,
    experts: int,
    width: int,
    twice: bool,
    kernel: str,
) -> None:
    back = places(tokens, experts)
    rows, others = (drawn(tokens * experts, width, seed=seed) for seed in (2, 3))
    sums = combined(rows, back, others if twice else None)
    right = torch.zeros(tokens, width, dtype=torch.float64)
    for token in range(tokens):
        for place in back[token].tolist():
            right[token] += rows[place].double() + (others[place].double() if twice else 0)
    torch.testing.assert_close(sums.double(), right, rtol=1e-5, atol=1e-5)


@KERNELS
@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation_and_its_gradients_are_those_of_the_formula(
    tokens: int,
    experts: int,
    width: int,
    dtype: torch.dtype,
    kernel: str,
) -> None:
    back = places(tokens, experts)
    gate, up, dh = (drawn(tokens * experts, width, seed=seed).to(dtype) for seed in (4, 5, 6))
    weights = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(7))
    leaves = [x.double().requires_grad_() for x in (gate, up, weights)]
    by_row = leaves[2].flatten()[back.flatten().argsort()]
    right = leaves[0] * torch.sigmoid(leaves[0]) * leaves[1] * by_row.unsqueeze(1)
    slopes = torch.autograd.grad(right, leaves, dh.double())
    h = activation(gate, up, weights, back)
    *gradients, again = activation_backward(dh, gate, up, weights, back)
    near = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    assert torch.equal(h, again)
    torch.testing.assert_close(h.double(), right.detach(), **near)
    for got, want in zip(gradients, slopes, strict=True):
        torch.testing.assert_close(got.double(), want, **near | {"atol": near["atol"] * width**0.5})


OPERATORS = {
    "experts_spread": lambda: (drawn(3, 8), places(3, 2), None),
    "experts_combined": lambda: (drawn(6, 8), places(3, 2), None),
    "experts_activation": lambda: (drawn(6, 8), drawn(6, 8), drawn(3, 2), places(3, 2)),
    "experts_activation_backward": lambda: (drawn(6, 8), drawn(6, 8), drawn(6, 8), drawn(3, 2), places(3, 2)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_sound(name: str) -> None:
    results = opcheck(
        getattr(torch.ops.headway, name).default, OPERATORS[name](),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip
    assert set(results.values()) == {"SUCCESS"}
