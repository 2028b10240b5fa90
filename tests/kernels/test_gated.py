"""Gated activations against float64, in Triton's interpreter; at large shapes on a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from headway.kernels.gated import geglu, reference_geglu, reference_swiglu, swiglu
from headway.models import experts, layers
from thinned import thinned

# A sigmoid far below zero is 1 / inf, as it should be; NumPy, which the interpreter computes with, warns.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative to a result and, for those near zero, to 1 or to the product that the bend is multiplied by. bfloat16's is
twice what rounding takes, since the interpreter cuts off instead."""
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1,), (1, 1), (3, 7), (5, 129), (2, 3, 1000), (1, 5000), (2, 0, 4), (0,)]


def exact_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate)) * up


def exact_geglu(gate: Tensor, up: Tensor) -> Tensor:
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


Function = Callable[[Tensor, Tensor], Tensor]
WAYS: dict[str, tuple[Function, Function, Function]] = {
    "swiglu": (swiglu, exact_swiglu, reference_swiglu),
    "geglu": (geglu, exact_geglu, reference_geglu),
}


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str = "cpu") -> Tensor:
    numbers = 3 * torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return numbers.to(dtype).requires_grad_()


def check(name: str, gate: Tensor, up: Tensor) -> None:
    """Both passes of a pair of tensors."""
    way, exact, _ = WAYS[name]
    tolerance, grad = TOLERANCE[gate.dtype], drawn(gate.shape, gate.dtype, 9, gate.device.type).detach()
    leaves = [x.detach().double().requires_grad_() for x in (gate, up)]
    out, truth = way(gate, up), exact(*leaves)
    results = (out, *torch.autograd.grad(out, (gate, up), grad))
    size = (grad.double() * leaves[1]).abs().clamp(min=1)
    for actual, right in zip(results, (truth, *torch.autograd.grad(truth, leaves, grad.double())), strict=True):
        assert actual.dtype == gate.dtype
        assert actual.is_contiguous()
        assert ((actual.double() - right).abs() <= tolerance * (right.abs() + size)).all()


@pytest.mark.parametrize(("name", "shape", "dtype"), thinned(WAYS, SHAPES, DTYPES), ids=str)
def test_both_passes(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(name, drawn(shape, dtype, 0), drawn(shape, dtype, 1))


@pytest.mark.parametrize("name", WAYS)
def test_halves_and_other_views(name: str) -> None:
    whole = drawn((2, 4, 10), torch.float32, 0).detach()
    views = [whole.chunk(2, dim=-1), (whole[..., :9:3], whole[..., :3]), (whole[:, ::2].mT, whole[:, 1::2].mT)]
    for gate, up in views:
        check(name, gate.requires_grad_(), up.requires_grad_())
    gate, up = (x.detach().requires_grad_() for x in views[0])
    # A sum's gradient is one number, expanded.
    gradients = torch.autograd.grad(WAYS[name][0](gate, up).sum(), (gate, up))
    for gradient, right in zip(gradients, torch.autograd.grad(WAYS[name][1](gate, up).sum(), (gate, up)), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", WAYS)
def test_far_out(name: str) -> None:
    """Open for what is large, shut for what is small; no gradient breaks."""
    gate = torch.tensor([-60000.0, -200, -30, 30, 200, 60000], requires_grad=True)
    up = torch.ones_like(gate, requires_grad=True)
    out = WAYS[name][0](gate, up)
    want = gate.detach().clamp(min=0)
    torch.testing.assert_close(out.detach(), want, rtol=1e-6, atol=1e-10)
    dgate, dup = torch.autograd.grad(out.sum(), (gate, up))
    torch.testing.assert_close(dgate, (want > 0).float(), rtol=1e-6, atol=1e-10)
    torch.testing.assert_close(dup, want, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("name", WAYS)
def test_one_rounding_is_closer_than_two(name: str) -> None:
    way, exact, reference = WAYS[name]
    gate, up = drawn((2000,), torch.float16, 0).detach(), drawn((2000,), torch.float16, 1).detach()
    truth = exact(gate.double(), up.double())
    fused_error, reference_error = ((out.double() - truth).abs().mean() for out in (way(gate, up), reference(gate, up)))
    assert fused_error < 0.9 * reference_error
    # A unit in the last place of float16 is at most 2^-10 of a number.
    torch.testing.assert_close(way(gate, up), reference(gate, up), rtol=2**-9, atol=1e-5)


def test_references_are_what_models_do() -> None:
    gate, up = drawn((4, 32), torch.bfloat16, 0).detach(), drawn((4, 32), torch.bfloat16, 1).detach()
    assert torch.equal(reference_swiglu(gate, up), experts.swiglu(gate, up))
    assert torch.equal(reference_geglu(gate, up), layers.gelu(gate) * up)


@pytest.mark.parametrize("name", WAYS)
def test_unsupported_inputs_are_refused(name: str) -> None:
    gate = torch.zeros(2, 8)
    wrong = [(gate.double(), gate.double()), (gate, gate.half()), (gate, gate[:1]), (gate[0, 0], gate[0, 0])]
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"expected a gate|differ"):
            WAYS[name][0](*arguments)


OPERATORS = {
    "gated": lambda device: tuple(drawn((3, 8), torch.float32, seed, device) for seed in (0, 1)),
    "gated_backward": lambda device: tuple(drawn((3, 8), torch.float32, seed, device).detach() for seed in (0, 1, 2)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_sound(name: str) -> None:
    # The interpreter needs numbers: what traces through it (aot_dispatch) is tested on a GPU.
    sound = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(getattr(torch.ops.headway, name).default, (*OPERATORS[name]("cpu"), True), test_utils=sound)


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_sound_on_a_gpu(name: str) -> None:
    opcheck(getattr(torch.ops.headway, name).default, (*OPERATORS[name]("cuda"), True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8192, 8192), (2048, 14336), (1000, 11008), (77, 999)])
@pytest.mark.parametrize("name", WAYS)
def test_large_ones_on_a_gpu(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    check(name, drawn(shape, dtype, 0, "cuda"), drawn(shape, dtype, 1, "cuda"))
    gate, up = drawn((shape[0] // 2, 2 * shape[1]), dtype, 2, "cuda").detach().chunk(2, dim=-1)
    check(name, gate.requires_grad_(), up.requires_grad_())


@pytest.mark.gpu
def test_more_than_two_to_the_31_numbers_on_a_gpu() -> None:
    gate = torch.ones(2**31 + 4096, device="cuda", dtype=torch.bfloat16)
    gate[-1] = 30
    out = swiglu(gate, gate)
    assert out[-1] == 900
    assert out[-2] == out[0]
    del out
    rows = torch.ones(3, 2**30 + 4096, device="cuda", dtype=torch.bfloat16)[:, : 2**30]
    rows[2, -1] = 30
    assert swiglu(rows, rows)[2, -1] == 900


@pytest.mark.gpu
@pytest.mark.parametrize("name", WAYS)
def test_compiled_on_a_gpu(name: str) -> None:
    gate, up = drawn((64, 512), torch.bfloat16, 0, "cuda"), drawn((64, 512), torch.bfloat16, 1, "cuda")
    way = WAYS[name][0]
    whole = torch.compile(lambda gate, up: 2 * way(gate + 1, up), fullgraph=True)
    compiled, plain = whole(gate, up), 2 * way(gate + 1, up)
    grad = torch.ones_like(plain)
    for actual, other in zip(
        (compiled, *torch.autograd.grad(compiled, (gate, up), grad)),
        (plain, *torch.autograd.grad(plain, (gate, up), grad)),
        strict=True,
    ):
        assert torch.equal(actual, other)
