"""GELU with a bias's gradient against float64, in Triton's interpreter, both passes."""

import pytest
import torch
from torch.library import opcheck

from headway.kernels.gelu import gelu, reference

# What is far out overflows on the way to 0 or 1, as it should; NumPy, which the interpreter computes with, warns.
pytestmark = [pytest.mark.filterwarnings(f"ignore:{what} encountered") for what in ("overflow", "invalid value")]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 40, 130), (0, 5)], ids=str)
def test_both_passes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = ((3 * torch.randn(shape, generator=generator)).to(dtype) for _ in range(2))
    x, bias = x.requires_grad_(), torch.zeros(shape[-1], requires_grad=True)
    y = gelu(x, bias)
    dx, dbias = torch.autograd.grad(y, (x, bias), grad)
    x64 = x.detach().double().requires_grad_()
    inner = (2 / torch.pi) ** 0.5 * (x64 + 0.044715 * x64**3)
    y64 = 0.5 * x64 * (1 + torch.tanh(inner))
    (dx64,) = torch.autograd.grad(y64, x64, grad.double())
    for actual, right in ((y, y64), (dx, dx64)):
        assert actual.dtype == dtype
        assert ((actual.double() - right).abs() <= TOLERANCE[dtype] * (1 + right.abs()) * 4).all()
    rows = max(1, x.numel() // shape[-1])
    torch.testing.assert_close(dbias.double(), dx64.flatten(0, -2).sum(0), rtol=1e-4, atol=1e-5 * rows)
    torch.testing.assert_close(gelu(x.detach(), None), reference(x.detach()), rtol=2e-2, atol=2e-2)


def test_far_out() -> None:
    """The identity for what is large, nothing for what is small; no gradient breaks."""
    x = torch.tensor([[-1e30, -60000.0, -30, 30, 60000, 1e30]], requires_grad=True)
    y = gelu(x, None)
    assert y.tolist() == [[0, 0, 0, 30, 60000, x[0, 5].item()]]
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [[0, 0, 0, 1, 1, 1]]


def test_a_bias_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="bias per column"):
        gelu(torch.zeros(2, 3), torch.zeros(2))


def test_operators_are_what_a_compiler_takes_them_for() -> None:
    inputs = torch.randn(3, 5, requires_grad=True), torch.zeros(5, requires_grad=True)
    assert set(opcheck(torch.ops.headway.gelu.default, inputs).values()) == {"SUCCESS"}
