"""Modulated norms and gated additions against float64, in Triton's interpreter, both passes."""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from headway.kernels import modulated_norm as kernel
from headway.kernels.modulated_norm import (
    Modulation,
    ResidualBranch,
    add,
    add_modulated_norm,
    modulated_norm,
    tiles,
    tiling,
)
from thinned import thinned

EPS = 1e-6
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
"""Relative to the largest of a result. bfloat16's is what the interpreter cuts off, where a GPU rounds."""
SHAPES = [(1, 1, 1), (2, 3, 5), (2, 270, 9), (1, 3, 1152), (270, 1, 8), (2, 0, 4)]
CASES = ["norm", "add", "gated add", "add norm", "gated add norm"]


def exact(case: str, x: Tensor, out: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, base: float) -> list[Tensor]:
    """The formulas, in the precision of their inputs; `out` has no bias added."""
    if "add" in case:
        x = x + (out * gate.unsqueeze(1) if "gated" in case else out)
    if "norm" not in case:
        return [x]
    away = x - x.mean(-1, keepdim=True)
    normal = away / (away.square().mean(-1, keepdim=True) + EPS).sqrt()
    y = normal * (base + scale.unsqueeze(1)) + shift.unsqueeze(1)
    return [x, y]


def ours(case: str, x: Tensor, branch: ResidualBranch, modulation: Modulation) -> list[Tensor]:
    branch = branch if "gated" in case else branch._replace(gate_BD=None)
    if case == "norm":
        return list(modulated_norm(x, modulation, EPS))
    return list(add_modulated_norm(x, branch, modulation, EPS)) if "norm" in case else [add(x, branch)]


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def five() -> tuple[Tensor, ...]:
    """A stream, a branch, and a gate, shift and scale."""
    return *(drawn(2, 3, 8, seed=n) for n in (0, 1)), *(drawn(2, 8, seed=n) for n in (2, 3, 4))


def close(actual: Tensor | None, right: Tensor | None, tolerance: float) -> None:
    assert (actual is None) == (right is None)
    if actual is not None and right is not None and right.numel():
        assert (actual.double() - right).abs().max() <= tolerance * right.abs().max().clamp(min=1)


