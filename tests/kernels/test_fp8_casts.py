"""Casts to float8 against the nearest of all codes, in PyTorch and in Triton's interpreter; products in float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from headway.kernels import dispatch, fp8, fp8_observed
from headway.kernels.fp8 import E4M3, E5M2, cast, cast_into, inverse_of, largest, product, scale_of, smallest
from headway.kernels.fp8_observed import SAMPLED_ROWS, observe
from headway.kernels.gated import gated_pair, gated_pair_backward, reference_geglu, reference_swiglu

FORMATS = pytest.mark.parametrize("e5m2", [False, True], ids=["e4m3", "e5m2"])


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "devices", ("cuda", "cpu"))


def drawn(*shape: int, seed: int = 0, spread: float = 3.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers over many powers of two, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))
    return numbers.to(dtype)


def all_codes(e5m2: bool) -> Tensor:
    codes = torch.arange(256, dtype=torch.uint8).view(E5M2 if e5m2 else E4M3).double()
    return codes[codes.isfinite()].sort().values


def nearest(x: Tensor, e5m2: bool) -> Tensor:
    """The nearest number that a code stands for; of two as near, the one whose code is even."""
    values = all_codes(e5m2).unique()
    right = torch.searchsorted(values, x.double()).clamp(max=len(values) - 1)
    left = (right - 1).clamp(min=0)
    down, up = x.double() - values[left], values[right] - x.double()
    even = values.to(E5M2 if e5m2 else E4M3).view(torch.uint8) % 2 == 0
    return torch.where((down < up) | ((down == up) & even[left]), values[left], values[right])


@FORMATS
def test_scale_is_the_least_power_of_two_that_holds_the_peak(e5m2: bool) -> None:
    edges = [largest(e5m2) * 2.0**k for k in range(-40, 40, 7)]
    amaxes = [*edges, *(math.nextafter(edge, math.inf) for edge in edges), 1.0, 3e-5, 1e30, 2.0**-100]
    for amax in torch.tensor(amaxes).tolist():
        scale = scale_of(torch.tensor(amax), e5m2).item()
        assert math.frexp(scale)[0] == 0.5
        assert amax <= scale * largest(e5m2)
        assert amax > scale / 2 * largest(e5m2)


@FORMATS
def test_scale_of_zero_is_finite_and_of_nothing_finite_is_not(e5m2: bool) -> None:
    zero = scale_of(torch.tensor([0.0, 1e-45]), e5m2)
    assert (zero > 0).all()
    assert (zero * inverse_of(zero) == 1).all()
    assert scale_of(torch.tensor([math.inf, math.nan]), e5m2).isnan().all()
    assert cast(torch.tensor([[1.0, math.nan]]), e5m2=e5m2).scale.isnan().all()


@FORMATS
def test_codes_are_the_nearest(e5m2: bool) -> None:
    values = all_codes(e5m2)
    x = torch.cat(((values[1:] + values[:-1]) / 2, drawn(4096).double(), values)).float().reshape(1, -1)
    x = x[:, x[0].abs() <= largest(e5m2)]
    one = torch.ones(1, 1)
    codes, codes_t = fp8.reference(x, one, one, e5m2=e5m2)
    assert torch.equal(codes.double()[0], nearest(x[0], e5m2))
    assert torch.equal(codes_t.mT.double(), codes.double())


@FORMATS
@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize(("shape", "dtype"), [((16, 32), torch.float32), ((131, 260), torch.bfloat16), ((1, 5), None)])
@pytest.mark.usefixtures("triton")
def test_kernel_has_the_bits_of_the_reference(
    shape: tuple[int, int], dtype: torch.dtype | None, e5m2: bool, rowwise: bool
) -> None:
    x = drawn(*shape, dtype=dtype or torch.float16)
    made = cast(x, e5m2=e5m2, rowwise=rowwise)
    right = fp8.reference(x, inverse_of(made.scale), inverse_of(made.scale_t), e5m2=e5m2)
    for codes, wanted in zip(made[:2], right, strict=True):
        assert codes.is_contiguous()
        assert torch.equal(codes.float(), wanted.float())  # the interpreter has no negative zero


@pytest.mark.usefixtures("triton")
def test_only_wanted_codes_are_written_and_columns_of_views_too() -> None:
    wide = drawn(40, 96)
    x = wide[:, 32:64]
    rows, columns = cast(x, columns=False), cast(x, rows=False)
    assert rows.codes_t.numel() == columns.codes.numel() == 0
    assert torch.equal(rows.codes.float(), columns.codes_t.mT.float())
    turned = cast(wide.mT)
    assert torch.equal(turned.codes.float(), cast(wide).codes_t.float())


@FORMATS
def test_what_codes_stand_for_has_the_same_codes(e5m2: bool) -> None:
    """So that weights gathered in float8 are cast to what one process has."""
    made = cast(drawn(64, 48), e5m2=e5m2)
    stood_for = (made.codes.float() * made.scale).to(torch.bfloat16)
    again = cast(stood_for, e5m2=e5m2)
    assert torch.equal(stood_for.float(), again.codes.float() * again.scale)


@FORMATS
def test_numbers_below_half_of_the_smallest_code_become_zero(e5m2: bool) -> None:
    half = smallest(e5m2) / 2
    x = torch.tensor([[half, math.nextafter(half, 0), math.nextafter(half, 1) * (1 + 2**-20)]])
    one = torch.ones(1, 1)
    assert (fp8.reference(x, one, one, e5m2=e5m2)[0].float() != 0).tolist() == [[False, False, True]]


def test_parts_of_other_tensors_are_written() -> None:
    x, whole, whole_t = (
        drawn(48, 32, dtype=torch.bfloat16),
        torch.zeros(96, 32, dtype=E4M3),
        torch.zeros(32, 96, dtype=E4M3),
    )
    scale = cast(x).scale
    cast_into(x, inverse_of(scale), whole[48:], whole_t[:, 48:])
    right = cast(x)
    assert torch.equal(whole[48:].float(), right.codes.float())
    assert torch.equal(whole_t[:, 48:].float(), right.codes_t.float())
    assert not whole[:48].float().any()
    assert not whole_t[:, :48].float().any()


@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
def test_product_is_that_of_what_codes_stand_for(rowwise: bool) -> None:
    a, b = cast(drawn(16, 48), rowwise=rowwise), cast(drawn(32, 48, seed=1), rowwise=rowwise)
    y = product(a.codes, a.scale, b.codes, b.scale, torch.float32)
    right = (a.codes.double() * a.scale.double()) @ (b.codes.double() * b.scale.double()).mT
    torch.testing.assert_close(y.double(), right, rtol=1e-5, atol=1e-5 * right.abs().max().item())
    turned = product(a.codes_t, a.scale_t, cast(drawn(32, 16)).codes, cast(drawn(32, 16)).scale, torch.float32)
    assert turned.shape == (48, 32)


@pytest.mark.parametrize("gelu", [False, True], ids=["swiglu", "geglu"])
@pytest.mark.parametrize("shape", [(3, 14), (2, 2, 5000), (0, 8)], ids=str)
@pytest.mark.parametrize("way", ["reference", "triton"])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gated_pair_is_the_gate_of_both_halves(
    gelu: bool, shape: tuple[int, ...], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "triton":
        monkeypatch.setattr(dispatch, "devices", ("cuda", "cpu"))
    pair = drawn(*shape, spread=0.5)
    out, amaxes = gated_pair(pair, gelu)
    leaf = pair.double().requires_grad_()
    right = (reference_geglu if gelu else reference_swiglu)(*leaf.chunk(2, dim=-1))
    torch.testing.assert_close(out.double(), right.detach(), rtol=1e-5, atol=1e-6)
    assert amaxes.max().item() == (out.abs().max().item() if out.numel() else 0)
    grad = drawn(*out.shape, seed=3)
    dpair, amaxes = gated_pair_backward(grad, pair, gelu)
    torch.testing.assert_close(dpair.double(), torch.autograd.grad(right, leaf, grad.double())[0], rtol=1e-4, atol=1e-5)
    assert amaxes.max().item() == (dpair.abs().max().item() if dpair.numel() else 0)


@FORMATS
@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("shape", [(70, 48), (5, 80)], ids=str)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.usefixtures("triton")
def test_kernel_observes_what_the_reference_does(
    e5m2: bool, rowwise: bool, shape: tuple[int, int], after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_observed, "BLOCK", 32)
    for x in (drawn(*shape), drawn(*shape[::-1]).mT, drawn(*shape).fill_(math.nan)):
        made, before = cast(x, e5m2=e5m2, rowwise=rowwise), drawn(SAMPLED_ROWS, 4) if after else None
        seen = observe(x, made, e5m2=e5m2, before=before)
        right = fp8_observed.reference(x, made.scale, made.amax, before, e5m2)
        torch.testing.assert_close(seen, right, equal_nan=True)
        assert seen[:, -2].any() == (right[:, -2] > 0).any()


OPERATORS = {
    "fp8_cast": lambda: (drawn(16, 24), torch.ones(1, 1), torch.ones(1, 1), False, False, True, True),
    "fp8_observe": lambda: (drawn(40, 24), torch.ones(1, 1), torch.ones(()), None, False),
    "gated_pair": lambda: (drawn(3, 8), False),
    "gated_pair_backward": lambda: (drawn(3, 4), drawn(3, 8), False),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_sound(name: str) -> None:
    results = opcheck(
        getattr(torch.ops.headway, name).default, OPERATORS[name](),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
def test_kernel_has_the_bits_of_the_reference_on_a_gpu(e5m2: bool, rowwise: bool) -> None:
    for shape in ((4096, 14336), (1000, 336), (16, 16)):
        x = drawn(*shape).to("cuda", torch.bfloat16)
        made = cast(x, e5m2=e5m2, rowwise=rowwise)
        right = fp8.reference(x, inverse_of(made.scale), inverse_of(made.scale_t), e5m2=e5m2)
        for codes, wanted in zip(made[:2], right, strict=True):
            assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
def test_product_on_a_gpu_is_that_of_the_reference(rowwise: bool) -> None:
    a, b = drawn(256, 512, spread=0.3), drawn(128, 512, seed=1, spread=0.3)
    right = [cast(x, rowwise=rowwise) for x in (a, b)]
    ours = [cast(x.cuda(), rowwise=rowwise) for x in (a, b)]
    y, wanted = (
        product(one.codes, one.scale, other.codes, other.scale, torch.bfloat16) for one, other in (ours, right)
    )
    torch.testing.assert_close(y.cpu(), wanted, rtol=1e-2, atol=1e-2 * wanted.abs().max().item())
