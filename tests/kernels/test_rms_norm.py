"""Root-mean-square normalization against float64, in Triton's interpreter; at large shapes on a GPU."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from headway.kernels import rms_norm as file
from headway.kernels.rms_norm import MAX_WIDTH, add_rms_norm, backward_cut, forward_cut, reference, rms_norm
from headway.models.gemma import Norm
from headway.models.layers import RMSNorm
from thinned import thinned

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}
"""Relative to a result and, for those near zero, to the largest one, or to 1. bfloat16's is twice what rounding takes,
since the interpreter cuts off instead."""
EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (5, 7), (3, 129), (2, 3, 1000), (1, 2048), (70, 64), (2, 9, 3, 128)]


def close(actual: Tensor, truth: Tensor, tolerance: float) -> None:
    atol = tolerance * max(1, truth.abs().max().item()) if truth.numel() else 0
    torch.testing.assert_close(actual.double(), truth, rtol=tolerance, atol=atol)


def leaf(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str = "cpu") -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return drawn.to(dtype).requires_grad_()


def exact(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    """In float64, from numbers that are float64 already."""
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * (weight + offset)


def double(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


@pytest.mark.parametrize(("shape", "dtype"), thinned(SHAPES, DTYPES), ids=str)
def test_both_passes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, grad = leaf(shape, dtype, 0), leaf(shape[-1:], dtype, 1), leaf(shape, dtype, 2).detach()
    x64, weight64 = double(x, weight)
    out, truth = rms_norm(x, weight, EPS), exact(x64, weight64, 0)
    assert out.dtype == dtype
    close(out, truth, TOLERANCE[dtype])
    gradients = torch.autograd.grad(out, (x, weight), grad)
    for gradient, right in zip(gradients, torch.autograd.grad(truth, (x64, weight64), grad.double()), strict=True):
        assert gradient.dtype == dtype
        # The mean that is taken off a gradient cancels: errors are those of its parts, a few units each.
        close(gradient, right, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("unused", ["neither", "sum", "normalized"])
def test_after_an_addition(dtype: torch.dtype, unused: str) -> None:
    x, residual, weight = leaf((6, 129), dtype, 0), leaf((6, 129), dtype, 1), leaf((129,), dtype, 2)
    grads = [leaf((6, 129), dtype, seed).detach() for seed in (3, 4)]
    normalized, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    total64, weight64 = double(total, weight)
    truth = exact(total64, weight64, 0)
    close(normalized, truth, TOLERANCE[dtype])
    loss64 = loss = torch.zeros((), dtype=torch.float64)
    if unused != "normalized":
        loss, loss64 = loss + (normalized * grads[0]).double().sum(), loss64 + (truth * grads[0].double()).sum()
    if unused != "sum":
        loss, loss64 = loss + (total * grads[1]).double().sum(), loss64 + (total64 * grads[1].double()).sum()
    gradients = torch.autograd.grad(loss, (x, residual, weight), allow_unused=True)
    want = torch.autograd.grad(loss64, (total64, total64, weight64), allow_unused=True)
    for gradient, right in zip(gradients, want, strict=True):
        if right is None:
            assert gradient is None
        else:
            close(gradient, right, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_what_is_rounded_when(offset: float) -> None:
    """A float32 weight is rounded to x's dtype only where nothing is added to it; as the families' norms do."""
    x, weight = leaf((40, 96), torch.float16, 0).detach(), leaf((96,), torch.float32, 1).detach()
    module = (Norm if offset else RMSNorm)(96, EPS)
    module.weight.data = weight
    plain = reference(x, weight, EPS, offset)
    assert torch.equal(plain, module(x))
    out = rms_norm(x, weight, EPS, offset)
    # Sums of squares in another order: a result in a thousand may fall to the other side.
    assert (out != plain).float().mean() < 0.002
    assert torch.equal(out, rms_norm(x, weight.half(), EPS, offset)) == (offset == 0)


def test_a_float32_weight_gets_a_float32_gradient() -> None:
    x, weight, grad = (
        leaf((300, 64), torch.bfloat16, 0),
        leaf((64,), torch.float32, 1),
        leaf((300, 64), torch.bfloat16, 2),
    )
    x64, weight64 = double(x, weight)
    (gradient,) = torch.autograd.grad(rms_norm(x, weight, EPS, 1.0), weight, grad)
    (right,) = torch.autograd.grad(exact(x64, weight64, 1.0), weight64, grad.double())
    assert gradient.dtype == torch.float32
    close(gradient, right, 1e-5)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, pytest.param(257, marks=pytest.mark.slow)])
def test_programs_that_go_through_many_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "MULTIPROCESSORS", 1)
    x, weight, grad = (
        leaf((rows, 600), torch.float32, 0),
        leaf((600,), torch.float32, 1),
        leaf((rows, 600), torch.float32, 2),
    )
    x64, weight64 = double(x, weight)
    gradients = torch.autograd.grad(rms_norm(x, weight, EPS), (x, weight), grad)
    want = torch.autograd.grad(exact(x64, weight64, 0), (x64, weight64), grad.double())
    for gradient, right in zip(gradients, want, strict=True):
        close(gradient, right, 4e-6)


@pytest.mark.parametrize("rows", [(0,), (2, 0, 3)])
def test_no_rows(rows: tuple[int, ...]) -> None:
    x, weight = leaf((*rows, 16), torch.float32, 0), leaf((16,), torch.float32, 1)
    out = rms_norm(x, weight, EPS)
    dx, dweight = torch.autograd.grad(out, (x, weight), torch.ones_like(out))
    assert out.shape == dx.shape == x.shape
    assert torch.equal(dweight, torch.zeros(16))


def test_rows_that_lie_apart() -> None:
    weight, whole = leaf((24,), torch.float32, 0), leaf((4, 3, 80), torch.float32, 1).detach()
    views = [whole[..., 8:32], whole[:, ::2, :24], whole.transpose(0, 2)[:, :, :1].expand(80, 3, 24), whole[..., :72:3]]
    for view in views:
        x = view.detach().requires_grad_()
        out, same = rms_norm(x, weight, EPS), rms_norm(x.contiguous(), weight, EPS)
        assert torch.equal(out, same)
        assert out.is_contiguous()
        # A sum's gradient is one number, expanded.
        gradients = torch.autograd.grad(out.sum(), (x, weight))
        for gradient, other in zip(gradients, torch.autograd.grad(same.sum(), (x, weight)), strict=True):
            assert torch.equal(gradient, other)


def test_scale_does_not_matter() -> None:
    x, weight = leaf((5, 200), torch.float32, 0).detach(), leaf((200,), torch.float32, 1).detach()
    assert torch.equal(rms_norm(x, weight, 1e-30), rms_norm(x * 2.0**20, weight, 1e-30))


def test_a_gradient_leaves_the_length_of_a_row_alone() -> None:
    x, weight, grad = leaf((5, 200), torch.float32, 0), leaf((200,), torch.float32, 1), leaf((5, 200), torch.float32, 2)
    (dx,) = torch.autograd.grad(rms_norm(x, weight, 1e-30), x, grad)
    assert (dx * x).sum(dim=-1).abs().max() < 1e-4


def test_unsupported_inputs_are_refused() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    for wrong in [(x.double(), weight), (x, weight.long()), (x, torch.zeros(4)), (x, torch.zeros(1, 8))]:
        with pytest.raises(ValueError, match=r"expected float32|cannot be normalized"):
            rms_norm(*wrong, EPS)
    with pytest.raises(ValueError, match="elements, got 16385"):
        rms_norm(torch.zeros(1, MAX_WIDTH + 1), torch.zeros(MAX_WIDTH + 1), EPS)
    with pytest.raises(ValueError, match="the residual"):
        add_rms_norm(x, x[:1], weight, EPS)


@pytest.mark.parametrize("rows", [1, 33, 16384, 2**24])
def test_how_work_is_cut(rows: int) -> None:
    widths = (1, 7, 64, 129, 2048, 4097, 8192, 16384)
    for width in widths:
        forward = forward_cut(rows, width)
        assert forward.programs * forward.rows >= rows > (forward.programs - 1) * forward.rows
    for width, column_bytes in product(widths, (4, 6, 8, 12)):
        cut = backward_cut(rows, width, column_bytes)
        programs_of_one_multiprocessor = 16 // cut.warps
        assert 1 <= cut.programs <= programs_of_one_multiprocessor * file.MULTIPROCESSORS
        ahead = (cut.stages - 1) * cut.rows * cut.block * column_bytes
        assert 0 < ahead * programs_of_one_multiprocessor <= 200 * 1024


OPERATORS = {
    "rms_norm": lambda x, weight, _: (x, weight, EPS, 0.0),
    "add_rms_norm": lambda x, weight, _: (x, x.detach().clone().requires_grad_(), weight, EPS, 1.0),
    "rms_norm_backward": lambda x, weight, rstd: (x.detach(), None, x.detach(), weight.detach(), rstd, 0.0),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_sound(name: str) -> None:
    arguments = OPERATORS[name](leaf((3, 40), torch.float32, 0), leaf((40,), torch.float32, 1), torch.ones(3))
    # The interpreter needs numbers: what traces through it (aot_dispatch) is tested on a GPU.
    sound = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(getattr(torch.ops.headway, name).default, arguments, test_utils=sound)


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_sound_on_a_gpu(name: str) -> None:
    x, weight = leaf((3, 40), torch.float32, 0, "cuda"), leaf((40,), torch.float32, 1, "cuda")
    arguments = OPERATORS[name](x, weight, torch.ones(3, device="cuda"))
    opcheck(getattr(torch.ops.headway, name).default, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(16384, 2048), (8192, 4096), (1000, 5120), (262144, 128), (999, 8192), (300, 16384)])
def test_large_ones_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight, grad, grad_sum = (
        leaf(shape if seed != 2 else shape[1:], dtype, seed, "cuda") for seed in range(5)
    )
    normalized, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    total64, weight64 = double(total, weight)
    truth = exact(total64, weight64, 0)
    close(normalized, truth, TOLERANCE[dtype])
    gradients = torch.autograd.grad((normalized, total), (x, weight), (grad, grad_sum), retain_graph=True)
    want = torch.autograd.grad(
        (truth, total64), (total64, weight64), (grad.double(), grad_sum.double()), allow_unused=True
    )
    for gradient, right in zip(gradients, want, strict=True):
        close(gradient, right, 4 * TOLERANCE[dtype])
    alone = rms_norm(total.detach().requires_grad_(), weight, EPS)
    assert torch.equal(alone, normalized)
    again = torch.autograd.grad((normalized, total), (x, weight), (grad, grad_sum))
    assert all(torch.equal(gradient, other) for gradient, other in zip(gradients, again, strict=True))


@pytest.mark.gpu
def test_compiled_on_a_gpu() -> None:
    x, weight, grad = (leaf(shape, torch.bfloat16, 0, "cuda") for shape in [(512, 1024), (1024,), (512, 1024)])
    whole = torch.compile(lambda x, weight: rms_norm(2 * x, weight, EPS) + 1, fullgraph=True)
    compiled, plain = whole(x, weight), rms_norm(2 * x, weight, EPS) + 1
    assert torch.equal(compiled, plain)
    for gradient, other in zip(
        torch.autograd.grad(compiled, (x, weight), grad), torch.autograd.grad(plain, (x, weight), grad), strict=True
    ):
        # compiled anew: a product may be fused with another sum, which shows in the last bit
        torch.testing.assert_close(gradient, other, rtol=1e-2, atol=1e-2)