@pytest.mark.parametrize(("case", "shape", "dtype"), thinned(CASES, SHAPES, list(TOLERANCE)), ids=str)
def test_both_passes(case: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """With the gradient of a linear map's bias, and one modulation of all samples."""
    samples, _, width = shape
    shared = width == 9
    rows, base = (1 if shared else samples), (0.0 if shared else 1.0)
    x, plain = (drawn(*shape, seed=seed, dtype=dtype) for seed in (0, 1))
    gate, shift, scale = (drawn(rows, width, seed=seed) for seed in (2, 3, 4))
    bias = drawn(width, seed=5)
    out = (plain + bias.detach().to(dtype)).detach().requires_grad_()
    results = ours(case, x, ResidualBranch(out, gate, bias), Modulation(shift, scale, base))
    leaves = [y.detach().double().requires_grad_() for y in (x, gate, shift, scale)]
    bias64, out64 = bias.detach().double().requires_grad_(), out.detach().double().requires_grad_()
    # the bias is part of `out` already: its gradient is that of a number added to it
    with_bias = out64 + (bias64 - bias64.detach())
    truths = exact(case, leaves[0], with_bias, leaves[1], leaves[2], leaves[3], base)
    grads = [drawn(*shape, seed=6 + number, dtype=dtype).detach() for number in range(len(results))]
    inputs, inputs64 = (x, out, gate, shift, scale, bias), (leaves[0], out64, *leaves[1:], bias64)
    gradients = torch.autograd.grad(results, inputs, grads, allow_unused=True)
    gradients64 = torch.autograd.grad(truths, inputs64, [g.double() for g in grads], allow_unused=True)
    tolerance = TOLERANCE[dtype]
    for result, truth in zip(results, truths, strict=True):
        assert result.dtype == dtype
        close(result, truth, tolerance)
    for gradient, truth in zip(gradients, gradients64, strict=True):
        close(gradient, truth, tolerance * max(1, samples * shape[1]) ** 0.5)


def test_the_reference_is_the_same() -> None:
    x, out, gate, shift, scale = (
        drawn(2, 3, 8, seed=0),
        drawn(2, 3, 8, seed=1),
        *(drawn(2, 8, seed=n) for n in (2, 3, 4)),
    )
    branch, modulation = ResidualBranch(out, gate), Modulation(shift, scale)
    total, y = add_modulated_norm(x, branch, modulation, EPS)
    torch.testing.assert_close(total, kernel.reference_add(x, branch))
    torch.testing.assert_close(y, kernel.reference_norm(total, modulation, EPS))
    torch.testing.assert_close(add(x, ResidualBranch(out)), kernel.reference_add(x, ResidualBranch(out)))


@pytest.mark.parametrize("unused", ["stream", "norm"])
def test_one_result_alone_has_a_gradient(unused: str) -> None:
    x, out, gate, shift, scale = (
        drawn(2, 3, 8, seed=0),
        drawn(2, 3, 8, seed=1),
        *(drawn(2, 8, seed=n) for n in (2, 3, 4)),
    )
    results = add_modulated_norm(x, ResidualBranch(out, gate), Modulation(shift, scale), EPS)
    truths = exact("gated add norm", x, out, gate, shift, scale, 1.0)
    number = unused == "stream"
    ask = (x, out, gate) if unused == "norm" else (x, out, gate, shift, scale)
    gradients = torch.autograd.grad(results[number].square().sum(), ask)
    for gradient, truth in zip(gradients, torch.autograd.grad(truths[number].square().sum(), ask), strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_stream_that_is_added_up_again_has_the_same_bits(device: str) -> None:
    """The backward pass reads the stream before a gated branch; a norm of the rounded sum that was stored is the truth.
    Gradients are rounded to bfloat16, and widths are small: a sum of another rounding would show."""
    x, out, *grads = (drawn(2, 6, 16, seed=n, dtype=torch.bfloat16) for n in range(4))
    gate, shift, scale = (drawn(2, 16, seed=n) for n in (4, 5, 6))
    x, out, gate, shift, scale = (y.detach().to(device).requires_grad_() for y in (x, out, gate, shift, scale))
    grads = [grad.detach().to(device) for grad in grads]
    at_once = add_modulated_norm(x, ResidualBranch(out, gate), Modulation(shift, scale), EPS)
    in_turn = modulated_norm(add(x, ResidualBranch(out, gate)), Modulation(shift, scale), EPS)
    for result, truth in zip(at_once, in_turn, strict=True):
        assert torch.equal(result, truth)
    pairs = [torch.autograd.grad(results, (x, shift, scale), grads) for results in (at_once, in_turn)]
    for gradient, truth in zip(*pairs, strict=True):
        assert torch.equal(gradient, truth)


def test_operators_are_what_a_compiler_takes_them_for() -> None:
    x, out, gate, shift, scale = (
        drawn(2, 3, 8, seed=0),
        drawn(2, 3, 8, seed=1),
        *(drawn(2, 8, seed=n) for n in (2, 3, 4)),
    )
    bias = drawn(8, seed=5)
    for inputs in (
        (x, out, gate, bias, shift, scale, 1.0, EPS),
        (x.detach(), None, None, None, shift.detach(), scale.detach(), 0.0, EPS),  # gradients are those of `_Norm`
        (x, out, None, bias, None, None, 0.0, 0.0),
    ):
        assert set(opcheck(torch.ops.headway.modulated_norm.default, inputs).values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("shape", "rows"), [((2, 3), (2, 3)), ((2, 3, 4), (3, 4)), ((2, 3, 4), (2, 5)), ((2, 3, 9000), (2, 9000))]
)
def test_wrong_shapes_are_refused(shape: tuple[int, ...], rows: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"stream"):
        modulated_norm(torch.zeros(shape), Modulation(torch.zeros(rows), torch.zeros(rows)), EPS)


def test_each_program_has_tokens() -> None:
    for samples, tokens in ((1, 17160), (256, 256), (1, 1), (1000, 4)):
        assert 1 <= tiling(samples, tokens, 1152).chunks <= tokens


@pytest.mark.parametrize(
    ("width", "warps", "expected"),
    [(1152, 4, (1024, 256)), (1536, 8, (1024, 512)), (1024, 4, (1024, 0)), (2000, 4, (2048, 0)), (24, 1, (32, 0))],
)
def test_two_tiles_take_less_than_the_next_power_of_two(width: int, warps: int, expected: tuple[int, int]) -> None:
    assert tiles(width, warps) == expected
