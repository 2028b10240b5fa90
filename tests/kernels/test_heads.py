"""Heads of one product against plain PyTorch in float64, in Triton's interpreter, both passes."""

import pytest
import torch
from torch import Tensor

from headway.kernels.heads import PartNorm, heads_of, reference
from thinned import thinned

EPS = 1e-6
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
CASES = ["plain plain plain", "rotated rotated plain", "normed", "rotated normed plain"]
SHAPES = [(1, 1, 1, 2), (2, 3, 3, 8), (1, 270, 2, 4), (1, 2, 12, 128), (1, 0, 2, 4)]


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def norms_of(case: str, width: int) -> list[PartNorm | None]:
    weights = (drawn(width, seed=10 + number) for number in range(9))
    return [None if kind == "plain" else PartNorm(next(weights), EPS, kind == "rotated") for kind in case.split()]


def doubled(norm: PartNorm | None) -> PartNorm | None:
    return None if norm is None else norm._replace(weight_D=norm.weight_D.detach().double().requires_grad_())


@pytest.mark.parametrize(("case", "shape", "dtype"), thinned(CASES, SHAPES, list(TOLERANCE)), ids=str)
def test_both_passes(case: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    samples, tokens, heads, head = shape
    angles, width = torch.arange(tokens * head // 2).view(tokens, head // 2) * 0.7, heads * head
    norms, table = norms_of(case, width), torch.stack((angles.cos(), angles.sin()))
    x, bias = drawn(samples, tokens, len(norms) * width, seed=0, dtype=dtype), drawn(len(norms) * width, seed=1)
    results = heads_of(x, bias, tuple(norms), head, table)
    x64, bias64, norms64 = x.detach().double().requires_grad_(), bias.detach().double().requires_grad_(), []
    norms64 = [doubled(norm) for norm in norms]
    parts = (x64 + (bias64 - bias64.detach())).chunk(len(norms), -1)  # the bias is part of x already
    truths = [exact(part, norm, head, table) for part, norm in zip(parts, norms64, strict=True)]
    grads = [drawn(*truth.shape, seed=20 + number, dtype=dtype).detach() for number, truth in enumerate(truths)]
    ask = [x, bias, *(norm.weight_D for norm in norms if norm)]
    ask64 = [x64, bias64, *(norm.weight_D for norm in norms64 if norm)]
    gradients = torch.autograd.grad(results, ask, grads)
    gradients64 = torch.autograd.grad(truths, ask64, [grad.double() for grad in grads])
    pairs = [*zip(results, truths, strict=True), *zip(gradients, gradients64, strict=True)]
    for actual, right in pairs:
        assert actual.shape == right.shape
        if right.numel():
            limit = TOLERANCE[dtype] * right.abs().max().clamp(min=1) * max(1, samples * tokens) ** 0.5
            assert (actual.double() - right).abs().max() <= limit


def exact(x_BLD: Tensor, norm: PartNorm | None, head: int, table_2LR: Tensor) -> Tensor:
    """The formula, with complex numbers for pairs."""
    if norm is not None:
        x_BLD = x_BLD / (x_BLD.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.weight_D
    x_BLNH = x_BLD.unflatten(-1, (-1, head))
    if norm is None or not norm.rotate:
        return x_BLNH
    turns_L1R = torch.complex(*table_2LR.double()).unsqueeze(1)
    return torch.view_as_real(torch.view_as_complex(x_BLNH.unflatten(-1, (-1, 2)).contiguous()) * turns_L1R).flatten(-2)


def test_the_reference_is_the_same() -> None:
    angles = torch.arange(12.0).view(3, 4)
    norm, table = PartNorm(drawn(16, seed=1), EPS, rotate=True), torch.stack((angles.cos(), angles.sin()))
    x = drawn(2, 3, 16, seed=0)
    torch.testing.assert_close(heads_of(x, None, (norm,), 8, table)[0], reference(x, norm, 8, table))
    assert torch.equal(heads_of(x, None, (None,), 8)[0], reference(x, None, 8))


def test_strided_gradients_of_attention() -> None:
    """As attention gives them back: [B, N, L, H] with heads and tokens swapped."""
    x = drawn(2, 3, 48, seed=0)
    gradients = []
    for swap in (False, True):
        results = heads_of(x, None, (PartNorm(drawn(16, seed=1), EPS), None, None), 8)
        grads = [drawn(2, 3, 2, 8, seed=2 + number).detach() for number in range(3)]
        if swap:
            grads = [grad.transpose(1, 2).contiguous().transpose(1, 2) for grad in grads]
        gradients.append(torch.autograd.grad(results, x, grads)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize(("width", "parts", "head"), [(10, 3, 2), (12, 3, 8), (6, 2, 3), (20000, 2, 4)])
def test_wrong_shapes_are_refused(width: int, parts: int, head: int) -> None:
    with pytest.raises(ValueError, match="heads"):
        heads_of(torch.zeros(1, 1, width), None, (None,) * parts, head)
